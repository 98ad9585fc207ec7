"""A corpus of long documents as a folder: arrays of tokens in the layout of LongCrawl64. Writing can be interrupted.

The folder contains

- `train.zarr`, `heldout.zarr`: uint16 [rows, row_tokens], zarr format 2, one chunk per row;
- `tokenizer.json`;
- `documents.jsonl`: one line per document, with its directory, split, number of files, bytes, tokens before cutting,
  rows, and a hash of its rows;
- `corpus.json`: the options, counts and hashes of all.

While the corpus is written, the name of the folder ends in `.partial`. The tokens after the last whole row of a
document are in no array, and neither are documents shorter than a row.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sympow.data.builders.sources import SPLITS, Source, SourceDocument
from sympow.data.text import BPE_TRAINING_CHARACTERS
from sympow.data.tokens import (
    TOKENIZER_FILE,
    BPETokenizer,
    Tokenizer,
    encode_document,
    load_tokenizer,
    tokenizers_library,
)
from sympow.files import digest, naming, parsed_json, sync, write_text
from sympow.locks import locked
from sympow.packages import from_extra

ROW_TOKENS = 65_536
VOCAB_SIZE = 16_384
SUMMARY = "corpus.json"
DOCUMENTS = "documents.jsonl"

_LARGEST_VOCABULARY = 1 << 16  # of uint16


def write_corpus(
    out: str | os.PathLike[str],
    settings: dict[str, Any],
    open_source: Callable[[Path], Source],
    *,
    row_tokens: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    kept: Collection[str] = (),
    texts: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Writes a corpus into the folder `out`, or continues an interrupted one. A finished corpus is not changed.

    The same source and options give the same bytes, even if the work was interrupted.

    Args:
        out: the folder: a new one, or one that an earlier call with the same arguments started.
        settings: values that must be equal for an interrupted corpus to be continued. They are written to
            `corpus.json`, together with the source's hash.
        open_source: returns the source. The source may keep files of its own in the folder that is passed.
        row_tokens: the number of tokens in a row.
        vocab_size: the size of the BPE that is trained on the training documents, 256 to 65,536.
        tokenizer: used instead of a trained BPE.
        kept: names of the source's own files in the folder that belong to the finished corpus.
        texts: the folder whose files the source reads, which would read a corpus within it, too; None: there is none.

    Returns the content of `corpus.json`. Raises ValueError for options out of range, for a corpus in `out` that was
    started with other options, for an `out` within `texts`, and for a source that gives no row; FileExistsError if
    `out` contains something else; RuntimeError if another process makes the corpus; ImportError naming the missing
    extra.
    """
    out = Path(out)
    if not 256 <= vocab_size <= _LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size must be 256 to 65,536, as tokens are uint16; got {vocab_size}")
    if tokenizer is not None and tokenizer.vocab_size > _LARGEST_VOCABULARY:
        raise ValueError(f"expected a tokenizer of at most 65,536 tokens, as they are uint16; got {tokenizer.name}")
    if row_tokens < 1:
        raise ValueError(f"row_tokens must be positive, got {row_tokens}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _finished(out, settings)
    if texts is not None and out.resolve().is_relative_to(Path(texts).resolve()):
        raise ValueError(f"{out} is in {texts}, the texts of the corpus: give a folder outside")
    _check_packages(tokenizer)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial, "makes a corpus"):
        source = open_source(partial)
        settings = settings | {"source": source.survey()}
        documents = source.plan()
        _check_room(documents, row_tokens, tokenizer)
        _begin(partial, settings)
        tokenizer = _tokenizer(partial / TOKENIZER_FILE, source, documents, vocab_size, tokenizer)
        with naming(partial), _Writer(partial, documents, row_tokens, tokenizer) as writer:
            for document, text in source.texts(documents, writer.finished):
                if isinstance(text, str):
                    text = encode_document(tokenizer, document.name, text)
                writer.add(document, text)
            counts = writer.finish()
        known = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        summary = read_summary(partial) | {"tokenizer": known} | counts
        _write_summary(partial, summary)
        _keep_only(partial, {SUMMARY, DOCUMENTS, TOKENIZER_FILE, *(f"{split}.zarr" for split in SPLITS), *kept})
        partial.replace(out)
        sync(out.parent)
        return summary


