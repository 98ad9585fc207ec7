"""A corpus of one's own texts, and `sympow corpus`, which makes it."""

import gzip
import json
import random

import numpy as np
import pytest
import zarr

from sympow.cli import main
from sympow.data import BPETokenizer, DataConfig, build_corpus, build_kernel_corpus, load_tokenizer, open_corpus
from sympow.data.builders.corpus_folder import read_entries
from sympow.data.tokens import ByteTokenizer
from sympow.recall.needle_corpus import build_needle_corpus
from tests.data.builders.killed import killed_builds
from tests.data.builders.trees import contents

ROW = 64
OPTIONS = {"vocab_size": 300, "row_tokens": ROW}
BYTES = {"tokenizer": ByteTokenizer()}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token
WORDS = ("this", "is", "the", "text", "that", "one", "can", "read", "of", "it", "by", "hand", "stone", "river", "deep")


def texts() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(60, 300))) for _ in range(40)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "texts"
    folder.mkdir()
    for i, text in enumerate(texts()):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("corpus") / "own"
    build_corpus(out, source, **OPTIONS)
    return out


def test_rows_are_written_one_by_one(tmp_path, source, monkeypatch):
    """Of several rows, zarr writes the files at a time, and prints the errors that follow the first."""
    keys, write = [], zarr.Array.__setitem__
    monkeypatch.setattr(zarr.Array, "__setitem__", lambda self, key, value: keys.append(key) or write(self, key, value))
    build_corpus(tmp_path / "own", source, **OPTIONS)
    assert keys and all(isinstance(key, int) for key in keys)


def test_every_document_is_in_rows_of_its_split(corpus):
    tokenizer, entries = load_tokenizer(corpus), read_entries(corpus)
    assert [entry.directory for entry in entries] == [f"{i:02}.txt" for i in range(40)]
    assert [entry.split for entry in entries].count("heldout") == 2
    for split in ("train", "heldout"):
        wanted = [tokenizer.encode(text) for text, entry in zip(texts(), entries, strict=True) if entry.split == split]
        rows = [tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW) for tokens in wanted]
        np.testing.assert_array_equal(zarr.open_array(corpus / f"{split}.zarr", mode="r")[:], np.concatenate(rows))


def test_a_build_killed_again_and_again_gives_the_same_bytes(tmp_path, source, corpus):
    out = tmp_path / "own"
    ended = killed_builds("build_corpus", out, source, (0, 1, 3, 20, 60, 70, 130, 10**9, 10**9))
    assert ended.count((9, False)) >= 5 and ended[-2:] == [(0, True)] * 2, ended
    assert contents(out) == contents(corpus)


def test_rows_of_files_and_one_document(tmp_path):
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts())
    (tmp_path / "a.jsonl").write_text(rows)
    made = build_corpus(tmp_path / "out", tmp_path / "a.jsonl", text_field="body", **BYTES, row_tokens=ROW)
    assert made["train"]["documents"] + made["heldout"]["documents"] == 40
    (tmp_path / "one.txt").write_text("line of text\n" * 400)
    made = build_corpus(tmp_path / "one", tmp_path / "one.txt", **BYTES, row_tokens=ROW)
    assert (made["train"]["documents"], made["heldout"]["documents"]) == (1, 1)


def test_texts_that_fill_no_row(tmp_path, source):
    for size, written in ((9999, "9,999"), (2**62, "4,611,686,018,427,387,904")):
        line = f"^row_tokens is {written}: the source gives no row of so many tokens for train.zarr$"
        with pytest.raises(ValueError, match=line):
            build_corpus(tmp_path / "out", source, **BYTES, row_tokens=size)


def test_a_corpus_within_its_texts_is_refused(tmp_path, source):
    """Another build would read its files. A folder beside the texts may have a name that begins as theirs."""
    link = tmp_path / "link"
    link.symlink_to(source)
    for out in (source / "sub", source / "a" / ".." / "sub", link / "sub"):
        for build in (
            lambda out: build_corpus(out, source, **OPTIONS),
            lambda out: build_needle_corpus(out, source, BPETokenizer.train(texts(), 300), rows=20, row_tokens=512),
            lambda out: build_kernel_corpus(out, source, **OPTIONS),
        ):
            with pytest.raises(ValueError, match=r"^.*sub is in .*, the texts of the corpus: give a folder outside$"):
                build(out)
    assert all(path.is_file() for path in source.iterdir())
    build_corpus(source.with_name("texts-corpus"), source, **OPTIONS)


def test_a_name_twice_is_refused(tmp_path):
    for i in range(2):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / ("a.jsonl", "a.json")[i]).write_text('{"text": "a"}\n')
    assert build_corpus(tmp_path / "out", tmp_path / "in", **BYTES, row_tokens=1)["train"]["rows"] == 1
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n', mtime=0))
    with pytest.raises(ValueError, match=r"in holds a.jsonl:1 twice: remove one of the files"):
        build_corpus(tmp_path / "again", tmp_path / "in", **BYTES, row_tokens=1)


def test_tokens_of_another_tokenizer_are_refused(corpus):
    """A larger vocabulary has every number of the corpus, but they mean other texts."""
    config = DataConfig(kind="zarr", path=str(corpus / "train.zarr"), tokenizer=str(corpus))
    more = json.loads((corpus / "tokenizer.json").read_text())
    more["added_tokens"] += [{"id": 300, "content": "<|new|>", "special": True, **dict.fromkeys(FLAGS, False)}]
    same_and_more = BPETokenizer(json.dumps(more))
    assert same_and_more.vocab_size == 301
    assert open_corpus(config, tokenizer=same_and_more).train.vocab_size == 301
    other = BPETokenizer.train([" ".join(f"{i}{i * i}" for i in range(400))] * 9, 320)
    assert other.vocab_size == 320
    with pytest.raises(ValueError, match=r"own has the tokens of its own tokenizer\.json; got another tokenizer"):
        open_corpus(config, tokenizer=other)


def test_the_command_trains_on_what_it_made(tmp_path, source, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for file in source.iterdir():
        (tmp_path / "texts" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "texts" / "a.png").write_bytes(b"\0")
    (tmp_path / "texts" / "short.txt").write_text("a")
    command = ["corpus", "texts", "--out", "own", "--vocab-size", "300", "--row-tokens", "64", "--quiet"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert first.err == "corpus texts: left out 1 binary (a.png)\n"
    lines = first.out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["own/train.zarr", "own/heldout.zarr"]
    assert lines[2].startswith("left out of train.zarr: ") and lines[2].endswith("in 2 documents shorter than a row")
    assert main(command) == 0 and capsys.readouterr().out == first.out
    assert main([*command, "--text-field", "body"]) == 2
    assert "own holds a corpus of reading {" in capsys.readouterr().err
    small = """training.steps=2 training.warmup_steps=1 training.context=32 training.batch_size=2 model.vocab_size=300
        training.precision=float32 model.d_model=24 model.n_layers=1 model.n_heads=2 training.evaluation_batches=1
        data.path=own/train.zarr data.held_out_path=own/heldout.zarr data.tokenizer=own data.vocab_size=none"""
    assert main(["train", "longcrawl64:power", "--out", "run", "--quiet", *small.split()]) == 0
