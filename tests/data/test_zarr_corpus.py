import functools
import http.server
import json
import pickle
import sys
import threading
import uuid

import numpy as np
import pytest
import zarr
from numcodecs import Blosc

from sympow.data import DataConfig, ZarrCorpus, open_corpus

TOKENS = np.random.default_rng(0).integers(0, 50257, (5, 64), dtype=np.uint16)


def store(url: str, tokens: np.ndarray = TOKENS, zarr_format: int = 2, **options) -> str:
    """As LongCrawl64: zarr format 2, a chunk a document."""
    zarr.create_array(
        url.removeprefix("file://"), data=tokens, chunks=(1, *tokens.shape[1:]), zarr_format=zarr_format, **options
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


@pytest.fixture
def longcrawl64(tmp_path):
    """A folder with small arrays in LongCrawl64's own layout: its names, format, compressor, and chunks of many
    documents and of a part of their tokens, those at the ends not full."""
    for name, tokens in (("train", TOKENS), ("heldout", TOKENS[:2])):
        zarr.create_array(
            tmp_path / f"{name}.zarr",
            data=tokens,
            chunks=(3, 20),
            zarr_format=2,
            fill_value=0,
            compressors=Blosc("lz4", clevel=5, shuffle=Blosc.SHUFFLE),
        )
    return tmp_path


@pytest.fixture
def serve():
    """serve(folder) gives the URL of a web server with its files."""
    servers = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if "/forbidden" in self.path:
                self.send_error(403)
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    def start(folder) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_longcrawl64_from_a_web_server(longcrawl64, serve):
    url = serve(longcrawl64)
    paths = {"path": f"{url}/train.zarr", "held_out_path": f"{url}/heldout.zarr"}
    splits = open_corpus(DataConfig(kind="zarr", tokenizer="none", vocab_size=50257, **paths))
    np.testing.assert_array_equal(list(splits.train), TOKENS)
    np.testing.assert_array_equal(list(splits.held_out), TOKENS[:2])


def test_errors_of_a_web_server(tmp_path, serve):
    url = serve(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^no zarr array or group at {url}/nothing.zarr$"):
        ZarrCorpus(f"{url}/nothing.zarr", 50257)
    with pytest.raises(OSError, match=f"^zarr corpus {url}/forbidden cannot be read: ClientResponseError 403,"):
        ZarrCorpus(f"{url}/forbidden", 50257)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_incomplete_copy_is_refused(tmp_path, zarr_format):
    """What zarr gives for a chunk that is not there are tokens too."""
    tokens = TOKENS.copy()
    tokens[0, :32] = 0  # a chunk that is there
    path = tmp_path / "a.zarr"
    config = {"write_empty_chunks": True}
    zarr.create_array(path, data=tokens, chunks=(1, 32), zarr_format=zarr_format, config=config)
    np.testing.assert_array_equal(list(ZarrCorpus(str(path), 50257)), tokens)
    key = {2: "3.1", 3: "c/3/1"}[zarr_format]
    (path / key).unlink()
    corpus = ZarrCorpus(str(path), 50257)  # document 3 is not among those read at opening
    with pytest.raises(ValueError, match=rf"a\.zarr is incomplete: document 3 lacks chunk {key}$"):
        corpus[3]


@pytest.mark.parametrize("fill", [0, 7])
@pytest.mark.parametrize("shards", [None, (4, 64), (2, 32)])
def test_a_chunk_of_fill_values_that_is_not_stored_is_told_from_one_that_is(tmp_path, shards, fill):
    """Also inside a shard, which is there."""
    tokens = TOKENS.copy()
    tokens[2, 16:32], tokens[3, :16] = fill, 9
    paths = {}
    for stored in (True, False):
        paths[stored] = str(tmp_path / f"{stored}.zarr")
        zarr.create_array(paths[stored], data=tokens, chunks=(1, 16), shards=shards, fill_value=fill,
                          config={"write_empty_chunks": stored})  # fmt: skip
    np.testing.assert_array_equal(list(ZarrCorpus(paths[True], 50257)), tokens)
    of_shard = {None: "", (4, 64): " of shard c/0/0", (2, 32): " of shard c/1/0"}[shards]
    message = rf"'write_empty_chunks': True.* is incomplete: document 2 lacks chunk c/2/1{of_shard}$"
    with pytest.raises(ValueError, match=message):
        list(ZarrCorpus(paths[False], 50257))


def test_a_damaged_copy_is_refused(tmp_path):
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=TOKENS, chunks=(1, TOKENS.shape[1]), zarr_format=2)
    corpus = ZarrCorpus(str(path), 50257)
    (path / "1.0").write_bytes((path / "1.0").read_bytes()[:20])
    with pytest.raises(OSError, match=rf"^zarr corpus {path}: document 1 cannot be read: \w+ .*$"):
        corpus[1]
    (path / ".zarray").write_text("{")
    with pytest.raises(ValueError, match=rf"^zarr corpus {path} is damaged: its metadata are no JSON \("):
        ZarrCorpus(str(path), 50257)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": 0}, "cannot be read: No Zarr data type"),
        ({"dtype": "|V10"}, "cannot be read: Invalid type: 0"),
        ({"filters": [{"id": "nope"}]}, "cannot be read: codec not available"),
        ({"shape": 3}, "cannot be read: The `shape` and"),
        ({"shape": [10**400, 8]}, r"expected fewer than 2\*\*63 tokens, got shape \(1000"),
    ],
)
def test_an_array_of_wrong_metadata_is_named(tmp_path, changed, message):
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=TOKENS, chunks=(1, TOKENS.shape[1]), zarr_format=2)
    metadata = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps(metadata | changed))
    with pytest.raises(ValueError, match=rf"^zarr corpus {path}:? {message}[^\n]*$"):
        ZarrCorpus(str(path), 50257)


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
    with pytest.raises(ValueError, match="expected one array in it, got heldout, tokens: name one in the path"):
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
    opened, real = [], zarr.open
    monkeypatch.setattr(zarr, "open", lambda *x, **options: opened.append(1) or real(*x, **options))
    copy = pickle.loads(pickle.dumps(corpus))
    assert not opened
    for index in (2, 1):
        np.testing.assert_array_equal(copy[index], TOKENS[index])
        np.testing.assert_array_equal(corpus[index], TOKENS[index])
    assert len(opened) == 1
    monkeypatch.setattr("os.getpid", lambda: -1)  # as after a fork
    np.testing.assert_array_equal(corpus[2], TOKENS[2])
    assert len(opened) == 2


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    tokens = np.ones((100, 8), dtype=np.uint16)
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


def test_missing_package_is_named(tmp_path, monkeypatch):
    """Also where zarr is there, and what it imports is not."""
    (tmp_path / "zarr.py").write_text("import absent")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zarr")
    line = r"reading zarr corpora needs zarr: pip install 'sympow\[train\]' \(No module named 'absent'\)"
    with pytest.raises(ImportError, match=line):
        ZarrCorpus("memory://a", 50257)


@pytest.mark.parametrize("index", [-1, 5])
def test_no_document_outside(tmp_path, index):
    with pytest.raises(IndexError, match=f"document {index} of a corpus of 5"):
        ZarrCorpus(store(str(tmp_path / "a")), 50257)[index]
