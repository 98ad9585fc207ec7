import numpy as np
import pytest
import zarr

from sympow.data import BPETokenizer, ByteTokenizer, DataConfig, open_corpus


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "books"
    root.mkdir()
    for i in range(10):
        (root / f"{i}.txt").write_text(f"book {i} " * (i + 1))
    return str(root)


def texts(corpus, tokenizer):
    return [tokenizer.decode(document) for document in corpus]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_in_one_split(folder, tmp_path, tokenizer):
    config = DataConfig(kind="text", path=folder, tokenizer=tokenizer, held_out=0.3)
    splits = open_corpus(config, cache_dir=tmp_path / "cache")
    train, held_out = texts(splits.train, splits.tokenizer), texts(splits.held_out, splits.tokenizer)
    assert len(held_out) == 3 and len(train) == 7
    assert sorted(train + held_out) == sorted(f"book {i} " * (i + 1) for i in range(10))
    assert splits.train.vocab_size == splits.held_out.vocab_size == splits.tokenizer.vocab_size


def test_the_seed_chooses_the_split(folder, tmp_path):
    def fingerprints(seed):
        splits = open_corpus(DataConfig(kind="text", path=folder, tokenizer="bytes", seed=seed), tmp_path / "cache")
        return splits.train.fingerprint, splits.held_out.fingerprint

    assert fingerprints(0) == fingerprints(0)
    assert len({fingerprints(seed) for seed in range(8)}) > 1


def test_bpe_learns_from_the_training_documents_alone(tmp_path):
    for name, text in (("train", "spam " * 100), ("held", "quux " * 100)):
        (tmp_path / name).write_text(text)
    config = DataConfig(kind="text", path=str(tmp_path / "train"), held_out_path=str(tmp_path / "held"))
    splits = open_corpus(config, tmp_path / "cache")
    assert len(splits.tokenizer.encode(" spam")) == 1 and len(splits.tokenizer.encode(" quux")) == 5
    assert texts(splits.train, splits.tokenizer) == ["spam " * 100]
    assert texts(splits.held_out, splits.tokenizer) == ["quux " * 100]


def test_a_single_file_is_cut(tmp_path):
    (tmp_path / "book.txt").write_text("line\n" * 100)
    config = DataConfig(kind="text", path=str(tmp_path / "book.txt"), tokenizer="bytes", held_out=0.1)
    splits = open_corpus(config, tmp_path / "cache")
    assert splits.train.lengths.tolist() == [450] and splits.held_out.lengths.tolist() == [50]


def test_tokenizer_from_a_file_or_given(folder, tmp_path):
    bpe = BPETokenizer.train(["book"], vocab_size=258)
    bpe.save(tmp_path / "own.json")
    config = DataConfig(kind="text", path=folder, tokenizer=str(tmp_path / "own.json"))
    assert open_corpus(config, tmp_path / "cache").tokenizer.fingerprint == bpe.fingerprint
    given = open_corpus(DataConfig(kind="text", path=folder), tmp_path / "cache", tokenizer=bpe)
    assert given.tokenizer is bpe and given.train.vocab_size == 258


def test_the_default_corpus_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    splits = open_corpus(DataConfig(tokenizer="bytes"))
    assert list((tmp_path / "sympow").glob("*.tokens.npy"))
    total = splits.train.lengths.sum() + splits.held_out.lengths.sum()
    assert 0.05 < splits.held_out.lengths.sum() / total < 0.2
    assert (splits.held_out.lengths >= 65_536).sum() >= 3  # long enough for contexts beyond the training one
    assert bytes(splits.train[0][:2]) == b"# "


def test_empty_corpora(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "empty.txt").write_text("")
    config = DataConfig(kind="text", path=str(tmp_path / "books"), tokenizer="bytes")
    with pytest.raises(ValueError, match="books is empty: its files hold no text"):
        open_corpus(config, tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="text corpus does not exist"):
        open_corpus(DataConfig(kind="text", path=str(tmp_path / "no"), tokenizer="bytes"), tmp_path / "cache")


def test_a_corpus_of_a_few_characters(tmp_path):
    config = DataConfig(kind="text", path=str(tmp_path / "short.txt"), tokenizer="bytes", held_out=0.9)
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(ValueError, match="has 1 character: too short to hold a part out"):
        open_corpus(config, tmp_path / "cache")
    (tmp_path / "short.txt").write_text("xy")
    splits = open_corpus(config, tmp_path / "cache")
    assert [bytes(corpus[0].tolist()) for corpus in (splits.train, splits.held_out)] == [b"x", b"y"]


def test_a_vocabulary_that_is_not_the_tokenizers_is_refused(folder, tmp_path):
    config = DataConfig(kind="text", path=folder, tokenizer="bytes", vocab_size=300)
    with pytest.raises(ValueError, match="data vocab_size is 300, but bytes tokens have 256"):
        open_corpus(config, tmp_path / "cache")


def zarr_array(path, documents: int, first: int = 0) -> str:
    tokens = np.arange(first, first + documents, dtype=np.uint16)[:, None].repeat(16, axis=1)
    config = {"write_empty_chunks": True}  # document 0 is all zeros
    zarr.create_array(str(path), data=tokens, chunks=(1, 16), zarr_format=2, config=config)
    return str(path)


def test_zarr_split_by_document(tmp_path):
    config = DataConfig(kind="zarr", path=zarr_array(tmp_path / "a", 20), tokenizer="none", vocab_size=20)
    splits = open_corpus(config)
    assert splits.tokenizer is None and (len(splits.train), len(splits.held_out)) == (18, 2)
    documents = [int(document[0]) for corpus in (splits.train, splits.held_out) for document in corpus]
    assert sorted(documents) == list(range(20))


def test_zarr_with_its_own_held_out_array(tmp_path):
    config = DataConfig(
        kind="zarr",
        path=zarr_array(tmp_path / "train", 3),
        held_out_path=zarr_array(tmp_path / "heldout", 2, first=10),
        tokenizer="bytes",
    )
    splits = open_corpus(config)
    assert isinstance(splits.tokenizer, ByteTokenizer) and splits.train.vocab_size == 256
    assert [int(document[0]) for document in splits.train] == [0, 1, 2]
    assert [int(document[0]) for document in splits.held_out] == [10, 11]


def test_zarr_tokens_outside_the_tokenizers_vocabulary(tmp_path):
    config = DataConfig(kind="zarr", path=zarr_array(tmp_path / "a", 2, first=300), tokenizer="bytes")
    with pytest.raises(ValueError, match="document 0 holds token 300, outside the vocabulary of 256"):
        open_corpus(config)
