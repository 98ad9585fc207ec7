"""The error for a package that is not installed, which names the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str, need: str) -> Iterator[None]:
    """Raises ImportError in one line where an import in the block fails.

    Args:
        extra: the extra of sympow that installs the package.
        need: what needs which package, such as "drawing images needs matplotlib".
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: pip install 'sympow[{extra}]' ({error})") from error
