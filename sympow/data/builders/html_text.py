"""The text of an HTML page: headings, paragraphs, lists, tables and listings, without its navigation.

Headings get the hash marks of Markdown, items of lists a dash, and rows of tables bars between their cells. Listings
are not changed. Scripts and forms are left out, and so are parts whose tag, role or class marks them as navigation, and
blocks in which more than half of the characters are links. If a page marks its main part, only this part is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}
_BLOCKS = {*_HEADINGS, "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "div",
           "dl", "dt", "fieldset", "figcaption", "figure", "hr", "li", "main", "menu", "ol", "p", "pre", "section",
           "summary", "table", "tbody", "tfoot", "thead", "title", "tr", "ul"}  # fmt: skip
_LEFT_OUT = {"annotation", "applet", "audio", "button", "canvas", "footer", "form", "iframe", "map", "nav", "noscript",
             "object", "script", "select", "style", "svg", "template", "textarea", "title", "video"}  # fmt: skip
_MAY_BE_LEFT_OUT = {"a", "aside", "div", "header", "ol", "section", "span", "table", "ul"}  # by a label
_NAVIGATION = re.compile(
    r"(?<![\w-])(breadcrumbs?|copybutton|footer|footer-nav|headerlink|linenos?|nav|navbar|navfooter|navheader|navigation"
    r"|nav-panel|navpanel|navpath|navrow|prev-next-\w+|related|search|sidebar|side-nav|sphinxfooter|sphinxsidebar|tabs\d?"
    r"|toc|topnav|bottomnav)(?![\w-])",
    re.IGNORECASE,
)
_ROLES = {"navigation", "search", "contentinfo", "banner"}
_LINKS_SHARE = 0.5
_LINE_END = "\x1e"  # of <br>, until white space is collapsed


@dataclass(frozen=True)
class Page:
    """Holds the content of a page.

    `text` ends with a line end, or is empty. `links` are the paths of other pages that the page links to, in order.
    `next` and `up` are the paths of the pages that it names as the next page and the page above, or None. `language` is
    the language that the page states, or "".
    """

    text: str
    links: tuple[str, ...] = ()
    next: str | None = None
    up: str | None = None
    language: str = ""


def read_page(path: str, data: bytes) -> Page:
    """Reads an HTML page.

    Args:
        path: of the page, with forward slashes; links are resolved against it.
        data: its bytes, of which those that are not UTF-8 are read in the encoding that the page names, or Latin-1.
    """
    reader = _Reader(path)
    reader.feed(_decode(data))
    reader.close()
    return reader.page()


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        named = re.search(rb"""charset=["']?([\w-]+)""", data[:4096], re.IGNORECASE)
        try:
            return data.decode(named[1].decode() if named else "latin-1", errors="replace")
        except LookupError:
            return data.decode("latin-1")


@dataclass(frozen=True)
class _Block:
    kind: str  # a tag; blocks of the kinds "li" and "tr" stand on lines without an empty one between them
    text: str


