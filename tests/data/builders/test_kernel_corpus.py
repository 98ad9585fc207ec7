import json
import os
import random
import re
import sys

import numpy as np
import pytest
import zarr

from sympow.data import BPETokenizer, DataConfig, build_kernel_corpus, load_tokenizer, open_corpus
from sympow.data.builders.corpus_folder import read_entries
from sympow.data.builders.debian_package import fetch_package
from sympow.data.builders.kernel_corpus import plan_documents
from sympow.data.builders.sources import HELD_OUT
from sympow.locks import locked
from tests.data.builders.killed import killed_builds
from tests.data.builders.trees import contents, source_tree, write_archive, write_folder, write_package

FILES = source_tree()
ROW = 64
OPTIONS = {"vocab_size": 300, "row_tokens": ROW}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return write_archive(tmp_path_factory.mktemp("source") / "linux.tar.xz", dict(sorted(FILES.items())))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, archive):
    out = tmp_path_factory.mktemp("corpus") / "kernel"
    build_kernel_corpus(out, archive, **OPTIONS)
    return out


def document_text(directory: str) -> str:
    """As the module describes it, of a directory that holds no small ones."""
    names = sorted(name for name in FILES if os.path.dirname(name) == directory and FILES[name])
    return "".join(f"# {name}\n{FILES[name].decode()}".rstrip("\n") + "\n" for name in names)


