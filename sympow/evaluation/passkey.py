"""Passkey recall: whether a model recalls a number from a long text, by the text's length and the number's depth.

A text of filler sentences contains one sentence with a number of five digits. The text ends with the start of a
sentence that asks for the number, and the model continues with its likeliest tokens [Mohtashami & Jaggi, Landmark
Attention, 2023]. The filler contains no information about the number, so the model must recall it from the context.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sympow.evaluation.plot import panels
from sympow.files import naming, write_table
from sympow.models import LanguageModel, generate
from sympow.ops.memory import check_memory
from sympow.progress import Progress

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 5
FILLER = "The river runs past the mill. The wind is calm today. Boats wait at the pier. Nobody is in a hurry. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is"
BATCH_TOKENS = 1 << 15  # tokens in a forward pass, at least one text

Continue = Callable[[Tensor, int], Tensor]
"""Continues texts, int64 [B, T], with the likeliest token n times; returns int64 [B, n]."""


class Tokenizer(Protocol):
    """Turns text into tokens and back. The evaluations of recall need no more of a tokenizer."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, integers, 1-D."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        ...


class PasskeyRow(NamedTuple):
    """Tells how often a model named the number.

    context: the number of tokens of the text with the answer; depth: the depth of the passkey, from 0, the beginning,
    to 1, the end; texts: the number of texts; accuracy: the share of texts in which the whole passkey was right;
    digits: the share of right tokens in the answers.
    """

    model: str
    context: int
    depth: float
    texts: int
    accuracy: float
    digits: float


