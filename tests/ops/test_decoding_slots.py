"""Steps on slots of a pool of states, against steps on states of their own; and states held in bfloat16 or int8."""

from dataclasses import replace

import pytest
import torch

from sympow.ops import DecodingState, PowerState, power_attention_step
from sympow.ops.decoding_state import in_int8
from tests.ops.contract import DEVICE, Case, assert_within_budget, make_inputs

GPU = DEVICE == "cuda"
CASE = Case(B=2, T=5, H=2, G=1, K=4, V=5, state=True)
CHOSEN = [4, 2]  # slots of a pool of 5
# On a GPU sums are taken in another order where slots begin at other alignments, so there all are multiples of 16.
CASES = {"K 128": replace(CASE, H=8, G=2, K=128, V=128)} if GPU else {"small": CASE}
IMPLS = ["eager", "triton"]


def tokens(case: Case, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: x.detach() for name, x in make_inputs(case, dtype=dtype).items() if x is not None}


def plain_state(case: Case, inputs: dict, **options) -> DecodingState:
    state = PowerState(inputs["s"].float(), inputs["z"].float(), case.p, case.K).clone()
    return DecodingState.from_state(state, dtype=inputs["k"].dtype, capacity=2, **options)


def pool_of(state: DecodingState, paged: bool) -> DecodingState:
    """The state in CHOSEN slots of five, the others of which hold nothing finite.

    paged: all tensors of a slot stand in one page of bytes, one behind the other and with room between pages.
    """
    tensors, at, size = {}, 0, 1 << 20 if GPU else 1 << 12
    while size < 2 * sum(x[:1].nbytes for x in state.tensors().values()):
        size *= 2
    pages = torch.zeros(5, size, dtype=torch.uint8, device=DEVICE)
    for name, x in state.tensors().items():
        shape = (5, *x.shape[1:])
        if paged:
            bytes_of_one = x[:1].nbytes
            tensors[name] = pages[:, at : at + bytes_of_one].view(x.dtype).unflatten(1, x.shape[1:])
            at += -(-bytes_of_one // 64) * 64
        else:
            tensors[name] = torch.zeros(shape, dtype=x.dtype, device=DEVICE)
        tensors[name].fill_(torch.nan if x.is_floating_point() else 3)
    pool = replace(state, **tensors).at(torch.tensor(CHOSEN, dtype=torch.int32, device=DEVICE))
    pool.put(state)
    return pool


def steps(case: Case, inputs: dict, state: DecodingState, impl: str) -> torch.Tensor:
    """One token at a time, and two at once: the tail is folded on the way."""
    outs = []
    for now in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5)):
        part = [inputs[name][:, now] for name in ("q", "k", "v", "log_g")]
        out, after = power_attention_step(*part, state=state, impl=impl, inplace=True)
        assert after is state
        outs.append(out)
    return torch.cat(outs, 1)


