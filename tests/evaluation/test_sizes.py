"""The printed tables hold the published numbers and exact ones in JSON."""

import json

import pytest

from sympow.evaluation import size_tables
from sympow.models import PRESETS, LanguageModel, MixerConfig, preset
from sympow.ops.cost import ModelShape

SMALL = ModelShape.of(*PRESETS["small"])


def tables(shape=SMALL, **options):
    return {table.name: table for table in size_tables(shape, **options)}


def test_text_of_the_124m_model():
    shown = tables()
    lines = {name: [" ".join(line.split()) for line in table.text().splitlines()] for name, table in shown.items()}
    assert "2 4,096 2,080 49.2%" in lines["dimension"]
    assert "6 68,719,476,736 119,877,472 99.8%" in lines["dimension"]
    for row in ("2 77 MB 39 MB", "4 314 GB 14 GB", "6 1.3 PB 2.2 TB", "8 5.3 EB 199 TB"):
        assert any(line.startswith(row) for line in lines["power_state"])
    assert "linear, no normalizer 1.2 MB 589,824" in lines["other_state"]
    assert "softmax 8:1 1:1 1:8 1:125" in lines["weight_state_flop_ratio"]
    assert "linear 30:1 30:1 30:1 30:1" in lines["weight_state_flop_ratio"]
    assert "window of 8,192 8:1 1:1 1:1 1:1" in lines["weight_state_flop_ratio"]


def test_columns_are_aligned():
    for table in tables().values():
        title, *lines = table.text().splitlines()
        assert title == table.title
        assert len({len(line) for line in lines}) == 1


def test_json_holds_exact_numbers():
    read = {entry["name"]: entry for entry in json.loads(json.dumps([table.to_dict() for table in tables().values()]))}
    assert read["power_state"]["rows"][-1]["spow_bytes"] == 144 * 10_639_125_640 * 65 * 2
    assert read["weight_state_flop_ratio"]["rows"][0]["at_1024"] == pytest.approx(7.714, rel=1e-3)


def test_options_choose_the_rows():
    shown = tables(powers=(1,), contexts=(32,), window=16, element_bytes=4)
    assert [row[0] for row in shown["dimension"].rows] == [1]
    assert shown["weight_state_flop_ratio"].to_dict()["rows"][0].keys() == {"attention", "at_32"}
    assert ("softmax at 32", 12 * 12 * 32 * 128 * 4, 12 * 12 * 32 * 128) in shown["other_state"].rows
    with pytest.raises(ValueError, match=r"at least one power.*powers=\[\]"):
        size_tables(SMALL, powers=())


def test_states_are_those_that_models_hold():
    """Tables and models count the same elements; grouped heads and a value width of their own included."""
    heads = {"n_kv_heads": 1, "head_dim": 12, "value_dim": 20}
    shape = ModelShape(d_model=64, n_layers=2, n_heads=2, key_dim=12, value_dim=20, n_kv_heads=1)
    shown = tables(shape, powers=(2,), contexts=(1024,))

    def held(name, **options):
        mixer = MixerConfig(name, {**heads, **options})
        return LanguageModel(preset("nano", 16, mixer), seed=0).state_size(1024)

    assert shown["other_state"].rows[-1] == ("softmax at 1,024", held("softmax") * 2, held("softmax"))
    power = held("power", p=2, short_convolution=0)
    assert shown["power_state"].rows[0][-1] == power
