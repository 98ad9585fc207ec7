"""The shapes that benchmarks time, by device, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sympow import power_attention

MODES = ("forward", "forward+backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Describes one call of power attention; letters as in docs/math.md."""

    T: int
    B: int = 1
    H: int = 4
    G: int = 4
    K: int = 32
    V: int = 32
    p: int = 2
    gated: bool = True
    dtype: str = "float32"


def _gpu(T: int, K: int = 64, **options) -> Case:
    return Case(T, **{"B": 8, "H": 12, "G": 12, "K": K, "V": K, "dtype": "bfloat16"} | options)


# Growing by a factor of four, so that the growth of the ratio is visible.
CASES = {
    "cpu": [Case(T) for T in (1024, 4096, 16384, 65536)],
    "cuda": [
        *(_gpu(T) for T in (1024, 4096, 16384, 65536)),
        *(_gpu(T, 32) for T in (1024, 4096, 16384, 65536)),
        *(_gpu(T, 128) for T in (4096, 65536)),
        *(_gpu(T, gated=False) for T in (4096, 65536)),
        _gpu(65536, G=2),
        _gpu(65536, 32, p=3),
        _gpu(65536, 16, p=4),
        *(_gpu(T, 128, B=1, H=32, G=8) for T in (8192, 32768, 131_072)),
    ],
}

# By device, the longest case of each p and K, and chunk sizes for it. Shorter cases have the same number of tokens in
# more sequences, so that the device has the same load. Where states are large and slow, one sequence is enough to fill
# a GPU.
FORMS = {
    "cpu": [(Case(8192), (64, 128, 256, 512, 1024))],
    "cuda": [
        (_gpu(65536, 32, B=4), (128, 256, 512, 1024, 2048)),
        (_gpu(65536, 64, B=4), (256, 512, 768, 1024, 2048, 4096)),
        (_gpu(65536, 128, B=1), (512, 1024, 2048, 4096, 8192)),
        (_gpu(65536, 32, B=1, p=3), (512, 1024, 2048, 4096, 8192)),
        (_gpu(65536, 16, B=1, p=4), (512, 1024, 2048, 4096, 8192)),
    ],
}


def make_inputs(case: Case, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Returns q, k, v and log_g, which require gradients, and the gradient of the output: random, heads along dim 2."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(case.B, case.T, heads, width, generator=gen, device=device).to(DTYPES[case.dtype])

    inputs = {"q": normal(case.H, case.K), "k": normal(case.G, case.K), "v": normal(case.G, case.V)}
    if case.gated:  # memories from a few tokens to thousands, as those of new layers
        bias = torch.linspace(1, 8, case.G, device=device)
        inputs["log_g"] = logsigmoid(torch.randn(case.B, case.T, case.G, generator=gen, device=device) + bias)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    return inputs | {"dout": normal(case.H, case.V)}


def power_call(case: Case, inputs: dict[str, Tensor], impl: str, mode: str, chunk: int | None = None) -> list[Tensor]:
    """Returns the output, and with a backward the gradients of all inputs."""
    leaves = {name: x for name, x in inputs.items() if name != "dout"}
    with torch.set_grad_enabled(mode != "forward"):
        out = power_attention(**leaves, p=case.p, normalize=case.p % 2 == 0, chunk_size=chunk, impl=impl).out
    if mode == "forward":
        return [out]
    return [out, *torch.autograd.grad(out, list(leaves.values()), inputs["dout"])]
