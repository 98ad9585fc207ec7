"""Text documents from files, folders and Python's standard library; and their tokens, cached on disk."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sympow.data.corpus import TokenCorpus
from sympow.data.streams import STREAM, streamed
from sympow.data.text_files import Reader, TextFile, classify, describe, find_files, without_compression
from sympow.data.tokens import BPETokenizer, Tokenizer, encode_document
from sympow.files import atomic_write, default_cache_dir, digest, naming, remove_leftovers

# The largest number of characters from which merges are learned. More text takes minutes and hardly changes a
# vocabulary of thousands.
BPE_TRAINING_CHARACTERS = 1 << 26

# A part of every cache key. Raise it if the same text would be cached as other tokens.
_CACHE_VERSION = "1"

# Packages of the standard library that are no program text: tables of characters and help texts, a sixth of all bytes.
_STDLIB_TABLES = {"encodings", "pydoc_data"}
# Folders that are skipped at any depth: test suites, and packages that pip installed.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class Document:
    """Describes a text that is read when it is needed."""

    name: str
    read: Callable[[], str]


@dataclass(frozen=True)
class Texts:
    """Holds the documents of a text corpus, and what is left out of it.

    Attributes:
        path: the file or the folder.
        documents: the documents in sorted order.
        left_out: counts and names of files that are left out, or "".
        reader: reads the documents. It knows which of them were damaged.
    """

    path: str
    documents: list[Document]
    left_out: str
    reader: Reader

    def remarks(self, empty: int) -> list[str]:
        """Returns a line for what is left out, and one for files with damaged bytes, after all documents were read.

        Args:
            empty: the number of documents without text.
        """
        parts = [part for part in (self.left_out, f"{empty:,} empty documents" if empty else "") if part]
        lines = [f"corpus {self.path}: left out {', '.join(parts)}"] if parts else []
        if names := list(self.reader.damaged):
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            what = f"{len(names):,} files with bytes that are no text, read as U+FFFD"
            lines.append(f"corpus {self.path}: {what} ({shown})")
        return lines


def find_texts(
    path: str | os.PathLike[str], group: str = "file", suffixes: Sequence[str] = (), text_field: str = "text"
) -> Texts:
    """Finds the documents of a file or of a folder, in sorted order.

    A file of JSON lines (.jsonl, .ndjson, .json), a Parquet file (.parquet) and an Arrow file (.arrow) hold a document
    in each row. A folder may be a dataset that `datasets` saved. Any other file of text is one document. Files may be
    compressed (.gz, .zst).

    Args:
        path: a file, or a folder, read with its subfolders. Hidden files and folders, binary files and tables (see
            `find_files`) are left out. Or "hf://datasets/OWNER/NAME", a dataset to stream, see `streamed`.
        group: "file": each file without rows is a document. "folder": the files directly in a folder are one document,
            each headed by a line with its path, so that documents are long.
        suffixes: file name endings to read, such as (".py", ".md"); empty: all.
        text_field: the field of a row that holds the text.

    Raises FileNotFoundError for a missing path. Raises ValueError if no file is left, for a file that cannot be read,
    for files of rows in groups, and if `path` is a file that would be left out. Raises ImportError naming the missing
    extra.
    """
    name = str(path)
    root = streamed(name, text_field) if name.startswith(STREAM) else Path(path)
    if not root.exists():
        raise FileNotFoundError(f"text corpus does not exist: {root}")
    if root.is_file():
        files, left_out = [_single_file(root, group, suffixes, text_field)], ""
    else:
        found = find_files(root, suffixes, text_field)
        files, left_out = found.files, describe(found.left_out)
        if not files:
            wanted = f"file ending in {', '.join(suffixes)}" if suffixes else "text file"
            rest = f"; left out are {left_out}" if left_out else ""
            raise ValueError(f"text corpus {root} is empty: no {wanted} in it{rest}")
    if group not in ("file", "folder"):
        raise ValueError(f"group must be file or folder, got {group!r}")
    reader = Reader(text_field)
    if group == "folder":
        rows = [file.path for file in files if file.kind != "text"]
        if rows:
            raise ValueError(f"text corpus {root}: data.group=folder joins plain texts, got a file of rows, {rows[0]}")
        return Texts(name, _folders(files, reader), left_out, reader)
    documents = []
    for file in files:
        if file.kind == "text":
            documents.append(Document(file.name, partial(reader.text, file)))
        else:
            documents += [
                Document(f"{file.name}:{i + 1}", partial(reader.row, file, i)) for i in range(reader.count(file))
            ]
    return Texts(name, documents, left_out, reader)


def stdlib_documents() -> list[Document]:
    """Returns the source of Python's standard library, as installed on this machine, in sorted order.

    A package with its subpackages is one document, and a single module is a document. Modules that are only neighbours
    in the alphabet are not joined, because the start of a document should help to predict its end. A line such as
    `# asyncio/base_events.py` precedes every file. Raises FileNotFoundError if Python was installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # sys.stdlib_module_names tells the library from what else lies in its folder, such as build settings
    wanted = sys.stdlib_module_names - _STDLIB_TABLES
    files = [name for name in files_below(root, (".py",), _STDLIB_SKIPPED) if _first_name(name) in wanted]
    if not files:
        raise FileNotFoundError(f"no source of Python's standard library in {root}: use data kind 'text' with a path")
    return _grouped(root, files, _first_name)