def passkey_recall(
    name: str,
    continues: Continue,
    tokenizer: Tokenizer,
    contexts: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    texts: int = 20,
    seed: int = 0,
    quiet: bool = True,
) -> Iterator[PasskeyRow]:
    """Measures recall at every context and depth, and yields each row when it is measured.

    All models of one tokenizer get the same texts.

    Args:
        name: the name of the model in the rows.
        continues: the model, such as the result of `native` or `transformers`.
        tokenizer: the tokenizer of the model.
        contexts: the numbers of tokens of a text, including the answer.
        depths: the depths of the number, each in [0, 1].
        texts: the number of texts for each context and depth; each text has its own number.
        seed: the seed of the numbers.
        quiet: show no progress.

    Raises ValueError at once for values out of range, for contexts too short to hold the number and the question, and
    if there is not enough memory for the texts.
    """
    if texts < 1 or not contexts or not depths:
        raise ValueError(f"expected at least one text, context and depth; got {texts}, {contexts}, {depths}")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"a depth must be from 0 to 1, got {depth}")
    check_memory(f"a context of {max(contexts):,} tokens", 32 * max(contexts))  # the text, and two parts of filler
    check_memory(f"a list of {texts:,} texts", 64 * texts)
    for key in _keys(texts, seed):  # before the model reads any of the texts
        passkey_text(tokenizer, key, min(contexts), 0.0)

    def measured() -> Iterator[PasskeyRow]:
        with Progress(f"passkeys, {name}", "text", total=len(contexts) * len(depths) * texts, quiet=quiet) as progress:
            for context, depth in product(contexts, depths):
                right = []
                drawn, size = _keys(texts, seed), max(1, BATCH_TOKENS // context)
                for keys in (drawn[start : start + size] for start in range(0, texts, size)):
                    for prompts, answers in _grouped(tokenizer, keys, context, depth):
                        made = continues(prompts, answers.shape[1]).cpu()
                        right.append((made == answers).double().mean(1).numpy())  # the share of right tokens [B]
                    progress.advance(len(keys))
                hits = np.concatenate(right)
                shares = float((hits == 1).mean()), float(hits.mean())
                yield PasskeyRow(name, context, depth, texts, *shares)

    return measured()


def passkey_text(tokenizer: Tokenizer, key: str, context: int, depth: float) -> tuple[np.ndarray, np.ndarray]:
    """Makes a text up to its answer, and the answer: tokens, int64 1-D, of `context` together.

    Raises ValueError if the number and the question do not fit.
    """
    needle, question, answer = (
        tokenizer.encode(text).astype(np.int64) for text in (NEEDLE.format(key=key), QUESTION, f" {key}")
    )
    filler = tokenizer.encode(FILLER).astype(np.int64)
    start = np.array(getattr(tokenizer, "start", ()), dtype=np.int64)  # the tokens that begin every text
    room = context - len(start) - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"a passkey needs a context of at least {context - room} tokens, got {context}")
    before = round(depth * room)
    # the filler is cut at the start and the end of the text, so that sentences beside the number are complete
    front = np.tile(filler, before // len(filler) + 1)[len(filler) - before % len(filler) :]
    behind = np.resize(filler, room - before) if room > before else filler[:0]
    return np.concatenate([start, front, needle, behind, question]), answer


def native(model: LanguageModel) -> Continue:
    """Wraps a model of sympow, which reads in chunks and continues from its state."""

    def continues(texts: Tensor, count: int) -> Tensor:
        return generate(model, texts, count, temperature=0.0).tokens

    return continues


def transformers(model: Any) -> Continue:
    """Wraps a causal language model of Hugging Face transformers, a softmax teacher or a model of sympow."""

    def continues(texts: Tensor, count: int) -> Tensor:
        texts = texts.to(model.device)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        try:
            made = model.generate(texts, attention_mask=torch.ones_like(texts), **options)
        except IndexError as error:  # of an embedding, such as that of learned positions
            length = texts.shape[1] + count
            raise ValueError(f"the model cannot read a text of {length:,} tokens with its answer: {error}") from error
        return made[:, texts.shape[1] :].cpu()

    return continues


def write_passkeys(path: str | os.PathLike[str], rows: Iterable[PasskeyRow]) -> None:
    """Writes the rows as a table, a line each, when they come."""
    cells = ([*row[:4], f"{row.accuracy:.4f}", f"{row.digits:.4f}"] for row in rows)
    write_table(path, PasskeyRow._fields, cells)


def plot_passkeys(rows: Sequence[PasskeyRow], path: str | os.PathLike[str]) -> None:
    """Draws accuracy by context, depth and model into an image whose format follows from its suffix.

    A panel is a model or, if there are fewer contexts than models, a context. Cells that no row measures are empty.

    Raises ValueError without rows, ImportError without matplotlib.
    """
    if not rows:
        raise ValueError("a plot needs at least one row")
    models = list(dict.fromkeys(row.model for row in rows))
    contexts = [f"{context:,} tokens" for context in sorted({row.context for row in rows})]
    depths = sorted({row.depth for row in rows})
    order = -1 if len(contexts) < len(models) else 1
    titles, columns = (models, contexts)[::order]
    figure, axes = panels(len(titles), (4, 3.4))
    for axis, title in zip(axes, titles, strict=True):
        table = np.full((len(depths), len(columns)), np.nan)
        for row in rows:
            panel, column = (row.model, f"{row.context:,} tokens")[::order]
            if panel == title:
                place = depths.index(row.depth), columns.index(column)
                table[place] = row.accuracy
                colour = "white" if abs(row.accuracy - 0.5) > 0.35 else "black"  # the ends of the scale are dark
                axis.text(place[1], place[0], f"{row.accuracy:.0%}", ha="center", va="center", fontsize=8, color=colour)
        axis.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set_ylabel("depth of the number")
        axis.set_title(title, fontsize=10)
    texts = " or ".join(map(str, sorted({row.texts for row in rows})))
    figure.suptitle(f"accuracy, {texts} texts a cell, one run each", fontsize=10)
    with naming(path):
        figure.savefig(path)


def _keys(count: int, seed: int) -> list[str]:
    drawn = np.random.default_rng(seed).integers(10 ** (DIGITS - 1), 10**DIGITS, size=count)
    return [str(key) for key in drawn]


def _grouped(tokenizer: Tokenizer, keys: Sequence[str], context: int, depth: float) -> Iterable[tuple[Tensor, Tensor]]:
    """Returns texts and answers as batches. The rows of a batch have the same length, also of their answers."""
    groups: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for key in keys:
        text, answer = passkey_text(tokenizer, key, context, depth)
        groups.setdefault(len(answer), []).append((text, answer))
    for pairs in groups.values():
        texts, answers = (torch.from_numpy(np.stack(each)) for each in zip(*pairs, strict=True))
        yield texts, answers
