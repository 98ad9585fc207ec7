"""What the compiler said of the kernels, kept with a fingerprint of all that it depends on.

`python -m tests.ops.triton.compile_record` compiles every kernel for both targets and writes compiled.json. Compiling
takes minutes of CPU time and gives the same result for the same code, so the test reads the file while the fingerprint
holds, and compiles where it does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

from benchmarks.common.code_hash import code_hash

TARGETS = ("cuda", "hip")
RECORD = Path(__file__).with_name("compiled.json")
COMPILER = Path(__file__).with_name("compile_kernels.py")


def fingerprint() -> str:
    """Returns 12 hex digits of the kernels' code, the launches that are compiled, and the version of Triton."""
    parts = (code_hash(), COMPILER.read_text(), triton.__version__)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def recorded(target: str) -> list[dict[str, Any]] | None:
    """Returns the rows of `compile_kernels` in the file; None if they are of other code or of another Triton."""
    record = json.loads(RECORD.read_text())
    return record[target] if record["fingerprint"] == fingerprint() else None


def compiled(target: str) -> list[dict[str, Any]]:
    """Compiles every kernel and returns the rows of `compile_kernels`. Raises RuntimeError where one does not."""
    return printed("compile_kernels", target)


def printed(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Returns what a module of this folder prints that compiles, which Triton's interpreter does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # which costs time and changes no instruction
    command = [sys.executable, "-m", f"tests.ops.triton.{module}", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    record: dict[str, Any] = {"fingerprint": fingerprint(), "triton": triton.__version__}
    record |= {target: compiled(target) for target in TARGETS}
    lines = [f" {json.dumps(name)}: {_lines(value)}" for name, value in record.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: Any) -> str:
    """Returns JSON with a line a row."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"


if __name__ == "__main__":
    main()