def test_layout_of_the_corpus(corpus):
    assert sorted(each.name for each in corpus.iterdir()) == [
        "corpus.json",
        "documents.jsonl",
        "heldout.zarr",
        "tokenizer.json",
        "train.zarr",
    ]
    summary, entries = json.loads((corpus / "corpus.json").read_text()), read_entries(corpus)
    assert summary["tokenizer"]["vocab_size"] == load_tokenizer(corpus).vocab_size == 300
    for split in ("train", "heldout"):
        array = zarr.open_array(corpus / f"{split}.zarr", mode="r")
        chosen = [entry for entry in entries if entry.split == split]
        assert (array.metadata.zarr_format, array.dtype, array.chunks) == (2, np.dtype("<u2"), (1, ROW))
        assert array.shape == (summary[split]["rows"], ROW) and array.nchunks_initialized == array.shape[0]
        assert summary[split]["rows"] == sum(entry.rows for entry in chosen)
        assert summary[split]["tokens"] == sum(entry.tokens for entry in chosen)
        assert summary[split]["documents"] == len(chosen) >= 1
        assert all(entry.rows == entry.tokens // ROW for entry in chosen)


def test_rows_are_the_documents_texts(corpus):
    tokenizer, entries = load_tokenizer(corpus), read_entries(corpus)
    arrays = {split: zarr.open_array(corpus / f"{split}.zarr", mode="r") for split in ("train", "heldout")}
    start = dict.fromkeys(arrays, 0)
    checked = 0
    for entry in entries:
        rows = arrays[entry.split][start[entry.split] : start[entry.split] + entry.rows]
        start[entry.split] += entry.rows
        if entry.directory.count("/") == 2:
            text = document_text(entry.directory)
            assert entry.bytes == len(text.encode()) and entry.tokens == len(tokenizer.encode(text))
            np.testing.assert_array_equal(rows.ravel(), tokenizer.encode(text)[: rows.size])
            checked += 1
    assert checked == 36


def test_a_run_reads_it(corpus):
    paths = {"path": f"{corpus}/train.zarr", "held_out_path": f"{corpus}/heldout.zarr"}
    splits = open_corpus(DataConfig(kind="zarr", tokenizer=str(corpus), **paths))
    assert splits.train.vocab_size == 300 and len(splits.train) > len(splits.held_out) > 0
    assert set(splits.train.lengths) == {ROW}


def test_no_subtree_is_in_both_splits(corpus):
    """By what is in the arrays, not by what the list says of them."""
    found = {}
    for split in ("train", "heldout"):
        array = zarr.open_array(corpus / f"{split}.zarr", mode="r")
        text = load_tokenizer(corpus).decode(array[:].ravel())
        found[split] = {"/".join(name.split("/")[:-1][:3]) for name in re.findall(r"^# (\S+)$", text, re.MULTILINE)}
    assert found["heldout"] and found["train"] and not found["heldout"] & found["train"]
    entries = read_entries(corpus)
    held_out = sum(entry.bytes for entry in entries if entry.split == "heldout")
    assert 0 < held_out <= HELD_OUT * sum(entry.bytes for entry in entries)


def test_what_is_left_out(corpus):
    listed = sum(entry.files for entry in read_entries(corpus))
    left_out = {".gitignore", "lib/.hidden/file.c", "lib/logo.gif", "lib/empty.c"}
    left_out |= {name for name in FILES if "asic_reg" in name}
    assert listed == len(FILES) - len(left_out)


def test_the_same_bytes_again_from_every_kind_of_source(tmp_path, archive, corpus):
    names = random.Random(0).sample(sorted(FILES), len(FILES))
    sources = {
        "package": write_package(tmp_path / "a.deb", archive),
        "folder": write_folder(tmp_path / "linux", FILES),
        "in another order": write_archive(tmp_path / "b", {name: FILES[name] for name in names}, "other/", "w:gz"),
    }
    for name, source in sources.items():
        summary = build_kernel_corpus(tmp_path / name, source, **OPTIONS)
        assert contents(tmp_path / name) == contents(corpus)
        assert summary == json.loads((corpus / "corpus.json").read_text())


def test_a_build_killed_again_and_again_gives_the_same_bytes(tmp_path, archive, corpus):
    """Each start is killed before it writes, renames or removes its n-th file, n growing until one comes through."""
    out = tmp_path / "kernel"
    ended = killed_builds("build_kernel_corpus", out, archive, (0, 1, 3, 5, 8, 12, 20, 50, 130, 131, 250, 10**9, 10**9))
    assert ended.count((9, False)) >= 8 and ended[-2:] == [(0, True)] * 2, ended
    assert contents(out) == contents(corpus)
    assert list(tmp_path.iterdir()) == [out]


def test_a_line_half_written_is_written_again(tmp_path, archive, corpus, monkeypatch):
    out = tmp_path / "kernel"
    with monkeypatch.context() as patch:
        patch.setattr("zarr.Array.resize", lambda *_: 1 / 0)  # what is called once all documents are written
        with pytest.raises(ZeroDivisionError):
            build_kernel_corpus(out, archive, **OPTIONS)
    assert not out.exists()
    listed = tmp_path / "kernel.partial" / "documents.jsonl"
    listed.write_bytes(listed.read_bytes()[:-30])
    (tmp_path / "kernel.partial" / "train.zarr" / "3.0123.partial").write_bytes(b"left by a killed process")
    (tmp_path / "kernel.partial" / "train.zarr" / "0.0").unlink()  # listed, so not written again: to be seen below
    build_kernel_corpus(out, archive, **OPTIONS)
    whole = contents(corpus)
    del whole["train.zarr/0.0"]
    assert contents(out) == whole


def test_rows_are_on_the_disk_before_their_document_is_listed(tmp_path, archive, corpus, monkeypatch):
    """And the corpus is on the disk before it has its name."""
    out, numbers = tmp_path / "kernel", {}
    lines: list[set[int]] = []  # the files synced before each line of the list

    def fsync(descriptor):
        number = os.fstat(descriptor).st_ino
        listed = tmp_path / "kernel.partial" / "documents.jsonl"
        if listed.exists() and listed.stat().st_ino == number:
            lines.append(set(numbers))
        numbers[number] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    build_kernel_corpus(out, archive, **OPTIONS)
    assert contents(out) == contents(corpus)
    found = {path: path.stat() for path in out.rglob("*")}
    unsynced = [path for path, stat in found.items() if path.is_file() and numbers.get(stat.st_ino) != stat.st_size]
    assert unsynced == [] and tmp_path.stat().st_ino in numbers
    done = dict.fromkeys(("train", "heldout"), 0)
    for entry, synced in zip(read_entries(out), lines, strict=True):
        for row in range(done[entry.split], done[entry.split] + entry.rows):
            assert found[out / f"{entry.split}.zarr" / f"{row}.0"].st_ino in synced
        done[entry.split] += entry.rows


def test_a_finished_corpus_is_left_as_it_is(corpus):
    summary = build_kernel_corpus(corpus, "not read", **OPTIONS)
    assert summary["train"]["rows"] > 0
    with pytest.raises(ValueError, match=r"kernel holds a corpus of vocab_size 300, not 301: remove it or give "):
        build_kernel_corpus(corpus, "not read", vocab_size=301, row_tokens=ROW)


def test_a_corpus_that_another_process_makes_is_left_to_it(tmp_path, archive, corpus):
    out, partial = tmp_path / "kernel", tmp_path / "kernel.partial"
    partial.mkdir()
    with (
        locked(partial, "makes a corpus"),
        pytest.raises(RuntimeError, match=f"^{partial} is in use, another process makes a corpus there: wait "),
    ):
        build_kernel_corpus(out, archive, **OPTIONS)
    assert os.listdir(partial) == [".lock"]
    build_kernel_corpus(out, archive, **OPTIONS)
    assert contents(out) == contents(corpus)


def test_another_source_or_option_does_not_continue_a_build(tmp_path, archive):
    out = tmp_path / "kernel"
    (tmp_path / "kernel.partial").mkdir()
    (tmp_path / "kernel.partial" / "corpus.json").write_text(json.dumps({"version": 1, "source": "f00", **OPTIONS}))
    with pytest.raises(ValueError, match=r"kernel\.partial holds a corpus of source f00, not [0-9a-f]{32}: remove it"):
        build_kernel_corpus(out, archive, **OPTIONS)
    with pytest.raises(ValueError, match=r"kernel\.partial holds a corpus of row_tokens 64, not 32: remove it"):
        build_kernel_corpus(out, archive, vocab_size=300, row_tokens=32)
    (tmp_path / "kernel.partial" / "corpus.json").write_text("{")
    with pytest.raises(ValueError, match=r"kernel\.partial/corpus\.json is not JSON: remove .*kernel\.partial$"):
        build_kernel_corpus(out, archive, **OPTIONS)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "linux", FILES)
    train = BPETokenizer.train

    def train_and_remove(texts, vocab_size):
        tokenizer = train(texts, vocab_size)
        (folder / "arch/a-0/x/core.c").unlink()
        return tokenizer

    monkeypatch.setattr(BPETokenizer, "train", train_and_remove)
    with pytest.raises(ValueError, match=r"linux was changed while it was read: files of arch/a-0/x are gone$"):
        build_kernel_corpus(tmp_path / "kernel", folder, **OPTIONS)
    with pytest.raises(ValueError, match=r"kernel\.partial holds a corpus of source "):
        build_kernel_corpus(tmp_path / "kernel", folder, **OPTIONS)


