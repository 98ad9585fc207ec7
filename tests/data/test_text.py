import errno
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from sympow.data import BPETokenizer, ByteTokenizer
from sympow.data import text as text_module
from sympow.data.text import (
    cut_document,
    find_texts,
    measure_documents,
    stdlib_documents,
    tokenize_documents,
    train_bpe,
)
from sympow.files import atomic_write, default_cache_dir, naming, write_text


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def read(documents) -> dict[str, str]:
    return {document.name: document.read() for document in documents}


@pytest.fixture
def folder(tmp_path):
    return write(
        tmp_path / "corpus",
        {"b.txt": "bee", "a/one.md": "one\n", "a/two.txt": "two", "a/deep/x.txt": "x\n", ".git/config": "hidden"}
        | {"a/.hidden": "hidden", "a/image.txt": b"PNG\0\1", "a/latin.txt": b"caf\xe9"},
    )


def test_a_document_for_each_text_file(folder):
    assert read(find_texts(folder).documents) == {
        "a/deep/x.txt": "x\n",
        "a/latin.txt": "caf\ufffd",
        "a/one.md": "one\n",
        "a/two.txt": "two",
        "b.txt": "bee",
    }


def test_a_document_for_each_folder(folder):
    assert read(find_texts(folder, group="folder").documents) == {
        ".": "# b.txt\nbee\n",
        "a": "# a/latin.txt\ncaf\ufffd\n# a/one.md\none\n# a/two.txt\ntwo\n",
        "a/deep": "# a/deep/x.txt\nx\n",
    }


def test_suffixes_and_single_files(folder):
    assert list(read(find_texts(folder, suffixes=(".md",)).documents)) == ["a/one.md"]
    assert read(find_texts(folder / "b.txt").documents) == {"b.txt": "bee"}


def test_broken_links_are_passed_over(folder):
    os.symlink(folder / "nowhere", folder / "a" / "link.txt")
    assert "a/link.txt" not in read(find_texts(folder).documents)


def test_missing_empty_and_binary_corpora(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text corpus does not exist: .*nothing"):
        find_texts(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"corpus is empty: no file ending in .rst, .tex in it"):
        find_texts(folder, suffixes=(".rst", ".tex"))
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="void is empty: no text file in it"):
        find_texts(tmp_path / "void")
    with pytest.raises(ValueError, match=r"image.txt: expected UTF-8 text, got a binary file"):
        find_texts(folder / "a" / "image.txt")
    with pytest.raises(ValueError, match=r"b.txt is a file that does not end in .md, .py; data.suffixes names other"):
        find_texts(folder / "b.txt", suffixes=(".md", ".py"))
    with pytest.raises(ValueError, match=r"b.txt is a file; data.group=folder needs a folder of text"):
        find_texts(folder / "b.txt", group="folder")
    with pytest.raises(ValueError, match="group must be file or folder, got 'tree'"):
        find_texts(folder, group="tree")


def test_stdlib_layouts(tmp_path, monkeypatch):
    """As Debian, pyenv and macOS lay it out: packages installed beside it, tests and tables stay out."""
    write(
        tmp_path,
        {"abc.py": "abc\n", "asyncio/__init__.py": "init\n", "asyncio/base_events.py": "base\n", "json/tool.py": "t\n"}
        | {"idlelib/run.py": "run\n", "idlelib/idle_test/a.py": "no", "unittest/test/a.py": "no", "test/a.py": "no"}
        | {"site-packages/torch/a.py": "no", "dist-packages/a.py": "no", "lib-dynload/a.so": b"\0"}
        | {"__pycache__/abc.py": "no", "config-3.11-darwin/a.py": "no", "_sysconfigdata__linux_.py": "no"}
        | {"encodings/cp037.py": "no", "pydoc_data/topics.py": "no", "LICENSE.txt": "no", "mine.py": "no"},
    )
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    assert read(stdlib_documents()) == {
        "abc": "# abc.py\nabc\n",
        "asyncio": "# asyncio/__init__.py\ninit\n# asyncio/base_events.py\nbase\n",
        "idlelib": "# idlelib/run.py\nrun\n",
        "json": "# json/tool.py\nt\n",
    }


def test_python_without_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path / "python311.zip")}.__getitem__)
    with pytest.raises(FileNotFoundError, match=r"no source of Python's standard library in .*python311.zip"):
        stdlib_documents()


def test_the_real_stdlib_has_long_documents():
    documents, sizes, _ = measure_documents(stdlib_documents())
    names = [document.name for document in documents]
    assert "asyncio" in names and "argparse" in names and names == sorted(names)
    assert (sizes >= 65_536).sum() >= 20 and sizes.sum() > 5_000_000


def test_cut_document(tmp_path):
    write(tmp_path, {"lines.txt": "0123456\n" * 10, "line.txt": "0123456789"})
    (lines,), (line,) = find_texts(tmp_path / "lines.txt").documents, find_texts(tmp_path / "line.txt").documents
    assert [len(part.read()) for part in cut_document(lines, 0.25)] == [56, 24]
    assert [part.read() for part in cut_document(line, 0.2)] == ["01234567", "89"]


def opened(path, tokenizer, cache):
    documents, _, hashes = measure_documents(find_texts(path).documents)
    return tokenize_documents(documents, hashes, tokenizer, cache)


def contents(corpus):
    return [document.tolist() for document in corpus]


