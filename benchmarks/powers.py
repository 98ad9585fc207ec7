"""Times p = 3 and 4 with the backward, by chunk size: `python -m benchmarks.powers --device cuda --csv FILE`.

Each shape and number of tokens has these rows: the quadratic form, chunks of some sizes, impl="auto" and, where values
are as wide as keys, softmax attention by cuDNN. At the smallest number of tokens, a call is checked against float64, as
in `ops.py`. At larger numbers, the output and the gradients of q, k and v are compared with those of the quadratic
form, which the first check covers. A call with a wrong result is not timed, and makes the command exit 1. The table
shows milliseconds, the growth from the row before, and by chunk size the milliseconds of each pass at the largest
number of tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from benchmarks.chunks import IMPL, by_pass, compile_kernels
from benchmarks.common.cases import Case, make_inputs
from benchmarks.common.measure import kernel_milliseconds, measured, milliseconds, options, write
from benchmarks.common.peers import PEERS
from benchmarks.ops import MODES, bound, check, chunk_size, expected, power_call

SHAPES = "3,32,32,8;4,16,16,8;3,32,64,2;4,24,64,2"  # p, K, V, B
COMPARED = 4  # results of a call that are compared: output and gradients of q, k and v


def distance(results: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Returns the largest relative difference, in norm."""
    pairs = zip(results[:COMPARED], others[:COMPARED], strict=True)
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)


def measure(case: Case, chunks: Sequence[int], device: str, shortest: bool, passes: bool) -> list[dict]:
    """Returns a row for each form: chunk sizes, the quadratic form, "auto" and, if it supports the shape, cuDNN's
    softmax."""
    inputs, mode = make_inputs(case, device), MODES[1]
    wanted = expected(case, inputs, mode) if shortest else None
    quadratic = power_call(case, inputs, IMPL[device], mode, case.T)
    rows, calls = [], []
    for impl, chunk in [(IMPL[device], x) for x in (*chunks, case.T) if x <= case.T] + [("auto", None)]:
        call = partial(power_call, case, inputs, impl, mode, chunk)
        row = {"form": "auto" if chunk is None else "quadratic" if chunk == case.T else f"chunk {chunk}"}
        row |= {"chunk": chunk_size(case, inputs, device, mode) if chunk is None else chunk, "ms": None, "passes": None}
        try:
            results = call()
            row["err"] = check(case, mode, results, wanted) if wanted else distance(results, quadratic)
            del results
            if not row["err"] <= 2 * bound(case):
                raise RuntimeError(f"differs by {row['err']:.1e} from the quadratic form")
            if passes and device == "cuda" and chunk and chunk < case.T:
                row["passes"] = by_pass(kernel_milliseconds(call, 1))
            calls.append(call)
        except Exception as failure:  # of a kernel, of memory, or of the check: a failure is a result
            row["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:100]
        rows.append(row)
    able = [row for row in rows if "failure" not in row]
    if case.K == case.V and device == "cuda":
        able.append({"form": "softmax, cuDNN", "chunk": None})
        rows.append(able[-1])
        calls.append(PEERS["cudnn"][1](case, inputs, mode))
    for row, ms in zip(able, milliseconds(calls, device, rounds=3, least=0.05), strict=True):
        row["ms"] = round(ms, 3)
    about = {"B": case.B, "T": case.T, "H": case.H, "K": case.K, "V": case.V, "p": case.p, "gated": case.gated}
    return [about | row | measured(device) for row in rows]


def table(rows: Sequence[dict]) -> list[str]:
    """Returns a line for each form, with the times at every number of tokens and how they grow."""
    lines, times = [], sorted({row["T"] for row in rows})
    head = " | ".join(f"T {time:,}" for time in times)
    lines += [f"| p | K | V | B | form | {head} | passes at {times[-1]:,} |"]
    for shape in dict.fromkeys((row["p"], row["K"], row["V"], row["B"]) for row in rows):
        same = [row for row in rows if (row["p"], row["K"], row["V"], row["B"]) == shape]
        for form in dict.fromkeys(row["form"] for row in same):
            cells, last = [], None
            for time in times:
                row = next((x for x in same if (x["T"], x["form"]) == (time, form)), {})
                ms = row.get("ms")
                cells.append(row.get("failure") or ("" if ms is None else f"{ms:.2f}"))
                if ms is not None and last:
                    cells[-1] += f" ({ms / last:.2f}x)"
                if ms is not None and form == "auto":
                    cells[-1] += f" [{row['chunk']}]"
                if ms is not None and row.get("err") is not None:
                    cells[-1] += f" {row['err']:.0e}"
                last = ms
            passes = row.get("passes") or {}
            cells.append(", ".join(f"{name} {ms:.1f}" for name, ms in passes.items()))
            lines.append("| " + " | ".join(map(str, (*shape, form, *cells))) + " |")
    return lines


def main() -> int:
    parser = options("benchmarks.powers", __doc__)
    parser.add_argument("--shapes", default=SHAPES, help=f"p,K,V,B with semicolons (default: {SHAPES})")
    parser.add_argument("--times", default="4096,16384,65536", help="tokens (default: 4096,16384,65536)")
    parser.add_argument("--chunks", default="1024,2048,4096", help="chunk sizes (default: 1024,2048,4096)")
    args = parser.parse_args()
    times, chunks = ([int(x) for x in text.split(",")] for text in (args.times, args.chunks))
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes.split(";")]
    cases = [Case(times[-1], B=b, H=12, G=12, K=k, V=v, p=p, dtype="bfloat16") for p, k, v, b in shapes]
    if args.device == "cuda":
        compile_kernels([(case, chunks) for case in cases], args.device)
    rows: list[dict] = []
    for case in cases:
        for time in times:
            rows += measure(replace(case, T=time), chunks, args.device, time == times[0], time == times[-1])
            write(args.csv, rows)
            print(case.p, case.K, case.V, time, flush=True)
    print(*table(rows), sep="\n")
    return int(any("failure" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