def cut_document(document: Document, fraction: float) -> tuple[Document, Document]:
    """Cuts a document in two: all but the last `fraction` of its characters, and those.

    The cut is at the end of a line if the document has one. Raises ValueError for a document of one character.
    """
    text = document.read()
    if len(text) < 2:
        raise ValueError(f"the only document, {document.name}, has {len(text)} character: too short to hold a part out")
    end = max(1, int(len(text) * (1 - fraction)))
    end = text.rfind("\n", 0, end) + 1 or end
    first, last = text[:end], text[end:]
    return Document(f"{document.name} (begin)", lambda: first), Document(f"{document.name} (end)", lambda: last)


def measure_documents(documents: Iterable[Document]) -> tuple[list[Document], np.ndarray, list[str]]:
    """Returns the documents that are not empty, their sizes, and a hash of each one's text.

    Sizes are bytes of UTF-8, int64.
    """
    kept, sizes, hashes = [], [], []
    for document in documents:
        data = document.read().encode("utf-8", errors="replace")  # a path in a headline may be odd
        if data:
            kept.append(document)
            sizes.append(len(data))
            hashes.append(digest([data]))
    return kept, np.array(sizes, dtype=np.int64), hashes


def train_bpe(
    documents: Sequence[Document], hashes: Sequence[str], vocab_size: int, cache_dir: Path | None = None
) -> BPETokenizer:
    """Trains a BPE tokenizer on the documents, or finds it in the cache.

    `hashes` as from `measure_documents`.

    Of a corpus above 64 Mi characters every document gives its beginning, in proportion.
    """
    file = (cache_dir or default_cache_dir()) / f"bpe-{digest([_CACHE_VERSION, str(vocab_size), *hashes])}.json"
    if file.is_file():
        try:
            return BPETokenizer.load(file)
        except ValueError:
            pass  # damaged: made again below
    tokenizer = BPETokenizer.train(training_texts(documents), vocab_size)
    tokenizer.save(file)
    return tokenizer


def tokenize_documents(
    documents: Sequence[Document], hashes: Sequence[str], tokenizer: Tokenizer, cache_dir: Path | None = None
) -> TokenCorpus:
    """Returns the tokens of documents, memory-mapped from the cache.

    If they are not in the cache, they are written first.

    The cache holds `<fingerprint>.tokens.npy`, one flat array of the smallest unsigned dtype, and
    `<fingerprint>.offsets.npy`; the fingerprint is that of the texts (`hashes`, as from `measure_documents`)
    and of the tokenizer. Raises ValueError if there are no tokens, OSError if the cache cannot be written.
    """
    # Earlier versions did not put the start before texts, and their caches of such tokenizers are not used.
    start = [f"start {list(tokenizer.start)}"] if tokenizer.start else []
    fingerprint = digest([_CACHE_VERSION, tokenizer.fingerprint, *start, *hashes])
    folder = cache_dir or default_cache_dir()
    tokens_file, offsets_file = folder / f"{fingerprint}.tokens.npy", folder / f"{fingerprint}.offsets.npy"
    cached = _load_cached(tokens_file, offsets_file)
    if cached is None:
        _write_tokens(documents, tokenizer, tokens_file, offsets_file)
        cached = _load_cached(tokens_file, offsets_file)
        if cached is None:
            raise RuntimeError(f"cache file {tokens_file} was changed by another process while it was in use")
    return TokenCorpus(*cached, tokenizer.vocab_size, fingerprint)


