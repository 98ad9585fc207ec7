"""The report of loss against context: every figure and table out of made-up results, whose answers are known."""

import json
import sys
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from benchmarks.context_scaling import __main__ as program
from benchmarks.context_scaling.figures import STYLES, draw
from benchmarks.context_scaling.grid import SCALES, Run, grid, parts, settings
from benchmarks.context_scaling.results import collect, read
from benchmarks.context_scaling.tables import tables
from benchmarks.tables import ROOT
from sympow.evaluation.context_loss import bin_edges

MINI = SCALES["mini"]
LOSS = {"softmax": 2.0, "power_ungated": 2.2, "power4_ungated": 1.9, "power6_ungated": 1.8}  # others: 2.1
TEXT = ROOT / "docs" / "results" / "context-scaling.md"


def record(run: Run) -> dict:
    """Losses lower by 0.1 for the rate 2e-3, and by 0.2 a seed; by position lower by 0.3 from 2,048 tokens on."""
    loss = LOSS.get(run.variant, 2.1) - 0.1 * (run.learning_rate == 2e-3) - 0.2 * run.seed
    bins = []
    for context in {run.context, MINI.longest}:
        edges = bin_edges(context - 1)
        bins += [{"evaluated_context": context, "start": start, "end": end, "loss": loss - 0.3 * (start >= 2048),
                  "stderr": 0.0, "tokens": end - start} for start, end in pairwise(edges)]  # fmt: skip
    speed = {"power_ungated": 1200, "power_gated": 1000, "power": 800}.get(run.variant, 100)
    row = {"parameters": 5, "steps": 4, "tokens": 4000, "flops": 8e6, "seconds": 4000 / speed,
           "tokens_per_second": speed, "peak_bytes": 3 << 30, "held_out_loss": loss}  # fmt: skip
    about = {"processor": "X", "torch": "2", "commit": "abc"}
    curve = [{"step": step, "tokens": 1000 * step, "loss": loss + 1 / step, "held_out_loss": loss if step % 2 else None}
             for step in range(1, 5)]  # fmt: skip
    return {"run": asdict(run), "status": "done", "row": row, "bins": bins, "curve": curve, "about": about}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "records").mkdir()
    for run in grid(dict.fromkeys(settings(MINI, list(parts(MINI))), (1e-3, 2e-3)), [0, 1]):
        failed = run.variant == "linear" and run.learning_rate == 2e-3
        kept = {"run": asdict(run), "status": "not finite"} if failed else record(run)
        (tmp_path / "records" / f"{run.name}.json").write_text(json.dumps(kept))
    collect(tmp_path / "records", tmp_path)
    return tmp_path


def lines(table: str, start: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith(f"| {start} |")]


def test_tables_hold_what_was_measured(folder):
    written = {name: write() for name, write in tables(read(folder)).items()}
    assert lines(written["runs"], "runs") == ["| runs | 90 done, 2 not finite |"]
    assert lines(written["loss"], "softmax") == ["| softmax |" + " 1.800 ± 0.100 (0.002) |" * 4]
    assert lines(written["loss"], "linear") == ["| linear |  |  |  | 2.000 ± 0.100 (0.001) |"]
    assert lines(written["beyond"], "softmax") == [
        "| softmax | 1,024 | 1.800 | 1.500 | 1.500 | -0.300 |",
        "| softmax | 4,096 | 1.500 | 1.500 | 1.500 | +0.000 |",
        "| softmax | 16,384 | 1.500 | 1.500 | 1.500 | +0.000 |",
    ]
    assert lines(written["compute"], "linear") == ["| linear | 2.000 ± 0.100 | 8e+06 | 40 | 100 | 3.0 |"]
    assert lines(written["powers"], "power, p = 2") == ["| power, p = 2 | 2.000 ± 0.100 | 1.111 | 1.03 |"]
    assert lines(written["powers"], "power, p = 6") == ["| power, p = 6 | 1.600 ± 0.100 | 0.889 | 0.97 |"]
    assert lines(written["additions"], "power, p = 2, gate") == ["| power, p = 2, gate | 0.09% |" + " 1.20x |" * 4]
    assert "| 0.18% | 1.50x |" in written["additions"]
    assert "| softmax | 8:1 | 1:1 | 1:8 | 1:125 |" in written["weight-state"]


def test_report_draws_all_figures_and_fills_the_text(folder, monkeypatch, capsys):
    text = folder / "report.md"
    text.write_text(TEXT.read_text())
    monkeypatch.setattr(sys, "argv", ["context_scaling", "report", "--results", str(folder), "--text", str(text)])
    assert program.main() == 0
    drawn = {file.name for file in (folder / "report").iterdir()}
    assert drawn == {"loss.png", "learning_rates.png", "evaluation_context.png", "training_curves.png", "compute.png"}
    assert all(f"(context-scaling/{name})" in text.read_text() for name in drawn)
    assert "No results yet" not in text.read_text() and "1.111" in text.read_text()


def test_one_learning_rate_is_not_drawn_against_itself(folder, tmp_path):
    results = read(folder)
    one = replace(results, runs=[run for run in results.runs if run["learning_rate"] == 2e-3])
    assert "learning_rates.png" not in {file.name for file in draw(one, tmp_path / "figures")}


def test_without_finished_runs_tables_say_so(tmp_path):
    (tmp_path / "records").mkdir()
    collect(tmp_path / "records", tmp_path)
    written = {name: write() for name, write in tables(read(tmp_path)).items()}
    assert written["runs"] == "No run has finished." and written["loss"] == "No results yet."
    assert written["powers"] == "No results yet."


def test_variants_can_be_told_apart():
    assert {variant for variant, _ in settings(MINI, list(parts(MINI)))} == set(STYLES)
    assert len({style[0] for style in STYLES.values()}) == len({style[1:] for style in STYLES.values()}) == len(STYLES)
