import pickle
import sys
import uuid

import numpy as np
import pytest
import zarr

from sympow.data import ZarrCorpus

TOKENS = np.random.default_rng(0).integers(0, 50257, (5, 64), dtype=np.uint16)


def store(url: str, tokens: np.ndarray = TOKENS, zarr_format: int = 2, **options) -> str:
    """As LongCrawl64: zarr format 2, a chunk a document."""
    zarr.create_array(
        url.removeprefix("file://"),
        data=tokens,
        chunks=(1, *tokens.shape[1:]),
        zarr_format=zarr_format,
        **options,
    )
    return url


@pytest.fixture(params=["path", "file", "memory"])
def url(request, tmp_path):
    return {
        "path": str(tmp_path / "train.zarr"),
        "file": f"file://{tmp_path}/train.zarr",
        "memory": f"memory://{uuid.uuid4()}/train.zarr",
    }[request.param]


def test_documents_of_the_longcrawl_layout(url):
    corpus = ZarrCorpus(store(url), vocab_size=50257)
    assert len(corpus) == 5 and corpus.lengths.tolist() == [64] * 5 and corpus.lengths.dtype == np.int64
    assert corpus.vocab_size == 50257 and corpus[3].dtype == np.uint16
    np.testing.assert_array_equal(list(corpus), TOKENS)


def test_storage_options_reach_fsspec(tmp_path):
    corpus = ZarrCorpus(f"file://{store(str(tmp_path / 'a'))}", 50257, {"auto_mkdir": False})
    np.testing.assert_array_equal(corpus[0], TOKENS[0])


def test_zarr_format_3_and_arrays_in_groups(tmp_path):
    store(str(tmp_path / "three"), zarr_format=3)
    np.testing.assert_array_equal(ZarrCorpus(str(tmp_path / "three"), 50257)[1], TOKENS[1])
    root = str(tmp_path / "group")
    zarr.create_group(root, zarr_format=2)
    with pytest.raises(ValueError, match="is a group; expected one array in it, got none"):
        ZarrCorpus(root, 50257)
    store(root, name="tokens")
    np.testing.assert_array_equal(ZarrCorpus(root, 50257)[1], TOKENS[1])
    store(root, name="heldout")
    with pytest.raises(
        ValueError, match="expected one array in it, got heldout, tokens: name one in the path"
    ):
        ZarrCorpus(root, 50257)
    np.testing.assert_array_equal(ZarrCorpus(f"{root}/tokens", 50257)[1], TOKENS[1])


def test_fingerprint_is_of_the_content_not_of_the_place(tmp_path):
    other = TOKENS.copy()
    other[-1, -1] ^= 1
    corpora = [
        ZarrCorpus(store(str(tmp_path / "a")), 50257),
        ZarrCorpus(store(str(tmp_path / "b")), 50257),
        ZarrCorpus(store(str(tmp_path / "c"), other), 50257),
        ZarrCorpus(store(str(tmp_path / "d"), TOKENS[:, :-1]), 50257),
        ZarrCorpus(str(tmp_path / "a"), 50304),
    ]
    prints = [corpus.fingerprint for corpus in corpora]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_another_process_opens_the_store_itself(tmp_path, monkeypatch):
    corpus = ZarrCorpus(store(str(tmp_path / "a")), 50257)
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy._opened is None
    np.testing.assert_array_equal(copy[2], TOKENS[2])
    before = corpus._array()
    assert corpus._array() is before
    monkeypatch.setattr("os.getpid", lambda: -1)  # as after a fork
    assert corpus._array() is not before


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    tokens = np.zeros((100, 8), dtype=np.uint16)
    tokens[50] = 300  # not among the documents read at opening
    corpus = ZarrCorpus(store(str(tmp_path / "a"), tokens), vocab_size=256)
    with pytest.raises(ValueError, match=r"a: document 50 holds token 300, outside the vocabulary of 256$"):
        corpus[50]
    with pytest.raises(ValueError, match=r"outside the vocabulary of 256$"):
        ZarrCorpus(store(str(tmp_path / "b")), vocab_size=256)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.zeros(8, np.uint16), ValueError, r"expected an array of documents x tokens, got shape \(8,\)"),
        (np.zeros((2, 2, 2), np.uint16), ValueError, r"documents x tokens, got shape \(2, 2, 2\)"),
        (np.zeros((2, 8), np.float32), TypeError, "expected integer tokens, got dtype float32"),
        (np.zeros((0, 8), np.uint16), ValueError, r"is empty: shape \(0, 8\)"),
    ],
)
def test_arrays_that_are_no_corpus_are_refused(tmp_path, tokens, error, message):
    path = str(tmp_path / "a")
    zarr.create_array(path, data=tokens, chunks=tuple(max(n, 1) for n in tokens.shape), zarr_format=2)
    with pytest.raises(error, match=message):
        ZarrCorpus(path, 50257)


def test_missing_stores(tmp_path, url):
    with pytest.raises(FileNotFoundError, match=r"zarr corpus does not exist: |no zarr array or group at "):
        ZarrCorpus(url, 50257)
    with pytest.raises(FileNotFoundError, match="no zarr array or group at"):
        ZarrCorpus(str(tmp_path), 50257)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"reading zarr corpora needs zarr: pip install 'sympow\[train\]'"):
        ZarrCorpus("memory://a", 50257)


@pytest.mark.parametrize("index", [-1, 5])
def test_no_document_outside(tmp_path, index):
    with pytest.raises(IndexError, match=f"document {index} of a corpus of 5"):
        ZarrCorpus(store(str(tmp_path / "a")), 50257)[index]