def test_tokens_are_cached_and_mapped(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = opened(folder, ByteTokenizer(), cache)
    assert contents(first) == [list(text.encode()) for text in read(find_texts(folder).documents).values()]
    assert sorted(path.suffixes[-2] for path in cache.iterdir()) == [".offsets", ".tokens"]
    monkeypatch.setattr(ByteTokenizer, "encode", None)  # the second time nothing is tokenized
    second = opened(folder, ByteTokenizer(), cache)
    assert contents(second) == contents(first) and second.fingerprint == first.fingerprint
    assert isinstance(second[0], np.memmap) and second[0].dtype == np.uint8


def test_cache_follows_content_and_tokenizer(folder, tmp_path):
    bpe = BPETokenizer.train(["one two"], vocab_size=260)
    corpora = [opened(folder, tokenizer, tmp_path / "cache") for tokenizer in (ByteTokenizer(), bpe)]
    write(folder, {"b.txt": "bay"})
    corpora.append(opened(folder, ByteTokenizer(), tmp_path / "cache"))
    assert len({corpus.fingerprint for corpus in corpora}) == 3
    assert corpora[1][0].dtype == np.uint16
    assert bpe.decode(corpora[1][4]) == "bee" and ByteTokenizer().decode(corpora[2][4]) == "bay"


@pytest.mark.parametrize("keep", [0, 5, 130, -1])
@pytest.mark.parametrize("part", ["tokens", "offsets"])
def test_damaged_cache_is_made_again(folder, tmp_path, part, keep):
    whole = contents(opened(folder, ByteTokenizer(), tmp_path / "cache"))
    (file,) = (tmp_path / "cache").glob(f"*.{part}.npy")
    file.write_bytes(file.read_bytes()[:keep])
    assert contents(opened(folder, ByteTokenizer(), tmp_path / "cache")) == whole


def test_cache_files_that_do_not_belong_together_are_made_again(folder, tmp_path):
    whole = contents(opened(folder, ByteTokenizer(), tmp_path / "cache"))
    (file,) = (tmp_path / "cache").glob("*.tokens.npy")
    np.save(file, np.load(file)[:-1])
    assert contents(opened(folder, ByteTokenizer(), tmp_path / "cache")) == whole


def test_bpe_is_cached(folder, tmp_path, monkeypatch):
    documents, _, hashes = measure_documents(find_texts(folder).documents)
    first = train_bpe(documents, hashes, 260, tmp_path)
    (file,) = tmp_path.glob("bpe-*.json")
    with monkeypatch.context() as patch:
        patch.setattr(BPETokenizer, "train", None)
        assert train_bpe(documents, hashes, 260, tmp_path).fingerprint == first.fingerprint
    file.write_text("{")
    assert train_bpe(documents, hashes, 260, tmp_path).fingerprint == first.fingerprint


def test_bpe_of_a_large_corpus_reads_a_share_of_each_document(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BPE_TRAINING_CHARACTERS", 8)
    documents, _, _ = measure_documents(find_texts(folder).documents)
    assert list(text_module.training_texts(documents)) == ["x", "ca", "on", "tw", "be"]


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "sympow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "sympow"


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write(tmp_path, {"file": "old"})
    for error in (OSError("no space"), KeyboardInterrupt()):
        with pytest.raises(type(error)), atomic_write(tmp_path / "file") as file:
            file.write(b"half")
            raise error
    assert read(find_texts(tmp_path).documents) == {"file": "old"} and len(list(tmp_path.iterdir())) == 1


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name is on the disk before the write ends."""
    path, synced = tmp_path / "file", []

    def fsync(descriptor):
        of_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        synced.append("folder" if of_folder else os.fstat(descriptor).st_size)
        assert path.exists() == of_folder

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(path) as file:
        file.write(b"whole")
    assert synced == [5, "folder"]


def test_what_killed_processes_left_in_the_cache_is_removed_after_a_day(folder, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, hours in ((".a.tokens.npy.0123.tmp", 25), (".b.tokens.npy.4567.tmp", 23), ("bpe-1.json", 99)):
        (cache / name).write_bytes(b"half")
        then = time.time() - 3600 * hours
        os.utime(cache / name, (then, then))
    documents, _, hashes = measure_documents(find_texts(folder).documents)
    tokenize_documents(documents, hashes, ByteTokenizer(), cache)
    left = {path.name for path in cache.iterdir() if not path.name.endswith(".npy")}
    assert left == {".b.tokens.npy.4567.tmp", "bpe-1.json"}


def test_a_full_disk_is_told_with_the_file_that_does_not_fit(tmp_path):
    """Other errors in the block may be of other files."""
    for number, name in ((errno.ENOSPC, str(tmp_path / "file")), (errno.EIO, None)):
        with pytest.raises(OSError) as caught, atomic_write(tmp_path / "file"):
            raise OSError(number, os.strerror(number))
        assert (caught.value.errno, caught.value.filename) == (number, name)


def test_an_error_of_a_file_that_is_read_names_the_innermost_file():
    with pytest.raises(OSError) as caught, naming("outer", reading=True), naming("inner", reading=True):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert caught.value.filename == "inner"
    with pytest.raises(OSError, match=r"^a whole message$"), naming("file", reading=True):
        raise OSError("a whole message")


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    """Such as two launchers of a sweep, which both write its results: the last one has its way."""
    path = tmp_path / "file"
    with atomic_write(path) as first:
        with atomic_write(path) as second:
            second.write(b"second")
        first.write(b"first")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_the_permissions_that_the_user_wants(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
