"""Commands in processes of their own."""

import subprocess
import sys
from pathlib import Path


def in_process(*arguments, script: str = "", **options) -> subprocess.CompletedProcess:
    """A command in a process of its own, after a line of Python."""
    code = f"import sys; {script}\nfrom sympow.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    options = {"capture_output": True} | options
    return subprocess.run(words, text=True, cwd=Path(__file__).parents[2], **options)
