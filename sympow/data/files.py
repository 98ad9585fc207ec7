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
    """Opens a binary file that appears at `path` when the block ends, whole, and not at all if the block raises.

    It is written beside `path` under a name of its own, so that processes writing the same file at once do
    not disturb each other. The folder is made if it is missing. Raises OSError as the file system does.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(partial, 0o644)  # mkstemp makes it private; a corpus or a tokenizer is no secret
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def digest(parts: Iterable[bytes | str]) -> str:
    """Returns a short hash of a sequence of byte strings; where one part ends and the next begins matters."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
