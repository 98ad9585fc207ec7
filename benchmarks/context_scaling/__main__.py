"""Shows what models make of long contexts: `python -m benchmarks.context_scaling COMMAND`.

`show` prints the results of a study, and `claims` those of all claims. `speed` times training steps.
`python -m benchmarks.learning run --studies` trains the runs of studies.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from benchmarks.bigram import not_learned
from benchmarks.common.measure import csv_file, known, measured, refuses
from benchmarks.context_scaling import speed, tables
from benchmarks.context_scaling.found import Found
from benchmarks.context_scaling.grid import SCALES
from benchmarks.context_scaling.studies import STUDIES
from benchmarks.tables import RESULTS
from sympow.recall import write_results
from sympow.training.devices import resolve_device

COMMITTED = RESULTS / "context_scaling"


@refuses
def main() -> None:
    options = _parser().parse_args()
    options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_scaling", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    show = commands.add_parser("show", help="print the finished runs of a study")
    show.set_defaults(command=_show)
    show.add_argument("study", choices=STUDIES)

    claims = commands.add_parser("claims", help="print all claims, those of one run too")
    claims.set_defaults(command=_claims)

    timed = commands.add_parser("speed", help="time training steps, alone on a GPU")
    timed.set_defaults(command=_speed)
    timed.add_argument("--variants", required=True, help="recipes of sympow/recipes/scaling.py")
    timed.add_argument("--contexts", default="1024,4096,16384,65536", help="(default: %(default)s)")
    timed.add_argument("--modes", default="eager,compiled", help="(default: %(default)s)")
    timed.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    timed.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
    timed.add_argument("--csv", type=csv_file, default=COMMITTED / speed.SPEED, help="file that gets the rows that it "
                       "lacks (default: the committed)")  # fmt: skip
    return parser


def _show(options: argparse.Namespace) -> None:
    print(tables.comparison(Found(COMMITTED), options.study, not_learned()))


def _claims(options: argparse.Namespace) -> None:
    print(tables.claims_table(Found(COMMITTED), not_learned(), least=1))


def _speed(options: argparse.Namespace) -> None:
    chosen = itertools.product(
        options.variants.split(","), map(int, options.contexts.split(",")), options.modes.split(",")
    )
    rows = known(options.csv)
    done = {tuple(row[name] for name in speed.KEY) for row in rows}
    left = [case for case in itertools.starmap(speed.Case, chosen) if tuple(vars(case).values()) not in done]
    print(f"{len(left)} cases to time", flush=True)
    device = resolve_device(options.device).type
    for case in left:
        rows.append(vars(case) | speed.timed(case, options.scale, device) | measured(device))
        print(
            f"{case.variant} at {case.context:,}, {case.mode}: {rows[-1]['tokens_per_second']:,} tokens/s", flush=True
        )
        columns = dict.fromkeys(name for row in rows for name in row)
        rows.sort(key=lambda row: [row[name] for name in speed.KEY])
        write_results(options.csv, [{name: row.get(name) for name in columns} for row in rows])


if __name__ == "__main__":
    sys.exit(main())
