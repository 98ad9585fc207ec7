"""Claims on jobs and on folders of runs and corpora, for processes that may be killed at any time."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Keeps a folder for this process until the block ends, by a claim on the file .lock in it.

    If the file system has no locks, a line on stderr says so, and the block is executed.

    Args:
        folder: the folder.
        work: what a process does in the folder, for the message, such as "trains".

    Raises RuntimeError if another process keeps the folder.
    """
    with ExitStack() as stack:
        try:
            ours = stack.enter_context(claim(folder / ".lock"))
        except (OSError, ImportError) as error:  # no locks on some network file systems and on Windows
            reason = getattr(error, "strerror", None) or error
            line = f"{folder} cannot be locked ({reason}): do not start the same command twice at the same time"
            print(line, file=sys.stderr)
            ours = True
        if not ours:
            raise RuntimeError(f"{folder} is in use, another process {work} there: wait for it, or give another folder")
        yield
