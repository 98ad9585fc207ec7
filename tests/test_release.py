"""The release can be built, and used where nothing else of the project is."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_release.py"


def test_the_release_is_built_installed_and_used(tmp_path):
    pytest.importorskip("hatchling", reason="needs hatchling")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "new"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "installed alone" in done.stdout
    (wheel,) = (tmp_path / "new" / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert folders == {"sympow", f"sympow-{wheel.name.split('-')[1]}.dist-info"}


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "must be new or empty" in done.stderr
