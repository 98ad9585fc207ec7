"""The tests that need a GPU run in several calls: those that have passed are left out."""

import csv
import subprocess

from benchmarks.common.code_hash import code_hash
from tests import gpu


def lines(record):
    with record.open(newline="") as file:
        return [row["test"].rpartition("::")[2] for row in csv.DictReader(file)]


def test_passed_tests_are_left_out(tmp_path, monkeypatch, capfd):
    """And lines of other code are removed."""
    record, file = tmp_path / "passed.csv", tmp_path / "test_some.py"
    gpu.write(record, [{"code": "0" * 12, "processor": "GPU", "test": "test_some.py::test_of_other_code"}])
    file.write_text("def test_a(): pass\ndef test_b(): assert not 'ready'\ndef test_of_other_code(): pass\n")
    monkeypatch.setattr("sys.argv", ["gpu", str(file), "--record", str(record), "--line", str(tmp_path / "line")])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take longer than these tests
    assert gpu.main() == 1
    assert lines(record) == ["test_a", "test_of_other_code"]
    assert (tmp_path / "line").read_text().splitlines()[1] == f"{code_hash()},CPU,2,some"
    assert "1 failed, 2 passed" in capfd.readouterr().out
    file.write_text(file.read_text().replace("not 'ready'", "'ready'"))
    assert gpu.main() == 0
    assert lines(record) == ["test_a", "test_b", "test_of_other_code"]
    assert "1 passed, 2 deselected" in capfd.readouterr().out
    assert gpu.main() == 0, "no test is left"
    assert (tmp_path / "line").read_text() == f"code,processor,passed,left\n{code_hash()},CPU,3,none\n"


def test_time_runs_out(tmp_path, monkeypatch, capfd):
    """What has passed until then is kept."""
    record = tmp_path / "passed.csv"

    def stopped(command, timeout):
        with record.open("a") as file:
            file.write(f"{code_hash()},GPU,test_some.py::test_a\n")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", stopped)
    monkeypatch.setattr("sys.argv", ["gpu", "--record", str(record), "--minutes", "8", "--line", str(tmp_path / "x")])
    assert gpu.main() == gpu.OUT_OF_TIME
    assert lines(record) == ["test_a"]
    assert "1 tests have passed" in capfd.readouterr().out
