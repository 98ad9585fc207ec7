"""Docstrings of the documentation site, an extension of griffe (mkdocs.yml).

A docstring is plain text, but the site reads it as Markdown. In Markdown, the asterisks of "x**2 + y**2" would mark
bold text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"\s*\*\*\w+:")  # of a section, as "**options: of the mixer"


def plain(text: str) -> str:
    """Returns a docstring with a backslash before every asterisk that is neither code nor part of an argument."""
    return "\n".join(line if ARGUMENT.match(line) else _plain_line(line) for line in text.split("\n"))


def _plain_line(line: str) -> str:
    parts = line.split("`")  # every other one is code
    return "`".join(part.replace("*", r"\*") if n % 2 == 0 else part for n, part in enumerate(parts))


class PlainDocstrings(griffe.Extension):
    """Keeps asterisks in docstrings as they are written."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
