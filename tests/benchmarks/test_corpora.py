"""Counts of a corpus's folder."""

import json

from benchmarks.corpora import describe


def test_counts_and_quartiles(tmp_path):
    counts = {"documents": 3, "documents_without_a_row": 1, "bytes": 60, "tokens": 30, "rows": 2}
    (tmp_path / "corpus.json").write_text(
        json.dumps({"source": "f00", "row_tokens": 8, "train": counts | {"hash": "x"}, "heldout": counts})
    )
    line = {"directory": "a", "files": 1, "bytes": 1, "rows": 1, "hash": "x"}
    lines = [line | {"split": split, "tokens": tokens} for split in ("train", "heldout") for tokens in (5, 9, 16)]
    (tmp_path / "documents.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    described = describe(tmp_path)
    assert described["train"] == counts | {"tokens_of_a_document": {"q25": 7, "median": 9, "q75": 12}}
    assert (described["source"], described["row_tokens"]) == ("f00", 8)
