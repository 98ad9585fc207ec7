"""A folder that appears when it is whole: after errors, kills, and where a folder cannot be replaced."""

import os
import subprocess
import sys

import pytest

from sympow.files import whole_folder

KILLED = """
import os, sys
from pathlib import Path
from sympow.files import whole_folder
with whole_folder(Path(sys.argv[1])) as folder:
    (folder / "part").touch()
    os._exit(9)
"""


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole(tmp_path):
    out = tmp_path / "deep" / "out"
    with whole_folder(out) as folder:
        (folder / "file").touch()
        assert not out.exists() and folder.parent == out.parent
    assert names(out) == ["file"] and names(out.parent) == ["out"]
    with pytest.raises(KeyError), whole_folder(tmp_path / "other") as folder:
        (folder / "file").touch()
        raise KeyError
    assert names(tmp_path) == ["deep"]


def test_what_a_kill_leaves_is_removed_by_the_next_call(tmp_path):
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False).returncode == 9
    (killed,) = names(tmp_path)
    running = tmp_path / f".out.{os.getpid()}.00000000.unfinished"
    running.mkdir()
    out.mkdir()  # an empty folder may be there
    with whole_folder(out) as folder:
        (folder / "file").touch()
    assert names(out) == ["file"] and names(tmp_path) == sorted(["out", running.name]) and killed.startswith(".out.")


def test_the_current_folder_is_filled(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with whole_folder(tmp_path / "here") as folder:
        for name in ("config.json", "file"):
            (folder / name).touch()
    assert names(tmp_path / "here") == ["config.json", "file"] and names(tmp_path) == ["here"]
    assert os.path.samefile(os.getcwd(), tmp_path / "here")
