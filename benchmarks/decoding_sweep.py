"""Times candidates for the launch of a decoding step: `python -m benchmarks.decoding_sweep --csv FILE`, on a GPU.

There is a row for each step and each candidate of `plan.DecodingLimits`, sorted by time. The kernels are first
compiled by several processes at the same time. Every candidate is checked against float64 before it is timed. A
candidate with a wrong result is printed and left out.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

import torch

from benchmarks.common.cases import DTYPES, Case
from benchmarks.common.measure import graphed, measured, milliseconds, options, write
from benchmarks.decoding_gpu import CASES, STATE_DTYPES, Step, checked_error, copy_call, states_in_turn, tokens, turn
from sympow.ops import DecodingState, PowerState, power_attention_step
from sympow.ops.triton import plan
from sympow.ops.triton.plan import DecodingLimits

COMPILERS = 8  # processes
COPIED = 1 << 30  # bytes
# Elements of a tile of the state, programs a multiprocessor, elements of a tile of the tail, warps, registers,
# stages.
CANDIDATES = {
    "few": [
        (4096, 4, 2048, 2, 168, 1),
        (4096, 4, 2048, 2, 168, 3),
        (4096, 4, 2048, 2, 168, 4),
        (4096, 3, 2048, 2, 168, 3),
        (4096, 2, 2048, 2, 168, 3),
        (4096, 2, 2048, 2, 168, 4),
        (4096, 2, 2048, 4, 128, 4),
    ],
    "many": [
        (4096, 32, 2048, 2, 168, 1),
        (4096, 32, 2048, 2, 168, 3),
        (4096, 32, 2048, 2, 168, 4),
        (4096, 12, 2048, 2, 168, 3),
        (4096, 12, 2048, 4, 128, 3),
    ],
}


def use(limits: DecodingLimits) -> None:
    """Makes later steps use this launch."""
    plan.DECODING.update(few=limits, many=limits)


def candidates(case: Case) -> list[DecodingLimits]:
    """Returns the candidates for the step of a case on this GPU."""
    processors = plan.processors(torch.device("cuda"))
    return [DecodingLimits(*each) for each in CANDIDATES["few" if processors > case.B * case.G else "many"]]


def compiled(step: Step, limits: DecodingLimits) -> None:
    """Compiles the kernel, which is then in Triton's cache."""
    use(limits)
    case, dtype = step.case, DTYPES[step.case.dtype]
    zeros = PowerState.zeros(case.B, case.G, case.K, case.V, case.p, device="cuda")
    state = DecodingState.from_state(zeros, dtype=dtype, state_dtype=STATE_DTYPES[step.state_dtype])
    power_attention_step(*tokens(case, 1, "cuda", seed=1), state=state, p=case.p, inplace=True)


def measure(step: Step) -> list[dict]:
    """Returns the rows of a step."""
    states = states_in_turn(step, "cuda")
    copy, rows = copy_call("cuda", COPIED), []
    read = step.case.B * (states[0].s[0].nbytes + states[0].z[0].nbytes)
    for limits in candidates(step.case):
        use(limits)
        try:
            wrong = checked_error(step, "cuda")
        except RuntimeError as failure:
            print(failure, flush=True)
            continue
        ms, copy_ms = milliseconds([graphed(turn(step.case, "cuda", states)), copy], "cuda", rounds=3, least=0.05)
        ms /= states[0].capacity * len(states)
        share = read / ms / (2 * COPIED / copy_ms)
        row = asdict(step.case) | {"state_dtype": step.state_dtype, "slotted": step.slotted} | asdict(limits)
        rows.append(row | {"us": round(ms * 1e3, 2), "share_of_copy": round(share, 3), "err": wrong})
    return sorted(rows, key=lambda row: row["us"])


@torch.no_grad()
def main() -> None:
    parser = options("benchmarks.decoding_sweep", __doc__ or "")
    parser.set_defaults(device="cuda")
    arguments = parser.parse_args()
    steps = sorted((step for step in CASES if not step.slotted), key=lambda step: -step.case.K)
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        waiting = [pool.submit(compiled, step, limits) for step in steps for limits in candidates(step.case)]
        for each in waiting:
            each.result()
    rows: list[dict] = []
    for step in steps:
        for row in measure(step):
            rows.append(row | measured("cuda"))
            shape = f"B {row['B']} H {row['H']} G {row['G']} K {row['K']} {row['state_dtype']}"
            limits = tuple(row[name] for name in ("elements", "programs", "tail", "warps", "registers", "stages"))
            print(f"{shape}: {limits}: {row['us']:.1f} us, {row['share_of_copy']:.0%} of a copy", flush=True)
        write(arguments.csv, rows)


if __name__ == "__main__":
    main()
