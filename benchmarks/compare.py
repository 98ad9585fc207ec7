"""Times the op of another version and of this one, in turns: `python -m benchmarks.compare --base FOLDER --csv FILE`.

FOLDER holds the files of the other version, as `git worktree add FOLDER COMMIT` makes it. Each version has a process of
its own, which takes only the package `sympow` from there. Every round times a call in each, so that a machine that
slows down does so for both, and the versions take turns in coming first. The ratio is the median over the rounds, of
the time here divided by the time there.
`python -m benchmarks.ops` checks and times the same calls beside other libraries.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from benchmarks.common.cases import CASES, MODES, Case, make_inputs, power_call
from benchmarks.common.measure import measured, milliseconds, options, write

HERE = Path(__file__).parents[1]
ROUNDS = 6
WARM_UP = 0.2  # seconds of calls before each time: the first ones after a pause of the GPU take another time


class Version:
    """Times calls of the version in a folder, in a process of its own."""

    def __init__(self, folder: Path, device: str, threads: int):
        command = [sys.executable, __file__, "--answer", device, str(threads)]
        self._package = tempfile.TemporaryDirectory()
        (Path(self._package.name) / "sympow").symlink_to(folder / "sympow")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((self._package.name, str(HERE)))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, case: Case, mode: str) -> float:
        """Returns milliseconds of a call; RuntimeError if the process ends instead."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([vars(case), mode]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that timed {case}, {mode}, ended with {self._process.wait()}")
        return float(answer)

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._package.cleanup()


def in_turn(base: Version, own: Version, case: Case, mode: str, *, own_first: bool) -> tuple[float, float]:
    """Returns milliseconds of a call in both versions."""
    if own_first:
        after = own.ask(case, mode)
        return base.ask(case, mode), after
    return base.ask(case, mode), own.ask(case, mode)


def answer(device: str, threads: int) -> None:
    """Reads cases from the standard input, and prints the time of each."""
    torch.set_num_threads(threads)
    made = None
    for line in sys.stdin:
        fields, mode = json.loads(line)
        case = Case(**fields)
        if made is None or made[0] != case:
            made = None  # frees the last inputs
            made = (case, make_inputs(case, device))
        call = partial(power_call, case, made[1], "auto", mode)
        end = time.perf_counter() + (WARM_UP if device == "cuda" else 0.0)
        while time.perf_counter() < end:
            call()
            torch.cuda.synchronize()
        (ms,) = milliseconds([call], device, rounds=1, least=0.1)
        print(ms, flush=True)


def main() -> None:
    parser = options("benchmarks.compare", __doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder with the files of the other version")
    parser.add_argument("--times", type=int, nargs="+", help="only cases of so many tokens")
    args = parser.parse_args()
    if not (args.base / "sympow/ops").is_dir():
        parser.error(f"--base: expected the folder of a version of sympow; got {args.base}")
    rows = []
    print(f"{'T':>7} {'H':>3} {'G':>3} {'K':>4} {'p':>2} {'mode':>17} {'base ms':>10} {'ms':>10} {'times base':>10}")
    with ExitStack() as stack:
        folders = (args.base.resolve(), HERE)
        base, own = (stack.enter_context(Version(folder, args.device, args.threads)) for folder in folders)
        for case in CASES[args.device]:
            if args.times and case.T not in args.times:
                continue
            for mode in MODES:
                pairs = [in_turn(base, own, case, mode, own_first=bool(n % 2)) for n in range(ROUNDS)]
                before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
                ratio = statistics.median(b / a for a, b in pairs)
                print(
                    f"{case.T:>7} {case.H:>3} {case.G:>3} {case.K:>4} {case.p:>2} {mode:>17} {before:>10.3f} "
                    f"{after:>10.3f} {ratio:>10.3f}",
                    flush=True,
                )
                rows.append(
                    {**vars(case), "mode": mode, "base_ms": round(before, 4), "ms": round(after, 4)}
                    | {"times_base": round(ratio, 4), "base": args.base.name, **measured(args.device)}
                )
                write(args.csv, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2], int(sys.argv[3]))
    else:
        main()