def _check_packages(tokenizer: Tokenizer | None) -> None:
    """Raises ImportError naming the missing extra, before a source is fetched and read."""
    with from_extra("train", "writing zarr corpora needs zarr"):
        import numcodecs  # noqa: F401
        import zarr  # noqa: F401
    if tokenizer is None:
        tokenizers_library()


def _tokenizer(
    file: Path, source: Source, documents: Sequence[SourceDocument], vocab_size: int, given: Tokenizer | None
) -> Tokenizer:
    """Trains the tokenizer on files that a hash of their paths chooses, or loads the one of an earlier start."""
    if not file.exists():
        if given is None:
            files = {name for document in documents if not document.held_out for name in document.files}
            share = BPE_TRAINING_CHARACTERS / sum(source.sizes[name] for name in files)
            sample = {name for name in files if int(digest([name])[:8], 16) < share * 2**32}
            given = BPETokenizer.train(source.sample(sample), vocab_size)
        given.save(file)
    return load_tokenizer(file)


class Entry(NamedTuple):
    """Holds a document, a line of documents.jsonl: its tokens before cutting, its rows, and a hash of these."""

    directory: str
    split: str
    files: int
    bytes: int
    tokens: int
    rows: int
    hash: str


def read_entries(corpus: str | os.PathLike[str]) -> list[Entry]:
    """Returns the documents of a corpus.

    Raises FileNotFoundError where there is none, ValueError for a damaged list.
    """
    file = Path(corpus) / DOCUMENTS
    try:
        return _parse(file.read_bytes().splitlines(keepends=True))
    except FileNotFoundError:
        raise FileNotFoundError(f"no corpus at {corpus}: it has no {DOCUMENTS}") from None
    except (ValueError, TypeError):
        raise ValueError(f"{file} is damaged: expected a JSON object a line, one a document") from None


def _parse(lines: Sequence[bytes]) -> list[Entry]:
    return [Entry(**parsed_json(line)) for line in lines]


def _capacity(document: SourceDocument, row_tokens: int, tokenizer: Tokenizer | None) -> int:
    """Returns the most rows that a document can give: no token has less than a byte, but those that begin a text."""
    return (document.size + (len(tokenizer.start) if tokenizer else 0)) // row_tokens


