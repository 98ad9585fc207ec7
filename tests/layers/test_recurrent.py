"""RetNet, RWKV-4, RWKV-7 and blocked windows against their formulas."""

import pytest
import torch

from sympow.layers import MIXERS
from sympow.layers.rwkv7 import delta_rule
from sympow.layers.zoology.rwkv4 import decayed_mean
from tests.draws import normal


def retnet(**options) -> torch.nn.Module:
    mixer = MIXERS["retnet"](16, 2, **options).double()
    mixer.reset_parameters(out_std=0.5, generator=torch.Generator().manual_seed(0))
    return mixer


@pytest.mark.parametrize(("name", "heads", "options"), [("retnet", 2, {"value_dim": 1}), ("rwkv7", 16, {})])
def test_heads_of_one_channel_are_refused(name, heads, options):
    """Their norm is 0 everywhere, and torch refuses it for a single token."""
    with pytest.raises(ValueError, match=r"at least 2.*: the norm of one.* is constant; got"):
        MIXERS[name](16, heads, **options)


def test_retnet_is_one_layer_in_three_forms():
    x = normal(2, 70, 16)
    parallel, recurrent, chunked_8, chunked_32 = (retnet(chunk_size=c) for c in (70, 1, 8, 32))
    y = parallel(x)
    state, rows = parallel.init_state(2), []
    for t in range(70):
        row, state = parallel.step(x[:, t : t + 1], state)
        rows.append(row)
    for other in (recurrent(x), chunked_8(x), chunked_32(x), torch.cat(rows, dim=1)):
        torch.testing.assert_close(other, y, rtol=1e-10, atol=1e-10)


def test_retnet_is_its_formula():
    mixer, x = retnet(rotation="none"), normal(1, 9, 16)
    q, k, v = mixer.heads(x)
    lag = torch.arange(9.0, dtype=torch.float64)[:, None] - torch.arange(9)
    gamma = torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64)
    decay = torch.where(lag >= 0, gamma[:, None, None] ** lag, 0)
    y = torch.einsum("bthk,bshk,hts,bshv->bthv", q, k, decay, v) / 8**0.5
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    gate = torch.nn.functional.silu(mixer.gate(x))
    assert mixer.value_dim == 2 * mixer.head_dim
    torch.testing.assert_close(mixer(x), mixer.out(gate * y.flatten(2)))


def weighted_mean(k, v, rate, bonus):
    lag = (torch.arange(k.shape[1])[:, None] - torch.arange(k.shape[1]))[..., None]
    exponent = k[:, None] - (lag - 1) * rate + torch.where(lag == 0, bonus - rate, 0)
    weight = exponent.masked_fill(lag < 0, -torch.inf).softmax(2)
    return (weight * v[:, None]).sum(2)


def start(batch: int, d: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(batch, d, dtype=dtype)
    return zeros, zeros, torch.full_like(zeros, -torch.inf)


@pytest.mark.parametrize("time", [1, 2, 8, 13, 32, 107])
def test_rwkv4_is_a_weighted_mean_with_its_gradient(time):
    inputs = [part.requires_grad_() for part in (3 * normal(2, time, 4), normal(2, time, 4, seed=1), normal(4, seed=2))]
    rate = normal(4, seed=3).exp().requires_grad_()
    k, v, bonus = inputs
    y, *_ = decayed_mean(k, v, rate, bonus, *start(2, 4))
    expected = weighted_mean(k, v, rate, bonus)
    torch.testing.assert_close(y, expected)
    weight = normal(2, time, 4, seed=4)
    used = [k, v, bonus, rate] if time > 2 else [v]
    got, wanted = (torch.autograd.grad((out * weight).sum(), used) for out in (y, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_rwkv4_stands_exponents_that_overflow_and_long_sequences():
    k, v = 300 * normal(1, 1000, 2), normal(1, 1000, 2, seed=1)
    rate, bonus = torch.tensor([1e-3, 20.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    y, *state = decayed_mean(*(part.float() for part in (k, v, rate, bonus)), *start(1, 2, torch.float32))
    assert y.isfinite().all() and all(part.isfinite().all() for part in state)
    exact, *_ = decayed_mean(k, v, rate, bonus, *start(1, 2))
    torch.testing.assert_close(exact, weighted_mean(k, v, rate, bonus))
    # In float32 an exponent of 1,200 is off by 6e-5, and so is the logarithm of a weight, of two exponents.
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2 * 2 * 6e-5 * float(v.abs().max()))


def test_rwkv7_is_its_matrices():
    r, k, v = (normal(1, 7, 2, 3, seed=seed) for seed in range(3))
    decay, rate = normal(1, 7, 2, 3, seed=3).sigmoid(), normal(1, 7, 2, 3, seed=4).sigmoid()
    kappa = torch.nn.functional.normalize(normal(1, 7, 2, 3, seed=5), dim=-1)
    start = normal(1, 2, 3, 3, seed=6)
    y, memory = delta_rule(r, decay, k, v, kappa, rate, start)
    for head in range(2):
        s = start[0, head]
        for t in range(7):
            row = (0, t, head)
            transition = torch.diag(decay[row]) - torch.outer(kappa[row], rate[row] * kappa[row])
            s = s @ transition + torch.outer(v[row], k[row])
            torch.testing.assert_close(y[row], s @ r[row])
        torch.testing.assert_close(memory[0, head], s)


def test_a_block_is_softmax_attention_of_its_own():
    blocked = MIXERS["blocked_window"](16, 2, window=6).double()
    softmax = MIXERS["softmax"](16, 2).double()
    softmax.load_state_dict(blocked.state_dict())
    x = normal(2, 15, 16)
    alone = torch.cat([softmax(x[:, i : i + 6]) for i in (0, 6, 12)], dim=1)
    torch.testing.assert_close(blocked(x), alone)


def test_rwkv4_starts_as_published_in_the_last_of_two_layers():
    """The shares are (i / d)^(1 - layer / layers); decays and the shift of values go by layer / (layers - 1)."""
    mixer = MIXERS["rwkv4"](16, 2, depth=1.0, shift_depth=0.5).double()
    channel = torch.arange(16, dtype=torch.float64)
    share = (channel / 16) ** 0.5
    torch.testing.assert_close(mixer.mix, torch.stack([share, share + 0.3, share**0.5]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mixer.decay, -5 + 8 * (channel / 15) ** 2, rtol=1e-6, atol=1e-6)
