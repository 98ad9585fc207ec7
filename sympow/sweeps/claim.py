"""Who works on what, among processes that may be killed at any moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Tells whether no other process holds the claim at `path`; it ends with the block, and with a process killed."""
    import fcntl  # not on Windows

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
