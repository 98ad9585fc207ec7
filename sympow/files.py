"""Small file helpers: the cache folder, atomic writes, which all files of runs and sweeps use, tables and digests."""

from __future__ import annotations

import csv
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

_DAY = 24 * 3600.0  # seconds
LONGEST_NAME = 200  # bytes; file systems take 255, and `atomic_write` and others add some


def default_cache_dir() -> Path:
    """Returns the folder for caches: `$XDG_CACHE_HOME/sympow`, or `~/.cache/sympow`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sympow"


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a binary file that appears at `path` when the block ends, and never appears if the block raises.

    The file is on the disk before it has its name, so that no loss of power leaves a part of it there. It is first
    written beside `path` under another name, `.NAME.*.tmp`, so that several processes can write the same file at
    the same time. The folder is made if it is missing. Raises OSError as the file system does.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path), open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to fill. It becomes the folder `path` when the block ends, and is removed if the block raises.

    A kill leaves a hidden folder beside `path`, which the next call removes. Raises OSError as the file system does.

    Args:
        path: a folder that does not exist, or is empty.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
        if not process_runs(other.name.removeprefix(f".{path.name}.").partition(".")[0]):
            shutil.rmtree(other, ignore_errors=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.unfinished")
    partial.mkdir()
    try:
        yield partial
        if path.exists() and (os.path.ismount(path) or path.samefile(Path.cwd())):  # cannot be replaced
            for each in sorted(partial.iterdir(), key=lambda each: each.name == "config.json"):
                shutil.move(each, path / each.name)
            partial.rmdir()
        else:
            if path.exists():
                path.rmdir()
            partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(path.parent)


def process_runs(process: str) -> bool:
    """Tells whether a process with this number may run, which only POSIX systems can deny."""
    if os.name != "posix":  # elsewhere the signal 0 is one that a process would get
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        return True
    return True


def remove_leftovers(folder: Path) -> None:
    """Removes what `atomic_write` left in a folder where its process was killed, once it is a day old.

    A younger file may be one that another process is writing.
    """
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):  # another process removes it too, or it belongs to another user
            if time.time() - path.stat().st_mtime > _DAY:
                path.unlink()


def read_utf8(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file with its line ends, as training reads texts.

    Raises OSError naming the file, and ValueError if it is not UTF-8.
    """
    try:
        with naming(path, reading=True):
            return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8 text: {error.reason}") from None


@contextmanager
def naming(path: str | os.PathLike[str], reading: bool = False) -> Iterator[None]:
    """Adds the name of a file to an error in the block that names none, and that the file may have caused.

    Args:
        path: of the file.
        reading: whether the block reads the file, so that any error of the system counts. Otherwise the block writes
            the file, and an error counts that says that the disk takes no more of it.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.filename is None and error.strerror is not None and (reading or full):
            error.filename = os.fspath(path)
        raise


def check_file_name(name: str, what: str) -> None:
    """Raises ValueError unless `name` can name a file or a folder, also with some more characters at its ends."""
    if not name or name != name.strip() or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"{what} must be usable as a file name, got {name!r}")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"{what} must have at most {LONGEST_NAME} bytes, got {len(name.encode())}: {name[:40]!r}...")


def parsed_json(text: str | bytes) -> Any:
    """Returns the content of a JSON text. Raises ValueError, also for lists and objects that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file of UTF-8 text as `atomic_write` does, with the line ends that `text` has."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_table(path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes the columns' names and the rows as CSV, every row when it comes.

    An existing file stays as it is until there is a first row, or none.
    """
    rows = iter(rows)
    first = list(islice(rows, 1))
    # The buffer holds one line, so that each line is in the file at once.
    with naming(path), open(path, "w", newline="", encoding="utf-8", buffering=1) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(chain(first, rows))


def sync(path: Path) -> None:
    """Writes a file to the disk, or the names of the files in a folder."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename is durable without
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest(parts: Iterable[bytes | str]) -> str:
    """Returns a short hash of a sequence of byte strings. It depends on the borders between the strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
