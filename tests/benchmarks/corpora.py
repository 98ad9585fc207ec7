"""Corpora of a benchmark's test: arrays of tokens in the layout of LongCrawl64."""

from pathlib import Path

import numpy as np
import zarr


def write_split(folder: Path, name: str, tokens: np.ndarray) -> None:
    """Writes documents of equal length, such as those of the split "train"."""
    tokens = np.asarray(tokens, dtype=np.uint16)
    zarr.create_array(str(folder / f"{name}.zarr"), data=tokens, chunks=(1, tokens.shape[1]), zarr_format=2)


def random_corpus(folder: Path, train: int, held_out: int, length: int, vocab_size: int = 256) -> Path:
    """Writes so many documents of random tokens, and returns the folder."""
    rng = np.random.default_rng(0)
    for name, documents in (("train", train), ("heldout", held_out)):
        write_split(folder, name, rng.integers(0, vocab_size, (documents, length), dtype=np.uint16))
    return folder
