"""Small file helpers of the data package: the cache folder, atomic writes, digests."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def default_cache_dir() -> Path:
    """Returns the folder for caches: `$XDG_CACHE_HOME/sympow`, or `~/.cache/sympow`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sympow"


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a binary file that appears at `path` when the block ends, and never appears if the block raises.

    The file is on the disk before it has its name, so that no loss of power leaves a part of it there. It is first
    written beside `path` under another name, so that several processes can write the same file at
    the same time. The folder is made if it is missing. Raises OSError as the file system does.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # mkstemp makes it private; a corpus or a tokenizer is no secret
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Writes the names of the files in a folder to the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename is durable without
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def digest(parts: Iterable[bytes | str]) -> str:
    """Returns a short hash of a sequence of byte strings. It depends on the borders between the strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
