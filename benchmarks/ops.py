"""Times power attention against its peers: `python -m benchmarks.ops --device cpu --csv FILE`.

Every call is checked against float64 before it is timed. Outputs at sampled rows are compared with the quadratic form
over all their keys. Gradients have too many pairs for that. They are compared with the same call in float64 at another
chunk size, which the tests compare with the quadratic form. A call whose error exceeds a bound derived from its dtype
stops the run.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.cases import CASES, DTYPES, MODES, Case, make_inputs, power_call
from benchmarks.common.measure import (
    gpu_peak_extra_bytes,
    graphed,
    measured,
    milliseconds,
    options,
    peak_extra_bytes,
    read,
    write,
)
from benchmarks.common.peers import PEERS, supports
from sympow.ops.eager import default_chunk_size

GRAPHED = 4096  # tokens up to which a call on a GPU is timed as a CUDA graph
SAME = ("device", "peer", "mode", "dtype", "B", "T", "H", "G", "K", "V", "p", "gated")  # what a row is about


@dataclass(frozen=True)
class Expected:
    """Holds the float64 results that a call is compared with."""

    rows: Tensor  # the rows where the output is sampled
    out: Tensor  # the output there, of all heads
    heads: list[Tensor]  # output and gradients of some heads; empty for a forward call
    roundings: list[float]  # the factor by which the error of each of these may exceed that of others


def expected(case: Case, inputs: dict[str, Tensor], mode: str) -> Expected:
    """Returns the output by (M1)-(M5) at sampled rows, and with a backward output and gradients of sampled heads."""
    wide = {name: x.detach().double() for name, x in inputs.items()}
    rows, out = _sampled_rows(case, wide)
    if mode == "forward":
        return Expected(rows, out, [], [])
    alone = {name: _sampled_heads(case, x).requires_grad_(name != "dout") for name, x in wide.items()}
    del wide
    # The states between chunks are float64 as well: at K = 128 few of them fit.
    heads = power_call(case, alone, "eager", mode, chunk=384 if case.K <= 64 else 4096)
    roundings = [1.0] * len(heads)
    if case.gated:  # its gradient adds up k.dk over the tokens after it, whose roundings it may carry
        terms = (alone["k"].detach() * heads[2]).sum(-1).norm() / case.p
        roundings[4] = max(1.0, (case.T**0.5 * terms / heads[4].norm()).item())
    return Expected(rows, out, [x.detach() for x in heads], roundings)


def error(case: Case, results: list[Tensor], wanted: Expected) -> float:
    """Returns the largest error of output and gradients, in norm, relative to what `bound` allows it."""
    errors = [relative(results[0][:, wanted.rows], wanted.out)]
    for got, want, roundings in zip(results, wanted.heads, wanted.roundings, strict=False):  # forward has one result
        errors.append(relative(_sampled_heads(case, got), want) / roundings)
    return max(errors)


def _sampled_heads(case: Case, x: Tensor) -> Tensor:
    """Returns some key/value heads of x [B, T, H or G, ...] with their query heads, as a batch [n, T, R, ...].

    There are 4 query heads, or those of one key/value head. A float64 gradient of all heads would take minutes."""
    n = case.B * case.G
    picked = torch.linspace(0, n - 1, min(n, max(1, 4 * case.G // case.H))).long().to(x.device)
    return x.unflatten(2, (case.G, -1))[picked // case.G, :, picked % case.G]


def _sampled_rows(case: Case, wide: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns rows of the output by (M1)-(M5), from all scores: the first row, the last row and some between."""
    rows = torch.linspace(0, case.T - 1, min(case.T, 16)).long().unique().to(wide["q"].device)
    q, k, v = (wide[x] for x in "qkv")
    q = q[:, rows].unflatten(2, (case.G, -1))
    weight = (torch.einsum("bigrk,bjgk->bgrij", q, k) * case.K**-0.5) ** case.p
    past = torch.arange(case.T, device=rows.device) <= rows[:, None]
    decay = past.double()
    if case.gated:
        total = wide["log_g"].cumsum(1).transpose(1, 2)
        decay = (total[:, :, rows, None] - total[:, :, None]).masked_fill(~past, -torch.inf).exp()[:, :, None]
    weight = weight * decay
    out = torch.einsum("bgrij,bjgv->bigrv", weight, v)
    if case.p % 2 == 0:
        out = out / (weight.sum(-1).permute(0, 3, 1, 2)[..., None] + 1e-6)
    return rows, out.flatten(2, 3)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def bound(case: Case) -> float:
    """Returns the allowed error: a few roundings of the dtype; float32 sums of T tokens round as sqrt(T)."""
    return max(4 * torch.finfo(DTYPES[case.dtype]).eps, 4 * case.T**0.5 * torch.finfo(torch.float32).eps)


