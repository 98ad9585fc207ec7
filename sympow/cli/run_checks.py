"""Labels of several runs, the check whether the runs can be compared, and the dtype of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sympow.data import ByteTokenizer, DataConfig, Tokenizer, load_tokenizer


def labels_of(paths: Sequence[str]) -> list[str]:
    """Names runs by the last part of each path if these parts differ, otherwise by the whole path.

    Raises ValueError for a run that is given twice, also if its paths are written differently.
    """
    resolved = [Path(path).resolve() for path in paths]
    if len(set(resolved)) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(paths)}")
    last = [path.name for path in resolved]
    return last if len(set(last)) == len(last) else list(paths)


def dtype_of(name: str) -> torch.dtype | None:
    """Returns the dtype of weights that the option --dtype names; None for "auto", the dtype of the checkpoint."""
    return None if name == "auto" else getattr(torch, name)


def check_tokenizers(tokenizers: Mapping[str, Tokenizer | None]) -> None:
    """Raises ValueError unless all runs, given by label, have the same tokenizer."""
    (first, tokenizer), *others = tokenizers.items()
    for label, other in others:
        if (other and other.fingerprint) != (tokenizer and tokenizer.fingerprint):
            raise ValueError(f"{first} and {label} have different tokenizers: their tokens mean different things")


def text_tokenizer(tokenizer: Tokenizer | None, run: str) -> Tokenizer:
    """Returns the tokenizer of a run. Raises ValueError, which names the run, if it has none."""
    if tokenizer is None:
        raise ValueError(f"{run} was trained on tokens without a tokenizer: it cannot read or write text")
    return tokenizer


def check_data_tokenizer(data: DataConfig, own: Tokenizer | None, label: str, assignments: Sequence[str]) -> None:
    """Raises ValueError if a data config describes another tokenizer than that of the model, where it would be ignored.

    Args:
        data: the config, with the assignments. A file that is gone since the training is not compared.
        own: the model's tokenizer; None if it is not known.
        label: of the model.
        assignments: what the user has set, key=value. A tokenizer among them must exist.

    Raises FileNotFoundError if the user names a tokenizer that does not exist.
    """
    if own is None:
        return
    check_bpe(own, label, assignments)
    named, keys = data.tokenizer, _keys(assignments)
    if "vocab_size" in keys and data.vocab_size not in (None, own.vocab_size):
        raise ValueError(f"vocab_size is {data.vocab_size}, but the tokenizer of {label} has {own.vocab_size} tokens")
    gone = named != "bytes" and "tokenizer" not in keys and not Path(named).exists()
    if named in ("bpe", "none") or gone:
        return
    other = ByteTokenizer() if named == "bytes" else load_tokenizer(named)
    if list(other.token_bytes) != list(own.token_bytes):
        raise ValueError(f"the data name the tokenizer {named}, but {label} reads text by its own, another one")


def check_bpe(own: Tokenizer | None, label: str, assignments: Sequence[str], group: str = "") -> None:
    """Raises ValueError if the user asks for a BPE for a model that reads bytes, which would go on to read bytes.

    A config alone does not tell, because "bpe" is what it has by default.

    Args:
        own: the model's tokenizer.
        label: of the model.
        assignments: what the user has set, key=value.
        group: as for `check_held_out`.
    """
    wanted = f"{group}tokenizer=bpe"
    if isinstance(own, ByteTokenizer) and wanted in assignments:
        raise ValueError(f"{label} reads text by its own tokenizer, bytes: leave {wanted} out")


def check_held_out(data: DataConfig, assignments: Sequence[str], group: str = "") -> None:
    """Raises ValueError if the user sets a field of a data config that has no effect beside its `held_out_path`.

    A recipe may set such a field, so the config itself allows it.

    Args:
        data: the config, with the assignments.
        assignments: what the user has set, key=value.
        group: what precedes the names of the config's fields in the keys, such as "data.".
    """
    for key in _keys(assignments):
        if data.held_out_path is not None and key in (f"{group}held_out", f"{group}seed"):
            raise ValueError(
                f"{key} chooses held-out documents, which {group}held_out_path = {data.held_out_path!r} gives already: "
                "leave one of them out"
            )


def check_given(assignments: Sequence[str], given: Mapping[str, str]) -> None:
    """Raises ValueError if the user sets a field of a config that an argument of the command sets already.

    Args:
        assignments: what the user has set, key=value.
        given: the arguments, by the fields that they set.
    """
    for assignment, key in zip(assignments, _keys(assignments), strict=True):
        if key in given:
            raise ValueError(f"{given[key]} sets {key} already: leave {assignment} out")


def _keys(assignments: Sequence[str]) -> list[str]:
    return [assignment.partition("=")[0] for assignment in assignments]
