"""Claims on jobs, for processes that may be killed at any time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Tells whether this process got the claim at `path`. The claim ends with the block, or when the process dies."""
    import fcntl  # not on Windows

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
