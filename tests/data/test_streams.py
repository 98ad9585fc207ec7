"""Datasets of Hugging Face that are streamed: what is asked of `datasets`, what is kept, and what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest

from sympow.data.streams import streamed
from sympow.data.text import find_texts

TEXTS = [f"Text {i}: ein Wort, 词, \U0001f600\n" for i in range(9)]


@pytest.fixture(autouse=True)
def calls(tmp_path, monkeypatch):
    """Calls of a `datasets` that holds these texts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []

    def load_dataset(*names, **options):
        made.append((*names, options))
        if names[0] == "a/gone":
            raise FileNotFoundError("no such dataset\nsee the hub")
        return ({"id": i, "content": text} for i, text in enumerate(TEXTS))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return made


def test_rows_are_read_once(calls):
    url = "hf://datasets/a/b?config=en&split=dev&revision=v1&rows=5"
    found = find_texts(url, text_field="content")
    assert found.path == url and [document.read() for document in found.documents] == TEXTS[:5]
    assert calls == [("a/b", "en", {"split": "dev", "revision": "v1", "streaming": True})]
    assert streamed(url, "content").read_bytes() and len(calls) == 1
    assert [document.read() for document in find_texts("hf://datasets/a/b", text_field="content").documents] == TEXTS
    assert calls[1:] == [("a/b", None, {"split": "train", "streaming": True})]


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("hf://datasets/a/b?rows=0", "expected hf://datasets/OWNER/NAME?"),
        ("hf://datasets/a/b?row=3", "expected hf://datasets/OWNER/NAME?"),
        ("hf://datasets/", "expected hf://datasets/OWNER/NAME?"),
        ("hf://datasets/a/gone", "hf://datasets/a/gone cannot be read: FileNotFoundError: no such dataset"),
        ("hf://datasets/a/b", "hf://datasets/a/b, row 1: expected a text in the field 'text', got 'id', 'content': "),
    ],
)
def test_what_is_refused(tmp_path, url, line):
    with pytest.raises(ValueError) as raised:
        streamed(url, "text")
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r"^reading hf://datasets/a/b needs datasets: pip install 'sympow\[stream\]' \("
    ):
        streamed("hf://datasets/a/b", "text")


def test_the_package_itself(tmp_path, monkeypatch):
    """It streams a folder as it does a dataset of the hub."""
    monkeypatch.delitem(sys.modules, "datasets")
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = find_texts(f"hf://datasets/{tmp_path / 'rows'}?rows=4")
    assert [document.read() for document in found.documents] == TEXTS[:4]
