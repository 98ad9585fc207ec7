"""Run the code of notebooks from top to bottom, without Jupyter, and store what it prints.

python scripts/run_notebooks.py docs/notebooks/*.ipynb
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def lines(text: str) -> list[str]:
    """Returns a text as notebooks hold it, line by line."""
    return text.splitlines(keepends=True)


def run(book: dict[str, Any], name: str) -> None:
    """Runs the code cells of a notebook in order, in one namespace, and replaces their outputs.

    Args:
        book: the notebook as read from JSON; it is changed in place. A cell may print; other outputs are not kept.
        name: stands in tracebacks.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    number = 0
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        text = printed.getvalue()
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines(text)}] if text else []


def main(paths: list[str]) -> None:
    """Runs notebooks and writes them back."""
    for path in map(Path, paths):
        book = json.loads(path.read_text("utf-8"))
        run(book, path.name)
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
