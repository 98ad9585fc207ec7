"""Files of tokens: nanoGPT's, and those with a header. The batches are those of the same texts in a folder."""

import numpy as np
import pytest

from sympow.data import Batches, DataConfig, open_corpus
from sympow.data.token_files import open_token_files

TEXTS = [f"Text {i}: " + "ein Wort\n" * (3 * i + 1) for i in range(12)]


def write(path, tokens, dtype="<u2", header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.array(tokens, dtype=dtype).tobytes()
    if header is not None:
        data = np.array([header, 1, len(tokens), *[0] * 253], dtype="<i4").tobytes() + data
    path.write_bytes(data)
    return path


def config(path, **values):
    return DataConfig(kind="tokens", path=str(path), **({"tokenizer": "none", "vocab_size": 300} | values))


@pytest.mark.parametrize(("dtype", "header"), [("<u2", None), ("<u2", 20240520), ("<u4", 20240801)])
def test_a_file_of_tokens_equals_the_same_text(tmp_path, dtype, header):
    """nanoGPT's train.bin and val.bin, and those of programs that write a header."""
    paths, texts = {}, ("".join(TEXTS[:9]), "".join(TEXTS[9:]))
    for name, text in zip(("path", "held_out_path"), texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
        paths[name] = str(write(tmp_path / f"{name}.bin", list(text.encode()), dtype, header))
    text = DataConfig(kind="text", path=str(tmp_path / "path.txt"), held_out_path=str(tmp_path / "held_out_path.txt"),
                      tokenizer="bytes")  # fmt: skip
    tokens = DataConfig(kind="tokens", tokenizer="bytes", **paths)
    plain, binary = open_corpus(text, tmp_path / "cache"), open_corpus(tokens)
    for old, new in ((plain.train, binary.train), (plain.held_out, binary.held_out)):
        old, new = Batches(old, 64, 3), Batches(new, 64, 3)
        assert all((old[i].targets == new[i].targets).all() for i in range(20))


@pytest.mark.parametrize("first", [False, True])
def test_documents_between_end_tokens_equal_a_folder_of_texts(tmp_path, first):
    """After each document, as nanoGPT writes them, or before each, as llm.c does."""
    tokens = [[256, *text.encode()] if first else [*text.encode(), 256] for text in TEXTS]
    file = write(tmp_path / "a.bin", [each for document in tokens for each in document])
    corpus, _ = open_token_files(file, 257, end_token=256)
    assert [document.tolist() for document in corpus] == tokens
    split = open_corpus(config(file, end_token=256, held_out=0.3))
    assert sorted(each.tolist() for part in (split.train, split.held_out) for each in part) == sorted(tokens)
    assert len(split.held_out) == 4


def test_one_document_is_cut(tmp_path):
    split = open_corpus(config(write(tmp_path / "a.bin", range(100)), held_out=0.1))
    assert [each[0].tolist() for each in (split.train, split.held_out)] == [list(range(90)), list(range(90, 100))]
    assert split.train.fingerprint != split.held_out.fingerprint


def test_a_folder_of_files(tmp_path):
    for name, tokens in (("b.bin", [4, 5]), ("a.bin", [1, 2, 3]), ("deep/c.bin", [6])):
        write(tmp_path / "shards" / name, tokens)
    (tmp_path / "shards" / "meta.pkl").write_bytes(b"\0")
    corpus, remarks = open_token_files(tmp_path / "shards", 300)
    assert [document.tolist() for document in corpus] == [[1, 2, 3], [4, 5], [6]]
    assert remarks == [f"corpus {tmp_path / 'shards'}: left out 1 files that are no .bin (meta.pkl)"]
    with pytest.raises(IndexError, match="document 3 of a corpus of 3"):
        corpus[3]


def test_large_vocabularies_have_tokens_of_32_bits(tmp_path):
    corpus, _ = open_token_files(write(tmp_path / "a.bin", [70_000, 1], "<u4"), 100_000)
    assert corpus[0].tolist() == [70_000, 1]


def test_fingerprints_follow_the_tokens(tmp_path):
    files = [write(tmp_path / f"{i}.bin", tokens) for i, tokens in enumerate(([1, 2, 1], [1, 2, 1], [1, 2, 3]))]
    prints = [open_token_files(file, 300)[0].fingerprint for file in files]
    prints += [open_token_files(files[0], 300, 2)[0].fingerprint, open_token_files(files[0], 301)[0].fingerprint]
    assert prints[0] == prints[1] and len(set(prints)) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"a.bin is empty"),
        (b"\1\0\1", r"a.bin: expected tokens of 2 bytes, got 3 bytes"),
        (np.array([1, 300], "<u2").tobytes(), r"a.bin holds token 300, outside the vocabulary of 300"),
        (np.arange(40, dtype="<u4").tobytes(), r"a.bin: expected tokens of 16 bits, got a file of 32 bits"),
        (np.array([20240520, 1, 9, *[0] * 255], "<i4").tobytes(), r"of 9 tokens, expected 1,042 bytes, got 1,0"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, data, message):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        open_token_files(tmp_path / "a.bin", 300)


def test_missing_files_and_wrong_tokens(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"token files do not exist: .*no"):
        open_token_files(tmp_path / "no", 300)
    with pytest.raises(ValueError, match=r"is empty: no file ending in .bin in it"):
        open_token_files(tmp_path, 300)
    with pytest.raises(ValueError, match=r"data.end_token is 300, outside the vocabulary of 300"):
        open_token_files(write(tmp_path / "a.bin", [1]), 300, end_token=300)
    with pytest.raises(ValueError, match=r"the only document has 1 token: too short to hold a part out"):
        open_corpus(config(tmp_path / "a.bin"))
