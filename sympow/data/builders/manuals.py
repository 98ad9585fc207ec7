"""The manuals in a Debian package: English pages as text, in reading order."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sympow.data.builders.debian_package import control_fields, package_archive
from sympow.data.builders.html_text import Page, read_page
from sympow.data.text import looks_binary

_HTML = (".html", ".htm", ".xhtml", ".html.en")
_TEXT = (".txt", ".text", ".md", ".rst")
_FRONT = re.compile(r"(index|contents|toc|book|title|front)(-?1)?\.x?html?", re.IGNORECASE)
_NOT_PAGES = re.compile(
    r"(^|/)([._].*|changelog.*|changes.*|news.*|copyright.*|license.*|licence.*|copying.*|authors.*|todo.*|readme\.debian.*"
    r"|genindex.*|py-modindex.*|index-all.*|search\.html|class-use|.*[-_](source|members)\.html|examples?|src|sources?"
    r"|_?static|tests?|javascript)(/|$)",
    re.IGNORECASE,
)
# Folders and name endings of pages in other languages than English.
_FOREIGN = re.compile(
    r"[/.](?!en)(([a-z]{2,3}[-_@][A-Z]{2}(-[a-z]+)?|zh[-_][a-z]+)|ar|bg|bn|ca|cs|da|de|el|eo|es|et|eu|fa|fi|fr|ga|gl|he|hi|hr|hu"
    r"|it|ja|ka|ko|lt|lv|ms|nb|nl|nn|pl|pt|pt[-_]br|ro|ru|sk|sl|sr|sv|ta|te|th|tr|uk|vi|zh)(?=[/.])"
)
# Words of which nearly every English sentence contains some. Other languages do not have them.
_ENGLISH = frozenset(
    ("the", "of", "and", "to", "is", "that", "for", "with", "this", "be",
     "are", "by", "not", "which", "from", "it", "you", "can", "will", "when")
)  # fmt: skip
_ENGLISH_SHARE = 0.1

_SHORTEST = 200  # the least number of characters of a page
_FRAMED = 0.1  # a block with which more than this share of pages begins, or ends, is not part of their text


@dataclass(frozen=True)
class Manuals:
    """Holds the name and version of a package, its licences, and path and text of each page in reading order."""

    package: str
    version: str
    licences: tuple[str, ...]
    pages: tuple[tuple[str, str], ...]


def read_manuals(package: Path) -> Manuals:
    """Reads a Debian package.

    Pages are HTML, also compressed by gzip; in a package without HTML plain text is read. Left out are pages that are
    no English prose or shorter than 200 characters, those that are no documentation by their name (change logs,
    licences, indexes, examples, hidden files), and blocks that many pages begin or end with. Paths begin with the
    package's name, and lack the folders that all pages are in.

    Raises ValueError for a file that is damaged or no package.
    """
    fields = control_fields(package)
    name = fields.get("Package", package.name.partition("_")[0])
    copyright = ""
    pages: dict[str, Page] = {}
    texts: dict[str, Page] = {}
    with package_archive(package, "data.tar") as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            if not member.isreg():
                continue
            if path == f"usr/share/doc/{name}/copyright":
                copyright = _content(archive, member).decode("utf-8", errors="replace")
            elif kind := _kind(path):
                page = _read(path, kind, _content(archive, member))
                (pages if kind == _HTML else texts)[path.removesuffix(".gz")] = page
    pages = pages or texts
    order = [path for path in reading_order(pages) if pages[path].language[:2] in ("", "en")]
    bodies = _without_frames([pages[path].text for path in order])
    kept = {path: text for path, text in zip(order, bodies, strict=True) if len(text) >= _SHORTEST and is_english(text)}
    common = os.path.commonpath([os.path.dirname(path) for path in kept]) if kept else ""
    named = tuple((f"{name}/{os.path.relpath(path, common or '.')}", text) for path, text in kept.items())
    return Manuals(name, fields.get("Version", ""), licences(copyright), named)


def reading_order(pages: Mapping[str, Page]) -> list[str]:
    """Returns the paths of all pages: chapters in the order that the manual gives.

    The order starts from the front page of each folder, in the order of folders. A page is followed by the pages that
    it links to and that name it as the page above, and then by the page that it names as the next. The other pages that
    the front page links to come after these. Pages that no page leads to come last, by name, with numbers in order.
    """
    order: dict[str, None] = {}

    def visit(start: str) -> None:
        waiting = [start]
        while waiting:
            path = waiting.pop()
            if path in order or path not in pages:
                continue
            page = pages[path]
            order[path] = None
            below = [link for link in page.links if link in pages and pages[link].up == path]
            waiting += [each for each in (page.next, *reversed(below)) if each is not None]

    for path in sorted(pages, key=_place):
        visit(path)
        if _FRONT.fullmatch(os.path.basename(path)):
            for link in pages[path].links:
                visit(link)
    return list(order)


def is_english(text: str) -> bool:
    """Returns whether a text is English prose: at least one word in ten is among twenty very frequent words."""
    words = text.lower().split()
    return sum(map(_ENGLISH.__contains__, words)) >= max(1.0, _ENGLISH_SHARE * len(words))


def licences(copyright: str) -> tuple[str, ...]:
    """Returns the licences that a Debian copyright file names, by its fields License or by the common ones it cites."""
    named = re.findall(r"^License: *(\S.*)$", copyright, re.MULTILINE)
    named = named or re.findall(r"common-licenses/([A-Za-z]+(?:-[\d.]*\d)?)", copyright)
    return tuple(sorted({" ".join(each.split()) for each in named}))


def _place(path: str) -> tuple:
    """Returns the sort key of a page that no link leads to: by folder, front pages first, then by number."""
    folder, name = os.path.split(path)
    return _natural(folder), not _FRONT.fullmatch(name), _natural(name)


def _natural(name: str) -> list[tuple[str, int]]:
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name)]


def _kind(path: str) -> tuple[str, ...] | None:
    """Returns the endings of the kind of page that a file is; None where it is not to be read."""
    name = re.sub(r"^usr/(share|lib)/(doc/)?", "", path).removesuffix(".gz")
    if _NOT_PAGES.search(name) or _FOREIGN.search(name):
        return None
    return next((kind for kind in (_HTML, _TEXT) if name.lower().endswith(kind)), None)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def _read(path: str, kind: tuple[str, ...], data: bytes) -> Page:
    """Reads a page; returns one without text where the file is damaged or binary."""
    if path.endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return Page("")
    if looks_binary(data):
        return Page("")
    if kind == _HTML:
        return read_page(path.removesuffix(".gz"), data)
    return Page(data.decode("utf-8", errors="replace").rstrip() + "\n")


def _without_frames(texts: Sequence[str]) -> list[str]:
    """Returns the texts without blocks with which many of them begin or end, such as the title of the manual."""
    pages = [text.rstrip("\n").split("\n\n") for text in texts]
    for end in (0, -1):
        while pages:
            counts = Counter(page[end] for page in pages if len(page) > 1)
            frames = {block for block, count in counts.items() if count > max(4, _FRAMED * len(pages))}
            if not frames:
                break
            for page in pages:
                if len(page) > 1 and page[end] in frames:
                    del page[end]
    return ["\n\n".join(page) + "\n" for page in pages]
