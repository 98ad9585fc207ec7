"""Opens the corpora of a `DataConfig`: training documents, held-out documents, and the tokenizer of both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sympow.data.config import DataConfig
from sympow.data.corpus import Corpus, Subset, choose_held_out
from sympow.data.text import (
    Document,
    cut_document,
    measure_documents,
    stdlib_documents,
    text_documents,
    tokenize_documents,
    train_bpe,
)
from sympow.data.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from sympow.data.zarr_corpus import ZarrCorpus

DEFAULT_BPE_VOCAB_SIZE = 2048


@dataclass(frozen=True)
class Splits:
    """Holds the result of `open_corpus`.

    No document is in both corpora. The tokenizer is None if it is not known.
    """

    train: Corpus
    held_out: Corpus
    tokenizer: Tokenizer | None


def open_corpus(
    config: DataConfig, cache_dir: str | os.PathLike[str] | None = None, tokenizer: Tokenizer | None = None
) -> Splits:
    """Opens the corpora that a config describes.

    Text is tokenized once and then memory-mapped from the cache, which is keyed by the texts and the
    tokenizer. A text corpus that is a single document is cut: its last `held_out` fraction is the held-out
    document.

    Args:
        config: see `DataConfig`.
        cache_dir: where to keep tokens and trained tokenizers; by default `default_cache_dir()`.
        tokenizer: used instead of `config.tokenizer`, for example the saved tokenizer of a run that continues.

    Raises FileNotFoundError for a missing corpus or tokenizer, ValueError for one that is empty or does not
    fit, ImportError naming the missing extra.
    """
    if tokenizer is None and config.tokenizer not in ("bpe", "none"):
        tokenizer = ByteTokenizer() if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer)
    if (
        tokenizer is not None
        and config.tokenizer != "bpe"
        and config.vocab_size not in (None, tokenizer.vocab_size)
    ):
        raise ValueError(
            f"data vocab_size is {config.vocab_size}, but {tokenizer.name} tokens have {tokenizer.vocab_size}"
        )
    if config.kind == "zarr":
        return _open_zarr(config, tokenizer)
    return _open_text(config, Path(cache_dir) if cache_dir is not None else None, tokenizer)


def _open_zarr(config: DataConfig, tokenizer: Tokenizer | None) -> Splits:
    vocab_size = tokenizer.vocab_size if tokenizer is not None else config.vocab_size
    if config.path is None or vocab_size is None:
        raise ValueError("data kind 'zarr' needs a path and a vocabulary")  # DataConfig has checked both
    corpus = ZarrCorpus(config.path, vocab_size, config.storage_options)
    if config.held_out_path is not None:
        held_out = ZarrCorpus(config.held_out_path, vocab_size, config.storage_options)
        return Splits(corpus, held_out, tokenizer)
    chosen = choose_held_out(corpus.lengths, config.held_out, config.seed)
    return Splits(Subset(corpus, _others(chosen, len(corpus))), Subset(corpus, chosen), tokenizer)


def _open_text(config: DataConfig, cache_dir: Path | None, tokenizer: Tokenizer | None) -> Splits:
    documents, sizes, hashes = measure_documents(_documents(config, config.path))
    if not documents:
        raise ValueError(f"text corpus {config.path} is empty: its files hold no text")
    if config.held_out_path is not None:
        held_documents, _, held_hashes = measure_documents(_documents(config, config.held_out_path))
        if not held_documents:
            raise ValueError(f"text corpus {config.held_out_path} is empty: its files hold no text")
    else:
        if len(documents) == 1:
            documents, sizes, hashes = measure_documents(cut_document(documents[0], config.held_out))
            chosen = np.array([1])
        else:
            chosen = choose_held_out(sizes, config.held_out, config.seed)
        held_documents, held_hashes = [documents[i] for i in chosen], [hashes[i] for i in chosen]
        others = _others(chosen, len(documents))
        documents, hashes = [documents[i] for i in others], [hashes[i] for i in others]
    if tokenizer is None:
        tokenizer = train_bpe(documents, hashes, config.vocab_size or DEFAULT_BPE_VOCAB_SIZE, cache_dir)
    return Splits(
        train=tokenize_documents(documents, hashes, tokenizer, cache_dir),
        held_out=tokenize_documents(held_documents, held_hashes, tokenizer, cache_dir),
        tokenizer=tokenizer,
    )


def _documents(config: DataConfig, path: str | None) -> list[Document]:
    if path is None:
        return stdlib_documents()
    return text_documents(path, config.group, config.suffixes)


def _others(chosen: np.ndarray, length: int) -> np.ndarray:
    kept = np.ones(length, dtype=bool)
    kept[chosen] = False
    return np.flatnonzero(kept)
