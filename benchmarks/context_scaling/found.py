"""Looks up the results of a run of a study in the tables, for all its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import sub, truediv
from pathlib import Path
from typing import Any

from benchmarks.context_scaling.grid import SETTING, Run, setting_of
from benchmarks.context_scaling.paired import Interval, interval
from benchmarks.context_scaling.results import Row, key_of, read
from benchmarks.context_scaling.speed import SPEED
from benchmarks.context_scaling.studies import RATE_STUDIES, STUDIES, grid, with_rate
from benchmarks.context_scaling.work import DONE
from sympow.recall.results import read_rows

Sample = tuple[str, int]  # a version of the corpus, and the seed of the weights and of the order of the data


class Found:
    """Holds rows of finished runs, by run and sample.

    Two runs are compared only if they have a sample in common. Such runs form a pair.

    Args:
        folder: of runs.csv, positions.csv and speed.csv; what is missing counts as empty.
    """

    def __init__(self, folder: Path):
        tables = read(folder)
        self._rows: dict[Run, dict[Sample, Row]] = {}
        for row in sorted(tables.runs, key=lambda row: (row["corpus"], row["seed"])):
            if row["status"] == DONE:
                run, corpus = key_of(row)
                self._rows.setdefault(replace(run, seed=0), {})[corpus, run.seed] = row
        self._positions: dict[tuple[str, str], list[Row]] = {}
        for row in tables.positions:
            self._positions.setdefault((row["run"], row["corpus"]), []).append(row)
        file = folder / SPEED
        times = read_rows(file, texts=("commit",)) if file.is_file() else []
        self._times = {(row["variant"], row["context"], row["mode"]): row for row in times}

    def rows(self, run: Run) -> Mapping[Sample, Row]:
        """Returns the row of every sample of a run, whatever its own seed, sorted by sample."""
        return self._rows.get(replace(run, seed=0), {})

    def finished(self, run: Run) -> bool:
        """Returns whether a run is finished with its seed, on whatever version of the corpus."""
        return run.seed in {seed for _, seed in self.rows(run)}

    def corpora(self, runs: Iterable[Run]) -> list[str]:
        """Returns the versions of the corpus that rows of some runs are of, each once, sorted."""
        return sorted({corpus for run in runs for corpus, _ in self.rows(run)})

    def positions(self, run: Run, context: int | None = None) -> dict[Sample, list[Row]]:
        """Returns for every sample its losses by position along training, in rows of `context`; None: as trained."""
        context = run.trained_at if context is None else context
        return {
            (corpus, seed): [
                row
                for row in self._positions.get((replace(run, seed=seed).name, corpus), [])
                if row["evaluated_context"] == context
            ]
            for corpus, seed in self.rows(run)
        }

    def along(self, run: Run) -> dict[Sample, list[Row]]:
        """Returns for every sample its losses along training, all on the same documents.

        Before the end a model is evaluated on some of the documents only. A loss on all of them is not comparable.
        """
        return {
            sample: [row for row in rows if row["documents"] == min(each["documents"] for each in rows)]
            for sample, rows in self.positions(run).items()
            if rows
        }

    def last(self, run: Run, context: int | None = None) -> dict[Sample, Row]:
        """Returns for every sample the losses by position at the end, on all documents, in rows of `context`."""
        return {sample: rows[-1] for sample, rows in self.positions(run, context).items() if rows}

    def speed(self, run: Run) -> float | None:
        """Returns tokens a second of training steps alone on a GPU; None where they were not timed.

        They are those of compiled steps where all samples of the run were compiled, else of eager ones.
        """
        rows = self.rows(run).values()
        mode = "compiled" if rows and all(row["compiled"] for row in rows) else "eager"
        row = self._times.get((run.variant, run.trained_at, mode))
        return None if row is None or run.size else row["tokens_per_second"]

    def times(self) -> list[Row]:
        """Returns the rows of all cases timed."""
        return list(self._times.values())

    def mean(self, run: Run, name: str) -> Interval | None:
        """Returns a column's mean over all samples of a run."""
        return interval([row[name] for row in self.rows(run).values() if row[name] is not None])

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


def varying(runs: Sequence[Run]) -> list[str]:
    """Returns the parts of the setting in which runs differ; the context alone if it tells all settings apart."""
    if len({run.context for run in runs}) == len({setting_of(run) for run in runs}):
        return ["context"]
    return [name for name in SETTING if len({getattr(run, name) for run in runs}) > 1]
