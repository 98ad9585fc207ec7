"""Finds and reads files of text: plain text, and documents as rows of JSON lines, Parquet and Arrow files.

Each of them may be compressed with gzip or Zstandard. Text is read as UTF-8, or as the encoding that a byte order mark
at its beginning names. Invalid bytes become U+FFFD, so that one damaged file does not stop a large corpus.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sympow.files import naming, parsed_json
from sympow.packages import from_extra

COMPRESSIONS = (".gz", ".zst")
# Files that hold a document in each row, by the end of their names without that of the compression.
ROWS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_TABLES = (".csv", ".tsv")

# Byte order marks. That of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# How compressed files, archives and PDF files begin. A small one may have no zero byte.
_BINARY = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04", b"%PDF-", b"PAR1", b"ARROW1")
# A line, or a whole text, may be so many times as large as its compressed file, if it is not small: text is less.
RATIO = 100
SMALL = 1 << 26  # bytes
_HEAD = 8192  # bytes that tell whether a file is text


@dataclass(frozen=True)
class TextFile:
    """Describes a file of text or of rows.

    Attributes:
        path: where it is.
        name: its path in the corpus, with forward slashes and without the end that names the compression.
        compression: "", ".gz" or ".zst".
        kind: "text", "jsonl", "parquet" or "arrow".
    """

    path: Path
    name: str
    compression: str
    kind: str


@dataclass(frozen=True)
class Found:
    """Holds the files of a corpus, sorted by their names, and why others are left out: names by reason."""

    files: list[TextFile]
    left_out: dict[str, list[str]]


def find_files(root: Path, suffixes: Sequence[str], field: str) -> Found:
    """Finds the files of a corpus in a folder and its subfolders.

    Left out are hidden files and folders, binary files, and tables: CSV files, and JSON files that do not consist of a
    JSON object a line. Tables that `suffixes` names are read as text. Of a dataset that `datasets` saved, the files
    that it lists are read.

    Args:
        root: the folder.
        suffixes: endings of names to read; empty: all.
        field: the field of a row that holds the text.

    Raises ValueError for a dataset of several splits, ImportError naming the missing extra, OSError as the file system
    does.
    """
    files: list[TextFile] = []
    left_out: dict[str, list[str]] = {}
    for folder, folders, names in os.walk(root, onerror=_raise):
        here = Path(folder).relative_to(root)
        known = _dataset(Path(folder))
        outside = [name for name in folders if name[0] == "." or Path(folder, name).is_symlink()]
        folders[:] = [name for name in folders if name not in outside]
        for name in (*outside, *names):
            path, reason = Path(folder, name), "hidden" if name[0] == "." else "links to folders"
            if name[0] != "." and name not in outside:
                if known is not None and name not in known and Path(name).suffix in (".arrow", ".json"):
                    continue  # of the dataset's own: descriptions and caches
                kept = not suffixes or without_compression(name)[0].endswith(tuple(suffixes))
                if not kept and not name.endswith(tuple(suffixes)):
                    continue
                if not path.is_file():
                    reason = "broken links"
                else:
                    file, reason = classify(path, (here / name).as_posix(), suffixes, field)
                    if file is not None:
                        files.append(file)
                        continue
            left_out.setdefault(reason, []).append((here / name).as_posix())
    return Found(sorted(files, key=lambda file: file.name), left_out)


def without_compression(name: str) -> tuple[str, str]:
    """Returns the name of a file without the end that names its compression, and that end or ""."""
    for end in COMPRESSIONS:
        if name.lower().endswith(end):
            return name[: -len(end)], end
    return name, ""


def classify(path: Path, name: str, suffixes: Sequence[str], field: str) -> tuple[TextFile | None, str]:
    """Returns the file as one of text or of rows, and ""; or None, and the reason to leave it out.

    Args:
        path: where the file is.
        name: its path in the corpus.
        suffixes: as for `find_files`.
        field: as for `find_files`.

    Raises ImportError naming the missing extra, OSError or ValueError naming a file that cannot be read.
    """
    plain, compression = without_compression(name)
    end = os.path.splitext(plain)[1].lower()
    file = TextFile(path, plain, compression, ROWS.get(end, "text"))
    if file.kind in ("parquet", "arrow"):
        return file, ""
    with _naming(file), _opened(file) as stream:
        head = stream.read(_HEAD)
    if not is_text(head):
        return None, "binary"
    named = plain.endswith(tuple(suffixes)) if suffixes else False
    if end == ".json" and not _begins_with_rows(file, field):
        return (_as_text(file), "") if named else (None, f"JSON without a field {field!r} in each line")
    if end in _TABLES and not named:
        return None, "tables"
    return file, ""


def is_text(head: bytes) -> bool:
    """Returns whether a file that begins with these bytes is text: a byte order mark, or no sign of a binary file."""
    if head.startswith(tuple(_MARKS)):
        return True
    return b"\0" not in head and not head.startswith(_BINARY)


def decode(data: bytes) -> str:
    """Returns the text of bytes: UTF-8, or as their byte order mark says, which is no part of the text."""
    return data.decode(_encoding(data), errors="replace")


class Reader:
    """Reads documents of files. The documents of a file of rows are read fastest in their order.

    At most one file is open at a time.

    Args:
        field: the field of a row that holds the text.

    Attributes:
        damaged: the names of the files read so far that have bytes that are not of their encoding.
    """

    def __init__(self, field: str):
        self.field = field
        self.damaged: dict[str, None] = {}  # in the order in which they were read
        self._file: TextFile | None = None
        self._rows: Iterator[str] = iter(())
        self._next = 0

    def text(self, file: TextFile) -> str:
        """Returns the text of a file."""
        with _naming(file), _opened(file) as stream:
            text = decode(_whole(file, stream))
        self._note(file, text)
        return text

    def count(self, file: TextFile) -> int:
        """Returns the number of rows of a file. Raises ValueError naming a file that cannot be read."""
        with _naming(file):
            if file.kind == "jsonl":
                return sum(1 for _ in _lines(file))
            return sum(map(len, _batches(file, self.field)))

    def row(self, file: TextFile, index: int) -> str:
        """Returns the text of row `index`. Raises ValueError naming the file and a row without a text."""
        if self._file is not file or index < self._next:
            self._file, self._rows, self._next = file, _rows(file, self.field), 0
        with _naming(file):
            for number in range(self._next, index + 1):
                text = next(self._rows, None)
                if text is None:
                    raise ValueError(f"{file.path} was changed while it was read: it has {number} rows")
        self._next = index + 1
        self._note(file, text or "")
        return text or ""

    def _note(self, file: TextFile, text: str) -> None:
        if "\ufffd" in text:
            self.damaged[file.name] = None


def describe(left_out: dict[str, list[str]]) -> str:
    """Returns the counts and names of files that are left out, such as "2 binary (a.png, b.png), 1 hidden (.git)"."""
    parts = []
    for reason, names in sorted(left_out.items()):
        ends = Counter(os.path.splitext(name)[1] for name in names)
        shown = sorted(names)[:3] + (
            [f"... {', '.join(f'{n} {end}' for end, n in ends.most_common(3) if end)}"] if len(names) > 3 else []
        )
        parts.append(f"{len(names):,} {reason} ({', '.join(shown)})")
    return ", ".join(parts)


def _raise(error: OSError) -> None:
    raise error


def _as_text(file: TextFile) -> TextFile:
    return TextFile(file.path, file.name, file.compression, "text")


def _dataset(folder: Path) -> set[str] | None:
    """Returns the names of the files of a dataset that `datasets` saved in a folder; None for another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json", "splits")
        if len(splits) > 1:
            raise ValueError(f"text corpus {folder} is a dataset with the splits {', '.join(splits)}: name one in the "
                             f"path, such as {folder / str(splits[0])}")  # fmt: skip
        return set()
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return None
    return {str(entry.get("filename")) for entry in _json(folder / "state.json", "_data_files")}