class _Reader(HTMLParser):
    def __init__(self, path: str):
        super().__init__(convert_charrefs=True)
        self._folder = dirname(path)
        self._links: dict[str, None] = {}
        self._relations: dict[str, str] = {}
        self._language = ""
        self._blocks: list[_Block] = []
        self._main: tuple[str, int, int | None] | None = None  # its tag, and its first and last block
        self._depth = 0  # of the main part's tag inside itself
        self._skipped: tuple[str, int] | None = None  # a tag that is left out, and how deep it stands in itself
        self._text: list[str] = []
        self._linked = 0  # characters of the block that are links
        self._in_link = False
        self._kind = ""
        self._mark = ""  # of an item, until its first block comes
        self._listing = 0
        self._cells = 0

    def page(self) -> Page:
        self._end_block()
        blocks = self._blocks
        if self._main is not None:
            blocks = blocks[self._main[1] : self._main[2]]
        return Page(
            _joined(blocks), tuple(self._links), self._relations.get("next"), self._relations.get("up"), self._language
        )

    def updatepos(self, i: int, j: int) -> int:  # counts no lines, which would take a seventh of the time
        return j

    def parse_marked_section(self, i: int, report: int = 1) -> int:  # as HTML has it; the library's own may raise
        return self.parse_bogus_comment(i, bool(report))

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        if self._skipped is not None:
            if tag == self._skipped[0]:
                self._skipped = tag, self._skipped[1] + 1
            self._see_link(tag, dict(attributes))
            return
        named = dict(attributes)
        self._see_link(tag, named)
        if tag == "html":
            self._language = (named.get("lang") or named.get("xml:lang") or "").lower()
        if self._is_left_out(tag, named):
            self._skipped = tag, 1
            return
        if self._main is None and (tag == "main" or named.get("role") == "main"):
            self._end_block()
            self._main, self._depth = (tag, len(self._blocks), None), 1
        elif self._main is not None and tag == self._main[0] and self._main[2] is None:
            self._depth += 1
        if tag in _BLOCKS:
            self._end_block()
            self._kind = tag
            if tag == "li":
                self._mark = "- "
            elif tag == "pre":
                self._listing += 1
            elif tag == "tr":
                self._cells = 0
        elif tag in ("td", "th"):
            if self._cells:
                self._text.append(" | ")
            self._cells += 1
        elif tag == "br":
            self._text.append("\n" if self._listing else _LINE_END)
        elif tag == "a":
            self._in_link = "href" in named

    def handle_endtag(self, tag: str) -> None:
        if self._skipped is not None:
            if tag == self._skipped[0]:
                depth = self._skipped[1] - 1
                self._skipped = (tag, depth) if depth else None
            return
        if tag in _BLOCKS:
            self._end_block()
            if tag == "pre":
                self._listing = max(0, self._listing - 1)
            elif tag == "li":
                self._mark = ""
        elif tag == "a":
            self._in_link = False
        if self._main is not None and tag == self._main[0] and self._main[2] is None:
            self._depth -= 1
            if not self._depth:
                self._end_block()
                self._main = tag, self._main[1], len(self._blocks)

    def handle_data(self, data: str) -> None:
        if self._skipped is None:
            self._text.append(data)
            if self._in_link:
                self._linked += len(data.strip())

    def _see_link(self, tag: str, named: dict[str, str | None]) -> None:
        if tag not in ("a", "link"):
            return
        target = self._target(named.get("href") or "")
        if target is None:
            return
        if tag == "a":
            self._links.setdefault(target)
        for relation in (named.get("rel") or "").lower().split():
            self._relations.setdefault(relation, target)

    def _target(self, link: str) -> str | None:
        """Returns the path of the page that a link leads to; None where it leads elsewhere."""
        try:
            parts = urlsplit(link)
        except ValueError:
            return None
        if parts.scheme or parts.netloc or not parts.path:
            return None
        return normpath(join(self._folder, unquote(parts.path)))

    def _is_left_out(self, tag: str, named: dict[str, str | None]) -> bool:
        if tag in _LEFT_OUT:
            return True
        if tag not in _MAY_BE_LEFT_OUT:
            return False
        labels = f"{named.get('class') or ''} {named.get('id') or ''}"
        return named.get("role") in _ROLES or _NAVIGATION.search(labels) is not None

    def _end_block(self) -> None:
        if not self._text:
            return
        text, linked = "".join(self._text), self._linked
        self._text, self._linked = [], 0
        if self._listing:
            text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).rstrip()
        else:
            text = "\n".join(" ".join(line.split()) for line in text.split(_LINE_END)).strip(" |\n")
        kind = self._kind
        if kind in _HEADINGS:
            text = text.replace("\n", " ").strip(" ¶#§◆")
        elif kind not in ("dt", "pre") and linked > _LINKS_SHARE * len(text):
            return
        if not text:
            return
        if kind in _HEADINGS:
            text = f"{_HEADINGS[kind]} {text}"
        elif self._mark and not self._listing:
            text, self._mark, kind = self._mark + text, "", "li"
        self._blocks.append(_Block(kind, text))


def _joined(blocks: Sequence[_Block]) -> str:
    parts: list[str] = []
    before = ""
    for block in blocks:
        close = block.kind == before and block.kind in ("li", "tr")
        parts += ["" if not parts else "\n" if close else "\n\n", block.text]
        before = block.kind
    return "".join(parts) + ("\n" if parts else "")