def _first_name(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def files_below(root: Path, suffixes: Sequence[str], skipped: Collection[str] = ()) -> list[str]:
    """Returns sorted paths relative to root, with forward slashes: the same order on every machine."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        wanted = [name for name in files if name[0] != "." and (not suffixes or name.endswith(tuple(suffixes)))]
        paths = [Path(folder, name) for name in wanted]
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]  # no broken links
    return sorted(found)


def looks_binary(data: bytes) -> bool:
    """Returns whether a file that begins so is no text: a zero byte near the beginning."""
    return b"\0" in data[:8192]


def headed_text(name: str, text: str) -> str:
    """Returns a file's text as a part of a document: headed by a line with its path, ended by a line end.

    An empty file gives nothing.
    """
    return text and f"# {name}\n{text}" + ("" if text.endswith("\n") else "\n")


def _single_file(path: Path, group: str, suffixes: Sequence[str], text_field: str) -> TextFile:
    """Returns a corpus of one file. Raises ValueError for one that would be left out of a folder."""
    if suffixes and not path.name.endswith(tuple(suffixes)):
        raise ValueError(
            f"text corpus {path} is a file that does not end in {', '.join(suffixes)}; data.suffixes names other files"
        )
    if group == "folder":
        raise ValueError(f"text corpus {path} is a file; data.group={group} needs a folder of text")
    file, reason = classify(path, path.name, suffixes, text_field)
    if file is not None:
        return file
    if reason == "binary":
        hint = "; data.kind=tokens reads files of tokens" if path.suffix == ".bin" else ""
        raise ValueError(f"text corpus {path}: expected UTF-8 text, got a binary file{hint}")
    end = os.path.splitext(without_compression(path.name)[0])[1]
    raise ValueError(f"text corpus {path}: expected text or a JSON object a line with the field {text_field!r}, got "
                     f"{reason} ({end}); data.suffixes={end} reads it as plain text")  # fmt: skip


def _read_text(path: Path) -> str:
    with naming(path, reading=True):
        return path.read_bytes().decode("utf-8", errors="replace")


def _folders(files: Sequence[TextFile], reader: Reader) -> list[Document]:
    """Returns a document for each folder."""
    groups: dict[str, list[TextFile]] = {}
    for file in files:
        groups.setdefault(os.path.dirname(file.name) or ".", []).append(file)

    def read(group: str) -> str:
        return "".join(headed_text(file.name, reader.text(file)) for file in groups[group])

    return [Document(group, partial(read, group)) for group in sorted(groups)]


def _grouped(root: Path, files: Iterable[str], key: Callable[[str], str]) -> list[Document]:
    groups: dict[str, list[str]] = {}
    for name in files:
        groups.setdefault(key(name), []).append(name)
    return [Document(group, partial(_read_headed, root, tuple(groups[group]))) for group in sorted(groups)]


def _read_headed(root: Path, names: tuple[str, ...]) -> str:
    return "".join(headed_text(name, _read_text(root / name)) for name in names)


def training_texts(documents: Sequence[Document]) -> Iterator[str]:
    """Yields the texts that a tokenizer is trained on: the same share of every document, from its start.

    Together they have at most BPE_TRAINING_CHARACTERS characters.
    """
    total = sum(len(document.read()) for document in documents)
    share = min(1.0, BPE_TRAINING_CHARACTERS / max(total, 1))
    for document in documents:
        text = document.read()
        yield text[: round(len(text) * share)]


def _load_cached(tokens_file: Path, offsets_file: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns tokens and offsets, or None if they are missing or damaged."""
    try:
        tokens, offsets = np.load(tokens_file, mmap_mode="r"), np.load(offsets_file)
    except (FileNotFoundError, ValueError, EOFError):  # missing; shortened files raise either of the others
        return None
    return (tokens, offsets) if offsets[-1] == len(tokens) else None


def _write_tokens(documents: Sequence[Document], tokenizer: Tokenizer, tokens_file: Path, offsets_file: Path) -> None:
    """Write the cache one document at a time: the corpus need not fit in memory."""
    remove_leftovers(tokens_file.parent)
    offsets = [0]
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with atomic_write(tokens_file) as file:
        _write_header(file, dtype, 0)
        for document in documents:
            tokens = np.ascontiguousarray(encode_document(tokenizer, document.name, document.read()), dtype=dtype)
            file.write(tokens.data)
            offsets.append(offsets[-1] + len(tokens))
        if not offsets[-1]:
            raise ValueError("the corpus is empty: its documents hold no tokens")
        file.seek(0)
        _write_header(file, dtype, offsets[-1])
    with atomic_write(offsets_file) as file:
        np.save(file, np.array(offsets, dtype=np.int64))


def _write_header(file, dtype: np.dtype, length: int) -> None:
    # numpy pads the header so that the first axis may grow in place: its size does not depend on the length
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, description)
