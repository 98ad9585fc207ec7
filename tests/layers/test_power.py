"""The power layer against the formulas of docs/math.md, and what it starts from."""

import math

import pytest
import torch
from torch.nn import functional as F

from sympow.layers import LinearAttention, PowerAttention, SoftmaxAttention
from sympow.layers.registry import make_mixer
from sympow.ops import DecodingState
from sympow.ops.types import OutOfRangeError
from tests.changed_linear import CHANGES, own_forward
from tests.draws import disturb, normal


def input_like(layer: PowerAttention, time: int = 20, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return normal(1, time, layer.d_model, seed=3, dtype=dtype)


# Nothing around the attention: no convolution in front, no norm of the heads' outputs, no gate on them.
PLAIN = {"short_convolution": 0, "head_norm": False, "output_gate": False}


def dense(layer: PowerAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer by its formulas: (M1)-(M5), (M13)-(M16), score by score, and what stands around; x [1, T, d]."""
    if layer.convolution is not None:
        taps, past = layer.convolution.weight, F.pad(x, (0, 0, layer.convolution.width - 1, 0))
        x = layer.convolution.bias + sum(taps[:, s] * past[:, s : s + x.shape[1]] for s in range(taps.shape[1]))
    heads, groups, key_dim = layer.n_heads, layer.n_kv_heads, layer.head_dim
    qkv = layer.qkv(x[0]) if layer.qkv_start is None else layer.qkv(x[0]) + layer.qkv_start
    q, k, v = qkv.split([heads * key_dim, groups * key_dim, groups * layer.value_dim], dim=-1)
    if layer.q_norm is not None:
        q, k = (
            F.rms_norm(y.unflatten(-1, (-1, key_dim)), (key_dim,), norm.weight, 1e-6).flatten(1)
            for y, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    turning = layer.rotary_dim or key_dim
    theta = 10_000.0 ** (-torch.arange(turning // 2, dtype=torch.float64) * 2 / turning)
    theta = F.pad(theta, (0, (key_dim - turning) // 2))
    outs = []
    for h in range(heads):
        g = h // (heads // groups)
        decay = F.logsigmoid(layer.gate(x[0])[:, g]).cumsum(0)
        steps = torch.ones(x.shape[1]) if layer.beta is None else 1 + torch.tanh(layer.beta(x[0])[:, g] / 10)
        angle = steps.double().cumsum(0)[:, None] * theta
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = [
            torch.view_as_complex(z.unflatten(-1, (-1, key_dim // 2, 2))[:, head].contiguous())
            for z, head in ((q, h), (k, g))
        ]
        score = ((pairs[0] * turn) @ (pairs[1] * turn).conj().T).real * key_dim**-0.5
        weight = (score**layer.p * (decay[:, None] - decay).exp()).tril()
        y = weight @ v[:, g * layer.value_dim : (g + 1) * layer.value_dim]
        if layer.normalize:
            y = y / (weight.sum(-1, keepdim=True) + layer.eps)
        if layer.head_norm is not None:
            y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.head_norm.weight
        outs.append(y)
    y = torch.cat(outs, dim=-1)
    if layer.output_gate is not None:
        gate = layer.output_gate(x[0])
        y = y * gate * torch.sigmoid(gate)
    return layer.out(y)[None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p": 3},
        {"n_kv_heads": 2, "value_dim": 5},
        {"normalize": False},
        {"eps": 1e-6},
        PLAIN,
        {"qk_norm": True},
        {"short_convolution": 2, "output_gate": False},
        {"short_convolution": 0, "head_norm": False},
        {"rotary_fraction": 1.0},
        {"rotation": "data"},
        {"rotation": "data", "rotary_fraction": 0.5, **PLAIN},
    ],
)
def test_is_the_formula(options):
    layer = disturb(PowerAttention(16, 4, **options).double(), 0.3, seed=5)
    x = input_like(layer)
    torch.testing.assert_close(layer(x), dense(layer, x), rtol=1e-9, atol=1e-10)


def test_starts_as_fixed_rotation_and_learns_its_own():
    layer, fixed = (PowerAttention(16, 2, rotation=rotation).double() for rotation in ("data", "fixed"))
    assert layer.load_state_dict(fixed.state_dict(), strict=False).missing_keys == ["beta.weight"]
    x = input_like(layer)
    torch.testing.assert_close(layer(x), fixed(x), rtol=1e-12, atol=1e-14)
    layer(x).square().sum().backward()
    assert layer.beta.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [1.0, 4.5, 8.0]), ({"n_kv_heads": 1}, [4.5]), ({"gate_bias": (2, 4)}, [2.0, 3.0, 4.0])],
)
def test_gate_starts_with_memories_from_short_to_long(options, expected):
    layer = PowerAttention(12, 3, **options)
    assert layer.gate.bias.tolist() == pytest.approx(expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "score"),
    [
        ({}, 1.0),
        ({"initial_score": 0.25, "n_kv_heads": 1, "value_dim": 3}, 0.25),
        ({"p": 4, "rotation": "none", "head_dim": 5}, 1.0),
        ({"qk_norm": True}, 8**0.5),  # normed, all queries and keys have the length K^0.5
        ({"initial_score": 0}, 0.0),
        ({"p": 3}, 0.0),
    ],
)
def test_scores_start_alike(options, score):
    layer = PowerAttention(16, 2, gate=False, **options)
    q, k, v = layer.rotated_heads(torch.zeros(1, 50, 16))  # what the biases alone say
    scores = torch.einsum("bthk,bsgk->hgts", q, k) * layer.head_dim**-0.5
    torch.testing.assert_close(scores, torch.full_like(scores, score), rtol=2e-2, atol=1e-6)
    assert not v.any()


@torch.no_grad()
def test_attention_starts_as_an_average_of_the_past():
    def started(**options):
        layer = PowerAttention(64, 2, gate=False, rotation="fixed", **PLAIN, **options)
        layer.reset_parameters(generator=torch.Generator().manual_seed(7))
        return layer.double()

    layer, plain = started(), started(initial_score=0, eps=1e-6)
    x = F.layer_norm(input_like(layer), (64,))
    v = layer.heads(x)[2].flatten(2)
    tokens = torch.arange(1, x.shape[1] + 1)[:, None]
    average, shrunk = layer.out(v.cumsum(1) / tokens), layer.out(v.cumsum(1) / (tokens + layer.eps))
    assert (layer(x) - shrunk).norm() < 0.15 * shrunk.norm()
    assert (plain(x) - average).norm() > 0.5 * average.norm()


def test_parameters_of_gate_and_rotation():
    def count(**options):
        return sum(parameter.numel() for parameter in PowerAttention(16, 4, **options).parameters())

    assert count() - count(gate=False) == (16 + 1) * 4
    assert count(rotation="data") - count() == 16 * 4
    # [CST] A.5: 0.09% and 0.18% of a model of 124 million parameters, of 12 layers 768 wide with 12 heads.
    gate, both = 12 * (768 + 1) * 12, 12 * (768 + 1) * 12 + 12 * 768 * 12
    assert [round(100 * more / 124e6, 2) for more in (gate, both)] == [0.09, 0.18]


@torch.no_grad()
def test_position_is_carried_in_float64_whatever_the_weights():
    layer = PowerAttention(16, 2, rotation="data", **PLAIN).to(torch.bfloat16)
    layer.beta.weight.fill_(0.1)
    x = input_like(layer, 1, torch.bfloat16)
    state = layer.init_state(1)
    state.position += 2.0**26  # where float32 cannot add 1 any more
    before = state.position.clone()
    _, state = layer.step(x, state)
    beta = 1 + math.tanh(0.1 / 10 * x.double().sum().item())
    assert state.position.dtype == torch.float64 and state.memory.s.dtype == torch.float32
    torch.testing.assert_close(state.position - before, torch.full((1, 2), beta).double(), rtol=1e-2, atol=0)


def test_gate_and_positions_stay_float32_under_autocast(monkeypatch):
    import sympow.layers.power as module

    seen = {}

    def spy(q, k, v, log_g, **options):
        seen.update(q=q.dtype, log_g=log_g.dtype)
        return real(q, k, v, log_g, **options)

    real = module.power_attention
    monkeypatch.setattr(module, "power_attention", spy)
    layer = PowerAttention(16, 2, rotation="data", gate_bias=(8, 8))
    torch.nn.init.normal_(layer.beta.weight, generator=torch.Generator().manual_seed(5))
    x = input_like(layer, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        gate, beta = module.linears_float32([layer.gate, layer.beta], x)
    assert seen == {"q": torch.bfloat16, "log_g": torch.float32}
    torch.testing.assert_close(gate, layer.gate(x))
    torch.testing.assert_close(beta, layer.beta(x))


@torch.no_grad()
def test_one_token_writes_into_the_state_it_was_given():
    layer = PowerAttention(16, 2)
    state = layer.init_state(1)
    held = memory(state).s
    for _ in range(3):
        _, state = layer.step(input_like(layer, 1, torch.float32), state)
    assert memory(state).s.data_ptr() == held.data_ptr()


def test_state_of_another_rotation_is_refused():
    state = PowerAttention(16, 2, rotation="data").init_state(1)
    with pytest.raises(TypeError, match="data-dependent rotation"):
        PowerAttention(16, 2, rotation="fixed").step(torch.zeros(1, 1, 16), state)


def test_frequencies_survive_a_change_of_dtype_and_inference_mode():
    layer = PowerAttention(16, 2, rotation="fixed", frequencies="conformal", max_length=1234)
    x = input_like(layer, dtype=torch.float32)
    with torch.inference_mode():
        y = layer(x)
    layer.to(torch.bfloat16).to(torch.float32)
    layer(x).sum().backward()  # nothing made in inference mode may be saved for this
    assert y.isfinite().all() and layer.qkv.weight.grad.isfinite().all()


def memory(state):
    """The op's part of the state of a layer, which may stand behind that of its convolution."""
    return getattr(state, "behind", state).memory


@pytest.mark.parametrize("kind", [PowerAttention, LinearAttention])
def test_decoding_by_kernel_keeps_a_tail(kind):
    """Read token by token, in pieces and with gradients on: the sequence, by a state of the size it says."""
    pytest.importorskip("triton", reason="needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = kind(8, 2, n_kv_heads=1, impl="triton").to(device)
    layer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    x = input_like(layer, 9, torch.float32).to(device)
    state, outs = layer.init_state(1), []
    assert isinstance(memory(state), DecodingState)
    for piece in x.split([1, 1, 4, 1, 2], dim=1):
        with torch.set_grad_enabled(piece.shape[1] == 2):
            y, state = layer.step(piece, state)
        outs.append(y)
        assert sum(tensor.numel() for tensor in state.tensors()) == layer.state_size(9)
    torch.testing.assert_close(torch.cat(outs, dim=1), layer(x), rtol=1e-4, atol=1e-5)
    assert outs[-1].requires_grad and memory(state).s.requires_grad


def host(module: torch.nn.Module) -> None:
    """Draws linear weights anew, as the models of Hugging Face and Zoology do by `apply`: N(0, 0.02), biases 0."""
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            torch.nn.init.zeros_(module.bias)


@pytest.mark.parametrize("kind", [PowerAttention, SoftmaxAttention])
def test_gates_survive_a_host_that_draws_linear_weights_anew(kind):
    layer = kind(16, 4, gate=True)
    gate = {name: parameter.clone() for name, parameter in layer.gate.named_parameters()}
    layer.apply(host)
    assert all(torch.equal(parameter, gate[name]) for name, parameter in layer.gate.named_parameters())
    assert layer.gate.bias.tolist() == pytest.approx([1.0, 10 / 3, 17 / 3, 8.0])


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"rotation": "none"}, {"qk_norm": True}, {"n_kv_heads": 1, "value_dim": 3}])
def test_the_start_survives_a_host_that_draws_linear_weights_anew(options):
    """With the weights put back after the host was there, the layer gives what it gave."""
    layer = PowerAttention(64, 2, **options)
    x = input_like(layer, dtype=torch.float32)
    drawn, before = {name: p.clone() for name, p in layer.named_parameters() if p.ndim == 2}, layer(x)
    layer.apply(host)
    for name, weight in drawn.items():
        layer.get_parameter(name).copy_(weight)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)


