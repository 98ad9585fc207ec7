"""The corpus of manuals, from small packages."""

import json
import os
import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import zarr

from sympow.data import build_doc_corpus, load_tokenizer
from sympow.data.builders import doc_corpus
from sympow.data.builders.corpus_folder import read_entries
from sympow.data.builders.sources import HELD_OUT
from sympow.data.tokens import BPETokenizer
from tests.data.builders.killed import killed_builds
from tests.data.builders.trees import contents, write_deb

ROW = 64
OPTIONS = {"vocab_size": 300, "row_tokens": ROW}
WORDS = ("this", "is", "the", "text", "that", "one", "can", "read", "of", "it", "by", "hand", "stone", "river", "deep")


def page(rng: random.Random, title: str) -> bytes:
    body = "".join(f"<p>{' '.join(rng.choice(WORDS) for _ in range(30))}." for _ in range(3))
    return f"<html><ul class=nav><li>Left out</ul><h1>{title}</h1>{body}</html>".encode()


def packages() -> dict[str, dict[str, bytes]]:
    """By package name: manuals of two chapters; `tool-12-doc` is an earlier version of `tool-13-doc`."""
    rng = random.Random(0)
    made = {
        f"{name}-doc": {
            f"html/{chapter}/{n}.html": page(rng, f"{name} {chapter} {n}")
            for chapter in ("one", "two")
            for n in (2, 10)
        }
        for name in (f"p{chr(97 + n)}" for n in range(24))
    }
    made["tool-12-doc"] = {f"html/{n}.html": page(rng, f"tool {n}") for n in range(4)}
    made["tool-13-doc"] = made["tool-12-doc"] | {"html/9.html": page(rng, "new")}
    made["picture-doc"] = {"all.pdf": b"%PDF"}
    return made


def write_packages(folder: Path) -> Path:
    folder.mkdir()
    for name, files in packages().items():
        installed = {f"./usr/share/doc/{name}/{path}": data for path, data in files.items()}
        installed[f"./usr/share/doc/{name}/copyright"] = b"License: GPL-2+\n"
        write_deb(folder / f"{name}_1.0_all.deb", installed, f"Package: {name}\nVersion: 1.0\n")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_packages(tmp_path_factory.mktemp("source") / "debs")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("corpus") / "docs"
    build_doc_corpus(out, source, **OPTIONS)
    return out


def manifest(corpus: Path) -> dict[str, dict]:
    return {line["package"]: line for line in map(json.loads, (corpus / "packages.jsonl").read_text().splitlines())}


