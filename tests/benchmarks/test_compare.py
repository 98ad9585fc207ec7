"""The comparison of two versions: each is timed from its own folder, and a folder of something else is refused."""

from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.common.cases import Case


def test_a_version_is_that_of_its_folder(tmp_path):
    """A version whose op is broken cannot be timed; this one can."""
    with compare.Version(compare.HERE, "cpu", 1) as own:
        assert own.ask(Case(64), "forward") > 0
    (tmp_path / "benchmarks").mkdir()  # of another version, which has no Case
    (tmp_path / "benchmarks" / "__init__.py").write_text("")
    ops = tmp_path / "sympow" / "ops"
    ops.mkdir(parents=True)
    for folder in (ops, ops.parent):
        (folder / "__init__.py").write_text("raise ImportError('the other version')\n")
    with compare.Version(tmp_path, "cpu", 1) as other, pytest.raises(RuntimeError, match="ended with 1"):
        other.ask(Case(64), "forward")


def test_a_folder_of_something_else_is_refused(tmp_path: Path, call, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(compare, "--base", tmp_path, "--csv", tmp_path / "rows.csv")
    assert f"expected the folder of a version of sympow; got {tmp_path}" in capsys.readouterr().err
