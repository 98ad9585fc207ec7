"""Tokens in the LongCrawl64 layout: a zarr array of documents x tokens, local or on object storage.

LongCrawl64 (Buckman, 2024) has 6,661,465 documents of 65,536 GPT-2 tokens each, in two arrays, `train.zarr` and
`heldout.zarr`: uint16, zarr format 2, Blosc with LZ4. Any array of documents x tokens is read, of any length and
chunks, of zarr format 2 or 3.

Reading a document reads every chunk that contains a part of it. LongCrawl64's chunks have 2,048 documents x 2,048
tokens, so a document needs 32 chunks. In a copy with one chunk per document it needs
one, about a thousandth of the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from sympow.data.corpus import check_index, check_tokens
from sympow.files import digest
from sympow.packages import from_extra


class ZarrCorpus:
    """Reads documents of equal length from a zarr array, when they are asked for.

    Args:
        url: local path or fsspec URL of the array, or of a group that holds a single array.
        vocab_size: every token read is checked against it (ValueError).
        storage_options: passed to fsspec, such as {"token": "anon"}.

    The fingerprint is of the array's shape and dtype and of a few documents, as reading all would take hours:
    it is the same for a copy elsewhere. Safe to fork and to pickle: each process opens the store for itself.
    Raises FileNotFoundError for a missing store, ValueError or TypeError for one that does not fit or lacks chunks,
    OSError for one that cannot be reached or has damaged chunks, ImportError naming the package that a protocol needs.
    """

    def __init__(self, url: str, vocab_size: int, storage_options: Mapping[str, Any] | None = None):
        self.url = url
        self.vocab_size = vocab_size
        self._storage_options = dict(storage_options or {})
        self._opened: tuple[int, Any] | None = None  # the process that opened the store, and the array
        array = self._array()
        if array.ndim != 2:
            raise ValueError(f"zarr corpus {url}: expected an array of documents x tokens, got shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise TypeError(f"zarr corpus {url}: expected integer tokens, got dtype {array.dtype}")
        tokens = math.prod(array.shape)
        if not tokens:
            raise ValueError(f"zarr corpus {url} is empty: shape {array.shape}")
        if tokens >= 1 << 63:
            raise ValueError(f"zarr corpus {url}: expected fewer than 2**63 tokens, got shape {array.shape!s:.100}")
        documents, length = array.shape
        self.lengths = np.broadcast_to(np.int64(length), (documents,))  # one number, however many documents
        samples = np.unique(np.linspace(0, documents - 1, 4).astype(np.int64))
        described = f"{array.shape} {array.dtype} {vocab_size}"
        self.fingerprint = digest([described, *(self[int(i)].tobytes() for i in samples)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, len(self))
        try:
            document = np.asarray(self._array()[int(index)])
        except Exception as error:  # each codec and each protocol of fsspec has others
            reason = f"{type(error).__name__} {error}".split("\n")[0]
            raise OSError(f"zarr corpus {self.url}: document {index} cannot be read: {reason}") from error
        self._check_chunks(document, index)
        check_tokens(document, self.vocab_size, f"zarr corpus {self.url}: document {index}")
        return document

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _check_chunks(self, document: np.ndarray, index: int) -> None:
        """Raises ValueError for a chunk that is not there, also for one in a shard.

        zarr fills such a chunk with one value, so an incomplete copy would look whole. A part of one value is read once
        more with another fill value: a chunk that is there does not change.
        """
        array = self._array()
        rows, width = array.chunks
        for start in range(0, len(document), width):
            part = document[start : start + width]
            if not (part == part[0]).all():
                continue
            other = _with_fill_value(array, 0 if part[0] else 1)
            if (np.asarray(other[index, start : start + width]) != part).any():
                key = array.metadata.encode_chunk_key((index // rows, start // width))
                what = f"chunk {key}"
                if array.shards is not None:
                    shard = (index // array.shards[0], start // array.shards[1])
                    what = f"chunk {key} of shard {array.metadata.encode_chunk_key(shard)}"
                raise ValueError(
                    "a chunk of fill values is stored only with zarr's config={'write_empty_chunks': True}; "
                    f"zarr corpus {self.url} is incomplete: document {index} lacks {what}"
                )

    def _array(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), _open_array(self.url, self._storage_options))
        return self._opened[1]


def _with_fill_value(array: Any, value: int) -> Any:
    """Returns the same array with another value for chunks that are not stored."""
    import zarr

    fill = array.dtype.type(value)
    metadata = dataclasses.replace(array.metadata, fill_value=fill)
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=array.store_path))


def _open_array(url: str, storage_options: dict[str, Any]) -> Any:
    with from_extra("train", "reading zarr corpora needs zarr"):
        import zarr
    if "://" not in url and not os.path.exists(url):
        raise FileNotFoundError(f"zarr corpus does not exist: {url}; data.path and data.held_out_path name corpora")
    try:
        # None, as zarr refuses options for a local path, even none of them
        node = zarr.open(url, mode="r", storage_options=storage_options or None)
    except FileNotFoundError:
        raise FileNotFoundError(f"no zarr array or group at {url}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"zarr corpus {url} is damaged: its metadata are no JSON ({error})") from None
    except (OSError, ImportError):  # with a line of their own
        raise
    except (ValueError, TypeError) as error:  # of metadata, a protocol or its options
        line = str(error).split("\n")[0]
        raise ValueError(f"zarr corpus {url} cannot be read: {line}") from None
    except Exception as error:  # each protocol of fsspec has others
        raise OSError(f"zarr corpus {url} cannot be read: {type(error).__name__} {error}") from None
    if isinstance(node, zarr.Array):
        return node
    arrays = dict(node.arrays())
    if len(arrays) != 1:
        names = ", ".join(sorted(arrays)) or "none"
        raise ValueError(f"zarr corpus {url} is a group; expected one array in it, got {names}: name one in the path")
    return next(iter(arrays.values()))
