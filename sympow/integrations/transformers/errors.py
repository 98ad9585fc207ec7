"""Errors of reading a model by transformers, in one line each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sympow.layers.registry import UntrustedCodeError


@contextmanager
def without_bars() -> Iterator[None]:
    """Runs a block without the progress bars of transformers, which would be lines before an error."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def reading(source: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the errors of a block that reads a model, or one of its files, into one line that names it.

    Args:
        source: the folder, the file or the id on the Hugging Face Hub.

    Raises UntrustedCodeError for a config that names code (see `sympow.layers.trust_code`), ImportError where a package
    is missing, FileNotFoundError for a file that is missing or cannot be opened, and ValueError for all else, such as a
    file of weights that is cut.
    """
    try:
        yield
    except UntrustedCodeError as error:
        raise UntrustedCodeError(f"{source} cannot be read: {error}") from None
    except ImportError as error:
        raise ImportError(f"reading {source} needs more packages: {_line(error)}") from error
    except OSError as error:
        raise FileNotFoundError(_named(source, error)) from error
    except Exception as error:  # transformers raises errors of all kinds for files that are not as it expects
        raise ValueError(_named(source, error)) from error


def _named(source: str | os.PathLike[str], error: BaseException) -> str:
    """Returns the line of an error, behind the source unless the line begins with it, or with a file in it."""
    line = _line(error)
    return line if line.startswith((f"{source} ", f"{source}{os.sep}")) else f"{source} cannot be read: {line}"


def _line(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "it needs Python files that come with the weights, and these are never run"
    return " ".join(str(error).split())[:500] or type(error).__name__
