"""The peers of power attention, each on the same tensors: a call without arguments for a case and a mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.cases import Case


def heads_first(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns x as [B, H, T, K], contiguous, which torch's attention takes."""
    layout = {name: x.detach().transpose(1, 2).contiguous() for name, x in inputs.items() if name != "log_g"}
    return {name: x.requires_grad_(name != "dout") for name, x in layout.items()}


def _softmax(backends: list[SDPBackend]) -> Callable:
    def prepare(case: Case, inputs: dict[str, Tensor], mode: str) -> Callable[[], object]:
        x = heads_first(inputs)

        def call() -> object:
            with torch.set_grad_enabled(mode != "forward"), sdpa_kernel(backends):
                gqa = {"enable_gqa": True} if case.H != case.G else {}
                out = scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, **gqa)
            return out if mode == "forward" else torch.autograd.grad(out, [x["q"], x["k"], x["v"]], x["dout"])

        return call

    return prepare


def _leaves(inputs: dict[str, Tensor]) -> list[Tensor]:
    return [x for name, x in inputs.items() if name != "dout"]


def _retention(case: Case, inputs: dict[str, Tensor], mode: str) -> Callable[[], object]:
    """Returns a call of Manifest's power retention: the same function, at the chunk size of its own examples."""
    from retention import power_retention

    chunk = 1024 if case.T > 1024 else None

    def call() -> object:
        with torch.set_grad_enabled(mode != "forward"):
            gate = inputs.get("log_g")
            out = power_retention(inputs["q"], inputs["k"], inputs["v"], gate, deg=case.p, chunk_size=chunk)
        return out if mode == "forward" else torch.autograd.grad(out, _leaves(inputs), inputs["dout"])

    return call


def _simple_gla(case: Case, inputs: dict[str, Tensor], mode: str) -> Callable[[], object]:
    """Returns flash-linear-attention's gated linear attention, p = 1: another function, whose state is K x V."""
    from fla.ops.simple_gla import chunk_simple_gla

    def call() -> object:
        with torch.set_grad_enabled(mode != "forward"):
            out, _ = chunk_simple_gla(inputs["q"], inputs["k"], inputs["v"], inputs.get("log_g"))
        return out if mode == "forward" else torch.autograd.grad(out, _leaves(inputs), inputs["dout"])

    return call


EVERY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PEERS: dict[str, tuple[str, Callable]] = {
    "sdpa": ("torch scaled_dot_product_attention", _softmax(EVERY)),
    "cudnn": ("cuDNN softmax attention", _softmax([SDPBackend.CUDNN_ATTENTION])),
    "flash": ("FlashAttention-2", _softmax([SDPBackend.FLASH_ATTENTION])),
    "retention": ("retention, power p = 2", _retention),
    "fla": ("fla simple_gla, linear p = 1", _simple_gla),
}


def supports(name: str, case: Case) -> bool:
    """Returns whether a peer is timed on a case. `retention` compiles for minutes a shape, so one shape is timed."""
    if name == "retention":
        return (case.p, case.K, case.H, case.T) == (2, 64, case.G, 65536) and case.gated
    if name == "fla":
        return case.gated and case.H == case.G and case.K == 64
    return True