def _json(path: Path, key: str) -> list[Any]:
    try:
        return list(parsed_json(path.read_bytes())[key])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: expected JSON of a saved dataset, with {key!r}") from None


@contextmanager
def _naming(file: TextFile) -> Iterator[None]:
    """Names the file in an error that says that it cannot be read."""
    try:
        with naming(file.path, reading=True):
            yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file.path} cannot be read as {file.compression}: {error}") from None
    except OSError as error:
        if error.filename is None and error.errno is None:  # of pyarrow, for compressed data
            line = str(error).split("\n")[0]
            raise ValueError(f"{file.path} cannot be read: {line}") from None
        raise


@contextmanager
def _opened(file: TextFile) -> Iterator[BinaryIO]:
    """Opens a file for its bytes after decompression."""
    if file.compression == ".gz":
        with gzip.open(file.path, "rb") as unzipped:
            yield unzipped  # type: ignore[misc]
    elif file.compression == ".zst":
        arrow = _arrow(f"reading {file.path}")
        with file.path.open("rb") as raw, arrow.CompressedInputStream(raw, "zstd") as stream:
            yield io.BufferedReader(stream)
    else:
        with file.path.open("rb") as stream:
            yield stream


def _most(file: TextFile) -> int | None:
    """Returns how large a part of a compressed file may be that is held in memory; None for any other file."""
    return max(SMALL, RATIO * file.path.stat().st_size) if file.compression else None


