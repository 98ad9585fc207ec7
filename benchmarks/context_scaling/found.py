"""Looks up the results of a run of a study in the tables, for all its seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from operator import sub, truediv
from pathlib import Path
from typing import Any

from benchmarks.context_scaling.grid import SETTING, Run, setting_of
from benchmarks.context_scaling.paired import Interval, interval
from benchmarks.context_scaling.results import Row, key_of, read, run_of
from benchmarks.context_scaling.speed import SPEED
from benchmarks.context_scaling.studies import STUDIES, grid, with_rate
from benchmarks.context_scaling.work import DONE
from sympow.recall.results import read_rows


class Found:
    """Holds rows of finished runs, by run and seed, of one corpus in each setting.

    The corpus of a setting is the one with most of the rows in it, see `of`.

    Args:
        folder: of runs.csv, positions.csv and speed.csv; what is missing counts as empty.
    """

    def __init__(self, folder: Path):
        tables = read(folder)
        self._rows: dict[tuple[Run, str], dict[int, Row]] = {}
        for row in tables.runs:
            if row["status"] == DONE:
                run, corpus = key_of(row)
                self._rows.setdefault((replace(run, seed=0), corpus), {})[run.seed] = row
        self._positions: dict[tuple[str, str], list[Row]] = {}
        for row in tables.positions:
            self._positions.setdefault((row["run"], row["corpus"]), []).append(row)
        self._corpora = self._chosen({run_of(row) for row in tables.runs})
        file = folder / SPEED
        times = read_rows(file, texts=("commit",)) if file.is_file() else []
        self._times = {(row["variant"], row["context"], row["mode"]): row for row in times}

    def of(self, study: str) -> Found:
        """Returns the same with the corpora of a study: in each setting that of most of the study's runs there."""
        other = copy(self)
        other._corpora = self._chosen(set(grid([study])))
        return other

    def fullest(self, run: Run) -> Found:
        """Returns the same with the corpus on which a run has most seeds; for what is not compared with other runs."""
        here = {corpus: len(rows) for (other, corpus), rows in self._rows.items() if other == replace(run, seed=0)}
        other = copy(self)
        if here:
            other._corpora = self._corpora | {setting_of(run): max(sorted(here), key=here.__getitem__)}
        return other

    def _chosen(self, runs: Set[Run]) -> dict[tuple, str]:
        """Returns the corpus of every setting: that with rows of most of these runs, seeds included, in the setting. If
        two have as many, it is the one with most variants in the setting, and if that is equal too, with most rows in
        all settings."""
        totals: Counter[str] = Counter()
        within: dict[tuple, dict[str, list[int]]] = {}
        for (run, corpus), rows in sorted(self._rows.items(), key=lambda each: each[0][1]):
            count = sum(replace(run, seed=seed) in runs for seed in rows)
            if count:
                totals[corpus] += count
                within.setdefault(setting_of(run), {}).setdefault(corpus, []).append(count)
        return {
            setting: max(here, key=lambda corpus: (sum(here[corpus]), len(here[corpus]), totals[corpus]))
            for setting, here in within.items()
        }

    def corpora(self) -> list[str]:
        """Returns the corpora of all settings, each once, sorted."""
        return sorted(set(self._corpora.values()))

    def rows(self, run: Run) -> Mapping[int, Row]:
        """Returns the row of every seed of a run, whatever its own seed."""
        return self._rows.get((replace(run, seed=0), self._corpus(run)), {})

    def _corpus(self, run: Run) -> str:
        return self._corpora.get(setting_of(run), "")

    def positions(self, run: Run, context: int | None = None) -> list[list[Row]]:
        """Returns for every seed its losses by position along training, in rows of `context`; None: as trained."""
        context = run.trained_at if context is None else context
        return [
            [
                row
                for row in self._positions.get((replace(run, seed=seed).name, self._corpus(run)), [])
                if row["evaluated_context"] == context
            ]
            for seed in self.rows(run)
        ]

    def along(self, run: Run) -> dict[int, list[Row]]:
        """Returns for every seed its losses along training, all on the same documents.

        Before the end a model is evaluated on some of the documents only. A loss on all of them is not comparable.
        """
        curves = dict(zip(self.rows(run), self.positions(run), strict=True))
        return {
            seed: [row for row in rows if row["documents"] == min(each["documents"] for each in rows)]
            for seed, rows in curves.items()
            if rows
        }

    def last(self, run: Run, context: int | None = None) -> dict[int, Row]:
        """Returns for every seed the losses by position at the end, on all documents, in rows of `context`."""
        return {seed: rows[-1] for seed, rows in zip(self.rows(run), self.positions(run, context), strict=True) if rows}

    def speed(self, run: Run) -> float | None:
        """Returns tokens a second of training steps alone on a GPU; None where they were not timed.

        They are those of compiled steps where all seeds of the run were compiled, else of eager ones.
        """
        rows = self.rows(run).values()
        mode = "compiled" if rows and all(row["compiled"] for row in rows) else "eager"
        row = self._times.get((run.variant, run.trained_at, mode))
        return None if row is None or run.size else row["tokens_per_second"]

    def times(self) -> list[Row]:
        """Returns the rows of all cases timed."""
        return list(self._times.values())

    def mean(self, run: Run, name: str) -> Interval | None:
        """Returns a column's mean over seeds."""
        return interval([row[name] for row in self.rows(run).values() if row[name] is not None])

    def difference(self, run: Run, base: Run, name: str = "held_out_loss") -> Interval | None:
        """Returns the mean difference of a column to another run, between runs with the same seed and corpus."""
        return self._paired(run, base, name, sub)

    def ratio(self, run: Run, base: Run, name: str = "held_out_loss") -> Interval | None:
        """Returns the mean ratio of a column to that of another run, between runs with the same seed and corpus."""
        return self._paired(run, base, name, truediv)

    def _paired(self, run: Run, base: Run, name: str, how: Callable[[Any, Any], Any]) -> Interval | None:
        ours, theirs = self.rows(run), self.rows(base)
        seeds = [
            seed
            for seed in sorted(ours.keys() & theirs.keys())
            if None not in (ours[seed][name], theirs[seed][name])
            and ours[seed]["corpus"] == theirs[seed]["corpus"]
        ]
        return interval([how(ours[seed][name], theirs[seed][name]) for seed in seeds])


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
    """Returns the run of the study's baseline in the same setting, at its own learning rate."""
    base = replace(run, variant=STUDIES[study].baseline, learning_rate=Run.learning_rate)
    return with_rate(base, STUDIES[study])


def varying(runs: Sequence[Run]) -> list[str]:
    """Returns the parts of the setting in which runs differ; the context if they differ in no part."""
    return [name for name in SETTING if len({getattr(run, name) for run in runs}) > 1] or ["context"]
