"""What is read of an HTML page."""

import pytest

from sympow.data.builders.html_text import read_page

PAGE = b"""<!DOCTYPE html>
<html lang="en"><head><title>Left out</title><link rel="next" href="two.html"><link rel="up" href="../index.html#top">
<style>p { color: red }</style></head>
<body>
<div class="navheader"><table><tr><td><p>Left out</td></tr></table></div>
<ul class="breadcrumbs"><li>Left out<ul><li>Left out</ul></ul>
<h1>One &amp; only<a class="headerlink" href="#one">P</a></h1>
<p>A first   paragraph,
in <em>two</em> lines, that points to <a href="three.html">another page</a>.
<p>A second one.<br>With a line of its own.
<ul><li>an item<li><p>a second</p><p>with more to say</ul>
<pre>
def f(x):
    return   x
</pre>
<table><tr><th>Name<th>Meaning</tr><tr><td>p<td>power</table>
<ol><li>Read <b>this</b>.</ol>
<p><a href="https://example.org/">Home</a> | <a href="two.html">Next page</a></p>
<script>if (a < b) { left_out("</p>") }</script>
<footer><p>Left out</footer>
</body></html>"""

TEXT = """\
# One & only

A first paragraph, in two lines, that points to another page.

A second one.
With a line of its own.

- an item
- a second

with more to say

def f(x):
    return   x

Name | Meaning
p | power

- Read this.
"""


def test_a_page_as_text():
    page = read_page("manual/one/one.html", PAGE)
    assert page.text == TEXT
    assert page.links == ("manual/one/three.html", "manual/one/two.html")
    assert (page.next, page.up, page.language) == ("manual/one/two.html", "manual/index.html", "en")


@pytest.mark.parametrize("mark", ["<main>{}</main>", '<div role="main"><div>{}</div></div>'])
def test_where_a_page_marks_its_main_part_nothing_else_is_read(mark):
    html = "<p>Before.</p>" + mark.format("<p>Inside.</p>") + "<p>Behind.</p>"
    assert read_page("a.html", html.encode()).text == "Inside.\n"


def test_headings_and_terms_may_be_links():
    html = b'<h2><a href="a.html">A heading</a></h2><dl><dt><a href="b.html">term</a><dd>Meaning.</dl>'
    assert read_page("c.html", html).text == "## A heading\n\nterm\n\nMeaning.\n"


@pytest.mark.parametrize(
    "data", [b"caf\xc3\xa9", b"caf\xe9", b'<meta charset="cp1252">caf\xe9', b"\xef\xbb\xbfcaf\xc3\xa9"]
)
def test_encodings(data):
    assert read_page("a.html", data).text == "caf\xe9\n"


def test_odd_marks_do_not_stop_the_reading():
    assert read_page("a.html", b"<![x[ y ]]><p>z<!q><!-- -->").text == "z\n"


@pytest.mark.parametrize("html", [b"", b"<p>", b"<div class=nav><p>Left out", b"<a href='[x'></a>", b"</p></div>"])
def test_odd_pages_have_no_text(html):
    assert read_page("a.html", html).text == ""
