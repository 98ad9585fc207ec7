"""Build the release, install it into an empty environment, and use it there. Needs no network.

    python scripts/check_release.py FOLDER

FOLDER, which must be new or empty, gets the sdist and the wheel in FOLDER/dist. The wheel is built from the unpacked
sdist, so that the sdist is known to be complete. The environment gets the wheel alone; torch and numpy come from the
environment that runs this script, which needs hatchling.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {"__pycache__", "theory"}
# The installed package with the torch of this environment: the op against its specification, then version and place.
USE = """
import sys
sys.path += sys.argv[1:]
import torch, sympow
q, k, v = torch.randn(3, 1, 8, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ours, specified = (sympow.power_attention(q, k, v, p=2, impl=impl) for impl in ('eager', 'reference'))
torch.testing.assert_close(ours, specified)
print(sympow.__version__, sympow.__file__)
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command and returns what it prints. Raises SystemExit with its errors where it fails."""
    words = [str(word) for word in command]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"check_release: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(dist: Path, work: Path) -> tuple[Path, Path]:
    """Builds the sdist, and from it the wheel; returns both."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", dist, cwd=ROOT)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    (source,) = work.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", dist, cwd=source)
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


def missing_files(wheel: Path) -> list[str]:
    """Returns the files of the package that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    files = (path.relative_to(ROOT) for path in sorted((ROOT / "sympow").rglob("*")) if path.is_file())
    return [path.as_posix() for path in files if not NOT_SHIPPED & set(path.parts) and path.as_posix() not in shipped]


def check(folder: Path) -> None:
    """Builds, installs and uses the release. Raises SystemExit with one reason where something is wrong."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"check_release: {folder} must be new or empty")
    folder = folder.resolve()
    sdist, wheel = build(folder / "dist", folder / "source")
    missing = missing_files(wheel)
    if missing:
        raise SystemExit(f"check_release: {wheel.name} lacks {', '.join(missing)}")
    clean = folder / "clean"
    venv.create(clean)
    binaries = clean / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    help_text = run(binaries / "sympow", "--help", cwd=folder)
    if not help_text.startswith("usage: sympow"):
        raise SystemExit(f"check_release: sympow --help printed {help_text[:80]!r}")
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    version, place = run(binaries / "python", "-c", USE, *libraries, cwd=folder).split()
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if version != expected or not Path(place).is_relative_to(clean):
        raise SystemExit(f"check_release: expected version {expected} within {clean}; got {version} at {place}")
    print(f"{sdist.name} and {wheel.name}: installed alone, sympow {version} runs")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/check_release.py FOLDER")
    check(Path(sys.argv[1]))
