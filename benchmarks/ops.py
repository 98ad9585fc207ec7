"""Times power attention against its peers: `python -m benchmarks.ops --device cpu --json FILE`.

Every call is checked against float64 before it is timed: outputs at sampled rows by the quadratic form over all their
keys; gradients (too many pairs for that) by the same call in float64 at another chunk size, which the tests hold to the
quadratic form. A call that errs by more than a bound derived from its dtype stops the run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import CASES, DTYPES, Case, make_inputs
from benchmarks.measure import commit, milliseconds, peak_extra_bytes, processor
from sympow.ops import power_attention
from sympow.ops.eager import default_chunk_size

MODES = ("forward", "forward+backward")


def power_call(case: Case, inputs: dict[str, Tensor], impl: str, mode: str, chunk: int | None = None) -> list[Tensor]:
    """The output, and with a backward the gradients of all inputs."""
    leaves = {name: x for name, x in inputs.items() if name != "dout"}
    with torch.set_grad_enabled(mode != "forward"):
        out = power_attention(**leaves, p=case.p, normalize=case.p % 2 == 0, chunk_size=chunk, impl=impl).out
    if mode == "forward":
        return [out]
    return [out, *torch.autograd.grad(out, list(leaves.values()), inputs["dout"])]


def sdpa_call(heads: dict[str, Tensor], mode: str) -> None:
    """torch's causal softmax attention on the same q, k, v, laid out as it wants them: [B, H, T, K]."""
    q, k, v = heads["q"], heads["k"], heads["v"]
    with torch.set_grad_enabled(mode != "forward"):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if mode != "forward":
        torch.autograd.grad(out, [q, k, v], heads["dout"])


def error(case: Case, inputs: dict[str, Tensor], results: list[Tensor]) -> float:
    """The largest relative error, in norm, of the output and the gradients against float64."""
    wide = {name: x.detach().double().requires_grad_(name != "dout") for name, x in inputs.items()}
    errors = [_relative(results[0][:, rows], out) for rows, out in [_sampled_rows(case, wide)]]
    if len(results) > 1:
        oracle = power_call(case, wide, "eager", "forward+backward", chunk=384)
        errors += [_relative(a, b) for a, b in zip(results[1:], oracle[1:], strict=True)]
    return max(errors)


def _sampled_rows(case: Case, wide: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of the output by (M1)-(M5), every score formed: the first, the last and some between."""
    rows = torch.linspace(0, case.T - 1, min(case.T, 16)).long().unique().to(wide["q"].device)
    q, k, v = (wide[x].detach() for x in "qkv")
    q = q[:, rows].unflatten(2, (case.G, -1))
    weight = (torch.einsum("bigrk,bjgk->bgrij", q, k) * case.K**-0.5) ** case.p
    past = torch.arange(case.T, device=rows.device) <= rows[:, None]
    decay = past.double()
    if case.gated:
        total = wide["log_g"].detach().cumsum(1).transpose(1, 2)
        decay = (total[:, :, rows, None] - total[:, :, None]).masked_fill(~past, -torch.inf).exp()[:, :, None]
    weight = weight * decay
    out = torch.einsum("bgrij,bjgv->bigrv", weight, v)
    if case.p % 2 == 0:
        out = out / (weight.sum(-1).permute(0, 3, 1, 2)[..., None] + 1e-6)
    return rows, out.flatten(2, 3)


def _relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def bound(case: Case) -> float:
    """What may err: a few roundings of the dtype; float32 sums over T tokens round as the square root of T."""
    return max(4 * torch.finfo(DTYPES[case.dtype]).eps, 4 * case.T**0.5 * torch.finfo(torch.float32).eps)


def extra_memory(case: Case, impl: str) -> int:
    """Peak bytes of a forward and backward beyond inputs, output and gradients, in this process."""
    power_call(Case(64), make_inputs(Case(64), "cpu"), impl, MODES[1])  # libraries loaded, threads started
    return peak_extra_bytes(partial(power_call, case, make_inputs(case, "cpu"), impl, MODES[1]))


def peer_layout(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as the peer wants them, heads before time."""
    layout = {name: x.detach().transpose(1, 2).contiguous() for name, x in inputs.items() if name != "log_g"}
    return {name: x.requires_grad_(name != "dout") for name, x in layout.items()}


def measure(cases: Sequence[Case], device: str, impl: str, mode: str) -> list[dict]:
    """A row a case. All are checked first, then timed in turns."""
    inputs = [make_inputs(case, device) for case in cases]
    errors, memories = [], []
    for case, tensors in zip(cases, inputs, strict=True):
        wrong = error(case, tensors, power_call(case, tensors, impl, mode))
        if not wrong <= bound(case):
            raise RuntimeError(f"{case}, {mode}: errs by {wrong:.1e} where {bound(case):.1e} is allowed; not timed")
        errors.append(wrong)
        memories.append(None)
        if device == "cpu" and sys.platform == "linux" and mode != "forward":
            with multiprocessing.get_context("spawn").Pool(1) as fresh:
                memories[-1] = round(fresh.apply(extra_memory, (case, impl)) / 1e6, 1)
    ours = milliseconds([partial(power_call, c, x, impl, mode) for c, x in zip(cases, inputs, strict=True)], device)
    peers = milliseconds([partial(sdpa_call, peer_layout(x), mode) for x in inputs], device, rounds=3)
    return [
        {"op": "power_attention", "impl": impl, "peer": "torch scaled_dot_product_attention", "device": device}
        | {"dtype": case.dtype, "B": case.B, "T": case.T, "H": case.H, "G": case.G, "K": case.K, "V": case.V}
        | {"p": case.p, "chunk": default_chunk_size(tensors["q"], tensors["k"], tensors["v"], case.p)}
        | {"gated": case.gated, "mode": mode, "ms": round(ms, 3), "peer_ms": round(peer_ms, 3)}
        | {"ratio": round(peer_ms / ms, 3), "err": float(f"{wrong:.2e}"), "extra_mb": memory}
        | {"processor": processor(device), "commit": commit(), "torch": torch.__version__}
        for case, tensors, wrong, memory, ms, peer_ms in zip(
            cases, inputs, errors, memories, ours, peers, strict=True
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(CASES), required=True)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, for sympow and its peer alike")
    parser.add_argument("--json", type=Path, required=True, help="file the rows are written to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    print(f"{'T':>7} {'mode':>17} {'ms':>10} {'peer ms':>10} {'ratio':>6} {'err':>8} {'extra MB':>8}")
    for mode in MODES:
        for row in measure(CASES[args.device], args.device, args.impl, mode):
            rows.append(row)
            memory = "" if row["extra_mb"] is None else f"{row['extra_mb']:.0f}"
            timing = f"{row['ms']:>10.1f} {row['peer_ms']:>10.1f} {row['ratio']:>6.2f}"
            print(f"{row['T']:>7} {row['mode']:>17} {timing} {row['err']:>8.1e} {memory:>8}", flush=True)
    rows.sort(key=lambda row: row["T"])
    args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
