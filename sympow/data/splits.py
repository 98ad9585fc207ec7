"""Opens the corpora of a `DataConfig`: training documents, held-out documents, and the tokenizer of both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sympow.data.config import TOKEN_KINDS, DataConfig
from sympow.data.corpus import Corpus, Mixture, Subset, choose_held_out
from sympow.data.text import (
    Document,
    cut_document,
    find_texts,
    measure_documents,
    stdlib_documents,
    tokenize_documents,
    train_bpe,
)
from sympow.data.token_files import cut_tokens, open_token_files
from sympow.data.tokens import TOKENIZER_FILE, ByteTokenizer, Tokenizer, load_tokenizer
from sympow.data.zarr_corpus import ZarrCorpus

DEFAULT_BPE_VOCAB_SIZE = 2048


@dataclass(frozen=True)
class Splits:
    """Holds the result of `open_corpus`.

    No document is in both corpora. The tokenizer is None if it is not known. Each of the remarks is a line on what was
    left out of a folder.
    """

    train: Corpus
    held_out: Corpus
    tokenizer: Tokenizer | None
    remarks: tuple[str, ...] = ()


def open_corpus(
    config: DataConfig, cache_dir: str | os.PathLike[str] | None = None, tokenizer: Tokenizer | None = None
) -> Splits:
    """Opens the corpora that a config describes.

    Text is tokenized once and then memory-mapped from the cache, which is keyed by the texts and the
    tokenizer. A corpus that is a single document is cut: its last `held_out` fraction is the held-out document.
    Corpora at several paths are split one by one, and joined to a `Mixture`.

    Args:
        config: see `DataConfig`.
        cache_dir: where to keep tokens and trained tokenizers; by default `default_cache_dir()`.
        tokenizer: used instead of `config.tokenizer`, for example the saved tokenizer of a run that continues.

    Raises FileNotFoundError for a missing corpus or tokenizer, ValueError for one that is empty, cannot be read or does
    not fit, ImportError naming the missing extra.
    """
    if tokenizer is None and config.tokenizer not in ("bpe", "none"):
        tokenizer = ByteTokenizer() if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer)
    if tokenizer is not None and config.tokenizer != "bpe" and config.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"data vocab_size is {config.vocab_size}, but {tokenizer.name} tokens have {tokenizer.vocab_size}"
        )
    if config.kind in TOKEN_KINDS:
        return _open_tokens(config, tokenizer)
    return _open_text(config, Path(cache_dir) if cache_dir is not None else None, tokenizer)


def _open_tokens(config: DataConfig, tokenizer: Tokenizer | None) -> Splits:
    vocab_size = tokenizer.vocab_size if tokenizer is not None else config.vocab_size
    if vocab_size is None:
        raise ValueError(f"data kind {config.kind!r} needs a vocabulary")  # DataConfig has checked that
    remarks: list[str] = []

    def opened(path: str) -> Corpus:
        if config.kind == "zarr":
            _check_tokens(Path(path).parent, tokenizer)
            return ZarrCorpus(path, vocab_size, config.storage_options)
        corpus, lines = open_token_files(path, vocab_size, config.end_token)
        remarks.extend(lines)
        return corpus

    corpora = [opened(path) for path in _paths(config)]
    if config.held_out_path is not None:
        return Splits(_joined(corpora, config), opened(config.held_out_path), tokenizer, tuple(remarks))
    parts = [_split(corpus, config) for corpus in corpora]
    train, held_out = (_joined(each, config) for each in zip(*parts, strict=True))
    return Splits(train, held_out, tokenizer, tuple(remarks))


def _check_tokens(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError for a folder of `write_corpus` whose tokens are not those of the tokenizer, if it is known.

    A tokenizer may have more tokens than the corpus.
    """
    if tokenizer is None or not ((folder / "corpus.json").is_file() and (folder / TOKENIZER_FILE).is_file()):
        return
    meant = list(load_tokenizer(folder).token_bytes)
    if list(tokenizer.token_bytes)[: len(meant)] != meant:
        raise ValueError(f"corpus {folder} has the tokens of its own {TOKENIZER_FILE}; got another tokenizer")


