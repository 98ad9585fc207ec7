"""The benchmark of decoding on a very small model: what is checked before it is timed, and what the rows hold."""

from collections.abc import Sequence

import pytest
import torch

from benchmarks import decoding
from benchmarks.common.measure import read
from benchmarks.tables import RESULTS, ROOT
from sympow.models import LanguageModel, MixerConfig, ModelConfig


def config(mixer: MixerConfig) -> ModelConfig:
    return ModelConfig(29, 8, 2, 2, (mixer,))


@pytest.mark.parametrize("name", decoding.MIXERS)
def test_rows(name):
    mixer = decoding.MIXERS[name]
    rows = decoding.measure(name, config(mixer), [40, 600], tokens=3)
    model = LanguageModel(config(mixer))
    assert [row["context"] for row in rows] == [40, 600]
    for row in rows:
        assert row["mixer"] == name and row["ms_per_token"] > 0 and row["forward_ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms_per_token"] / rows[0]["ms_per_token"], rel=0.01)
        positions = sum(t.numel() for t in model.init_state(1).tensors() if t.dtype == torch.float64)
        assert row["state_bytes"] == 4 * model.state_size(row["context"]) + 4 * positions
    assert (rows[1]["state_bytes"] > rows[0]["state_bytes"]) == (mixer.name == "softmax")


@pytest.mark.parametrize("mixer", decoding.MIXERS.values(), ids=list(decoding.MIXERS))
@torch.no_grad()
def test_the_state_stands_where_it_should(mixer):
    """Decoding on it costs what it costs after so many tokens."""
    model = LanguageModel(config(mixer), seed=0)
    made = decoding.state_after(model, 600)
    _, real = decoding.read(model, torch.zeros(1, 600, dtype=torch.int64))
    assert [(t.shape, t.dtype) for t in made.tensors()] == [(t.shape, t.dtype) for t in real.tensors()]
    assert [getattr(layer, "length", None) for layer in made.layers] == [
        getattr(layer, "length", None) for layer in real.layers
    ]


def test_a_wrong_step_is_not_timed(monkeypatch):
    step = LanguageModel.step
    monkeypatch.setattr(LanguageModel, "step", lambda self, x, state: step(self, x * 0, state))
    with pytest.raises(RuntimeError, match=r"power: a step errs by .* where .* is allowed; not timed"):
        decoding.measure("power", config(decoding.MIXERS["power"]), [40], tokens=3)


def test_command(tmp_path, call, capsys):
    threads, file = torch.get_num_threads(), tmp_path / "rows.csv"
    words = ["--preset", "nano", "--contexts", "8", "40", "--tokens", "2", "--threads", str(threads)]
    call(decoding, *words, "--csv", file)
    assert [(row["mixer"], row["context"]) for row in read(file)] == [
        (name, context) for name in decoding.MIXERS for context in (8, 40)
    ]
    assert len(capsys.readouterr().out.splitlines()) == 11


def test_the_page_quotes_the_committed_times():
    rows = {(row["mixer"], row["context"]): row for row in read(RESULTS / "decoding_cpu.csv")}
    text = " ".join((ROOT / "docs/results/speed.md").read_text("utf-8").split())

    def more(mixer: str, base: str, column: str, contexts: Sequence[int] = (1024, 16_384, 32_768)) -> str:
        shares = sorted(rows[mixer, at][column] / rows[base, at][column] - 1 for at in contexts)
        return " to ".join(dict.fromkeys(f"{share:.0%}" for share in (shares[0], shares[-1])))

    published, own = "power, published", "power, published, gate and rotation"
    block, step = more("power", "power, no block", "ms_per_token"), more(own, published, "ms_per_token")
    whole = more(own, published, "forward_ms", [16_384])
    assert f"With its block, power attention takes {block} more time for a token" in text
    assert f"take {step} more time for a token, and {whole} more for a forward pass of 16,384 tokens" in text