def extra_memory(case: Case, impl: str) -> int:
    """Returns the peak bytes of a forward and backward beyond inputs, output and gradients, in this process."""
    power_call(Case(64), make_inputs(Case(64), "cpu"), impl, MODES[1])  # libraries loaded, threads started
    return peak_extra_bytes(partial(power_call, case, make_inputs(case, "cpu"), impl, MODES[1]))


def check(case: Case, mode: str, results: list[Tensor], wanted: Expected) -> float:
    """Returns the error of a call, which must not be timed if this raises."""
    wrong = error(case, results, wanted)
    if not wrong <= bound(case):
        raise RuntimeError(f"{case}, {mode}: errs by {wrong:.1e} where {bound(case):.1e} is allowed; not timed")
    return wrong


def peak_memory(case: Case, inputs: dict[str, Tensor], device: str, impl: str) -> float | None:
    """Returns MB of a forward and backward beyond inputs, output and gradients."""
    if device == "cuda":
        return round(gpu_peak_extra_bytes(partial(power_call, case, inputs, impl, MODES[1])) / 1e6, 1)
    if sys.platform != "linux":
        return None
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        return round(fresh.apply(extra_memory, (case, impl)) / 1e6, 1)


def cold_start(case: Case) -> float:
    """Returns seconds of a first forward and backward on a GPU, with no kernel compiled before."""
    code = f"""
import time, torch
from benchmarks.common.cases import Case, make_inputs
from benchmarks.ops import MODES, power_call
case = {replace(case, B=1)!r}
inputs = make_inputs(case, "cuda")
torch.cuda.synchronize()
start = time.perf_counter()
power_call(case, inputs, "auto", MODES[1])
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return round(float(run.stdout.split()[-1]), 1)


def measure(
    cases: Sequence[Case], device: str, impl: str, mode: str, peers: Sequence[str] = ("sdpa",)
) -> Iterator[dict]:
    """Returns a row for each case and peer. On the CPU all cases are checked first and timed in turns; on a GPU one by
    one."""
    for together in [[case] for case in cases] if device == "cuda" else [cases]:
        yield from _measure_together(together, device, impl, mode, peers)


def _measure_together(cases: Sequence[Case], device: str, impl: str, mode: str, peers: Sequence[str]) -> list[dict]:
    inputs = [make_inputs(case, device) for case in cases]
    errors, memories, chunks = [], [], []
    for case, tensors in zip(cases, inputs, strict=True):
        wanted = expected(case, tensors, mode)
        errors.append(check(case, mode, power_call(case, tensors, impl, mode), wanted))
        memories.append(None if mode == "forward" else peak_memory(case, tensors, device, impl))
        chunks.append(chunk_size(case, tensors, device, mode))
    graph = device == "cuda" and max(case.T for case in cases) <= GRAPHED
    wrap = graphed if graph else (lambda call: call)
    calls = [wrap(partial(power_call, c, x, impl, mode)) for c, x in zip(cases, inputs, strict=True)]
    ours = milliseconds(calls, device)
    rows = []
    for peer in peers:
        title, prepare = PEERS[peer]
        able = [i for i, case in enumerate(cases) if supports(peer, case)]
        try:
            times = milliseconds([wrap(prepare(cases[i], inputs[i], mode)) for i in able], device, rounds=3)
        except (ImportError, RuntimeError) as error:  # not installed, or refusing the device or this Triton
            print(f"{title}, {mode}: left out: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        for i, peer_ms in zip(able, times, strict=True):
            case = cases[i]
            rows.append(
                {"op": "power_attention", "impl": impl, "peer": title, "device": device, "dtype": case.dtype}
                | {"B": case.B, "T": case.T, "H": case.H, "G": case.G, "K": case.K, "V": case.V, "p": case.p}
                | {"chunk": chunks[i], "gated": case.gated, "mode": mode, "ms": round(ours[i], 3)}
                | {"peer_ms": round(peer_ms, 3), "ratio": round(peer_ms / ours[i], 3), "graph": graph}
                | {"err": float(f"{errors[i]:.2e}"), "extra_mb": memories[i], **measured(device)}
            )
    return rows


def chunk_size(case: Case, inputs: dict[str, Tensor], device: str, mode: str) -> int:
    """Returns the form that "auto" takes."""
    if device == "cpu":
        return default_chunk_size(inputs["q"], inputs["k"], inputs["v"], case.p)
    from sympow.ops.triton import adapt

    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    return min(case.T, adapt.automatic_chunk_size(q, k, v, inputs.get("log_g"), None, case.p, mode != "forward"))


def main() -> None:
    parser = options("benchmarks.ops", __doc__)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}, with commas; default sdpa on the CPU, cudnn on a GPU")
    parser.add_argument("--times", type=int, nargs="+", help="only cases of so many tokens; other rows are kept")
    parser.add_argument("--powers", type=int, nargs="+", help="only cases of these p; other rows are kept")
    parser.add_argument("--plot", type=Path, help="PNG of throughput against context")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw --plot from the rows of --csv")
    args = parser.parse_args()
    if args.draw:
        if not args.plot:
            parser.error("--draw needs --plot, the file to write")
        plot(read(args.csv), args.plot)
        return
    peers = (args.peers or {"cpu": "sdpa", "cuda": "cudnn"}[args.device]).split(",")
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        parser.error(f"unknown peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    torch.set_num_threads(args.threads)
    cases = CASES[args.device]
    times, powers = ({getattr(case, name) for case in cases} for name in ("T", "p"))
    for name, given, known in (("--times", args.times, times), ("--powers", args.powers, powers)):
        if set(given or ()) - known:
            parser.error(f"{name} are of {sorted(known)}; got {given}")
    chosen = [case for case in cases if case.T in (args.times or times) and case.p in (args.powers or powers)]
    if not chosen:
        parser.error(f"no case has --times {args.times} and --powers {args.powers}")
    rows: list[dict] = []
    if chosen != cases and args.csv.exists():
        rows = read(args.csv)
    cold = cold_start(CASES["cuda"][0]) if args.device == "cuda" and chosen == cases else None
    print(f"{'T':>7} {'K':>4} {'p':>2} {'mode':>17} {'ms':>10} {'peer ms':>10} {'ratio':>6} {'err':>8} {'extra MB':>8}")
    for mode in MODES:
        for row in measure(chosen, args.device, args.impl, mode, peers):
            rows = [other for other in rows if any(other[name] != row[name] for name in SAME)]
            rows.append(row | {"cold_start_s": cold})
            memory = "" if row["extra_mb"] is None else f"{row['extra_mb']:.0f}"
            timing = f"{row['ms']:>10.2f} {row['peer_ms']:>10.2f} {row['ratio']:>6.2f}"
            case = f"{row['T']:>7} {row['K']:>4} {row['p']:>2} {row['mode']:>17}"
            print(f"{case} {timing} {row['err']:>8.1e} {memory:>8} {row['peer']}", flush=True)
            rows.sort(key=_order)
            write(args.csv, rows)  # a run that is stopped keeps what it has
    if args.plot:
        plot(rows, args.plot)


def _order(row: dict) -> tuple:
    titles = [title for title, _ in PEERS.values()]
    shape = (row["p"], row["K"], row["G"] / row["H"], row["G"], row["T"])
    return (*shape, MODES.index(row["mode"]), not row["gated"], titles.index(row["peer"]))


def plot(rows: list[dict], path: Path) -> None:
    """Draws throughput against context with the backward, of ours and of the peers, gated, p = 2.

    There is a panel for each K of 64 and more that was measured at three lengths, or for the K of a CPU. Peers that
    compute another function than softmax attention or ours are left out.
    """
    from matplotlib.figure import Figure

    some = [row for row in rows if row["p"] == 2 and row["gated"] and row["mode"] == "forward+backward"
            and (row["K"] >= 64 or row["device"] == "cpu") and "linear" not in row["peer"]]  # fmt: skip
    shapes: dict[tuple[int, ...], list[dict]] = {}
    for row in some:
        shapes.setdefault((row["K"], row["B"], row["H"], row["G"]), []).append(row)
    shapes = {shape: own for shape, own in shapes.items() if len({row["T"] for row in own}) > 2}
    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, len(shapes), sharey=True, squeeze=False)
    colors: dict[str, str] = {}
    for axis, ((key_dim, batch, heads, groups), own) in zip(axes.flat, sorted(shapes.items()), strict=True):
        # Of several measurements of our own, as of runs with other peers, the first one counts.
        lines = {"sympow, p = 2": {r["T"]: r["B"] * r["T"] / r["ms"] * 1e3 for r in reversed(own)}}
        for row in own:
            lines.setdefault(row["peer"], {})[row["T"]] = row["B"] * row["T"] / row["peer_ms"] * 1e3
        for name, points in lines.items():
            color = colors.setdefault(name, f"C{len(colors)}")
            axis.loglog(list(points), list(points.values()), marker="o", label=name, color=color)
        axis.set(title=f"K = V = {key_dim}: B {batch}, H {heads}, G {groups}", xlabel="tokens of context")
        times = sorted({row["T"] for row in own})
        axis.set_xticks(times, [f"{time:,}" for time in times])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} million")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    axes[0, 0].set_ylabel("tokens a second")
    figure.suptitle(f"{rows[0]['processor']}, forward and backward, gated, {rows[0]['dtype']}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