def _split(corpus: Corpus, config: DataConfig) -> tuple[Corpus, Corpus]:
    if len(corpus) == 1 and config.kind == "tokens":
        return cut_tokens(corpus, config.held_out)
    chosen = choose_held_out(corpus.lengths, config.held_out, config.seed)
    return Subset(corpus, _others(chosen, len(corpus))), Subset(corpus, chosen)


def _open_text(config: DataConfig, cache_dir: Path | None, tokenizer: Tokenizer | None) -> Splits:
    remarks: list[str] = []
    paths: Sequence[str | None] = _paths(config) or [None]
    sources = [_measured(config, path, remarks) for path in paths]
    if config.held_out_path is not None:
        held_out = [_measured(config, config.held_out_path, remarks)]
    else:
        parts = [_split_texts(texts, config) for texts in sources]
        sources, held_out = [first for first, _ in parts], [last for _, last in parts]
    if tokenizer is None:
        documents = [document for texts in sources for document in texts.documents]
        hashes = [each for texts in sources for each in texts.hashes]
        tokenizer = train_bpe(documents, hashes, config.vocab_size or DEFAULT_BPE_VOCAB_SIZE, cache_dir)
    train, held = (
        [tokenize_documents(texts.documents, texts.hashes, tokenizer, cache_dir) for texts in split]
        for split in (sources, held_out)
    )
    return Splits(_joined(train, config), _joined(held, config), tokenizer, tuple(remarks))


class _MeasuredTexts(NamedTuple):
    """Holds documents that are not empty, their sizes in bytes, int64, and their hashes."""

    documents: list[Document]
    sizes: np.ndarray
    hashes: list[str]

    def at(self, indices: np.ndarray) -> _MeasuredTexts:
        """Returns some of the documents."""
        chosen = indices.tolist()
        return _MeasuredTexts(
            [self.documents[i] for i in chosen], self.sizes[indices], [self.hashes[i] for i in chosen]
        )


def _measured(config: DataConfig, path: str | None, remarks: list[str]) -> _MeasuredTexts:
    """Measures the documents at a path, or in the standard library, and adds to the remarks what is left out."""
    if path is None:
        return _MeasuredTexts(*measure_documents(stdlib_documents()))
    try:
        texts = find_texts(path, config.group, config.suffixes, config.text_field)
    except FileNotFoundError as error:
        field = "held_out_path" if path == config.held_out_path else "path"
        raise FileNotFoundError(f"{error}; data.{field} names the corpus") from None
    found = _MeasuredTexts(*measure_documents(texts.documents))
    if not found.documents:
        raise ValueError(f"text corpus {path} is empty: its files hold no text")
    remarks.extend(texts.remarks(len(texts.documents) - len(found.documents)))
    return found


def _split_texts(texts: _MeasuredTexts, config: DataConfig) -> tuple[_MeasuredTexts, _MeasuredTexts]:
    if len(texts.documents) == 1:
        texts = _MeasuredTexts(*measure_documents(cut_document(texts.documents[0], config.held_out)))
        chosen = np.array([1])
    else:
        chosen = choose_held_out(texts.sizes, config.held_out, config.seed)
    return texts.at(_others(chosen, len(texts.documents))), texts.at(chosen)


def _paths(config: DataConfig) -> list[str]:
    return [config.path] if config.path is not None else list(config.paths)


def _joined(corpora: Sequence[Corpus], config: DataConfig) -> Corpus:
    """Returns one corpus: the only one, or a mixture with the weights of the config."""
    return corpora[0] if len(corpora) == 1 else Mixture(corpora, config.weights)


def _others(chosen: np.ndarray, length: int) -> np.ndarray:
    kept = np.ones(length, dtype=bool)
    kept[chosen] = False
    return np.flatnonzero(kept)
