"""The same texts in other files give the same corpus; what is left out is told, what cannot be read is refused."""

import gzip
import json
import os
import sys

import numpy as np
import pytest

from sympow.data import DataConfig, open_corpus, text_files
from sympow.data.text import find_texts

TEXTS = [f"Text {i}: " + "ein Wort, 词, \U0001f600\n" * (3 * i + 1) for i in range(24)]


def folder_of_texts(root, encoding="utf-8"):
    root.mkdir()
    for i, text in enumerate(TEXTS):
        (root / f"{i:03}.txt").write_bytes(text.encode(encoding))
    return root


def lines(texts, field="text", start=0):
    rows = ({"id": start + i, field: text} for i, text in enumerate(texts))
    return "".join(json.dumps(row, ensure_ascii=start == 0) + "\n" for row in rows).encode()


def zstd(data):
    arrow = pytest.importorskip("pyarrow")
    sink = arrow.BufferOutputStream()
    with arrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def as_jsonl(root):
    root.with_suffix(".jsonl").write_bytes(lines(TEXTS))
    return root.with_suffix(".jsonl")


def as_jsonl_gz(root):
    """Two shards, and a member more in the second."""
    (root / "deep").mkdir(parents=True)
    (root / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:10])))
    parts = (lines(TEXTS[10:20], start=10), b"\n \n" + lines(TEXTS[20:], start=20))
    (root / "deep" / "b.json.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    return root


def as_jsonl_zst(root):
    root.mkdir()
    (root / "a.jsonl.zst").write_bytes(zstd(lines(TEXTS[:20])) + zstd(lines(TEXTS[20:])))
    return root


def as_marked_jsonl(root):
    root.mkdir()
    (root / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(TEXTS[:10]))
    (root / "b.ndjson").write_bytes(lines(TEXTS[10:]).decode().encode("utf-16"))
    return root


def as_text_gz(root):
    root.mkdir()
    for i, text in enumerate(TEXTS):
        (root / f"{i:03}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return root


def as_utf16(root):
    return folder_of_texts(root, "utf-16")


def as_marked_utf8(root):
    return folder_of_texts(root, "utf-8-sig")


def as_parquet(root):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = root.with_suffix(".parquet")
    parquet.write_table(arrow.table({"id": range(len(TEXTS)), "text": TEXTS}), file, row_group_size=7)
    return file


def as_parquet_gz(root):
    file = as_parquet(root)
    root.mkdir()
    (root / "a.parquet.gz").write_bytes(gzip.compress(file.read_bytes()))
    return root


def as_dataset(root):
    """As `datasets` saves it, and a cache that it wrote later."""
    arrow = pytest.importorskip("pyarrow")
    root.mkdir()
    names = ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    for name, texts in zip((*names, "cache-1.arrow"), (TEXTS[:9], TEXTS[9:], ["no"]), strict=True):
        table = arrow.table({"text": texts})
        with arrow.ipc.new_stream(root / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    (root / "dataset_info.json").write_text("{}")
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return root


def as_arrow_file(root):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": arrow.array(TEXTS).dictionary_encode()})
    with arrow.ipc.new_file(root.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table)
    return root.with_suffix(".arrow")


def as_dataset_by_datasets(root):
    datasets = pytest.importorskip("datasets")
    table = datasets.table.InMemoryTable.from_pydict({"text": TEXTS})
    datasets.DatasetDict({"train": datasets.Dataset(table, fingerprint="0")}).save_to_disk(str(root))
    return root


FORMS = [as_jsonl, as_jsonl_gz, as_jsonl_zst, as_marked_jsonl, as_text_gz, as_utf16, as_marked_utf8, as_parquet,
         as_parquet_gz, as_dataset, as_arrow_file, as_dataset_by_datasets]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_same_texts_give_the_same_corpus(form, tmp_path):
    def opened(path):
        return open_corpus(DataConfig(kind="text", path=str(path)), tmp_path / "cache")

    plain, other = opened(folder_of_texts(tmp_path / "plain")), opened(form(tmp_path / "other"))
    assert other.tokenizer.fingerprint == plain.tokenizer.fingerprint
    for old, new in ((plain.train, other.train), (plain.held_out, other.held_out)):
        assert new.fingerprint == old.fingerprint
        assert [document.tolist() for document in new] == [document.tolist() for document in old]
    assert other.remarks == ()


def test_rows_are_read_in_any_order(tmp_path):
    documents = find_texts(as_jsonl(tmp_path / "a")).documents
    order = np.random.default_rng(0).permutation(len(TEXTS)).tolist()
    assert [documents[i].read() for i in order] == [TEXTS[i] for i in order]


def test_the_field_of_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS, "content"))
    assert [each.read() for each in find_texts(tmp_path / "a.jsonl", text_field="content").documents] == TEXTS
    config = DataConfig(kind="text", path=str(tmp_path / "a.jsonl"), tokenizer="bytes")
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: expected the field 'text', got 'id', 'content': data."):
        open_corpus(config, tmp_path / "cache")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"content": TEXTS}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: expected the field 'text', got 'content': data.text_field"):
        find_texts(tmp_path / "a.parquet")


