"""States of whole models with their sums in bfloat16 or int8."""

import pytest
import torch

from sympow.layers.state import narrowed
from sympow.models import Context, load_context, save_context
from sympow.ops import DecodingState, PowerState
from tests.integrations.small import VOCAB, small_model


def memories(state):
    return [layer.behind.memory for layer in state.layers]


def read(model, state, tokens):
    """The logits of every step: a long one, single tokens, and a few that can be taken back."""
    found = []
    with torch.no_grad():
        for piece in tokens.split([20, 1, 1, 1, 1, 1, 1], dim=1):
            logits, state = model.step(piece, state)
            found.append(logits)
        logits, after = model.try_step(tokens[:, -2:], state)
        state = after(1)
    return torch.cat([*found, logits[:, 0]]), state


# The error of rounding a number, as a share of the largest one of its row. Half of a step of int8 is rounded at random.
ROUNDING = {torch.bfloat16: 2**-9, torch.int8: 1 / 127}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("tails", [False, True])
def test_steps_keep_the_form_and_err_by_roundings(tails, dtype, monkeypatch):
    monkeypatch.setattr("sympow.layers.power.prefers_tail", lambda device, dtype: tails)
    model = small_model()
    tokens = torch.randint(VOCAB, (1, 26), generator=torch.Generator().manual_seed(3))
    plain, narrow = model.init_state(1), narrowed(model.init_state(1), dtype)
    assert narrow.nbytes < 0.8 * plain.nbytes and type(narrow) is type(plain)
    (expected, plain), (found, narrow) = (read(model, state, tokens) for state in (plain, narrow))
    for memory in memories(narrow):
        assert isinstance(memory, DecodingState)
        assert (memory.s.dtype, memory.z.dtype) == (dtype, torch.float32)
    wrong = (found - expected).norm() / expected.norm()
    # A few folds of a rounding each, in two layers; the head sees the sum of many.
    assert 0 < wrong < 4 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_context_files_take_them(dtype, tmp_path):
    model = small_model()
    tokens = torch.randint(VOCAB, (1, 26), generator=torch.Generator().manual_seed(3))
    _, state = read(model, narrowed(model.init_state(1), dtype), tokens)
    expected = [memory.folded().s for memory in memories(state)]
    save_context(tmp_path / "a.ctx", model, Context(state, None, 27, Context.begin(model).digest))
    loaded = load_context(tmp_path / "a.ctx", model).state
    for memory, s in zip(memories(loaded), expected, strict=True):
        assert isinstance(memory, PowerState), "in the form that steps of this model have here"
        assert torch.equal(memory.s, s)


def test_float64_is_refused():
    with pytest.raises(TypeError, match=r"a torch\.float64 state is kept as it is, or in bfloat16 or int8 if it"):
        narrowed(small_model().double().init_state(1))


@pytest.mark.parametrize("grad", [False, True])
def test_a_step_of_many_tokens_counts_as_a_fold(grad):
    """Else it would round in the same direction each time."""
    model = small_model()
    state = narrowed(model.init_state(1), torch.int8)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            _, state = model.step(torch.randint(VOCAB, (1, 20)), state)
    assert all((memory.folds == 3).all() for memory in memories(state))


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"^sums are narrowed to torch\.bfloat16 or torch\.int8; got torch\.float16$"):
        narrowed(small_model().init_state(1), torch.float16)


def test_sums_change_from_one_dtype_to_another():
    model = small_model()
    _, state = read(model, narrowed(model.init_state(1)), torch.randint(VOCAB, (1, 26)))
    for memory, again in zip(memories(state), memories(narrowed(state, torch.int8)), strict=True):
        assert again.s.dtype == torch.int8
        largest = memory.sums().abs().amax(-1, keepdim=True)
        assert ((again.sums() - memory.sums()).abs() <= 1.01 * ROUNDING[torch.int8] * largest + 1e-30).all()
