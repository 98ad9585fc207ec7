"""Long documents without a network: the Linux kernel's source, from a Debian package, in the layout of LongCrawl64.

A document is a directory of the kernel. Its text is that of the files directly in it, sorted by name, each headed by a
line with its path. A directory with less text than four bytes for each token of a row, its own and what has joined it,
joins the directory above it, behind that one's files and in the order of paths; so a document also holds the small
directories below. Left out are hidden and binary files, and the register tables of two drivers (folders `asic_reg`),
which a machine wrote: 400 MB, nearly a third of the whole.

The documents are tokenized by a byte-level BPE trained on a sample of the training files, and cut to rows of 65,536
tokens. What is left at a document's end, and a document shorter than a row, is in no array.

Documents whose paths agree in the first three folders are held out, or trained on, together: nearby directories hold
much of the same text. They are taken in the order of a hash of these folders, each that still fits, until 5% of the
text is held out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sympow.data.files import atomic_write, digest
from sympow.data.source_tree import read_files
from sympow.data.text import BPE_TRAINING_CHARACTERS, headed_text, looks_binary
from sympow.data.tokens import TOKENIZER_FILE, BPETokenizer
from sympow.progress import Progress

PACKAGE = "linux-source-6.1"
ROW_TOKENS = 65_536
VOCAB_SIZE = 16_384
HELD_OUT = 0.05
SPLITS = ("train", "heldout")  # of the arrays' names: train.zarr and heldout.zarr, as LongCrawl64 has them
SUMMARY = "corpus.json"
DOCUMENTS = "documents.jsonl"

_SMALLEST = 4  # bytes a token of a row: the kernel has 2.5 bytes a token, so that a document fills a row or more
_SUBTREE = 3  # folders of a path that are held out together
_TABLES = "asic_reg"
_VERSION = 1  # of the rules in this file: to be raised whenever the same source would become another corpus


@dataclass(frozen=True)
class SourceDocument:
    """A directory, its files in the order of its text, the text's size in bytes, and whether it is held out."""

    directory: str
    files: tuple[str, ...]
    size: int
    held_out: bool

    @property
    def split(self) -> str:
        return SPLITS[self.held_out]


