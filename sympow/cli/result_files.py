"""Checks the places of results before a command does its work, and reads standard input."""

from __future__ import annotations

import csv
import io
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from sympow.files import naming
from sympow.packages import from_extra

# How images begin, by their types.
_IMAGES = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xm", "eps": b"%!PS", "ps": b"%!PS", "jpg": b"\xff\xd8",
           "jpeg": b"\xff\xd8", "webp": b"RIFF", "gif": b"GIF"}  # fmt: skip
_LONGEST_LINE = 1 << 20  # characters of a line with the names of columns


def check_image(file: str | None) -> None:
    """Raises ValueError if matplotlib draws no images of the type of `file`, ImportError without matplotlib.

    Raises ValueError also if `file` exists and does not begin as images of this type do: it is not to be replaced.
    Raises also as `check_writable`.
    """
    if file is None:
        return
    check_writable(file)
    types = image_types()
    if (kind := Path(file).suffix.removeprefix(".").lower()) and kind not in types:
        raise ValueError(f"{file}: an image is one of {', '.join(sorted(types))}; got {kind!r}")
    if Path(file).is_file():
        with open(file, "rb") as opened:
            start = opened.read(4)
        if start and not start.startswith(_IMAGES.get(kind, b"")):
            raise ValueError(f"{file} exists and is no image of the type {kind}: give another file, or remove it")


def image_types() -> Collection[str]:
    """Returns the types of images that matplotlib draws. Raises ImportError without matplotlib."""
    with from_extra("eval", "drawing images needs matplotlib"):
        from matplotlib.backend_bases import FigureCanvasBase
    return FigureCanvasBase.get_supported_filetypes()


def check_writable(file: str | None, replaced: bool = False) -> None:
    """Raises OSError if results cannot be written to `file`. It is called before a long evaluation.

    Args:
        file: the path of the results; None: there are none to write. An existing file is not changed.
        replaced: whether a new file takes the place of an existing one, so that only the folder must be writable.
    """
    if file is None:
        return
    place = Path(file)
    if not place.parent.is_dir() or place.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: it is a folder, or its folder does not exist")
    try:
        if replaced or not place.exists():
            tempfile.TemporaryFile(dir=place.parent).close()
        elif place.is_file():  # opening a pipe could block
            place.open("ab").close()
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror}") from error


def check_table(file: str | None, columns: Collection[str]) -> None:
    """Raises ValueError if `file` exists and is no table of results; the table will take its place.

    Raises also as `check_writable`.

    Args:
        file: the path of a table of results, as for `check_writable`.
        columns: names that the first line of such a table has. An empty file is accepted.
    """
    check_writable(file)
    line = _first_line(file)
    try:
        names = next(csv.reader([line]), []) if line else []
    except csv.Error:
        names = []
    if line != "" and not set(columns) <= set(names):
        raise ValueError(f"{file} exists and is no table that this command wrote: give another file, or remove it")


def check_page(file: str | None, start: str) -> None:
    """Raises ValueError if `file` exists and does not begin with `start`, as the page that will take its place does.

    Raises also as `check_writable`.
    """
    check_writable(file)
    line = _first_line(file)
    if line != "" and not (line or "").startswith(start):
        raise ValueError(f"{file} exists and is no page that this command wrote: give another file, or remove it")


def _first_line(file: str | None) -> str | None:
    """Returns the first line of a text file, "" where there is none or an empty file, and None where it is no text."""
    if file is None or not Path(file).is_file():
        return ""
    try:
        with open(file, encoding="utf-8") as opened:
            line = opened.readline(_LONGEST_LINE)
            return "" if line == "\n" and not opened.read(1) else line
    except UnicodeDecodeError:
        return None


@contextmanager
def standard_input() -> Iterator[TextIO]:
    """Gives standard input as text in UTF-8 with its line ends, whatever the locale is.

    Raises ValueError if it is closed, and within the context if it is not UTF-8.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    if not hasattr(sys.stdin, "buffer"):  # a text, by a program that calls `main`
        yield sys.stdin
        return
    file = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="")
    try:
        with naming("standard input", reading=True):
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error.reason}") from None
    finally:
        file.detach()  # which keeps standard input open
