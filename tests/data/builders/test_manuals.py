"""What is read of a Debian package, and in which order."""

import gzip

import pytest

from sympow.data.builders.html_text import Page
from sympow.data.builders.manuals import is_english, licences, read_manuals, reading_order
from tests.data.builders.trees import write_deb

PROSE = "This is the text of a page that one can read, and it is long enough to be kept. "
GERMAN = "Dies ist der Text einer Seite, den man lesen kann, und er ist lang genug, um zu bleiben. "


def html(title: str, text: str = PROSE, head: str = "") -> bytes:
    return f"<html><head>{head}</head><h1>The manual</h1><h2>{title}</h2><p>{text * 4} {title}.</html>".encode()


def read(tmp_path, files, control="Package: tool-doc\nVersion: 1.2-3\n"):
    installed = {f"./usr/share/doc/{name}": data for name, data in files.items()}
    return read_manuals(write_deb(tmp_path / "a.deb", installed, control))


def test_pages_of_a_package(tmp_path):
    next_page = '<link rel="next" href="use.html">'
    files = {
        "tool-doc/copyright": b"License: GPL-2+\n text\n\nLicense: Expat\n",
        "tool-doc/html/use.html": html("Use"),
        "tool-doc/html/index.html": html("Welcome", head=next_page),
        "tool-doc/html/a10.html": html("Ten"),
        "tool-doc/html/a9.html.gz": gzip.compress(html("Nine")),
        "tool-doc/html/appendix/last.html": html("Last"),
        "tool-doc/html/short.html": b"<p>This is the end.",
        "tool-doc/html/de/index.html": html("Willkommen"),
        "tool-doc/html/about.html": html("Wozu", GERMAN),
        "tool-doc/html/genindex.html": html("Index"),
        "tool-doc/html/_sources/use.txt": PROSE.encode() * 4,
        "tool-doc/html/notes.txt": PROSE.encode() * 4,
        "tool-doc/html/broken.html.gz": b"\x1f\x8b broken",
        "tool-doc/html/picture.html": b"\0" + html("Picture"),
    }
    manuals = read(tmp_path, files)
    assert (manuals.package, manuals.version, manuals.licences) == ("tool-doc", "1.2-3", ("Expat", "GPL-2+"))
    names = ["index", "use", "a9", "a10", "appendix/last"]
    assert [path for path, _ in manuals.pages] == [f"tool-doc/{name}.html" for name in names]
    assert dict(manuals.pages)["tool-doc/a9.html"] == f"## Nine\n\n{PROSE * 4}Nine.\n"  # not "The manual"


def test_plain_text_is_read_where_there_is_no_html(tmp_path):
    files = {f"tool-doc/{n}.txt": f"{n} {PROSE * 4}".encode() for n in (2, 10)}
    assert [path for path, _ in read(tmp_path, files).pages] == ["tool-doc/2.txt", "tool-doc/10.txt"]


def test_a_package_without_pages(tmp_path):
    manuals = read(tmp_path, {"tool-doc/tool.pdf": b"%PDF"})
    assert manuals.pages == () and manuals.licences == ()


def test_damaged_packages_are_refused_in_one_line(tmp_path):
    whole = write_deb(tmp_path / "a.deb", {"./usr/share/doc/a/a.html": html("A")}, "Package: a\n").read_bytes()
    for data, message in (
        (b"no package", "expected a Debian package, got another kind of file"),
        (whole[:-40], "damaged, it ends within data.tar$"),
        (whole[:72], "expected a Debian package, got an archive without control.tar"),
        (whole.replace(b"data.tar", b"other.xy"), "expected a Debian package, got an archive without data.tar"),
    ):
        (tmp_path / "b.deb").write_bytes(data)
        with pytest.raises(ValueError, match=rf"^source .*b\.deb: {message}") as raised:
            read_manuals(tmp_path / "b.deb")
        assert "\n" not in str(raised.value)


def test_chapters_follow_what_pages_say_of_each_other():
    """Sections stand behind the chapter that they name as the one above, then comes the next chapter."""
    pages = {
        "m/index.html": Page("", links=("m/late.html", "m/b.html")),
        "m/late.html": Page("", next="m/b.html", links=("m/b.html", "m/s2.html", "m/s1.html")),
        "m/s1.html": Page("", up="m/late.html", next="m/gone.html"),
        "m/s2.html": Page("", up="m/late.html", next="m/s1.html"),
        "m/b.html": Page("", up="m/index.html"),
        "m/a2.html": Page(""),
        "m/a10.html": Page(""),
    }
    order = [path[2:-5] for path in reading_order(pages)]
    assert order == ["index", "b", "late", "s2", "s1", "a2", "a10"]
    del pages["m/index.html"]
    assert [path[2:-5] for path in reading_order(pages)] == ["a2", "a10", "b", "late", "s2", "s1"]


def test_every_page_stands_once_also_in_circles():
    pages = {"a.html": Page("", next="b.html"), "b.html": Page("", next="a.html", up="b.html", links=("b.html",))}
    assert reading_order(pages) == ["a.html", "b.html"]


def test_english():
    assert is_english(PROSE) and not is_english(GERMAN)
    assert not is_english("int x = f(y); " * 50) and not is_english("")


def test_licences_of_a_file_without_fields():
    text = "see `/usr/share/common-licenses/GPL-2', or /usr/share/common-licenses/Artistic.\n"
    assert licences(text) == ("Artistic", "GPL-2")