def build_kernel_corpus(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    row_tokens: int = ROW_TOKENS,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the corpus into the folder `out`, or go on with it; a finished one is left as it is.

    The folder appears when the corpus is whole; until then it is `out` with `.partial` behind its name. The same
    source and options give the same bytes, however often the work was stopped. It holds

    - `train.zarr`, `heldout.zarr`: uint16 [rows, row_tokens], zarr format 2, a chunk a row;
    - `tokenizer.json`;
    - `documents.jsonl`: a line a document, with its directory, split, number of files, bytes, tokens before cutting,
      rows, and a hash of its rows;
    - `corpus.json`: the options, counts and hashes of all, as returned.

    Args:
        source: as for `read_files`; by default Debian's package linux-source-6.1, by `apt-get download`.
        vocab_size: tokens of the BPE, 256 to 65,536; a small source may give fewer.
        row_tokens: tokens of a row.
        progress: whether to tell on stderr how far it is, by bars or lines, as `Progress` does.

    Returns what `corpus.json` holds. Raises ValueError for options out of range or others than a corpus in `out` was
    made or begun with, and for a source that does not fit; FileExistsError where `out` holds something else;
    FileNotFoundError for a missing source; RuntimeError if the package cannot be fetched; ImportError naming the
    missing extra.
    """
    out = Path(out)
    if not 256 <= vocab_size <= 1 << 16:
        raise ValueError(f"vocab_size must be 256 to 65,536, as tokens are uint16; got {vocab_size}")
    if row_tokens < 1:
        raise ValueError(f"row_tokens must be positive, got {row_tokens}")
    settings = {"version": _VERSION, "vocab_size": vocab_size, "row_tokens": row_tokens}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _finished(out, settings)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    if source is None:
        with Progress(f"fetching {PACKAGE}", quiet=not progress):
            source = fetch_package(partial / "package")
    tree = _Tree(source, progress)
    _begin(partial, settings | {"source": tree.survey()})
    documents = plan_documents(tree.sizes, _SMALLEST * row_tokens)
    tokenizer = _tokenizer(partial / TOKENIZER_FILE, tree, documents, vocab_size)
    with _Writer(partial, documents, row_tokens) as writer:
        for document, text in tree.texts(documents, writer.finished):
            writer.add(document, tokenizer.encode(text))
        counts = writer.finish()
    known = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    summary = read_summary(partial) | {"tokenizer": known} | counts
    _write_summary(partial, summary)
    _keep_only(partial, {SUMMARY, DOCUMENTS, TOKENIZER_FILE, *(f"{split}.zarr" for split in SPLITS)})
    partial.replace(out)
    return summary


def fetch_package(folder: Path) -> Path:
    """The Debian package with the kernel's source, fetched into a folder of its own or found there.

    Raises RuntimeError if apt-get is not there or fails.
    """
    if not folder.exists():
        fresh = folder.with_name(f"{folder.name}.fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            done = subprocess.run(["apt-get", "download", PACKAGE], cwd=fresh, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError(f"no apt-get to fetch {PACKAGE}: name the kernel's source as --source") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RuntimeError(f"apt-get download {PACKAGE} failed: {reason}")
        fresh.replace(folder)
    found = sorted(folder.glob("*.deb"))
    if len(found) != 1:
        raise RuntimeError(f"expected one package in {folder}, got {len(found)}: remove that folder")
    return found[0]


def plan_documents(sizes: dict[str, int], smallest: int) -> list[SourceDocument]:
    """Which files make which documents, and which are held out.

    Documents are in the order in which they become complete when files are read in the order of their paths, as
    archives have them. Raises ValueError where nothing can be held out.

    Args:
        sizes: bytes of each file's text by path.
        smallest: bytes; a directory with less joins the one above.
    """
    files: dict[str, list[str]] = defaultdict(list)
    directories = {""}
    for name in sizes:
        files[directory := os.path.dirname(name)].append(name)
        while directory not in directories:
            directories.add(directory)
            directory = os.path.dirname(directory)
    kept: dict[str, int] = {}
    for directory in sorted(directories, key=lambda name: (-name.count("/"), not name, name)):  # from the leaves up
        size = sum(sizes[name] for name in files[directory])
        if directory and size < smallest:
            files[os.path.dirname(directory)] += files.pop(directory)
        elif size:
            kept[directory] = size
    held_out = _held_out(kept)
    ordered = sorted(kept, key=lambda directory: max(files[directory]))
    return [
        SourceDocument(each, tuple(sorted(files[each], key=os.path.split)), kept[each], each in held_out)
        for each in ordered
    ]


def _held_out(sizes: dict[str, int]) -> set[str]:
    """Directories to hold out, of all with their sizes."""
    subtrees = {directory: "/".join(directory.split("/")[:_SUBTREE]) for directory in sizes}
    totals = Counter[str]()
    for directory, size in sizes.items():
        totals[subtrees[directory]] += size
    left, chosen = HELD_OUT * sum(sizes.values()), set()
    for subtree in sorted(totals, key=lambda name: digest([name])):
        if totals[subtree] <= left:
            chosen.add(subtree)
            left -= totals[subtree]
    if not chosen:
        raise ValueError(
            f"the source has {len(sizes)} long directories, too few to hold {HELD_OUT:.0%} of the text out: "
            "expected the source of a kernel"
        )
    return {directory for directory in sizes if subtrees[directory] in chosen}


class _Tree:
    """The files of a source that count. Each reading of them goes through the source once more."""

    def __init__(self, source: str | os.PathLike[str], progress: bool):
        self._source, self._progress = source, progress
        self.sizes: dict[str, int] = {}  # bytes of each file's text by path, once surveyed
        self._count: int | None = None  # of all files, once surveyed

    def reading(self, task: str) -> Progress:
        """What tells how far a reading of all files is."""
        return Progress(task, "file", total=self._count, quiet=not self._progress)

    def survey(self) -> str:
        """Measures all files. Returns a hash of them that does not depend on the kind of source."""
        hashes = {}
        with self.reading("looking through") as progress:
            for name, text in self.files(progress):
                if name in self.sizes:
                    raise ValueError(f"source {self._source} holds {name} twice")
                data = text.encode("utf-8")
                self.sizes[name], hashes[name] = len(data), digest([data])
        self._count = progress.done
        if not hashes:
            raise ValueError(f"source {self._source} is empty: no text in it")
        return digest(hashes[name] for name in sorted(hashes))

    def files(self, progress: Progress) -> Iterator[tuple[str, str]]:
        """Path and headed text of each; `progress` counts all that are read."""
        for name, data in read_files(self._source):
            progress.advance()
            parts = name.split("/")
            hidden = any(part.startswith(".") for part in parts)
            if data and not hidden and _TABLES not in parts and not looks_binary(data):
                yield name, headed_text(name, data.decode("utf-8", errors="replace"))

    def texts(self, documents: Sequence[SourceDocument], start: int) -> Iterator[tuple[SourceDocument, str]]:
        """The documents from number `start` on, in turn, with their texts."""
        place = {name: n for n, document in enumerate(documents[start:], start) for name in document.files}
        parts: dict[int, dict[str, str]] = defaultdict(dict)
        turn = start
        with self.reading("tokenizing") as progress:
            for name, text in self.files(progress):
                if name in place:
                    parts[place[name]][name] = text
                while turn < len(documents) and len(parts[turn]) == len(documents[turn].files):
                    texts = parts.pop(turn)
                    yield documents[turn], "".join(texts[file] for file in documents[turn].files)
                    turn += 1
        if turn < len(documents):
            raise ValueError(
                f"source {self._source} was changed while it was read: files of {documents[turn].directory} are gone"
            )


def _tokenizer(file: Path, tree: _Tree, documents: Sequence[SourceDocument], vocab_size: int) -> BPETokenizer:
    """Trained on a sample of the training files, which a hash of their paths chooses; or what an earlier start left."""
    if not file.exists():
        files = {name for document in documents if not document.held_out for name in document.files}
        share = BPE_TRAINING_CHARACTERS / sum(tree.sizes[name] for name in files)
        sample = {name for name in files if int(digest([name])[:8], 16) < share * 2**32}
        with tree.reading("training the tokenizer") as progress:
            texts = (text for name, text in tree.files(progress) if name in sample)
            BPETokenizer.train(texts, vocab_size).save(file)
    return BPETokenizer.load(file)


class Entry(NamedTuple):
    """A document of a corpus, a line of documents.jsonl: its tokens before cutting, its rows, and a hash of these."""

    directory: str
    split: str
    files: int
    bytes: int
    tokens: int
    rows: int
    hash: str


def read_entries(corpus: str | os.PathLike[str]) -> list[Entry]:
    """The documents of a corpus. Raises FileNotFoundError where there is none, ValueError for a damaged list."""
    file = Path(corpus) / DOCUMENTS
    try:
        return _parse(file.read_bytes().splitlines(keepends=True))
    except FileNotFoundError:
        raise FileNotFoundError(f"no corpus at {corpus}: it has no {DOCUMENTS}") from None
    except (ValueError, TypeError):
        raise ValueError(f"{file} is damaged: expected a JSON object a line, one a document") from None


def _parse(lines: Sequence[bytes]) -> list[Entry]:
    return [Entry(**json.loads(line)) for line in lines]


class _Writer:
    """Adds documents to the arrays, and to documents.jsonl when their rows are written: what is listed there is done.

    Args:
        folder: of an unfinished corpus; what is listed in it already is kept.
        documents: all of the corpus, in the order in which they are added.
        row_tokens: tokens of a row.
    """

    def __init__(self, folder: Path, documents: Sequence[SourceDocument], row_tokens: int):
        self._folder, self._row_tokens = folder, row_tokens
        self._file = (folder / DOCUMENTS).open("a+b")
        self._entries = self._read(documents)
        capacity = Counter[str]()
        for document in documents:
            capacity[document.split] += document.size // row_tokens  # no token has less than a byte
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
            self._arrays[document.split][start : start + len(rows)] = rows
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
        self._entries.append(entry)

    def finish(self) -> dict[str, Any]:
        """Cut the arrays to their rows and return counts and hashes."""
        summary = {}
        for split in SPLITS:
            entries = [entry for entry in self._entries if entry.split == split]
            rows = sum(entry.rows for entry in entries)
            if not rows:
                raise ValueError(f"the source gives no row of {self._row_tokens:,} tokens for {split}.zarr")
            self._arrays[split].resize((rows, self._row_tokens))
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
        """The entries there are; a line that was not written to its end is cut off."""
        self._file.seek(0)
        lines = [line for line in self._file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._file.truncate(sum(map(len, lines)))
        entries = _parse(lines)
        if [entry.directory for entry in entries] != [each.directory for each in documents[: len(entries)]]:
            raise ValueError(f"{self._file.name} lists other documents than the source has: remove {self._folder}")
        return entries

    def _open(self, split: str, rows: int) -> Any:
        try:
            import zarr
            from numcodecs import Zstd
        except ImportError:
            raise ImportError("writing zarr corpora needs zarr: pip install 'sympow[train]'") from None
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
    """The summary there. Raises ValueError where it is of a corpus with other settings."""
    summary = read_summary(folder)
    for name, value in settings.items():
        if summary.get(name) != value:
            raise ValueError(
                f"{folder} holds a corpus of {name} {summary.get(name)}, not {value}: remove it or give another folder"
            )
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{folder / SUMMARY} is not JSON: remove {folder}") from None


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    with atomic_write(folder / SUMMARY) as file:
        file.write((json.dumps(summary, indent=2) + "\n").encode())
