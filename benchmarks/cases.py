"""The shapes that benchmarks time, by device, and the inputs they time them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call of power attention; letters as in docs/math.md."""

    T: int
    B: int = 1
    H: int = 4
    G: int = 4
    K: int = 32
    V: int = 32
    p: int = 2
    gated: bool = True
    dtype: str = "float32"


# Growing by four, so that the growth of the ratio shows.
CASES = {"cpu": [Case(T) for T in (1024, 4096, 16384, 65536)]}


def make_inputs(case: Case, device: str, seed: int = 0) -> dict[str, Tensor]:
    """q, k, v and log_g, which require gradients, and the gradient of the output: random, heads along dim 2."""
    gen = torch.Generator().manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        x = torch.randn(case.B, case.T, heads, width, generator=gen)
        return x.to(device, DTYPES[case.dtype])

    inputs = {"q": normal(case.H, case.K), "k": normal(case.G, case.K), "v": normal(case.G, case.V)}
    if case.gated:  # memories from a few tokens to thousands, as the layers are initialised
        bias = torch.linspace(1, 8, case.G)
        inputs["log_g"] = logsigmoid(torch.randn(case.B, case.T, case.G, generator=gen) + bias).to(device)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    return inputs | {"dout": normal(case.H, case.V)}
