"""Claims on jobs and on run folders, for processes that may be killed at any time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Tells whether this process got the claim at `path`. The claim ends with the block, or when the process dies.

    The file at `path` stays: a process that removed it could not tell whether another one has just opened it. Raises
    OSError if the file cannot be opened or its file system has no locks, and ImportError on Windows.
    """
    import fcntl  # not on Windows

    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