def _check_room(documents: Sequence[SourceDocument], row_tokens: int, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError if no document is as long as a row, before texts are encoded."""
    for split in SPLITS:
        if not any(_capacity(each, row_tokens, tokenizer) for each in documents if each.split == split):
            raise _no_row(row_tokens, split)


def _no_row(row_tokens: int, split: str) -> ValueError:
    return ValueError(f"row_tokens is {row_tokens:,}: the source gives no row of so many tokens for {split}.zarr")


class _Writer:
    """Writes the rows of documents to the arrays, and then lists each document in documents.jsonl.

    Args:
        folder: the folder of an unfinished corpus; documents that its list contains already are kept.
        documents: all documents of the corpus, in the order in which they are added.
        row_tokens: the number of tokens in a row.
        tokenizer: encodes the documents.
    """

    def __init__(self, folder: Path, documents: Sequence[SourceDocument], row_tokens: int, tokenizer: Tokenizer):
        self._folder, self._row_tokens = folder, row_tokens
        self._file = (folder / DOCUMENTS).open("a+b")
        self._entries = self._read(documents)
        capacity = Counter[str]()
        for document in documents:
            capacity[document.split] += _capacity(document, row_tokens, tokenizer)
        self._arrays = {split: self._open(split, capacity[split]) for split in SPLITS}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def finished(self) -> int:
        """Documents done."""
        return len(self._entries)

    def add(self, document: SourceDocument, tokens: np.ndarray) -> None:
        """Write the next document's rows."""
        rows = tokens[: len(tokens) // self._row_tokens * self._row_tokens].reshape(-1, self._row_tokens)
        rows = rows.astype("<u2")
        start = sum(entry.rows for entry in self._entries if entry.split == document.split)
        if len(rows):
            # One row a call: zarr writes the files of several rows concurrently, and prints all errors but the first.
            for row, values in enumerate(rows, start):
                self._arrays[document.split][row] = values
            folder = self._folder / f"{document.split}.zarr"
            for name in (".zarray", *(f"{row}.0" for row in range(start, start + len(rows))), "."):
                sync(folder / name)  # no document in the list whose rows a loss of power would take away
        entry = Entry(
            document.directory,
            document.split,
            len(document.files),
            document.size,
            len(tokens),
            len(rows),
            digest([rows.tobytes()]),
        )
        self._file.write((json.dumps(entry._asdict()) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._entries.append(entry)

    def finish(self) -> dict[str, Any]:
        """Cut the arrays to their rows and return counts and hashes."""
        summary = {}
        for split in SPLITS:
            entries = [entry for entry in self._entries if entry.split == split]
            rows = sum(entry.rows for entry in entries)
            if not rows:
                raise _no_row(self._row_tokens, split)
            self._arrays[split].resize((rows, self._row_tokens))
            for name in (".zarray", ".zattrs"):
                sync(self._folder / f"{split}.zarr" / name)
            chunks = {f"{row}.0" for row in range(rows)}
            _keep_only(self._folder / f"{split}.zarr", {".zarray", ".zattrs"} | chunks)
            summary[split] = {
                "documents": len(entries),
                "documents_without_a_row": sum(not entry.rows for entry in entries),
                "files": sum(entry.files for entry in entries),
                "bytes": sum(entry.bytes for entry in entries),
                "tokens": sum(entry.tokens for entry in entries),
                "rows": rows,
                "tokens_in_rows": rows * self._row_tokens,
                "hash": digest(entry.hash for entry in entries),
            }
        return summary

    def _read(self, documents: Sequence[SourceDocument]) -> list[Entry]:
        """Returns the entries of the list; a last line that is incomplete is cut off."""
        self._file.seek(0)
        lines = [line for line in self._file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._file.truncate(sum(map(len, lines)))
        entries = _parse(lines)
        if [entry.directory for entry in entries] != [each.directory for each in documents[: len(entries)]]:
            raise ValueError(f"{self._file.name} lists other documents than the source has: remove {self._folder}")
        return entries

    def _open(self, split: str, rows: int) -> Any:
        import zarr
        from numcodecs import Zstd

        path = self._folder / f"{split}.zarr"
        config: Any = {"write_empty_chunks": True}  # that a chunk is missing shall always mean a damaged corpus
        if self._entries:
            return zarr.open_array(path, mode="r+", config=config)
        return zarr.create_array(
            path,
            shape=(rows, self._row_tokens),
            dtype="<u2",
            chunks=(1, self._row_tokens),
            compressors=Zstd(level=5),
            zarr_format=2,
            config=config,
            overwrite=True,
        )


def _keep_only(folder: Path, names: set[str]) -> None:
    """Remove the package, and what writers leave when they are killed."""
    for path in folder.iterdir():
        if path.name in names:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _begin(folder: Path, settings: dict[str, Any]) -> None:
    if not (folder / SUMMARY).exists():
        _write_summary(folder, settings)
    _check_settings(folder, settings)


def _finished(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    if not (folder / SUMMARY).is_file():
        raise FileExistsError(f"{folder} holds something else than a corpus (no {SUMMARY}); give another folder")
    return _check_settings(folder, settings)


def _check_settings(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the summary in the folder. Raises ValueError where its corpus has other settings."""
    summary = read_summary(folder)
    for name, value in settings.items():
        if summary.get(name) != value:
            raise ValueError(
                f"{folder} holds a corpus of {name} {summary.get(name)}, not {value}: remove it or give another folder"
            )
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads the `corpus.json` of a corpus. Raises ValueError where it is not JSON."""
    try:
        return parsed_json((folder / SUMMARY).read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{folder / SUMMARY} is not JSON: remove {folder}") from None


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
