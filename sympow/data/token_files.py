"""Files of tokens (.bin): a flat array of 16 or 32 bit integers, with or without a header.

A file without a header, as nanoGPT writes it, has tokens of 16 bits, or of 32 bits for a vocabulary above 65,536. A
header of 1,024 bytes, as llm.c and programs after it write it, tells the number of tokens: its int32 numbers are a
magic number, a version, and this number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sympow.data.corpus import Concatenated, Corpus, TokenCorpus
from sympow.files import digest

_HEADER = 1024  # bytes
_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # by the magic number of the header
_BLOCK = 1 << 24  # tokens that are checked at a time


def open_token_files(
    path: str | os.PathLike[str], vocab_size: int, end_token: int | None = None
) -> tuple[Corpus, list[str]]:
    """Opens a file of tokens, or all files of tokens (.bin) in a folder and its subfolders, in sorted order.

    The files are mapped into memory. All tokens are read once, to check them and to find the ends of documents.

    Args:
        path: the file or the folder.
        vocab_size: the size of the vocabulary.
        end_token: the token that separates documents. In a file that begins with it, it is the first token of every
            document, otherwise the last one. None: a file is one document.

    Returns the corpus, and a line for what is left out of a folder.

    Raises FileNotFoundError for a missing path, and ValueError for a folder without such files, for a file of another
    format, and for tokens outside the vocabulary.
    """
    if end_token is not None and end_token >= vocab_size:
        raise ValueError(f"data.end_token is {end_token}, outside the vocabulary of {vocab_size}")
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"token files do not exist: {root}; data.path names them")
    if root.is_file():
        return _open_file(root, vocab_size, end_token), []
    below = sorted(file for file in root.rglob("*") if file.is_file())
    files = [file for file in below if file.suffix == ".bin"]
    if not files:
        raise ValueError(f"token corpus {root} is empty: no file ending in .bin in it")
    others = [file.relative_to(root).as_posix() for file in below if file.suffix != ".bin"]
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    remarks = [f"corpus {root}: left out {len(others):,} files that are no .bin ({shown})"] if others else []
    return Concatenated([_open_file(file, vocab_size, end_token) for file in files]), remarks


def cut_tokens(corpus: Corpus, fraction: float) -> tuple[Corpus, Corpus]:
    """Cuts a corpus of one document in two: all but the last `fraction` of its tokens, and those.

    Raises ValueError for a document of one token.
    """
    tokens = corpus[0]
    if len(tokens) < 2:
        raise ValueError("the only document has 1 token: too short to hold a part out")
    end = max(1, int(len(tokens) * (1 - fraction)))
    parts = ((tokens[:end], "begin"), (tokens[end:], "end"))
    first, last = (
        TokenCorpus(part, np.array([0, len(part)]), corpus.vocab_size, digest([corpus.fingerprint, str(end), name]))
        for part, name in parts
    )
    return first, last


def _open_file(path: Path, vocab_size: int, end_token: int | None) -> TokenCorpus:
    tokens = _map(path, vocab_size)
    hashes, ends, odd = [str(vocab_size), str(end_token)], [], False
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        largest = block.max()
        if largest >= vocab_size:
            raise ValueError(f"token file {path} holds token {largest}, outside the vocabulary of {vocab_size}")
        odd = odd or bool(block[1::2].any())
        hashes.append(digest([np.ascontiguousarray(block, dtype=np.uint32).tobytes()]))
        if end_token is not None:
            ends.append(start + np.flatnonzero(block == end_token))
    if not odd and len(tokens) >= 64 and tokens.itemsize == 2 and bool(tokens[::2].any()):
        raise ValueError(f"token file {path}: expected tokens of 16 bits, got a file of 32 bits: every second one is 0")
    bounds = np.concatenate(list(_bounds(tokens, ends)))
    return TokenCorpus(tokens, bounds, vocab_size, digest(hashes))


def _bounds(tokens: np.ndarray, ends: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the parts of the offsets of documents."""
    found = np.concatenate([np.empty(0, np.int64), *ends]).astype(np.int64)
    if not len(found) or found[0] != 0:  # the token ends documents
        found = found + 1
    yield np.array([0])
    yield found[(found > 0) & (found < len(tokens))]
    yield np.array([len(tokens)])


def _map(path: Path, vocab_size: int) -> np.ndarray:
    size = path.stat().st_size
    dtype, start, count = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4"), 0, None
    if size >= _HEADER:
        magic, _, number = (int(each) for each in np.fromfile(path, dtype="<i4", count=3))
        if magic in _DTYPES:
            dtype, start, count = np.dtype(_DTYPES[magic]), _HEADER, number
    if count is not None and size != start + count * dtype.itemsize:
        raise ValueError(f"token file {path}: its header tells of {count:,} tokens, expected "
                         f"{start + count * dtype.itemsize:,} bytes, got {size:,}")  # fmt: skip
    if size == start:
        raise ValueError(f"token file {path} is empty")
    if (size - start) % dtype.itemsize:
        raise ValueError(f"token file {path}: expected tokens of {dtype.itemsize} bytes, got {size - start:,} bytes")
    return np.memmap(path, dtype=dtype, mode="r", offset=start)
