from math import pi

import pytest
import torch
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile

from sympow.ops import rotary_frequencies, rotary_positions, rotate, rotate_heads
from sympow.ops.feature_map import spow
from sympow.ops.running_sums import SUM_BLOCK
from tests.draws import normal

F64 = torch.float64


def test_frequencies():
    standard = rotary_frequencies(8)
    assert standard.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert rotary_frequencies(8, base=1e8).tolist() == pytest.approx([1.0, 1e-2, 1e-4, 1e-6])
    conformal = rotary_frequencies(4, "conformal", max_length=100)
    assert conformal.tolist() == pytest.approx([2 * pi, 2 * pi / 10])


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
          "original_max_position_embeddings": 100}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 100}


def test_scaled_frequencies():
    """By hand: pairs turn 15.9, 1.6, 0.16 and 0.016 times in 100 tokens; the last have no frequency."""
    plain = rotary_frequencies(10, rotary_dim=8)
    assert (rotary_frequencies(10, rotary_dim=8, scaling={"rope_type": "linear", "factor": 4}) * 4).equal(plain)
    factors = {"rope_type": "factors", "factors": [1, 2, 3.0, 4]}
    assert rotary_frequencies(8, scaling=factors).tolist() == pytest.approx([1, 0.05, 0.01 / 3, 0.00025])
    kept = (10 / (2 * pi) - 1) / 3
    between = 0.1 / 8 + (0.1 - 0.1 / 8) * kept
    assert rotary_frequencies(8, scaling=LLAMA3).tolist() == pytest.approx([1, between, 0.01 / 8, 0.001 / 8])
    exact = YARN | {"truncate": False, "beta_fast": 10 / (2 * pi), "beta_slow": 0.1 / (2 * pi)}  # pairs 1 to 3
    assert rotary_frequencies(8, scaling=exact).tolist() == pytest.approx([1, 0.1, 0.01 * (1 + 0.25) / 2, 0.001 / 4])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({}, "one of linear, llama3, yarn, factors; got None"),
        ({"rope_type": "dynamic", "factor": 2}, "one of linear, llama3, yarn, factors; got 'dynamic'"),
        ({"rope_type": "linear"}, "a rotation scaled by linear needs the number 'factor'"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "scaled by linear has no number 'beta_fast'"),
        ({"rope_type": "linear", "factor": 0}, "factor of a scaled rotation must be positive and finite; got 0"),
        ({"rope_type": "linear", "factor": True}, "must be positive and finite; got True"),
        ({"rope_type": "linear", "factor": float("inf")}, "must be positive and finite; got inf"),
        (LLAMA3 | {"low_freq_factor": 4}, "high_freq_factor of a scaled rotation must be greater than low_freq_factor"),
        (YARN | {"truncate": 1}, "truncate of a scaled rotation must be true or false; got 1"),
        ({"rope_type": "factors", "factors": [1, 2, 3]}, "factors of a scaled rotation must be 4 positive numbers"),
        ({"rope_type": "factors", "factors": [1, 2, 3, -1]}, "factors of a scaled rotation must be 4 positive numbers"),
    ],
)
def test_scalings_that_are_none_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(8, scaling=scaling)
    with pytest.raises(ValueError, match="a scaled rotation is of the standard rule"):
        rotary_frequencies(8, "conformal", max_length=9, scaling=YARN)