def test_what_is_left_out_is_told(tmp_path):
    root = folder_of_texts(tmp_path / "books")
    for name, data in (
        ("a.bin", b"\0\1"),
        ("small.bz2", b"BZh91AY&SY"),
        ("noted.gz", gzip.compress(b"\0\0", mtime=0)),
        (".hidden", b"no"),
        ("table.csv", b"text,id\nno,1\n"),
        ("package.json", b'{\n "name": "no"\n}\n'),
        ("empty.txt", b""),
        ("latin.txt", b"caf\xe9"),
    ):
        (root / name).write_bytes(data)
    (root / ".git").mkdir()
    os.symlink(tmp_path / "nowhere", root / "broken.txt")
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", root / "link")
    splits = open_corpus(DataConfig(kind="text", path=str(root), tokenizer="bytes"), tmp_path / "cache")
    assert len(splits.train) + len(splits.held_out) == len(TEXTS) + 1  # latin.txt
    assert splits.remarks == (
        f"corpus {root}: left out 1 JSON without a field 'text' in each line (package.json), "
        "3 binary (a.bin, noted.gz, small.bz2), 1 broken links (broken.txt), 2 hidden (.git, .hidden), "
        "1 links to folders (link), 1 tables (table.csv), 1 empty documents",
        f"corpus {root}: 1 files with bytes that are no text, read as U+FFFD (latin.txt)",
    )


def test_many_names_are_shortened(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(b"\0")
    (tmp_path / "a.txt").write_text("a")
    assert find_texts(tmp_path).left_out == "5 binary (0.png, 1.png, 2.png, ... 5 .png)"
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"is empty: no text file in it; left out are 5 binary \(0.png, "):
        find_texts(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt.gz", gzip.compress(b"a" * 99, mtime=0)[:20], r"a.txt.gz cannot be read as .gz: Compressed file ended"),
        ("a.jsonl.gz", gzip.compress(lines(TEXTS))[:-9], r"a.jsonl.gz cannot be read as .gz: "),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"a.jsonl.gz cannot be read as .gz: Not a gzipped file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a.jsonl, line 2: expected a JSON object, got what is no JSON"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", r"a.jsonl, line 2: expected .* nested too deeply"),
        ("a.jsonl", b'["a"]\n', r"""a.jsonl, line 1: expected a JSON object, got '\["a"\]'"""),
        ("a.jsonl", b'\n{"text": ["a"]}\n', r"a.jsonl, line 2: expected a string in the field 'text', got \['a'\]"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, name, data, message, inside):
    root = tmp_path / "corpus"
    root.mkdir()
    (root / name).write_bytes(data)
    (root / "z.txt").write_text("text")
    config = DataConfig(kind="text", path=str(root if inside else root / name), tokenizer="bytes")
    with pytest.raises(ValueError, match=message):
        open_corpus(config, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.parquet", b"PAR1", "a.parquet cannot be read as parquet: "),
        ("a.parquet", b"text", "a.parquet cannot be read as parquet: "),
        ("a.arrow", b"text", "a.arrow cannot be read as arrow: "),
        ("a.jsonl.zst", b"text", "a.jsonl.zst cannot be read: ZSTD decompress failed"),
    ],
)
def test_files_that_pyarrow_cannot_read_are_refused_by_name(tmp_path, name, data, message):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        find_texts(tmp_path)


@pytest.mark.parametrize("end", ["gz", "zst"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.jsonl",
            r", line 2: expected at most 20,000 characters from the [\d,]+ bytes of the .* file; got more$",
        ),
        ("a.txt", r": expected at most 20,000 bytes from the [\d,]+ bytes of the compressed file; got more$"),
        ("a.parquet", ": expected at most 20,000 bytes "),
    ],
)
def test_a_small_compressed_file_does_not_fill_the_memory(tmp_path, monkeypatch, end, name, message):
    monkeypatch.setattr(text_files, "SMALL", 20000)
    monkeypatch.setattr(text_files, "RATIO", 1)
    file, data = tmp_path / f"{name}.{end}", lines(["a" * 19000, "b" * 20000])
    file.write_bytes(gzip.compress(data) if end == "gz" else zstd(data))
    with pytest.raises(ValueError, match=rf"{file.name}{message}"):
        [document.read() for document in find_texts(file).documents]
    monkeypatch.undo()
    if name != "a.parquet":
        assert len(find_texts(file).documents[0].read()) >= 19000


def test_numbers_in_the_field_are_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: expected strings in the field 'text', got 1"):
        find_texts(tmp_path).documents[0].read()


def test_a_dataset_of_splits_names_them(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"is a dataset with the splits train, test: name one in the path"):
        find_texts(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{")
    with pytest.raises(ValueError, match=r"dataset_dict.json is damaged: expected JSON of a saved dataset"):
        find_texts(tmp_path)


@pytest.mark.parametrize(("name", "data"), [("a.csv", b"text,id\n"), ("a.json", b'{\n"name": 1}')])
def test_tables_are_read_as_text_only_if_their_ending_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    end = os.path.splitext(name)[1]
    with pytest.raises(ValueError, match=rf"data.suffixes={end} reads it as plain text"):
        find_texts(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        (document,) = find_texts(path, suffixes=(end,)).documents
        assert document.read() == data.decode()


def test_files_of_tokens_name_their_kind(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\1\0")
    with pytest.raises(ValueError, match=r"got a binary file; data.kind=tokens reads files of tokens"):
        find_texts(tmp_path / "train.bin")


def test_groups_are_of_plain_texts(tmp_path):
    as_text_gz(tmp_path / "texts")
    folder_of_texts(tmp_path / "plain")
    zipped, plain = (find_texts(tmp_path / name, group="folder").documents[0].read() for name in ("texts", "plain"))
    assert zipped == plain
    with pytest.raises(ValueError, match=r"data.group=folder joins plain texts, got a file of rows, .*a.jsonl"):
        find_texts(as_jsonl(tmp_path / "a").parent, group="folder")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.arrow", "a.txt.zst"):
        (tmp_path / name).write_bytes(b"data")
        with pytest.raises(ImportError, match=rf"reading .*{name} needs pyarrow: pip install 'sympow\[data\]'"):
            find_texts(tmp_path / name)
