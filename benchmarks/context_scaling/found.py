"""Looks up the results of a run of a study in the committed tables, for all its samples.

runs.csv has a row a run, positions.csv its losses by position along training, and speed.csv times of training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from operator import sub, truediv
from pathlib import Path
from typing import Any

from benchmarks.common.intervals import Interval, interval
from benchmarks.common.measure import known
from benchmarks.context_scaling.grid import DOCUMENT, Run
from benchmarks.context_scaling.speed import SPEED
from benchmarks.context_scaling.studies import RATE_STUDIES, STUDIES, grid, with_rate
from benchmarks.context_scaling.work import DONE

Row = dict[str, Any]
Sample = tuple[str, int]  # a version of the corpus, and the seed of the weights and of the order of the data

RUNS, POSITIONS = "runs.csv", "positions.csv"
KEY = tuple(each.name for each in fields(Run))


def run_of(row: Row) -> Run:
    """Returns the run of a row of runs.csv."""
    return Run(**{name: row[name] for name in KEY})


def along(run: Run, positions: Iterable[Row]) -> dict[int, Row]:
    """Returns the losses by position along training, by tokens, of the fewest documents, in rows as trained."""
    rows = [row for row in positions if row["evaluated_context"] == run.context]
    least = min((row["documents"] for row in rows), default=0)
    return {row["step"] * run.documents * DOCUMENT: row for row in rows if row["documents"] == least}


class Found:
    """Holds rows of finished runs, by run and sample.

    Two runs are compared only if they have a sample in common. Such runs form a pair.

    Args:
        folder: of runs.csv, positions.csv and speed.csv; what is missing counts as empty.
    """

    def __init__(self, folder: Path):
        self._rows: dict[Run, dict[Sample, Row]] = {}
        for row in sorted(known(folder / RUNS), key=lambda row: (row["corpus"], row["seed"])):
            if row["status"] == DONE:
                run = run_of(row)
                self._rows.setdefault(replace(run, seed=0), {})[row["corpus"], run.seed] = row
        self._positions: dict[tuple[str, str], list[Row]] = {}
        for row in known(folder / POSITIONS):
            self._positions.setdefault((row["run"], row["corpus"]), []).append(row)
        self._times = {(row["variant"], row["context"], row["mode"]): row for row in known(folder / SPEED)}

    def rows(self, run: Run) -> Mapping[Sample, Row]:
        """Returns the row of every sample of a run, whatever its own seed, sorted by sample."""
        return self._rows.get(replace(run, seed=0), {})

    def finished(self, run: Run) -> bool:
        """Returns whether a run is finished with its seed, on whatever version of the corpus."""
        return run.seed in {seed for _, seed in self.rows(run)}

    def last(self, run: Run, context: int) -> dict[Sample, Row]:
        """Returns for every sample the losses by position at the end, on all documents, in rows of `context`."""
        found = {}
        for corpus, seed in self.rows(run):
            rows = self._positions.get((replace(run, seed=seed).name, corpus), [])
            of_context = [row for row in rows if row["evaluated_context"] == context]
            if of_context:
                found[corpus, seed] = of_context[-1]
        return found

    def along(self, run: Run) -> dict[int, Row]:
        """Returns the losses along training by tokens, of the version of the corpus with most of them; {} without any.

        All are of the same documents, fewer than at the end.
        """
        curves: list[dict[int, Row]] = [{}]
        for corpus, seed in self.rows(run):
            if seed == run.seed:
                curves.append(along(run, self._positions.get((run.name, corpus), [])))
        return max(curves, key=len)

    def speed(self, variant: str, context: int, mode: str = "compiled") -> int | None:
        """Returns tokens a second of steps, see `speed.Case`, alone on a GPU; None where they were not timed."""
        row = self._times.get((variant, context, mode))
        return None if row is None else row["tokens_per_second"]

    def timed_on(self) -> str:
        """Returns the processors on which steps were timed."""
        return ", ".join(sorted({row["processor"] for row in self._times.values()}))

    def mean(self, run: Run, name: str) -> Interval | None:
        """Returns a column's mean over all samples of a run."""
        return interval([row[name] for row in self.rows(run).values() if row[name] is not None])

    def learned(self, run: Run, not_learned: float) -> bool:
        """Returns whether a run's loss is at most `not_learned`, and that of a window of 32 tokens in its setting."""
        loss, control = (self.mean(each, "held_out_loss") for each in (run, replace(run, variant="window32")))
        return loss is not None and loss.mean <= min(not_learned, control.mean if control else not_learned)

    def difference(self, run: Run, base: Run, name: str = "held_out_loss") -> Interval | None:
        """Returns the mean difference of a column to another run, over pairs; None where there is no pair."""
        return self._paired(run, base, name, sub)

    def ratio(self, run: Run, base: Run, name: str = "held_out_loss") -> Interval | None:
        """Returns the mean ratio of a column to that of another run, over pairs; None where there is no pair."""
        return self._paired(run, base, name, truediv)

    def _paired(self, run: Run, base: Run, name: str, how: Callable[[Any, Any], Any]) -> Interval | None:
        ours, theirs = self.rows(run), self.rows(base)
        pairs = [(ours[sample][name], theirs[sample][name]) for sample in ours if sample in theirs]
        return interval([how(*pair) for pair in pairs if None not in pair])


def runs_of(study: str) -> list[Run]:
    """Returns the runs of a study at seed 0."""
    return grid([study], [0])


def pick(study: str, variant: str, **setting: Any) -> Run:
    """Returns the run of a study with a variant and a setting; ValueError unless there is exactly one."""
    found = [run for run in runs_of(study) if run.variant == variant]
    found = [run for run in found if all(getattr(run, name) == value for name, value in setting.items())]
    if len(found) != 1:
        raise ValueError(f"{study} has {len(found)} runs of {variant} with {setting}")
    return found[0]


def baseline_of(run: Run, study: str) -> Run:
    """Returns the run that a run is compared with: that of the study's baseline in the same setting, at the baseline's
    learning rate. Studies of rates compare with the same variant at the default rate."""
    base = replace(run, learning_rate=Run.learning_rate)
    return base if study in RATE_STUDIES else with_rate(replace(base, variant=STUDIES[study].baseline), STUDIES[study])
