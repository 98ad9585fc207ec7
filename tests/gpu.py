"""Runs the tests that need a GPU, in as many calls as it takes: `python -m tests.gpu --workers 14 --minutes 8`.

The tests compile more than a thousand kernels, and a GPU may be available for a few minutes at a time. Each test that
passes becomes a line of the record at once: the hash of the kernels' code, the GPU, and the test. A call runs the
tests that have not passed with the present code, and removes the lines of other code. It exits with 0 if no test is
left, with the status of pytest if a test fails, and with 124 if the time is over. At the end it writes gpu_passed.csv,
which is committed: a line for the present code, with the number of tests that have passed, and whether some are left.
This module is also the plugin that pytest loads for this.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common.code_hash import code_hash

COMMITTED = Path(__file__).with_name("gpu_passed.csv")
RECORD = COMMITTED.parent.parent / "build" / "gpu_passed_tests.csv"
COLUMNS = ("code", "processor", "test")
TESTS = ("tests/ops", "tests/layers", "tests/models/test_slots.py", "tests/models/test_cross_entropy.py",
         "tests/training/test_step_numbers.py", "tests/integrations/test_transformers_graphs.py",
         "tests/integrations/test_vllm_pages.py")  # fmt: skip
OUT_OF_TIME = 124  # as the command `timeout` does


def passed(record: Path) -> list[dict[str, str]]:
    """Returns the lines of the tests that have passed with the present code."""
    if not record.exists():
        return []
    with record.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["code"] == code_hash()]


def write(record: Path, rows: list[dict[str, str]]) -> None:
    with record.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["test"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="leave out tests in this file, and add those that pass")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {row["test"] for row in passed(config.getoption("--passed"))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


class _Recorder:
    """Adds a line for each test that passes. Only one process has it, also with workers."""

    def __init__(self, record: Path):
        self._record, self._code = record, code_hash()
        self._processor = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self._record.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow((self._code, self._processor, report.nodeid))
        if report.failed:  # at once, because pytest does not print a summary if the time runs out
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config.getoption("--passed")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=TESTS, help="files and folders (default: all that use kernels)")
    parser.add_argument("--record", type=Path, default=RECORD, help="(default: build/gpu_passed_tests.csv)")
    parser.add_argument("--line", type=Path, default=COMMITTED, help="(default: tests/gpu_passed.csv)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--minutes", type=float, help="stop after these")
    args = parser.parse_args()
    args.record.parent.mkdir(exist_ok=True)
    write(args.record, passed(args.record))
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "tests.gpu", "--passed", str(args.record)]
    command += ["-n", str(args.workers), "--dist", "worksteal"] if args.workers > 1 else []
    try:
        status = subprocess.run([*command, *args.tests], timeout=args.minutes and 60 * args.minutes).returncode
    except subprocess.TimeoutExpired:
        status = OUT_OF_TIME
    rows = passed(args.record)
    write(args.record, rows)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and rows:  # all have passed before
        status = 0
    processors = " and ".join(sorted({row["processor"] for row in rows}))
    left = "none" if status == 0 else "some"
    args.line.write_text(f"code,processor,passed,left\n{code_hash()},{processors},{len(rows)},{left}\n")
    print(f"{len(rows)} tests have passed with the code {code_hash()}" + (", time ran out" * (status == OUT_OF_TIME)))
    return status


if __name__ == "__main__":
    sys.exit(main())
