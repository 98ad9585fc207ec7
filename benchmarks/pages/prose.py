"""Lines of prose in pages that are written from results."""

from __future__ import annotations

import re
import textwrap

WIDTH = 100


def wrapped(text: str) -> str:
    """Returns `text` with its long lines broken at 100 characters.

    Rows of tables and pictures stay as they are. A broken line of a list, also of one in a list, is
    continued under its text.

    Args:
        text: Markdown without blocks of code.
    """
    lines = []
    for line in text.split("\n"):
        whole = len(line) <= WIDTH or line.startswith(("|", "!["))
        item = re.match(r" *- ", line)
        lines.append(line if whole else _broken(line, indent=" " * len(item[0]) if item else ""))
    return "\n".join(lines)


def _broken(line: str, indent: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