@pytest.mark.parametrize("rule", ["standard", "conformal"])
@pytest.mark.parametrize("carried", [False, True])
def test_phase_at_a_million_tokens(rule, carried):
    """Within 1e-5 of exact arithmetic, float32 activations, in one call or resumed from a carried position."""
    frequencies = rotary_frequencies(16, rule, max_length=2**20 if rule == "conformal" else None)
    beta = torch.rand(1, 1_000_000, 1, generator=torch.Generator().manual_seed(0)) * 2
    if carried:
        half = rotary_positions(beta[:, :500_000])
        positions = rotary_positions(beta[:, 500_000:], start=half[:, -1])[:, -8:]
    else:
        positions = rotary_positions(beta)[:, -8:]
    x = torch.ones(1, 8, 1, 16)
    # The oracle: the steps as exact integers of 2**-24 (which float32 steps are), summed and reduced without rounding.
    steps = (beta[0, :, 0].double() * 2**24).long()
    exact = steps.cumsum(0)[-8:]
    whole, rest = exact // 2**24, exact % 2**24
    turns = frequencies / (2 * pi)
    phase = (whole[:, None].double() * turns).remainder(1) + rest[:, None].double() / 2**24 * turns
    angle = phase * 2 * pi
    expected = torch.stack([angle.cos() - angle.sin(), angle.sin() + angle.cos()], -1).flatten(-2)
    assert (rotate(x, positions, frequencies)[0, :, 0].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("time", [1, SUM_BLOCK, SUM_BLOCK + 1, 3 * SUM_BLOCK - 5, SUM_BLOCK**2 + 3 * SUM_BLOCK + 1])
def test_sums_in_blocks(time, carried):
    """Positions and gradients are those of one running sum, but for the rounding of T float64 additions."""
    beta, start = normal(2, time, 3).requires_grad_(), normal(2, 3, seed=1).requires_grad_()
    plain = beta.cumsum(1) + carried * start[:, None]
    positions = rotary_positions(beta, start if carried else None)
    leaves, weights = (beta, start)[: 1 + carried], normal(2, time, 3, seed=2)
    grads = [torch.autograd.grad((c * weights).sum(), leaves) for c in (positions, plain)]
    # No sum of any terms is larger than that of their sizes, and each addition rounds it by half of eps at most.
    for actual, expected, terms in ((positions, plain, beta), *zip(*grads, (weights, weights), strict=False)):
        bound = time * torch.finfo(F64).eps * (terms.abs().sum(1).max() + start.abs().max())
        assert (actual - expected).abs().max() <= bound


def test_no_sum_is_longer_than_a_block():
    """Neither forward nor backward: what torch.compile makes of longer ones on a GPU may not compile."""
    beta = torch.ones(1, 2 * SUM_BLOCK**2 + 2 * SUM_BLOCK, 2, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        rotary_positions(beta).sum().backward()
    lengths = [event.input_shapes[0][-1] for event in profiler.events() if event.name == "aten::cumsum"]
    assert len(lengths) == 2 * 3 and max(lengths) == SUM_BLOCK  # blocks, blocks of blocks, and those


def test_only_differences_of_positions_matter():
    q, k, frequencies = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1), rotary_frequencies(8)

    def at(x, position):
        return rotate(x, torch.tensor([position], dtype=F64), frequencies)

    def score(i, j):
        return (at(q, i) * at(k, j)).sum().item()

    assert score(7.5, 3.25) == pytest.approx(score(1007.5, 1003.25), rel=1e-12)
    assert score(7.5, 3.25) != pytest.approx(score(7.5, 4.25), rel=1e-3)


def test_fixed_rotary_is_steps_of_one():
    x, frequencies = normal(2, 9, 4, 6), rotary_frequencies(6)
    fixed = rotate(x, torch.arange(1, 10, dtype=F64), frequencies)
    torch.testing.assert_close(rotate(x, rotary_positions(torch.ones(2, 9, 2)), frequencies), fixed, rtol=0, atol=1e-14)
    angle = 3.0  # the third token, the first pair
    pair = x[0, 2, 1, :2]
    turned = torch.stack(
        [
            pair[0] * torch.tensor(angle).cos() - pair[1] * torch.tensor(angle).sin(),
            pair[0] * torch.tensor(angle).sin() + pair[1] * torch.tensor(angle).cos(),
        ]
    )
    torch.testing.assert_close(fixed[0, 2, 1, :2], turned, rtol=1e-6, atol=1e-6)


def test_heads_of_a_group_turn_together():
    x, beta, frequencies = normal(2, 5, 6, 4), torch.rand(2, 5, 3), rotary_frequencies(4)
    positions = rotary_positions(beta)
    grouped = rotate(x, positions, frequencies)
    for h in range(6):
        alone = rotate(x[:, :, h : h + 1], positions[:, :, h // 2 : h // 2 + 1], frequencies)
        torch.testing.assert_close(grouped[:, :, h : h + 1], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("positions", [torch.arange(5, dtype=F64), rotary_positions(normal(2, 5, 3).abs())])
def test_heads_of_a_projection(positions):
    """q and k as `rotate` turns them, v as it is; with gradients no result is a view of what came in."""
    frequencies, qkv = rotary_frequencies(4), normal(2, 5, 6 * 4 + 3 * 4 + 3 * 7)
    q, k, v = qkv.split([24, 12, 21], dim=-1)
    expected = [rotate(x.unflatten(-1, (-1, 4)), positions, frequencies) for x in (q, k)] + [v.unflatten(-1, (3, 7))]
    for x in (qkv, qkv.clone().requires_grad_()):
        actual = rotate_heads(x, positions, frequencies, 6, 3)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not any(a.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for a in actual)


def test_gradients():
    frequencies = rotary_frequencies(4)

    def call(x, beta):
        return rotate(x, rotary_positions(beta), frequencies)

    assert gradcheck(call, (normal(2, 3, 4, 4).requires_grad_(), normal(2, 3, 2, seed=1).requires_grad_()))
    shared = normal(3, seed=2).requires_grad_()
    assert gradcheck(lambda c: rotate(normal(2, 3, 4, 4), c, frequencies), (shared,))


@pytest.mark.parametrize("p", [2, 3])
def test_a_rotation_of_keys_rotates_their_features(p):
    """(M17): phi(P k) = P_bar phi(k) with P_bar orthogonal, solved for from more keys than dimensions."""
    keys = normal(1, 200, 1, 4)
    rotated = rotate(keys, torch.full((200,), 2.7, dtype=F64), rotary_frequencies(4))
    features, turned = spow(keys[0, :, 0], p), spow(rotated[0, :, 0], p)
    p_bar = torch.linalg.lstsq(features, turned).solution
    torch.testing.assert_close(features @ p_bar, turned)
    torch.testing.assert_close(p_bar @ p_bar.T, torch.eye(len(p_bar), dtype=F64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_is_kept(dtype):
    x = normal(1, 3, 1, 4, dtype=dtype)
    assert rotate(x, torch.arange(3, dtype=F64), rotary_frequencies(4)).dtype == dtype


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary_frequencies(7), "key_dim must be even; got 7"),
        (lambda: rotary_frequencies(8, "alibi"), "one of standard, conformal; got 'alibi'"),
        (lambda: rotary_frequencies(8, "conformal"), "max_length belongs to the conformal rule"),
        (lambda: rotary_frequencies(8, max_length=9), "max_length belongs to the conformal rule"),
        (lambda: rotary_frequencies(8, "conformal", 9, base=5e5), "the rotation's base belongs to the standard rule"),
        (lambda: rotary_frequencies(8, base=1.0), "the rotation's base must be greater than 1; got 1"),
        (lambda: rotary_frequencies(8, "conformal", 0.5), "max_length must be greater than 1; got 0.5"),
        (lambda: rotate(torch.ones(1, 3, 1, 6), torch.ones(3), rotary_frequencies(8)), r"x is \[B, T, H, 8\]"),
        (lambda: rotate(torch.ones(1, 3, 1, 8), torch.ones(4), rotary_frequencies(8)), r"got \[4\]"),
        (lambda: rotate(torch.ones(1, 3, 3, 8), torch.ones(1, 3, 2), rotary_frequencies(8)), "G dividing H"),
        (lambda: rotate_heads(torch.ones(1, 3, 9), torch.ones(3), rotary_frequencies(2), 3, 2), "multiple of kv_heads"),
        (lambda: rotate_heads(torch.ones(1, 3, 8), torch.ones(3), rotary_frequencies(2), 2, 2), r"\(2 \+ 2\) 2 \+ 2 V"),
        (lambda: rotate_heads(torch.ones(1, 3, 9), torch.ones(3), rotary_frequencies(2), 2, 2), "got .1, 3, 9"),
        (lambda: rotate_heads(torch.ones(3, 10), torch.ones(3), rotary_frequencies(2), 2, 2), "got .3, 10"),
        (lambda: rotate_heads(torch.ones(1, 3, 10), torch.ones(4), rotary_frequencies(2), 2, 2), "got .4"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
