"""Labels of several runs, and the check whether the runs can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sympow.data import Tokenizer


def labels_of(paths: Sequence[str]) -> list[str]:
    """Names runs by the last part of each path if these parts differ, otherwise by the whole path.

    Raises ValueError for a run that is given twice.
    """
    last = [Path(path).resolve().name for path in paths]
    labels = last if len(set(last)) == len(last) else list(paths)
    if len(set(labels)) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(paths)}")
    return labels


def check_tokenizers(tokenizers: Mapping[str, Tokenizer | None]) -> None:
    """Raises ValueError unless all runs, given by label, have the same tokenizer."""
    (first, tokenizer), *others = tokenizers.items()
    for label, other in others:
        if (other and other.fingerprint) != (tokenizer and tokenizer.fingerprint):
            raise ValueError(f"{first} and {label} have different tokenizers: their tokens mean different things")
