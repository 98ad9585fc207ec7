"""Tables and lines of prose in pages that are written from results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

WIDTH = 100


def wrapped(text: str) -> str:
    """Returns `text` with its long lines broken at 100 characters.

    Rows of tables and pictures stay as they are. A broken line of a list, also of one in a list, is
    continued under its text.

    Args:
        text: Markdown without blocks of code.
    """
    fill = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        whole = len(line) <= WIDTH or line.startswith(("|", "!["))
        item = re.match(r" *- ", line)
        indent = " " * len(item[0]) if item else ""
        lines.append(line if whole else fill(line, subsequent_indent=indent))
    return "\n".join(lines)


def table(heading: str, rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """Returns a table in Markdown.

    Args:
        heading: the titles of the columns, with " | " between.
        rows: the cells of each line.
        left: the columns that hold words; all others hold numbers.
    """
    rule = "|".join("---" if n in left else "---:" for n in range(heading.count(" | ") + 1))
    return "\n".join([f"| {heading} |", f"|{rule}|", *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def filled(text: str, written: Callable[[str], str], kind: str = "table") -> str:
    """Returns `text` with everything between `<!-- table: NAME -->` and `<!-- end -->` written anew, by name.

    Args:
        text: a page.
        written: what stands between the marks of a name.
        kind: the first word of the marks.
    """

    def marked(match: re.Match[str]) -> str:
        return f"<!-- {kind}: {match[1]} -->\n{wrapped(written(match[1]))}\n<!-- end -->"

    return re.sub(rf"<!-- {kind}: (.+?) -->\n.*?<!-- end -->", marked, text, flags=re.DOTALL)
