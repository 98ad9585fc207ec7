"""Options of the layer of the delta rule. What all mixers share is tested with their contract."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from sympow.layers import LinearAttention, PowerDeltaAttention
from sympow.ops import power_delta_rule


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_offset_of_scores(p):
    """What the first token writes is read by the second one with ((a . b + c) / (1 + c))**p."""
    torch.manual_seed(0)
    plain = {"short_convolution": 0, "head_norm": False, "output_gate": False, "rotation": "none", "gate": False}
    layer = PowerDeltaAttention(12, 2, p=p, offset=0.3, beta=1.0, impl="reference", **plain).double()
    x = torch.randn(1, 2, 12, dtype=torch.float64)
    q, k, v = layer.heads(x)
    a, b, first = normalize(q[:, 1, :, :-1], dim=-1), normalize(k[..., :-1], dim=-1), v[:, 0]

    def score(x, y):
        return (((x * y).sum(-1, keepdim=True) + 0.3) / 1.3) ** p

    second = v[:, 1] - score(b[:, 1], b[:, 0]) * first
    expected = score(a, b[:, 0]) * first + score(a, b[:, 1]) * second
    torch.testing.assert_close(layer.mix(x, None)[:, 1], expected)


@pytest.mark.parametrize("options", [{"beta": 2.0}, {"beta_bias": 60.0, "beta_max": 2.0}])
def test_the_state_does_not_grow_with_rounded_keys(options):
    """A key whose rounded norm is above 1 comes again and again: beta = 2 multiplies what it wrote by less than -1."""
    torch.manual_seed(0)
    layer = PowerDeltaAttention(64, 4, gate=False, rotation="none", short_convolution=0, **options).bfloat16()
    x = torch.randn(1, 1, 64, dtype=torch.bfloat16).expand(1, 2000, 64)
    with torch.no_grad():
        _, state = layer.mix_step(x, layer.mix_state(1))
        first = layer.heads(x[:, :1])[2]
    assert state.memory.abs().max() < 10 * first.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offset": -0.1}, "offset must be finite and not negative; got -0.1"),
        ({"offset": float("nan")}, "offset must be finite and not negative; got nan"),
        ({"offset": 0.1, "rotary_fraction": 1.0}, "needs head_dim of at least 2, and a rotary_fraction"),
        ({"offset": 0.1, "head_dim": 1, "rotation": "none"}, "needs head_dim of at least 2"),
        ({"offset": 0.1, "head_dim": 2}, "got head_dim=2, rotation='fixed', 2 rotated channels"),
    ],
)
def test_offsets_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        PowerDeltaAttention(12, 2, **options)


@pytest.mark.parametrize(
    ("dtype", "size", "offset"),
    [
        (torch.float16, 6e4, 1.0),  # the norm leaves the range of float16
        (torch.float16, 6e4, 1e4),
        (torch.float16, 6e-6, 0.3),  # 100 times the smallest number
        (torch.float16, 1.0, 1e12),
        (torch.bfloat16, 1e30, 0.3),  # squares leave the range of float32
        (torch.float32, 1e30, 0.3),
        (torch.float32, 1e-8, 0.3),  # norms below the least one that vectors are divided by
        (torch.float32, 1.0, 1e300),
        (torch.float64, 1e200, 1e300),
        (torch.float64, 0.0, 0.3),
    ],
)
def test_an_offset_of_vectors_of_every_size(dtype, size, offset):
    """Whole and token by token, the layer does what the specification does with vectors of norm 1 in float64."""
    torch.manual_seed(1)
    options = {
        "offset": offset,
        "n_kv_heads": 1,
        "beta": 1.0,
        "gate": False,
        "rotation": "none",
        "short_convolution": 0,
    }
    layer = PowerDeltaAttention(12, 2, **options, head_norm=False, output_gate=False).to(dtype)
    x = torch.randn(2, 5, 12).to(dtype)
    with torch.no_grad():
        layer.qkv.weight[:18] *= size / max(each.abs().max().item() for each in layer.heads(x)[:2])

    def vectors(x):
        own = x.double()[..., :-1]
        if size > 1e-6:
            own = own / own.abs().amax(-1, keepdim=True)
        own = own / own.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        last = math.sqrt(offset) * own.norm(dim=-1, keepdim=True)
        return torch.cat([own, last], dim=-1) / math.sqrt(1 + offset)

    with torch.no_grad():
        q, k, v = layer.heads(x)
        beta = torch.ones(k.shape[:3], dtype=torch.float64)
        expected = power_delta_rule(vectors(q), vectors(k), v.double(), beta, qk_norm=False, impl="reference").out
        state, steps = layer.mix_state(2), []
        for t in range(5):
            y, state = layer.mix_step(x[:, t : t + 1], state)
            steps.append(y)
        for y in (layer.mix(x, None), torch.cat(steps, dim=1)):
            scale = 16 * torch.finfo(dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(y.double(), expected, rtol=0, atol=scale)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e100])
def test_gradients_with_an_offset(size):
    torch.manual_seed(2)
    options = {"p": 3, "offset": 0.3, "head_dim": 4, "beta": 1.0, "gate": False, "short_convolution": 0}
    layer = PowerDeltaAttention(6, 1, **options, head_norm=False, output_gate=False).double()
    with torch.no_grad():
        layer.qkv.weight[:8] *= size
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize("name", ["power_delta", "elu+1", "taylor"])
def test_a_token_reads_back_its_value_with_yarn(name):
    """The magnitude of the rotation changes keys and queries alike, and the sums that divide as the weights."""
    plain = {"bias": False, "head_norm": False, "short_convolution": 0, "output_gate": False, "rotary_fraction": 0.5}
    plain["rope_scaling"] = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    if name == "power_delta":
        mixer = PowerDeltaAttention(8, 1, p=2, beta=1.0, gate=False, **plain).double()
    else:
        mixer = LinearAttention(8, 1, feature_map=name, **plain).double()
    with torch.no_grad():
        mixer.qkv.weight.copy_(torch.eye(8).repeat(3, 1))
        mixer.out.weight.copy_(torch.eye(8))
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(1, 1, 8)
    torch.testing.assert_close(mixer(x), x, rtol=1e-5, atol=0)