def test_what_cannot_be_a_corpus_is_refused_in_one_line(tmp_path, archive):
    def refused(error, message, out="kernel", source=archive, **options):
        with pytest.raises(error, match=message) as raised:
            build_kernel_corpus(tmp_path / out, source, **OPTIONS | options)
        assert "\n" not in str(raised.value)

    refused(ValueError, "^vocab_size must be 256 to 65,536, as tokens are uint16; got 65537$", vocab_size=65_537)
    refused(ValueError, "^row_tokens must be positive, got 0$", row_tokens=0)
    refused(FileNotFoundError, "^source does not exist: nowhere$", source="nowhere")
    two = write_folder(tmp_path / "two", {"a/b.c": b"x" * 5000, "c/d.c": b"x" * 5000})
    line = "^the source has 2 long directories, too few to hold 5% of the text out: .*, or a smaller row_tokens$"
    refused(ValueError, line, "few", two)
    bare = write_folder(tmp_path / "bare", {"a.gif": b"\0"})
    refused(ValueError, r"^source .*bare is empty: no text in it$", "empty", bare)
    twice = write_archive(tmp_path / "twice.tar", {"a/b.c": b"x", "./a/b.c": b"y"}, mode="w", top="")
    refused(ValueError, "holds b.c twice$", "twice", twice)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    refused(FileExistsError, r"notes holds something else than a corpus \(no corpus\.json\)", out="notes")
    refused(FileExistsError, r"a\.txt holds something else than a corpus", out="notes/a.txt")
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    line = "^row_tokens is 4,096: the source gives no row of so many tokens for heldout.zarr$"
    refused(ValueError, line, "short", row_tokens=4096)