@torch.no_grad()
def test_attention_starts_as_an_average_of_the_past_under_a_host():
    torch.manual_seed(0)
    layer = PowerAttention(64, 2, gate=False, rotation="none").apply(host)
    q, k, _ = layer.rotated_heads(F.layer_norm(input_like(layer, dtype=torch.float32), (64,)))
    scores = torch.einsum("bthk,bshk->hts", q, k) * layer.head_dim**-0.5
    assert scores.mean().item() == pytest.approx(1.0, abs=0.05) and scores.min() > 0


@torch.no_grad()
def test_older_weights_hold_the_start_in_their_biases():
    layer, other = disturb(PowerAttention(16, 2), 0.3, seed=5), PowerAttention(16, 2)
    older = layer.state_dict()
    older["qkv.bias"] = older["qkv.bias"] + older.pop("qkv_start")
    other.load_state_dict(older)
    x = input_like(layer, dtype=torch.float32)
    assert torch.equal(other(x), layer(x)) and not other.qkv_start.any() and layer.qkv_start.any()


@torch.no_grad()
def test_an_adapter_of_the_projection_is_heard():
    layer = PowerAttention(16, 2)
    x = input_like(layer, dtype=torch.float32)
    expected = layer(x)
    layer.qkv = Doubled(layer.qkv)
    assert not torch.allclose(layer(x), expected, rtol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.projected(x).dtype == torch.bfloat16


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_projection_is_heard(change):
    layer = PowerAttention(16, 2)
    x, found = input_like(layer, dtype=torch.float32).requires_grad_(), []
    undo = change(layer.qkv)
    try:
        for y in (layer.projected(x), layer.qkv(x) + layer.qkv_start):
            found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    finally:
        undo()
    torch.testing.assert_close(*found)


def test_a_compiled_layer_hears_a_forward_that_its_projection_gets():
    layer = PowerAttention(16, 2)
    x = input_like(layer, dtype=torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected = layer(x)
    torch.testing.assert_close(compiled(x), expected)
    own_forward(layer.qkv)
    torch.testing.assert_close(compiled(x), layer(x))
    assert not torch.allclose(layer(x), expected, rtol=1e-2)
    torch.compiler.reset()


class Doubled(torch.nn.Module):
    """Stands for an adapter: gives twice what the layer gives that it wraps."""

    def __init__(self, wrapped: torch.nn.Linear):
        super().__init__()
        self.wrapped, self.weight = wrapped, wrapped.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.wrapped(x)


@pytest.mark.parametrize("name", ["gate.weight", "gate.bias", "convolution.weight"])
def test_weights_that_are_not_finite_are_named(name):
    """And not taken for a gate out of range, in a sequence and in a step."""
    layer, x = PowerAttention(16, 2), torch.ones(1, 4, 16)
    layer.state_dict()[name].view(-1)[1] = math.nan
    for call in (lambda: layer(x), lambda: layer.step(x[:, :1], layer.init_state(1))):
        with pytest.raises(OutOfRangeError, match=rf"^weights of PowerAttention are not finite: {name}$"):
            call()


def test_an_input_that_is_not_finite_is_named():
    with pytest.raises(OutOfRangeError, match=r"^the input of PowerAttention is not finite$"):
        PowerAttention(16, 2)(torch.full((1, 4, 16), math.nan))


def test_complex_weights_and_inputs_are_refused():
    layer = PowerAttention(16, 2)
    weights = layer.state_dict()
    weights["qkv.weight"] = weights["qkv.weight"] + 1j
    with pytest.raises(TypeError, match=r"^weights must be real; got qkv.weight of torch.complex64$"):
        layer.load_state_dict(weights)
    with pytest.raises(TypeError, match=r"^weights must be real; got 0.qkv.weight of torch.complex64$"):
        torch.nn.Sequential(layer).load_state_dict({f"0.{name}": weight for name, weight in weights.items()})
    x = torch.ones(1, 4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"^x and the weights must be real; got x torch.complex64, weights torch.f"):
            layer(x + 1j)
        layer.qkv.weight = torch.nn.Parameter(weights["qkv.weight"])
        with pytest.raises(TypeError, match=r"^x and the weights must be real; got x torch.float32, weights torch.c"):
            layer(x)


def test_normalize_is_a_boolean():
    with pytest.raises(TypeError, match="normalize must be True or False; got 1"):
        PowerAttention(16, 2, normalize=1)


@pytest.mark.parametrize("mixer", ["power", "power_delta", "short_convolution"])
def test_a_step_refuses_a_state_that_it_cannot_write_into(mixer):
    """An expanded one, whose rows share memory, and one that was made in inference mode."""
    options = {"mixer": "power"} if mixer == "short_convolution" else {"short_convolution": 0}
    layer = make_mixer(mixer, 16, 2, options)
    with torch.inference_mode():
        made = layer.step(torch.randn(1, 3, 16), layer.init_state(1))[1]
    shared = layer.init_state(1).mapped(lambda x: x.expand(2, *x.shape[1:]))
    with torch.no_grad(), pytest.raises(ValueError, match=r"made in inference mode: clone\(\) it"):
        layer.step(torch.randn(1, 1, 16), made)
    with torch.no_grad(), pytest.raises(ValueError, match=r"got an expanded or overlapping one: clone\(\) it"):
        layer.step(torch.randn(2, 1, 16), shared)
