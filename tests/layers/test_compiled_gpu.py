"""Mixers under torch.compile on a GPU, in bfloat16 autocast: as exact as without it.

On a GPU the compiler fuses operations and leaves out conversions to half precision between them. CPUs do not show this.
"""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from sympow.layers import Mixer, make_mixer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

B, T, D_MODEL, HEADS = 64, 1024, 128, 2  # sizes at which the compiler splits sums along rows
BLOCK = {"short_convolution": 4, "head_norm": True, "output_gate": True}
CASES = [
    ("power", {}),
    ("power", {"rotation": "data"}),
    ("power", {"rotation": "fixed", "n_kv_heads": 1, "chunk_size": 256}),
    ("softmax", {}),
    ("softmax", BLOCK),
    ("softmax", BLOCK | {"gate": True}),
    ("softmax", {"gate": True, "n_kv_heads": 1}),
    ("window", BLOCK | {"window": 200}),
    ("window", BLOCK | {"window": 200, "gate": True}),
    ("linear", BLOCK),
    ("linear", {"feature_map": "elu+1"}),
    ("linear", {"feature_map": "elu+1", "qk_norm": True}),
    ("linear", {"feature_map": "taylor", "head_dim": 16}),
    ("hyena", {"max_length": 64, "recurrences": 2}),
    ("h3", {"state_dim": 256}),
    ("retnet", {}),
    ("h3", {}),
]


def results(mixer: Mixer, x: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the output and all gradients, under autocast to `dtype` if it is not None."""
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        y = mixer(x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).sin().view_as(y)
    return [y, *torch.autograd.grad((y.float() * weights).sum(), [x, *mixer.parameters()])]


def errors(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> list[float]:
    """Returns the norm of each difference over that of what is wanted."""
    norms = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(got, wanted, strict=True)]
    return [float(norm) for norm in norms]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_as_exact_as_eager(name, options):
    generator = torch.Generator().manual_seed(0)
    mixer = make_mixer(name, D_MODEL, HEADS, options)
    mixer.reset_parameters(std=0.05, generator=generator)
    for parameter in mixer.parameters():  # nothing stays at 0
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    mixer.cuda()
    x = torch.randn(B, T, D_MODEL, generator=generator).cuda().requires_grad_()
    exact = results(mixer, x, None)
    eager = errors(results(mixer, x, torch.bfloat16), exact)
    torch.compiler.reset()
    compiled = errors(results(torch.compile(mixer), x, torch.bfloat16), exact)
    names = ["output", "x", *dict(mixer.named_parameters())]
    for part, error, allowed in zip(names, compiled, eager, strict=True):
        assert error <= 2 * allowed + 2e-3, part
