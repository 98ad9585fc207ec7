"""Softmax attention with forgetting gates against its formula: results, gradients, precision; and ALiBi, (M18)."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sympow.layers import PowerAttention, SoftmaxAttention, WindowAttention
from sympow.layers.gate_channels import gated_key_dim
from sympow.layers.softmax import gated_attention
from sympow.ops import power_attention
from tests.draws import normal

GPU = torch.cuda.is_available()
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def scores(q, k):
    """q . k / sqrt(K) of every pair, [B, H, T, T]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5


def attended(score, v, window=None):
    """Causal softmax attention [B, T, H, V] of scores [B, H, T, T], to the last `window` tokens."""
    v = v.repeat_interleave(score.shape[1] // v.shape[2], dim=2)
    seen = torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    if window is not None:
        seen &= ~seen.tril(-window)
    return torch.einsum("bhts,bshv->bthv", score.masked_fill(~seen, -torch.inf).softmax(-1), v)


def dense(q, k, v, log_g, window=None):
    """The formula: scores s_ij + L_i - L_j."""
    sums = log_g.cumsum(1).transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    return attended(scores(q, k) + sums[..., None] - sums[..., None, :], v, window)


def inputs(time: int, heads: int, groups: int, key_dim: int, value_dim: int, bias: float) -> list[torch.Tensor]:
    shapes = ((heads, key_dim), (groups, key_dim), (groups, value_dim))
    q, k, v = (normal(1, time, *shape, seed=seed) for seed, shape in enumerate(shapes))
    return [q, k, v, F.logsigmoid(bias + normal(1, time, groups, seed=3))]


@pytest.mark.parametrize("time", [1, 2, 12, 13, 14, 100])
@pytest.mark.parametrize(("heads", "groups", "value_dim"), [(2, 2, 6), (4, 2, 3), (3, 1, 40)])
def test_is_the_formula_with_its_gradients(time, heads, groups, value_dim):
    given = [x.requires_grad_() for x in inputs(time, heads, groups, 6, value_dim, bias=1.0)]
    got, wanted = gated_attention(*given), dense(*given)
    dout = normal(*wanted.shape, seed=4)
    torch.testing.assert_close(got, wanted, **TIGHT)
    for a, b in zip(*(torch.autograd.grad(y, given, dout) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.parametrize("window", [1, 7, 50, 300])
def test_a_window_is_the_formula_with_its_gradients(window):
    """The layer, with rows longer than a block of queries; its gradients are those of weights and input."""
    layer = WindowAttention(16, 4, window=window, gate=True, gate_bias=(0, 2), n_kv_heads=2).double()
    layer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    x = normal(2, 300, 16).requires_grad_()
    given = [x, *layer.parameters()]
    heads = dense(*layer.rotated_heads(x), F.logsigmoid(layer.gate(x)), window)
    got, wanted = layer(x), layer.output(x, heads)
    torch.testing.assert_close(got, wanted, **TIGHT)
    dout = normal(*wanted.shape, seed=4)
    for a, b in zip(*(torch.autograd.grad(y, given, dout) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10 * float(b.abs().max()))


def in_one_batch(layer, x, lengths):
    """The state of rows of x [B, T, d] that have read different numbers of tokens."""
    states = []
    for i, length in enumerate(lengths):
        states.append(layer.step(x[i : i + 1, :length], layer.init_state(1))[1].with_all_room(x.shape[1]))
    assert states[0].rows_may_differ
    tensors = iter([torch.cat(parts) for parts in zip(*(list(state.tensors()) for state in states), strict=True)])
    return states[0].mapped(lambda _: next(tensors)).counting(torch.tensor(lengths))


def of_window(window, **options):
    """A layer with a window of 6 tokens, or of all."""
    layer = WindowAttention(16, 2, window=6, **options) if window else SoftmaxAttention(16, 2, **options)
    layer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    return layer.double()


@torch.no_grad()
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("taken", [0, 2, 9])
def test_tokens_are_taken_back_in_rows_of_different_lengths(window, gate, taken):
    layer = of_window(window, gate=gate, gate_bias=(-1, 1), n_kv_heads=1)
    x, lengths = normal(2, 40, 16), (3, 17)
    wanted = layer(x)

    def parts(whole, first, count):
        return torch.stack([whole[row, length + first : length + first + count] for row, length in enumerate(lengths)])

    y, after = layer.try_step(parts(x, 0, 9), in_one_batch(layer, x, lengths))
    torch.testing.assert_close(y, parts(wanted, 0, 9), **TIGHT)
    y, _ = layer.step(parts(x, taken, 4), after(taken))
    torch.testing.assert_close(y, parts(wanted, taken, 4), **TIGHT)


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("gate", [False, True])
def test_gradients_go_through_steps_of_rows_of_different_lengths(window, gate):
    layer = of_window(window, gate=gate, gate_bias=(-1, 1))
    state = layer.init_state(2).with_all_room(20).counting(torch.zeros(2, dtype=torch.int64))
    x, outs = normal(2, 20, 16).requires_grad_(), []
    for piece in x.split([7, 1, 1, 11], dim=1):
        y, state = layer.step(piece, state)
        outs.append(y)
    got, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (torch.cat(outs, dim=1), layer(x)))
    torch.testing.assert_close(got, wanted, **TIGHT)


@torch.no_grad()
@pytest.mark.parametrize("window", [True, False])
def test_gates_in_steps_of_rows_of_different_lengths(window):
    layer = of_window(window, gate=True, gate_bias=(-1, 1))
    x, lengths = normal(2, 30, 16), (3, 17)
    state = in_one_batch(layer, x, lengths)
    for i in range(8):
        step = torch.stack([x[row, length + i] for row, length in enumerate(lengths)])[:, None]
        y, state = layer.step(step, state)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(y[row, 0], layer(x[row : row + 1])[0, length + i], **TIGHT)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_compiled_is_eager():
    """On a GPU the compiler splits long sums, and it leaves out conversions that the parts of a sum consist of."""
    given = [normal(64, 1024, *shape, seed=seed).to("cuda", torch.bfloat16) for seed, shape in enumerate([(6, 64)] * 3)]
    log_g = F.logsigmoid(normal(64, 1024, 6, seed=3) + 4).to("cuda", torch.float32)
    given = [x.requires_grad_() for x in (*given, log_g)]
    torch.compiler.reset()
    outs = [form(*given) for form in (torch.compile(gated_attention), gated_attention)]
    grads = [torch.autograd.grad(out, given, torch.ones_like(out)) for out in outs]
    torch.testing.assert_close(outs[0], outs[1], rtol=2**-7, atol=2**-7)
    for got, wanted in zip(*grads, strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reset", [-300.0, -1e6, -1e9, -3e38])
def test_a_reset_takes_little_from_what_follows(reset, dtype):
    """Scores err by 2**-16 for each of the four resets in float32, and so do the weights and their sum."""
    q, k, v, log_g = inputs(64, 2, 1, 6, 5, bias=1.0)
    log_g[:, ::16] = reset
    given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    gates = log_g.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_()
    got = gated_attention(*given, gates)
    rounded = [*(x.detach().double() for x in given), log_g.clamp(min=-300.0)]
    wanted = torch.cat([dense(*(x[:, t : t + 16] for x in rounded)) for t in range(0, 64, 16)], 1)
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error <= {torch.float64: 1e-12, torch.float32: 2 * 4 * 2**-16, torch.bfloat16: 2**-7}[dtype]
    grads = torch.autograd.grad(got.sum(), [*given, gates])
    assert all(x.isfinite().all() for x in grads) and not grads[3][:, ::16].any()


@pytest.mark.parametrize("window", [None, 16])
def test_sums_of_many_resets_are_no_infinities_in_float16(window):
    """1,100 resets: the sum of -281,600 exceeds what a float16 key held. A token then sees itself alone."""
    kind, options = (SoftmaxAttention, {}) if window is None else (WindowAttention, {"window": window})
    layer = kind(16, 2, gate=True, n_kv_heads=1, head_dim=64, **options)
    layer.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(layer.gate.bias, -1e4)
    layer, x = layer.half(), normal(1, 1100, 16).half().requires_grad_()
    alone = layer(x.detach().transpose(0, 1)).transpose(0, 1)
    y = layer(x)
    torch.testing.assert_close(y, alone, rtol=2**-9, atol=2**-9)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()], allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)
    with torch.no_grad():
        state, outs = layer.init_state(1), []
        for piece in x.split([1000, 1, 50, 49], dim=1):
            out, state = layer.step(piece, state)
            outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), alone, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("time", [5, 30])
def test_gradients_are_those_of_differences(time):
    given = [x.requires_grad_() for x in inputs(time, 2, 1, 2, 2, bias=0.0)]
    torch.autograd.gradcheck(gated_attention, given)


@pytest.mark.parametrize(("time", "bias"), [(300, 8.0), (1024, -3.0), (1024, 4.0), (2048, 1.0)])
@pytest.mark.parametrize(
    "dtype, backend",
    [
        (torch.bfloat16, None),
        (torch.float32, None),
        *(
            pytest.param(torch.bfloat16, backend, marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        ),
    ],
)
def test_gates_are_as_exact_as_float32(time, bias, dtype, backend):
    """Against float64 on the same rounded inputs.

    A score is a sum of numbers up to max |L|, rounded to float32 for each of 3 parts and for all: 4 * 2**-24 |L|.
    In bfloat16 there are besides roundings of weights, of the gradient of scores, and of results, of 2**-9 each; in
    float32 those of T terms, 2**-24 sqrt(T). The gradient of gates adds up those of stretches of T / 12 tokens, two
    a token; if it added up those of all T, it would miss what is allowed for strong gates by 10 times.
    """
    on = "cuda" if GPU else "cpu"
    *rest, log_g = inputs(time, 1, 1, 64, 64, bias)
    given = [x.to(on, dtype) for x in rest] + [log_g.to(on, torch.float32)]
    dout = normal(1, time, 1, 64, seed=4).to(on, dtype)

    def run(attend, *tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        y = attend(*tensors)
        return [y, *torch.autograd.grad(y, tensors, dout.to(y))]

    with nullcontext() if backend is None else sdpa_kernel([backend]):
        got = run(gated_attention, *given)
    assert got[0].dtype == dtype and got[-1].dtype == torch.float32
    unit = 2**-9 if dtype == torch.bfloat16 else time**0.5 * 2**-24
    sums = 2 * (time / 12) ** 0.5 if dtype == torch.bfloat16 else 8
    score = 4 * 2**-24 * -float(log_g.sum(1).min())
    allowed = [4 * unit + score, *[8 * unit + score] * 3, sums * unit + score]
    for a, b, rtol in zip(got, run(dense, *(x.cpu().double() for x in given)), allowed, strict=True):
        assert (a.cpu().double() - b).norm() <= rtol * b.norm()


@torch.no_grad()
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
def test_sums_keep_their_precision_in_the_cache(cache):
    """Late in a row, under autocast: there a sum rounded to bfloat16 is off by more than the scores are large."""
    layer = SoftmaxAttention(32, 2, gate=True, gate_bias=(-1, 1))
    layer.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    x = normal(1, 600, 32).float()
    y, state, outs = layer(x), layer.init_state(1, dtype=cache), []
    with torch.autocast("cpu", torch.bfloat16):
        for piece in x.split([500, 1, 1, 40, 58], dim=1):
            out, state = layer.step(piece, state)
            outs.append(out.float())
    assert state.log_sum.dtype == torch.float64 and state.log_sum.min() < -600
    assert (torch.cat(outs, dim=1) - y).norm() < 0.03 * y.norm()


def test_gates_start_as_those_of_power_attention():
    for options in ({}, {"n_kv_heads": 1}, {"gate_bias": (2, 4)}):
        softmax, power = (
            kind(12, 3, **options | more) for kind, more in ((SoftmaxAttention, {"gate": True}), (PowerAttention, {}))
        )
        assert torch.equal(softmax.gate.bias, power.gate.bias)


def test_without_a_past_to_forget_gates_change_nothing():
    plain, gated = (SoftmaxAttention(8, 2, gate=gate).double() for gate in (False, True))
    assert gated.load_state_dict(plain.state_dict(), strict=False).missing_keys == ["gate.weight", "gate.bias"]
    x = normal(1, 20, 8)
    assert (gated(x) - plain(x)).abs().max() > 1e-4
    torch.nn.init.constant_(gated.gate.bias, 60.0)
    torch.testing.assert_close(gated(x), plain(x), **TIGHT)


def test_states_of_other_layers_are_refused():
    plain, gated = SoftmaxAttention(8, 2), SoftmaxAttention(8, 2, gate=True)
    x = torch.zeros(1, 1, 8)
    with pytest.raises(TypeError, match=r"state must be that of this mixer, KVCache; got GatedCache$"):
        plain.step(x, gated.init_state(1))
    with pytest.raises(TypeError, match="made by a layer with a gate; this one has none"):
        plain.mix_step(x, gated.init_state(1))
    with pytest.raises(TypeError, match=r"state must be that of this mixer, GatedCache; got KVCache$"):
        gated.step(x, plain.init_state(1))
    with pytest.raises(TypeError, match="made by a layer without a gate; this one has one"):
        gated.mix_step(x, plain.init_state(1))


def test_keys_with_sums_are_whole_eights():
    assert [gated_key_dim(k) for k in (4, 5, 32, 64, 128)] == [8, 16, 40, 72, 136]


def test_alibi_is_a_constant_gate():
    """(M18): biases -m (i - j) of softmax's scores, factors exp(-m (i - j)) of power attention's weights."""
    slopes, time = torch.tensor([0.5, 0.1, 0.01], dtype=torch.float64), 50
    q, k, v, log_g = inputs(time, 3, 3, 4, 4, bias=0.0)
    log_g = -slopes.expand_as(log_g)
    lag = torch.arange(time, dtype=torch.float64)[:, None] - torch.arange(time)
    bias = -slopes[:, None, None] * lag
    torch.testing.assert_close(gated_attention(q, k, v, log_g), attended(scores(q, k) + bias, v), **TIGHT)
    for p in (2, 4):
        weight = (scores(q, k) ** p * bias.exp()).tril()
        wanted = torch.einsum("bhts,bshv->bthv", weight / (weight.sum(-1, keepdim=True) + 1.0), v)
        torch.testing.assert_close(power_attention(q, k, v, log_g, p=p, eps=1.0).out, wanted, **TIGHT)