@pytest.mark.parametrize(
    ("paged", "state_dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.int8)], ids=str
)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_a_slot_is_stepped_as_a_state_of_its_own(name, impl, paged, state_dtype):
    """Bit for bit, and what stands in no slot of the batch stays as it was."""
    case = CASES[name]
    inputs = tokens(case)
    state = plain_state(case, inputs, state_dtype=state_dtype)
    pool = pool_of(state, paged)
    unused = [slot for slot in range(5) if slot not in CHOSEN]
    before = {name: x[unused].clone() for name, x in pool.tensors().items()}
    assert torch.equal(steps(case, inputs, pool, impl), steps(case, inputs, state, impl))
    for name, x in state.tensors().items():
        assert torch.equal(pool.tensors()[name][CHOSEN], x), name
        torch.testing.assert_close(pool.tensors()[name][unused], before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_in_bfloat16_errs_by_its_roundings(impl, dtype):
    """It is rounded once when it is made and once when a tail is folded: here the tokens of two folds."""
    if impl == "triton" and dtype == torch.bfloat16 and not GPU:
        return  # slow in the interpreter
    inputs = tokens(CASE, dtype)
    exact = plain_state(CASE, inputs)
    rounded = plain_state(CASE, inputs, state_dtype=torch.bfloat16)
    assert rounded.s.dtype == torch.bfloat16 and rounded.z.dtype == torch.float32
    assert rounded.nbytes == exact.nbytes - exact.s.nbytes // 2
    outs = [steps(CASE, inputs, each, impl).float() for each in (exact, rounded)]
    wrong = (outs[1] - outs[0]).norm() / outs[0].norm()
    assert 0 < wrong < 3 * 2**-9 + 2 * torch.finfo(dtype).eps
    for state in (exact, rounded):
        assert state.folded().s.dtype == torch.float32


@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_in_int8_errs_by_its_roundings(impl):
    """As in bfloat16, with a step of 1/127 of the largest number of a row."""
    inputs = tokens(CASE)
    exact = plain_state(CASE, inputs)
    rounded = plain_state(CASE, inputs, state_dtype=torch.int8)
    assert (rounded.s.dtype, rounded.z.dtype) == (torch.int8, torch.float32)
    assert rounded.nbytes == exact.nbytes - 3 * exact.s.nbytes // 4 + exact.z.nbytes + exact.count.nbytes
    outs = [steps(CASE, inputs, each, impl) for each in (exact, rounded)]
    assert 0 < (outs[1] - outs[0]).norm() / outs[0].norm() < 3 / 127
    # Each of the three roundings errs by less than a step, and later decay makes none of them larger.
    step = rounded.scales[..., None] * 3
    assert ((rounded.sums() - exact.s).abs() <= 1.5 * step).all()


def test_rounding_to_int8_is_right_on_average():
    """Numbers between two steps are rounded up or down, so that small terms are not lost. The results are always
    the same."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(64, 1000, generator=generator) * 1e-3 + 0.3
    rows[:, 0] = 127
    folds = torch.tensor(0, dtype=torch.int32)
    found, scales = in_int8(rows, folds)
    assert torch.equal(scales, torch.ones(64)) and set(found[:, 1:].unique().tolist()) == {0, 1}
    assert found[:, 1:].float().mean().item() == pytest.approx(0.3005, abs=0.01)
    assert torch.equal(in_int8(rows.clone(), folds)[0], found)
    stepped = torch.zeros(64, 1000)
    for _ in range(100):  # to the nearest step every number would stay 0
        stepped[:, 0] = 127
        folds += 1
        found, scales = in_int8(stepped + 0.1, folds)
        stepped = found * scales[:, None]
    assert (stepped[:, 1:] - 10).abs().max() <= 2.1
    assert stepped[:, 1:].mean().item() == pytest.approx(10, rel=0.02)


def test_an_int8_state_follows_values_that_change_while_its_keys_do_not():
    """The normalizer of equal keys reaches a number that does not change any more."""
    key = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    state = DecodingState.from_state(PowerState.zeros(1, 1, 8, 8, device=DEVICE), state_dtype=torch.int8)
    value = torch.eye(8, device=DEVICE)[:1].view(1, 1, 1, 8).contiguous()
    for i in range(3000):
        if i == 1000:
            value = torch.where(value == 0, 0.5, value)
        out, _ = power_attention_step(
            key, key, value, torch.full((1, 1, 1), -0.01, device=DEVICE), state=state, inplace=True
        )
    torch.testing.assert_close(out, value, rtol=0.02, atol=0)


def test_a_state_that_differs_a_little_is_rounded_in_the_same_way():
    inputs = tokens(replace(CASE, T=40))
    states = [plain_state(CASE, tokens(CASE), state_dtype=torch.int8) for _ in range(2)]
    for i in range(40):
        now = [inputs[name][:, i : i + 1] for name in ("q", "k", "v", "log_g")]
        power_attention_step(*now, state=states[0], inplace=True)
        power_attention_step(now[0], now[1] * (1 + 1e-6), *now[2:], state=states[1], inplace=True)
    levels = (states[0].s.int() - states[1].s.int()).abs()
    assert levels.max() <= 1 and levels.float().mean() < 0.01


def test_the_kernel_rounds_to_int8_as_plain_torch_does():
    pytest.importorskip("triton", reason="needs triton")
    inputs = tokens(replace(CASE, T=12))
    states = [plain_state(CASE, tokens(CASE), state_dtype=torch.int8) for _ in IMPLS]
    for impl, state in zip(IMPLS, states, strict=True):
        for i in range(12):
            now = [inputs[name][:, i : i + 1] for name in ("q", "k", "v", "log_g")]
            power_attention_step(*now, state=state, impl=impl, inplace=True)
    plain, kernel = states
    assert torch.equal(plain.folds, kernel.folds) and (plain.folds == 5).all()
    levels = (plain.s.int() - kernel.s.int()).abs()
    assert levels.max() <= 1 and levels.float().mean() < 0.01
    torch.testing.assert_close(plain.scales, kernel.scales)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_make_nan_of_an_int8_row(impl, bad):
    """And of no other key/value head."""
    inputs = tokens(replace(CASE, G=2))
    inputs["v"][0, 0, 0, 1] = bad
    state = plain_state(replace(CASE, G=2), inputs, state_dtype=torch.int8)
    out = steps(CASE, inputs, state, impl)
    assert out[0, 3:, 0].isnan().all() and state.scales[0, 0].isnan().all()
    assert out[0, :, 1].isfinite().all() and out[1].isfinite().all() and state.scales[1].isfinite().all()


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite():
    rows = torch.tensor([[0.0, 0.0], [1e-42, -1e-42], [1e-37, 1e-38], [3e38, -3e38]])
    found, scales = in_int8(rows, torch.tensor(0, dtype=torch.int32))
    assert scales.isfinite().all() and ((found * scales[:, None] - rows).abs() <= 1.01 * scales[:, None]).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_are_within_the_budget(impl):
    case = replace(CASE, return_state=True)
    inputs = make_inputs(case, dtype=torch.float32)
    detached = {name: x.detach() for name, x in inputs.items() if x is not None}
    pool = pool_of(plain_state(case, detached), paged=True)
    out = steps(case, detached, pool, impl)
    after = pool.folded()
    assert_within_budget({"out": out, "s": after.s, "z": after.z}, case, inputs)


def test_a_batch_of_slots_is_a_state():
    """It can be copied, folded, rolled back and written again."""
    inputs = tokens(CASE)
    state = plain_state(CASE, inputs)
    pool = pool_of(state, paged=True)
    assert (pool.batch, state.batch) == (2, 2) and pool.at(None).batch == 5
    power_attention_step(*(inputs[n][:, :2] for n in ("q", "k", "v", "log_g")), state=pool, inplace=True)
    power_attention_step(*(inputs[n][:, :2] for n in ("q", "k", "v", "log_g")), state=state, inplace=True)
    copy = pool.clone()
    assert copy.slots is None and torch.equal(copy.folded().s, state.folded().s)
    pool.rollback(1)
    state.rollback(1)
    assert torch.equal(pool.folded().s, state.folded().s) and not torch.equal(pool.folded().s, copy.folded().s)
    _, apart = power_attention_step(*(inputs[n][:, 2:3] for n in ("q", "k", "v", "log_g")), state=pool)
    assert apart.slots is None and torch.equal(pool.folded().s, state.folded().s)
    one = pool.at(pool.slots[1:2])
    assert one.continued(PowerState.zeros(1, 1, 4, 5, device=DEVICE)) is one
    assert not pool.s[CHOSEN[1]].any() and pool.count[CHOSEN[1]].sum() == 0 and pool.s[CHOSEN[0]].any()
    with pytest.raises(ValueError, match=r"these slots hold s \[1, 1, 10, 5\] of p=2; got \[2, 1, 10, 5\] of p=2"):
        one.put(PowerState.zeros(2, 1, 4, 5, device=DEVICE))


def test_refusals():
    inputs = tokens(CASE)
    pool = pool_of(plain_state(CASE, inputs), paged=False)
    slots = torch.tensor(CHOSEN, dtype=torch.int32, device=DEVICE)
    for bad in (slots.long(), slots.float()):
        with pytest.raises(TypeError, match=rf"^slots must be a tensor of int32; got {bad.dtype}$"):
            pool.at(bad)
    with pytest.raises(TypeError, match="slots must be a tensor of int32; got list"):
        pool.at(CHOSEN)
    for bad in (slots[None], slots.repeat(2)[::2], slots.to("meta")):
        with pytest.raises(ValueError, match=r"^slots must be \[B\], contiguous and on the state's device, .*; got "):
            pool.at(bad)
    with pytest.raises(ValueError, match=r"s must be \[B, G, D, V\] = \[2, 1, 10, 5\]; got \[1, 1, 10, 5\]"):
        part = [inputs[name][:, :1] for name in ("q", "k", "v", "log_g")]
        power_attention_step(*part, state=pool.at(slots[:1]))
    with pytest.raises(ValueError, match="the tensors of every slot of a DecodingState must be contiguous"):
        replace(pool, s=pool.s.transpose(2, 3).contiguous().transpose(2, 3))
    for state_dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="kept as it is, or in bfloat16 or int8 if it is float32; got"):
            DecodingState.from_state(PowerState.zeros(1, 1, 2, 2), state_dtype=state_dtype)
    with pytest.raises(TypeError, match=r"a DecodingState has scales if s is int8; got Tensor for torch\.float32"):
        replace(pool, scales=pool.z)
    narrow = plain_state(CASE, inputs, state_dtype=torch.int8)
    for name in ("scales", "folds"):
        with pytest.raises(TypeError, match=rf"a DecodingState has {name} if s is int8; got NoneType for torch\.int8"):
            replace(narrow, **{name: None})
    with pytest.raises(ValueError, match=r"holds scales \[2, 1, 10\]; got \[2, 1, 9\]"):
        replace(narrow, scales=narrow.scales[..., :9])
    with pytest.raises(TypeError, match="kept as it is, or in bfloat16 or int8"):
        DecodingState.from_state(PowerState.zeros(1, 1, 2, 2, dtype=torch.float64), state_dtype=torch.bfloat16)