def test_documents_are_directories_of_manuals_in_their_order(corpus):
    tokenizer, entries = load_tokenizer(corpus), {entry.directory: entry for entry in read_entries(corpus)}
    assert {"pa-doc/one", "pa-doc/two", "tool-12-doc"} <= entries.keys()
    start = defaultdict(int)
    for entry in entries.values():
        if entry.directory == "pb-doc/two":
            rows = zarr.open_array(corpus / f"{entry.split}.zarr", mode="r")[start[entry.split] :][: entry.rows]
            text = tokenizer.decode(rows.ravel())
            assert text.startswith("# pb two 2\n\n") and "\n\n# pb two 10\n\n" in text and "Left out" not in text
        start[entry.split] += entry.rows
    assert all(entry.rows == entry.tokens // ROW for entry in entries.values())


def test_whole_packages_are_held_out(corpus):
    splits = defaultdict(set)
    for entry in read_entries(corpus):
        splits[entry.split].add(entry.directory.split("/")[0])
    assert splits["train"] and splits["heldout"] and not splits["train"] & splits["heldout"]
    held_out = sum(entry.bytes for entry in read_entries(corpus) if entry.split == "heldout")
    assert 0 < held_out <= HELD_OUT * sum(entry.bytes for entry in read_entries(corpus))
    families = [doc_corpus.package_family(name) for name in ("tool-12-doc/a", "tool-13-doc", "pa-doc")]
    assert families[0] == families[1] != families[2]


def test_the_manifest_tells_of_every_package(corpus):
    lines = manifest(corpus)
    assert lines.keys() == packages().keys() and list(lines) == sorted(lines)
    assert lines["pa-doc"]["version"] == "1.0" and lines["pa-doc"]["licences"] == ["GPL-2+"]
    assert lines["picture-doc"]["pages"] == 0
    assert sum(line["bytes"] for line in lines.values()) == sum(entry.bytes for entry in read_entries(corpus))


def test_pages_that_were_there_before_are_left_out(corpus):
    lines = manifest(corpus)
    assert (lines["tool-12-doc"]["pages"], lines["tool-12-doc"]["duplicates"]) == (4, 0)
    assert (lines["tool-13-doc"]["pages"], lines["tool-13-doc"]["duplicates"]) == (1, 4)


def test_a_build_killed_again_and_again_gives_the_same_bytes(tmp_path, source, corpus):
    out = tmp_path / "docs"
    ended = killed_builds("build_doc_corpus", out, source, (0, 1, 3, 20, 60, 70, 130, 10**9, 10**9))
    assert ended.count((9, False)) >= 5 and ended[-2:] == [(0, True)] * 2, ended
    assert contents(out) == contents(corpus)
    assert list(tmp_path.iterdir()) == [out]


def test_another_tokenizer_may_be_given(tmp_path, source):
    given = BPETokenizer.train(["the text that one can read"], 280)
    summary = build_doc_corpus(tmp_path / "docs", source, tokenizer=given, row_tokens=ROW)
    assert summary["tokenizer"]["fingerprint"] == load_tokenizer(tmp_path / "docs").fingerprint == given.fingerprint
    with pytest.raises(ValueError, match=r"docs holds a corpus of words .* remove it or give another folder$"):
        build_doc_corpus(tmp_path / "docs", source, **OPTIONS)


def test_the_packages_are_fetched_once_each(tmp_path, source, corpus, apt_get, monkeypatch):
    monkeypatch.setattr(doc_corpus, "PACKAGES", tuple(sorted(packages())))
    apt_get(f'echo "$2" >> {tmp_path}/calls; cp {source}/$2_*.deb .')
    build_doc_corpus(tmp_path / "docs", **OPTIONS)
    assert (tmp_path / "calls").read_text().split() == sorted(packages())
    assert contents(tmp_path / "docs") == contents(corpus)


@pytest.mark.parametrize(("package", "extra"), [("zarr", "zarr"), ("numcodecs", "zarr"), ("tokenizers", "tokenizers")])
def test_a_missing_package_is_told_before_anything_is_fetched(tmp_path, apt_get, monkeypatch, package, extra):
    apt_get(f"touch {tmp_path}/called; exit 1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs? {extra}: pip install 'sympow\[train\]'"):
        build_doc_corpus(tmp_path / "docs")
    assert not (tmp_path / "called").exists() and not (tmp_path / "docs.partial").exists()


def test_what_cannot_be_a_corpus_is_refused_in_one_line(tmp_path, source, corpus):
    def refused(error, message, out="docs", source=source, **options):
        with pytest.raises(error, match=message) as raised:
            build_doc_corpus(tmp_path / out, source, **OPTIONS | options)
        assert "\n" not in str(raised.value)

    refused(FileNotFoundError, "^source is no folder with Debian packages: nowhere$", source="nowhere")
    (tmp_path / "empty").mkdir()
    refused(ValueError, r"empty is empty: no Debian package \(\*\.deb\) in it$", source=tmp_path / "empty")
    write_deb(tmp_path / "empty" / "a_1_all.deb", {"./usr/share/doc/a/a.pdf": b"%PDF"}, "Package: a\n")
    refused(ValueError, "^the source is empty: no page of English text in its packages$", source=tmp_path / "empty")
    wide = BPETokenizer.train(["text"], 256)
    wide.vocab_size = 70_000
    refused(ValueError, "^expected a tokenizer of at most 65,536 tokens, as they are uint16; got bpe", tokenizer=wide)
    os.rename(tmp_path / "empty" / "a_1_all.deb", tmp_path / "empty" / "b.deb")
    (tmp_path / "empty" / "b.deb").write_bytes(b"odd")
    refused(ValueError, "expected a Debian package, got another kind of file$", out="odd", source=tmp_path / "empty")