def test_small_directories_join_the_one_above():
    sizes = {"a/b/c/1.c": 60, "a/b/2.c": 60, "a/b/d/3.c": 120, "a/e/4.c": 30, "a/5.c": 10, "f/6.c": 20, "7.c": 1}
    sizes |= {f"g{n}/x.c": 100 for n in range(20)}
    documents = {each.directory: each for each in plan_documents(sizes, 100)}
    assert documents.keys() == {"", "a/b", "a/b/d", *(f"g{n}" for n in range(20))}
    assert documents["a/b"].files == ("a/b/2.c", "a/b/c/1.c") and documents["a/b"].size == 120
    assert documents[""].files == ("7.c", "a/5.c", "a/e/4.c", "f/6.c") and documents[""].size == 61
    assert sum(each.held_out for each in documents.values()) == 1


def test_neighbours_are_held_out_together_and_as_many_as_fit():
    sizes = {f"t{n}/a/b/{leaf}/1.c": 100 for n in range(50) for leaf in "xyz"}
    documents = plan_documents(sizes, 100)
    held_out = {each.directory for each in documents if each.held_out}
    assert len(held_out) == 6 and len({directory.split("/")[0] for directory in held_out}) == 2  # 7.5 would be 5%


@pytest.mark.parametrize("seed", range(5))
def test_every_file_is_in_one_document_and_order_is_that_of_completion(seed):
    rng = random.Random(seed)
    names = {"/".join(rng.choice("abc-") * 2 for _ in range(rng.randint(1, 6))) + f"/{n}.c" for n in range(400)}
    sizes = {name: rng.randint(1, 50) for name in names}
    documents = plan_documents(sizes, 90)
    assert sorted(name for each in documents for name in each.files) == sorted(names)
    assert all(each.size == sum(sizes[name] for name in each.files) for each in documents)
    assert all(each.size >= 90 for each in documents if each.directory)
    assert all(name.startswith(f"{each.directory}/") for each in documents if each.directory for name in each.files)
    last = [max(each.files) for each in documents]
    assert last == sorted(last)


def test_the_package_is_fetched_once_and_removed_at_the_end(tmp_path, archive, corpus, apt_get):
    package = write_package(tmp_path / "made.deb", archive)
    apt_get(f'echo "$@" >> {tmp_path}/calls; cp {package} linux-source-6.1_6.1.0_all.deb')
    (tmp_path / "kernel.partial").mkdir()
    fetched = fetch_package("linux-source-6.1", tmp_path / "kernel.partial" / "package")
    assert fetched.read_bytes() == package.read_bytes()
    build_kernel_corpus(tmp_path / "kernel", **OPTIONS)
    assert (tmp_path / "calls").read_text() == "download linux-source-6.1\n"
    assert contents(tmp_path / "kernel") == contents(corpus)


def test_damaged_lists_of_documents(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^no corpus at .*: it has no documents\.jsonl$"):
        read_entries(tmp_path)
    (tmp_path / "documents.jsonl").write_text('{"directory": "a"}\n')
    with pytest.raises(ValueError, match=r"documents\.jsonl is damaged: expected a JSON object a line, one a document"):
        read_entries(tmp_path)


def test_missing_package_is_named(tmp_path, archive, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"^writing zarr corpora needs zarr: pip install 'sympow\[train\]' \("):
        build_kernel_corpus(tmp_path / "kernel", archive, **OPTIONS)
