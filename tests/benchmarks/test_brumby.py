"""The benchmark of a model of Brumby's shape, at the small scale: what is checked first, and what the rows hold."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import brumby
from benchmarks.common.measure import read
from benchmarks.pages import result_tables
from sympow.integrations.transformers.pretrained.power_models import power_config
from sympow.models import LanguageModel
from sympow.models.lm import Undrawn
from sympow.models.slots import Slots

TOY = brumby.SCALES["toy"]


def test_the_full_shape_is_that_of_the_public_model():
    """14,769,945,600 parameters, and a zero for the bias of every gate."""
    with torch.device("meta"):
        model = Undrawn(power_config(brumby.SHAPE, True, "the model"), dtype=torch.bfloat16)
    assert model.num_parameters() == 14_769_945_600 + 40 * 8
    assert sum(each.nbytes for each in model.init_state(1).tensors()) > 40 * 8 * 8256 * 129 * 4


def test_command(tmp_path, call, capsys):
    file = tmp_path / "rows.csv"
    words = ["--scale", "toy", "--threads", str(torch.get_num_threads()), "--csv", str(file)]
    call(brumby, *words)
    rows = read(file)
    kinds = [("reading", 1, 200), ("reading", 1, 1000), ("decoding", 1, 12), ("decoding", 4, 12)]
    assert [(row["what"], row["rows"], row["tokens"]) for row in rows] == kinds
    assert len(capsys.readouterr().out.splitlines()) == 4
    model = brumby.random_model(TOY.shape, "cpu")
    read_weights = 2 * (model.num_parameters() - model.embedding.weight.numel())
    for row in rows[2:]:
        state = model.init_state(row["rows"]).nbytes
        assert row["state_bytes"] == state and row["weight_bytes"] == read_weights
        assert row["least_bytes"] == read_weights + state * 5 / 4  # the tail has room for 4 tokens
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms_per_token"], abs=0.002)
        assert row["err"] < 0.04
    lines = result_tables.brumby_table(rows).splitlines()
    assert len(lines) == 8 and "decoding, 1 sequence |" in lines[4] and "177,428 parameters" in lines[-1]


@torch.no_grad()
def test_reading_in_chunks_is_reading_at_once():
    model = brumby.random_model(TOY.shape, "cpu", torch.float32)
    tokens = torch.randint(300, (1, 70), generator=torch.Generator().manual_seed(0))
    state = brumby.read(model, tokens, chunk=32)
    logits, _ = model.step(tokens[:, :1], state)
    expected = model(torch.cat([tokens, tokens[:, :1]], 1))[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_wrong_steps_are_not_timed(monkeypatch):
    model = brumby.random_model(TOY.shape, "cpu")
    step = Slots.step
    monkeypatch.setattr(Slots, "step", lambda self, tokens: step(self, tokens * 0))
    with pytest.raises(RuntimeError, match=r"steps of 2 sequences err by .* where .* is allowed; not timed"):
        brumby.checked_slots(model, 2)


@torch.no_grad()
def test_a_lost_context_is_not_timed(monkeypatch):
    """The bound is small enough: without the state, the error is larger."""
    model = brumby.random_model(TOY.shape, "cpu")
    monkeypatch.setattr(brumby, "read", lambda model, tokens, chunk: model.init_state(1))
    with pytest.raises(RuntimeError, match="not timed"):
        brumby.checked_slots(model, 2)


def test_memories_are_long():
    """A kernel skips what a gate has decayed to nothing, which would make reading look faster than it is."""
    model = brumby.random_model(TOY.shape, "cpu")
    assert isinstance(model, LanguageModel)
    assert all((block.mixer.gate.bias == brumby.GATE_BIAS).all() for block in model.blocks)