def _whole(file: TextFile, stream: BinaryIO) -> bytes:
    """Returns all bytes of an open file. Raises ValueError for a small file that would take much memory."""
    most = _most(file)
    data = stream.read(-1 if most is None else most + 1)
    if most is not None and len(data) > most:
        raise ValueError(f"{file.path}: {_too_large(file, most, 'bytes')}")
    return data


def _too_large(file: TextFile, most: int, unit: str) -> str:
    size = file.path.stat().st_size
    return f"expected at most {most:,} {unit} from the {size:,} bytes of the compressed file; got more"


def _encoding(head: bytes) -> str:
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), "utf-8")


def _lines(file: TextFile) -> Generator[tuple[int, str]]:
    """Yields the lines of a file that are not blank, with their numbers from 1 on."""
    with _opened(file) as stream:
        head = stream.read(4)
    with (
        _opened(file) as stream,
        io.TextIOWrapper(stream, encoding=_encoding(head), errors="replace", newline="\n") as text,
    ):
        most = _most(file)
        lines = text if most is None else iter(lambda: text.readline(most + 1), "")
        for number, line in enumerate(lines, 1):
            if most is not None and len(line) > most:
                raise ValueError(f"{file.path}, line {number}: {_too_large(file, most, 'characters')}")
            if line.strip():
                yield number, line


def _begins_with_rows(file: TextFile, field: str) -> bool:
    with _naming(file), closing(_lines(file)) as lines:
        for _, line in lines:
            try:
                row = parsed_json(line)
            except ValueError:
                return False
            return isinstance(row, dict) and field in row
    return False


def _rows(file: TextFile, field: str) -> Iterator[str]:
    """Yields the text of every row; "" for a row whose text is null."""
    if file.kind == "jsonl":
        yield from _json_rows(file, field)
        return
    for batch in _batches(file, field):
        for value in batch.to_pylist():
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{file.path}: expected strings in the field {field!r}, got {value!r}")
            yield value or ""


def _json_rows(file: TextFile, field: str) -> Iterator[str]:
    with closing(_lines(file)) as lines:
        for number, line in lines:
            where = f"{file.path}, line {number}"
            try:
                row = parsed_json(line)
            except ValueError as error:
                raise ValueError(f"{where}: expected a JSON object, got what is no JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {line.strip()[:40]!r}")
            if field not in row:
                raise ValueError(f"{where}: {_missing(field, row)}")
            value = row[field]
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{where}: expected a string in the field {field!r}, got {value!r}"[:300])
            yield value or ""


def _missing(field: str, fields: Collection[str]) -> str:
    known = ", ".join(map(repr, fields)) or "none"
    return f"expected the field {field!r}, got {known}: data.text_field names the field of the text"


def _batches(file: TextFile, field: str) -> Iterator[Any]:
    """Yields the values of a field in a Parquet or Arrow file, in arrays. Raises ValueError naming a damaged file."""
    arrow = _arrow(f"reading {file.path}")
    from pyarrow import ipc, parquet

    refused = (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, arrow.ArrowTypeError, OSError)
    try:
        with file.path.open("rb") as raw:
            source: Any = raw
            if file.compression:
                with _opened(file) as stream:
                    source = arrow.BufferReader(_whole(file, stream))
            if file.kind == "parquet":
                table = parquet.ParquetFile(source)
                _check_field(file, field, table.schema_arrow.names)
                batches = table.iter_batches(columns=[field])
            else:
                head = source.read(6)
                source.seek(0)
                reader = ipc.open_file(source) if head == b"ARROW1" else ipc.open_stream(source)
                _check_field(file, field, reader.schema.names)
                whole = hasattr(reader, "num_record_batches")
                batches = map(reader.get_batch, range(reader.num_record_batches)) if whole else iter(reader)
            for batch in batches:
                yield batch.column(field)
    except refused as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        line = str(error).split("\n")[0]
        raise ValueError(f"{file.path} cannot be read as {file.kind}: {line}") from None


def _check_field(file: TextFile, field: str, fields: Sequence[str]) -> None:
    if field not in fields:
        raise ValueError(f"{file.path}: {_missing(field, fields)}")


def _arrow(task: str) -> Any:
    with from_extra("data", f"{task} needs pyarrow"):
        import pyarrow
    return pyarrow
