"""Make a virtual environment with the project and a build of torch that fits the machine.

    python scripts/install.py .venv

On Linux the default wheel of torch depends on gigabytes of CUDA packages; on other systems it may lack CUDA.
Therefore a dry run of pip first shows what pip would install. Only if that does not fit the machine, uv installs
torch, because uv knows the locations of other builds. A torch in the environment is kept if it meets
constraints.txt.
Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
MINIMUM_PIP = "pip>=23.3"  # the first whose dry run reads metadata instead of fetching whole wheels
MINIMUM_UV = "uv>=0.7"  # --torch-backend
GPU_SIGNS = ("/dev/nvidia0", "/proc/driver/nvidia/version")


def has_nvidia_gpu(signs: Iterable[str] = GPU_SIGNS) -> bool:
    """Returns whether the NVIDIA driver shows a device, or nvidia-smi lists one."""
    if any(os.path.exists(sign) for sign in signs):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def brings_cuda(report: dict) -> bool:
    """Returns whether pip's installation report contains the packages that a CUDA build of torch depends on."""
    names = [item["metadata"]["name"].lower().replace("_", "-") for item in report["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in names)


def torch_backend(report: dict, gpu: bool) -> str | None:
    """Returns the torch backend for uv: "cpu", "auto" (the machine's GPU), or None if pip's own choice fits.

    report: the answer of `pip install --dry-run --report - torch`; it does not name torch where a torch that
    meets the constraints is installed already.
    """
    if not any(item["metadata"]["name"] == "torch" for item in report["install"]):
        return None
    cuda = brings_cuda(report)
    if cuda and not gpu:
        return "cpu"
    if gpu and not cuda and sys.platform != "darwin":
        return "auto"
    return None


def run(*command: str | Path, what: str, capture: bool = False) -> str:
    """Runs a command, and shows or returns its output. If it fails, the program ends with one line."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"install: {what} failed, see above: {' '.join(words)}")
    return done.stdout or ""


def install(venv: Path) -> None:
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        print(f"install: making {venv}", flush=True)
        run(sys.executable, "-m", "venv", venv, what="making the virtual environment")
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check")
    run(*pip, "--quiet", MINIMUM_PIP, what="updating pip")
    asking = (*pip, "--quiet", "--dry-run", "--report", "-", "-c", CONSTRAINTS, "torch")
    report = json.loads(run(*asking, what="asking pip about torch", capture=True))
    gpu = has_nvidia_gpu()
    backend = torch_backend(report, gpu)
    source = "pip" if backend is None else f"uv --torch-backend={backend}"
    print(f"install: {'an' if gpu else 'no'} NVIDIA GPU; torch by {source}", flush=True)
    if backend is not None:
        run(*pip, "--quiet", MINIMUM_UV, what="installing uv")
        uv = (python, "-m", "uv", "pip", "install", "--python", python, f"--torch-backend={backend}")
        run(*uv, "-c", CONSTRAINTS, "torch", what="installing torch (a torch put there by hand is kept)")
    run(*pip, "-c", CONSTRAINTS, "-e", f"{ROOT}[dev]", what="installing sympow")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/install.py VENV")
    install(Path(sys.argv[1]))
