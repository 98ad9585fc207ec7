"""Times the forms of power attention against each other: `python -m benchmarks.chunks --device cuda --csv FILE`.

Contexts start at 256 tokens. The forms are the quadratic form, the chunked form at several chunk sizes, and
impl="auto", which should choose the fastest form. On a GPU, the time of each pass by chunk size is measured too, at the
longest context. With --no-gate all calls are without a gate: with one, the kernels skip tiles that the gate has decayed
to nothing. Every call is checked against float64 before it is timed, as in `ops.py`. A call that fails is a row without
a time. It does not stop the others, and makes the command exit 1.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from benchmarks.common.cases import FORMS, MODES, Case, make_inputs, power_call
from benchmarks.common.measure import graphed, keep, kernel_milliseconds, measured, milliseconds, options
from benchmarks.ops import GRAPHED, check, chunk_size, expected
from benchmarks.pages.result_tables import chunks_table

SHORTEST = 256
IMPL = {"cpu": "eager", "cuda": "triton"}
PASSES = ("state_pass", "output_pass", "query_pass", "key_pass")  # kernels; all others are small


def contexts(longest: Case) -> list[Case]:
    """Returns the case at every power of two from 256 tokens on, with the same number of tokens in all."""
    times = [SHORTEST << i for i in range((longest.T // SHORTEST).bit_length())]
    return [replace(longest, T=time, B=longest.B * longest.T // time) for time in times]


def measure(case: Case, chunks: Sequence[int], device: str, passes: bool = False) -> Iterator[dict]:
    """Returns the rows of a case: the choices of each mode, "auto" as the last. A chunk of T tokens is the quadratic
    form."""
    inputs = make_inputs(case, device)
    wanted = expected(case, inputs, MODES[1])
    about = {"op": "power_attention", "device": device, "dtype": case.dtype, "gated": case.gated}
    about |= {"B": case.B, "T": case.T, "H": case.H, "G": case.G, "K": case.K, "V": case.V, "p": case.p}
    run = measured(device)
    graph = device == "cuda" and case.T <= GRAPHED
    for mode in MODES:
        single = [(IMPL[device], chunk) for chunk in (*(x for x in chunks if x < case.T), case.T)]
        rows, calls = [], []
        for impl, chunk in [*single, ("auto", None)]:
            taken = chunk_size(case, inputs, device, mode) if chunk is None else chunk
            row = about | {"impl": impl, "chunk": taken, "mode": mode, "graph": graph}
            row |= dict.fromkeys(("ms", "ratio", "err", "passes", "failure"))
            call = partial(power_call, case, inputs, impl, mode, chunk)
            try:
                row["err"] = float(f"{check(case, mode, call(), wanted):.2e}")
                if passes and impl != "auto" and chunk < case.T:
                    row["passes"] = by_pass(kernel_milliseconds(call))
                calls.append(graphed(call) if graph else call)
            except Exception as failure:  # of a kernel, of memory, or of the check: a failure is a result
                row["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            rows.append(row)
        able = [row for row in rows if row["failure"] is None]
        for row, ms in zip(able, milliseconds(calls, device, rounds=3, least=0.1), strict=True):
            row["ms"] = round(ms, 4)
        best = min((row["ms"] for row in able if row["impl"] != "auto"), default=None)
        for row in able:
            row["ratio"] = best and round(row["ms"] / best, 3)
        yield from (row | run for row in rows)


def by_pass(kernels: dict[str, float]) -> dict[str, float]:
    """Returns milliseconds of each pass and of all other kernels. With a backward the state pass runs three times."""
    times = dict.fromkeys((*PASSES, "other"), 0.0)
    for name, ms in kernels.items():
        times[name if name in PASSES else "other"] += ms
    return {name: round(ms, 4) for name, ms in times.items()}


def compile_kernels(forms: Sequence[tuple[Case, Sequence[int]]], device: str) -> None:
    """Compiles all kernels that will be timed, in several processes at the same time, which saves minutes."""
    jobs = [(case, chunk, device) for case, chunks in forms for chunk in (*chunks, case.T)]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))


def _compile(case: Case, chunk: int, device: str) -> None:
    """Compiles a case: two chunks, or 256 tokens for the quadratic form."""
    short = replace(case, B=1, T=2 * chunk if chunk < case.T else SHORTEST)
    with suppress(Exception):  # it comes again where it is reported
        power_call(short, make_inputs(short, device), IMPL[device], MODES[1], min(chunk, short.T))


def advice(rows: Sequence[dict]) -> Iterator[str]:
    """Returns a line for each p, K and mode: the best chunk size, and the longest context for the quadratic form.

    Best means that the largest ratio to the fastest choice is the smallest. The lines are entries for the tables of
    sympow/ops/triton/plan.py.
    """
    for p, key_dim, mode in sorted({(row["p"], row["K"], row["mode"]) for row in rows}):
        same = [row for row in rows if (row["p"], row["K"], row["mode"]) == (p, key_dim, mode)]
        ratios = {(row["T"], row["chunk"]): row["ratio"] for row in same if row["impl"] != "auto"}
        times, chunks = {row["T"] for row in same}, {chunk for time, chunk in ratios if chunk < time}
        worst, chunk, quadratic = min(
            (_worst(ratios, chunk, quadratic), chunk, quadratic) for chunk in chunks for quadratic in {chunk} | times
        )
        now = max(row["ratio"] or float("inf") for row in same if row["impl"] == "auto")
        taken = f"chunk {chunk:,}, quadratic up to {quadratic:,}"
        yield f"p {p}, K {key_dim}, {mode}: {taken}: {worst:.3f}x; auto now {now:.3f}x"


def _worst(ratios: dict[tuple[int, int], float | None], chunk: int, quadratic: int) -> float:
    """Returns the largest ratio to the fastest choice, if up to `quadratic` and `chunk` tokens the quadratic form is
    used."""
    taken = {(time, time if time <= max(quadratic, chunk) else chunk) for time, _ in ratios}
    return max(ratios.get(choice) or float("inf") for choice in taken)


def main() -> int:
    parser = options("benchmarks.chunks", __doc__)
    parser.add_argument("--no-gate", action="store_true", help="of calls without a gate")
    parser.add_argument("--widths", type=int, nargs="+", help="only shapes of these K")
    parser.add_argument("--plot", type=Path, help="PNG of the passes' times against chunk size, GPU only")
    args = parser.parse_args()
    if args.plot and args.device == "cpu":
        parser.error("--plot shows the passes, kernels of --device cuda; on the CPU there are none")
    torch.set_num_threads(args.threads)
    forms = [(replace(case, gated=not args.no_gate), chunks) for case, chunks in FORMS[args.device]
             if case.K in (args.widths or (case.K,))]  # fmt: skip
    if not forms:
        parser.error(f"--widths are of {sorted({case.K for case, _ in FORMS[args.device]})}; got {args.widths}")
    if args.device == "cuda":
        compile_kernels(forms, args.device)
    found = (measure(case, chunks, args.device, case == longest and args.device == "cuda")
             for longest, chunks in forms for case in contexts(longest))  # fmt: skip
    rows = keep(args.csv, chain.from_iterable(found), line)
    print(chunks_table(rows), *advice(rows), sep="\n")
    if args.plot:
        plot(rows, args.plot)
    return int(any(row["failure"] for row in rows))


def line(row: dict) -> str:
    """Returns a row as text to print."""
    form = "quadratic" if row["chunk"] >= row["T"] else f"chunk {row['chunk']}"
    about = f"p {row['p']} K {row['K']:>3} T {row['T']:>6} {row['mode']:>17} {row['impl']:>6} {form:>11}"
    if row["failure"]:
        return f"{about} failed: {row['failure'][:100]}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}x"
    return f"{about} {row['ms']:>9.3f} ms {ratio:>8} err {row['err']:.1e}"


def plot(rows: Sequence[dict], path: Path) -> None:
    """Draws the stacked times of the passes against the chunk size, a row for each mode.

    There is a column for each of the two largest K with p = 2. The table has the other shapes.
    """
    from matplotlib.figure import Figure

    some = [row for row in rows if row["passes"]]
    shapes = sorted({(row["p"], row["K"]) for row in some if row["p"] == 2})[-2:]
    figure = Figure(figsize=(4.5 * len(shapes), 7))
    axes = figure.subplots(len(MODES), len(shapes), squeeze=False)
    for axis, (mode, shape) in zip(axes.flat, ((mode, shape) for mode in MODES for shape in shapes), strict=True):
        bars = [row for row in some if (row["mode"], row["p"], row["K"]) == (mode, *shape)]
        below = [0.0] * len(bars)
        for name in (*PASSES, "other"):
            heights = [row["passes"][name] for row in bars]
            axis.bar([f"{row['chunk']:,}" for row in bars], heights, bottom=below, label=name.replace("_", " "))
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axis.set_title(f"p = {shape[0]}, K = {shape[1]}, B = {bars[0]['B']}: {mode}", fontsize=10)
        axis.set_xlabel("chunk, tokens")
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=9, ncols=len(PASSES) + 1, loc="lower center")
    figure.supylabel("ms")
    row = some[0]
    shape = f"T {row['T']:,}, H {row['H']}, K = V, {'gated' if row['gated'] else 'no gate'}, {row['dtype']}"
    figure.suptitle(f"{row['processor']}, {shape}", fontsize=10)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
