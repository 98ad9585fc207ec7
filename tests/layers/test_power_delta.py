"""Options of the layer of the delta rule. What all mixers share is tested with their contract."""

import pytest
import torch
from torch.nn.functional import normalize

from sympow.layers import PowerDeltaAttention


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offset": -0.1}, "offset must be finite and not negative; got -0.1"),
        ({"offset": float("nan")}, "offset must be finite and not negative; got nan"),
        ({"offset": 0.1, "rotary_fraction": 1.0}, "needs head_dim of at least 2, and a rotary_fraction"),
        ({"offset": 0.1, "head_dim": 1, "rotation": "none"}, "needs head_dim of at least 2"),
        ({"offset": 0.1, "head_dim": 2}, "or rotation='none'; got head_dim=2, rotation='fixed'"),
    ],
)
def test_offsets_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        PowerDeltaAttention(12, 2, **options)
