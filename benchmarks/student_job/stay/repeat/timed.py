"""A few rows of programs whose options cannot choose them: timed.py PART CSV. Times are compared on an H200 alone."""
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.measure import commit, measured, processor, write

DEVICE = os.environ.get("REPEAT_DEVICE", "cuda")


def chunks(gated: bool):
    import benchmarks.chunks as C

    case, _ = next((case, sizes) for case, sizes in C.FORMS["cuda"] if (case.p, case.K) == (2, 64))
    case = replace(case, gated=gated)
    case, sizes = (replace(case, T=256, B=1), (128,)) if DEVICE == "cpu" else (replace(case, T=16384, B=case.B * 4), (1024,))
    C.chunk_size = lambda *_: case.T  # of impl "auto", whose rows are dropped
    for row in C.measure(case, sizes, DEVICE):
        if row["impl"] != "auto" and row["chunk"] < case.T:
            yield row


def powers():
    import benchmarks.powers as P
    from benchmarks.common.cases import Case

    case = Case(4096, B=2, H=12, G=12, K=32, V=64, p=3, dtype="bfloat16")
    if DEVICE == "cpu":
        case = replace(case, T=128, B=1)
    for row in P.measure(case, (2048,), DEVICE, True, False):
        if row["form"] in ("quadratic", "chunk 2048"):
            yield row


def sweep():
    import torch

    import benchmarks.decoding_sweep as D

    step = next(s for s in D.CASES if (s.case.B, s.case.K, s.state_dtype, s.slotted) == (32, 128, "float32", False))
    one = D.candidates(step.case)[:1]
    D.candidates = lambda case: one
    with torch.no_grad():
        for row in D.measure(step):
            yield row | measured("cuda")


def conversion_decoding():
    import torch

    import benchmarks.conversion_decoding as C

    torch.set_num_threads(2)
    C.CONVERTED = {name: C.CONVERTED[name] for name in ("windows of 1,024 and power", "power")}
    cpu = DEVICE == "cpu"
    about = {"processor": processor(DEVICE), "torch": torch.__version__, "commit": commit()}
    for row in C.measure("tiny" if cpu else "smollm2", torch.device(DEVICE), [64 if cpu else 2048], 2 if cpu else 32,
                         4 if cpu else 32):
        if row["model"] in C.CONVERTED:
            yield row | about


PARTS = {"chunks": partial(chunks, True), "chunks_no_gate": partial(chunks, False), "powers": powers,
         "decoding_sweep": sweep, "conversion_decoding": conversion_decoding}


def main() -> None:
    part, csv = sys.argv[1:]
    Path(csv).parent.mkdir(parents=True, exist_ok=True)
    rows = list(PARTS[part]())
    write(Path(csv), rows)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
