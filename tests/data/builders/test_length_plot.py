import json
import sys

import numpy as np
import pytest

from sympow.data.builders.corpus_folder import Entry
from sympow.data.builders.length_plot import bin_edges, plot_document_lengths


def write_corpus(folder, lengths, row=64):
    folder.mkdir(exist_ok=True)
    entries = [
        Entry(f"d{n}", "heldout" if n % 5 == 4 else "train", 1, 4 * tokens, tokens, tokens // row, "")
        for n, tokens in enumerate(lengths)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(entry._asdict()) + "\n" for entry in entries))
    (folder / "corpus.json").write_text(json.dumps({"row_tokens": row}))
    return folder


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_an_image_is_written(tmp_path, suffix):
    corpus = write_corpus(tmp_path / "corpus", [3, 64, 65, 100, 700, 5000, 70_000, 130, 200, 64])
    plot_document_lengths(corpus, tmp_path / f"a.{suffix}")
    image = (tmp_path / f"a.{suffix}").read_bytes()
    assert image.startswith(b"\x89PNG" if suffix == "png" else b"<?xml") and len(image) > 5000
    if suffix == "svg":
        assert b"training: 8 documents" in image and b"held out: 2 documents" in image


@pytest.mark.parametrize("lengths", [[1, 10**7], [64], [63], [65], [0, 3], [128, 64, 100]])
def test_bins_hold_every_length_and_none_reaches_across_a_row(lengths):
    edges = bin_edges(np.array(lengths), 64)
    assert edges[0] <= max(min(lengths), 1) and max(lengths) < edges[-1]
    np.testing.assert_allclose(edges[2:] / edges[:-2], 2)
    inside = (edges[:-1] < 64) & (edges[1:] > 64)
    assert not inside.any()


def test_missing_corpus_and_package(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"^no corpus at "):
        plot_document_lengths(tmp_path, tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^drawing lengths needs matplotlib: pip install 'sympow\[eval\]' \("):
        plot_document_lengths(tmp_path, tmp_path / "a.png")
