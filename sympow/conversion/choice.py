"""Chooses the layers that keep softmax attention: those whose replacement changes the predictions most."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sympow.conversion.swap import parse_pattern, replaced_layers, swap_mixers
from sympow.data import Tokenizer, encode_text
from sympow.data.text import find_texts
from sympow.models import LanguageModel

ROWS, ROW_TOKENS = 4, 512  # on which predictions are compared
_CHARACTERS = 32  # of a token, at most: the beginning of a text that is tokenized


def parse_kept(text: str) -> tuple[str, ...]:
    """Reads the kinds of the layers to keep: "5" and "softmax*5" mean five layers of softmax attention.

    Raises ValueError for what is neither a number nor a pattern of softmax and gated layers.
    """
    wrong = f"the layers to keep are of one kind, softmax or gated, such as 5 or gated*5; got {text!r}"
    try:
        kinds = parse_pattern(f"softmax*{text}" if text.isdecimal() else text)
    except ValueError as error:
        raise ValueError(wrong) from error
    if len(set(kinds)) != 1 or kinds[0] not in ("softmax", "gated"):
        raise ValueError(wrong)
    return kinds


def choose_layers(divergences: Mapping[int, float], count: int) -> list[int]:
    """Returns the layers with the `count` largest divergences, sorted.

    Raises ValueError for more layers than there are, and for a divergence that is not a number.
    """
    check_count(len(divergences), count)
    for layer, divergence in divergences.items():
        if math.isnan(divergence):
            raise ValueError(f"the replacement of layer {layer} gives predictions that are not finite")
    return sorted(sorted(divergences, key=lambda layer: -divergences[layer])[:count])


def check_count(replaced: int, count: int) -> None:
    """Raises ValueError for more layers to keep than are replaced."""
    if count > replaced:
        raise ValueError(f"expected at most {replaced} layers to keep, as the pattern replaces so many; got {count}")


def layer_divergences(
    teacher: LanguageModel,
    pattern: Sequence[str],
    tokens: Tensor,
    *,
    p: int = 2,
    window: int = 1024,
    unshare: bool = False,
) -> Iterator[tuple[int, float]]:
    """Yields every replaced layer and the mean KL(teacher || model) in nats a token if this layer alone is replaced.

    Args:
        teacher: as for `swap_mixers`.
        pattern: as for `swap_mixers`.
        tokens: int64 [B, T], on the device of the teacher.
        p: as for `swap_mixers`.
        window: as for `swap_mixers`.
        unshare: as for `swap_mixers`.

    Raises the errors of `swap_mixers`.
    """
    swapped = swap_mixers(teacher, pattern, p=p, window=window, unshare=unshare)
    model = swap_mixers(teacher, ("softmax",))
    for layer in replaced_layers(teacher.config, pattern, p=p, window=window, unshare=unshare):
        block, own = swapped.blocks[layer], model.blocks[layer]
        model.blocks[layer] = block  # type: ignore[index]
        with torch.no_grad():
            total = sum(float(model.divergence_sum(row, row, teacher)) for row in tokens.split(1))
        model.blocks[layer] = own  # type: ignore[index]
        yield layer, total / tokens.numel()


def rows_of(path: str | os.PathLike[str], tokenizer: Tokenizer) -> Tensor:
    """Returns the first `ROW_TOKENS` tokens of up to `ROWS` documents, int64 [B, ROW_TOKENS].

    Shorter documents are left out. Raises the errors of `find_texts`, and ValueError if every document is shorter.
    """
    rows: list[Tensor] = []
    for document in find_texts(path).documents:
        tokens = encode_text(tokenizer, document.read()[: _CHARACTERS * ROW_TOKENS])[:ROW_TOKENS]
        if len(tokens) == ROW_TOKENS:
            rows.append(torch.from_numpy(tokens.astype("int64")))
        if len(rows) == ROWS:
            break
    if not rows:
        raise ValueError(f"expected a text of at least {ROW_TOKENS} tokens to choose layers by; {path} has none")
    return torch.stack(rows)
