"""Recall of facts from long texts: single needles, needles with several keys, and chains of names.

The tasks are those of RULER [Hsieh et al., What's the Real Context Size of Your Long-Context Language Models?, 2024],
in sentences of our own and without examples before the question. A text of prose contains a few statements. It ends
with the start of a sentence that asks for one of them, and the model continues with its likeliest tokens. An answer
counts if it occurs in the continuation as a whole word.

- "single": one statement gives a key a value.
- "multikey": several statements give keys their values, and one of them is asked for.
- "tracing": the first statement gives a name a value. Every other statement says that its name has the value of the
  name before. All names of the value are asked for, and the share of those that the model names counts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import NamedTuple

import numpy as np
import torch

from sympow.evaluation.passkey import BATCH_TOKENS, DEPTHS, FILLER, Continue, Tokenizer
from sympow.files import write_table
from sympow.ops.memory import check_memory
from sympow.progress import Progress

TASKS = ("single", "multikey", "tracing")
VALUES = ("digits", "words")
DIGITS = 7  # of a number
LETTERS = 5  # of a name
SPARE = 8  # tokens that a model may write more than an answer has
LONGEST = 200  # characters of a sentence; a longer one is divided, so that statements are near their depth

_NOUNS = (
    "anchor apple arrow autumn barrel basket beacon blanket bottle bridge bucket butter button camera candle canyon "
    "carpet castle cherry circle cloud coffee copper cotton cradle crystal curtain desert diamond dragon eagle engine "
    "feather fiddle finger forest fountain garden ginger glacier hammer harbor helmet honey island ivory jacket jungle "
    "kettle kitchen ladder lantern lemon library lizard marble market meadow mirror monkey mountain needle ocean "
    "orange orchard palace paper parrot pencil pepper pillow planet pocket prairie pumpkin rabbit ribbon rocket "
    "saddle salmon shadow silver spider summer sunset table temple thunder ticket tiger timber tower tunnel turtle "
    "valley velvet village violin walnut water whistle willow window winter wizard yellow zebra"
)
WORDS = tuple(_NOUNS.split())  # none of them is in FILLER


class FactForm(NamedTuple):
    """Holds the sentence that gives a key its value, and the text up to the value that asks for it."""

    statement: str
    question: str


class ChainForm(NamedTuple):
    """Holds the sentence of the first name, that of every further name, and the text up to the names."""

    first: str
    further: str
    question: str


FACT = FactForm(
    "The secret {kind} of the {key} is {answer}. ",
    "What is the secret {kind} of the {key}? The secret {kind} of the {key} is",
)
CHAIN = ChainForm(
    "{name} stands for {value}. ",
    "{name} stands for the same as {before}. ",
    "Which names stand for {value}? The names that stand for {value} are",
)


class NeedleRow(NamedTuple):
    """Tells how often a model gave the answers.

    task: one of `TASKS`; values: "digits" or "words"; context: the number of tokens of a text with the room for the
    answer; depth: that of the statement asked for, or of the first of a chain, from 0, the beginning, to 1, the end;
    distance: the mean number of tokens between this statement and the answer; texts: the number of texts; accuracy: the
    share of answers that the model gave.
    """

    model: str
    task: str
    values: str
    context: int
    depth: float
    distance: float
    texts: int
    accuracy: float


class NeedleText(NamedTuple):
    """Holds a text and what it asks for.

    tokens: int64 [context - new_tokens], up to the answer; answers: the words to be found in the continuation;
    new_tokens: the number of tokens of the continuation; distance: the number of tokens between the statement and the
    answer.
    """

    tokens: np.ndarray
    answers: tuple[str, ...]
    new_tokens: int
    distance: int


class Prose:
    """Cuts pieces of a given number of tokens out of a text. They end with whole sentences.

    A sentence of more than `LONGEST` characters is divided between words, or where that is too long if it has none.

    Args:
        tokenizer: the tokenizer of the model.
        text: the prose, which is repeated where it is too short.

    Raises ValueError for a text without words.
    """

    def __init__(self, tokenizer: Tokenizer, text: str = FILLER):
        self._tokenizer = tokenizer
        sentences = re.split(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])", text.strip())
        parts = rf"\S.{{0,{LONGEST - 1}}}(?!\S)|\S.{{{LONGEST - 1}}}"
        self._sentences = [f"{part} " for each in sentences for part in re.findall(parts, each, re.DOTALL)]
        if not self._sentences:
            raise ValueError("expected a text with words to hide statements in; got an empty one")
        self._encoded: dict[int, np.ndarray] = {}

    def cut(self, room: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns the sentences of a piece, int64 1-D each, of `room` tokens together; the first may be a part of one.

        Args:
            room: the number of tokens.
            rng: draws where the piece begins.

        Raises ValueError for a text without tokens.
        """
        at, left, found = int(rng.integers(len(self._sentences))), room, []
        while left > 0:
            sentence = self._tokens(at)
            found.append(sentence)
            left -= len(sentence)
            at = (at + 1) % len(self._sentences)
            if left == room and len(found) == len(self._sentences):
                raise ValueError("expected a text that the tokenizer turns into tokens; got one without any")
        while left < 0:  # the piece is too long by -left tokens, which are left out at its beginning
            taken = min(-left, len(found[0]))
            found[0] = found[0][taken:]
            found = found if len(found[0]) else found[1:]
            left += taken
        return found

    def _tokens(self, number: int) -> np.ndarray:
        if number not in self._encoded:
            self._encoded[number] = self._tokenizer.encode(self._sentences[number]).astype(np.int64)
        return self._encoded[number]


def needle_text(
    prose: Prose,
    tokenizer: Tokenizer,
    task: str,
    values: str,
    context: int,
    depth: float,
    rng: np.random.Generator,
    *,
    keys: int = 4,
    hops: int = 4,
) -> NeedleText:
    """Makes a text up to its answer.

    Args:
        prose: the text around the statements.
        tokenizer: the tokenizer of the model.
        task: one of `TASKS`.
        values: one of `VALUES`.
        context: the number of tokens, with those of the answer.
        depth: the depth of the statement asked for, or of the first of a chain, whose others follow at equal distances.
        rng: draws keys, values and places.
        keys: the number of statements of "multikey".
        hops: the number of names of "tracing" after the first.

    Raises ValueError if the statements and the question do not fit.
    """
    if task == "tracing":
        statements, question, answers = _chain(values, depth, rng, hops)
    else:
        statements, question, answers = _facts(values, depth, rng, 1 if task == "single" else keys)
    encoded = [(place, tokenizer.encode(text).astype(np.int64)) for place, text in statements]
    asked = tokenizer.encode(question).astype(np.int64)
    start = np.array(getattr(tokenizer, "start", ()), dtype=np.int64)  # the tokens that begin every text
    count = len(tokenizer.encode(f" {', '.join(answers)}")) + SPARE
    room = context - len(start) - len(asked) - count - sum(len(tokens) for _, tokens in encoded)
    if room < 0:
        raise ValueError(f"a text of {task} needs a context of at least {context - room} tokens, got {context}")
    pieces, ends = interleaved(prose.cut(room, rng), encoded)
    tokens = np.concatenate([start, *pieces, asked])
    return NeedleText(tokens, answers, count, len(tokens) - len(start) - ends[0])


def interleaved(
    sentences: Sequence[np.ndarray], texts: Sequence[tuple[float, np.ndarray]]
) -> tuple[list[np.ndarray], list[int]]:
    """Puts texts between sentences.

    Args:
        sentences: the tokens of each sentence, int64 1-D.
        texts: the place of each text among the sentences, from 0, before them, to 1, and its tokens, int64 1-D. Texts
            with one place keep their order.

    Returns the pieces in order, and the number of tokens up to the end of each text.
    """
    borders = np.cumsum([0, *map(len, sentences)])
    pieces: list[np.ndarray] = []
    ends, done, length = [0] * len(texts), 0, 0
    for i in sorted(range(len(texts)), key=lambda i: texts[i][0]):  # stable
        border = int(np.abs(borders - texts[i][0] * borders[-1]).argmin())
        pieces += [*sentences[done:border], texts[i][1]]
        length += int(borders[border] - borders[done]) + len(texts[i][1])
        ends[i], done = length, border
    return [*pieces, *sentences[done:]], ends


def needle_recall(
    name: str,
    continues: Continue,
    tokenizer: Tokenizer,
    contexts: Sequence[int],
    *,
    tasks: Sequence[str] = TASKS,
    values: Sequence[str] = VALUES,
    depths: Sequence[float] = DEPTHS,
    text: str = FILLER,
    texts: int = 20,
    keys: int = 4,
    hops: int = 4,
    seed: int = 0,
    quiet: bool = True,
) -> Iterator[NeedleRow]:
    """Measures recall for every task, kind of values, context and depth, and yields each row when it is measured.

    All models of one tokenizer get the same texts.

    Args:
        name: the name of the model in the rows.
        continues: the model, such as the result of `sympow.evaluation.passkey.native`.
        tokenizer: the tokenizer of the model.
        contexts: the numbers of tokens of a text, including the answer.
        tasks: some of `TASKS`.
        values: some of `VALUES`.
        depths: as in `needle_text`, each in [0, 1].
        text: the prose around the statements.
        texts: the number of texts for each row.
        keys: as for `needle_text`.
        hops: as for `needle_text`.
        seed: the seed of keys, values and places.
        quiet: show no progress.

    Raises ValueError at once for values out of range, for contexts too short to hold the statements and the question,
    and if there is not enough memory for the texts.
    """
    for what, found, known in (("task", tasks, TASKS), ("kind of values", values, VALUES)):
        for each in found:
            if each not in known:
                raise ValueError(f"a {what} must be one of {', '.join(known)}; got {each!r}")
    if texts < 1 or not contexts or not depths or not 0 <= min(depths) <= max(depths) <= 1:
        raise ValueError(f"expected texts, contexts and depths from 0 to 1; got {texts}, {contexts}, {depths}")
    if not 1 <= keys < len(WORDS) or hops < 1:  # one word at least is left for the values
        raise ValueError(f"expected 1 to {len(WORDS) - 1} keys and at least one hop; got {keys} and {hops}")
    check_memory(f"a context of {max(contexts):,} tokens", 32 * max(contexts))
    check_memory(f"a list of {texts:,} texts", 64 * texts)
    prose, options = Prose(tokenizer, text), {"keys": keys, "hops": hops}

    def made(task: str, kind: str, context: int, depth: float, number: int) -> NeedleText:
        rng = np.random.default_rng([seed, TASKS.index(task), VALUES.index(kind), number])
        return needle_text(prose, tokenizer, task, kind, context, depth, rng, **options)

    for task, kind, number in product(tasks, values, range(texts)):  # before the model reads any of them
        made(task, kind, min(contexts), depths[0], number)

    def measured() -> Iterator[NeedleRow]:
        total = len(tasks) * len(values) * len(contexts) * len(depths) * texts
        with Progress(f"needles, {name}", "text", total=total, quiet=quiet) as progress:
            for task, kind, context, depth in product(tasks, values, contexts, depths):
                shares, distances = [], []
                size = max(1, BATCH_TOKENS // context)
                for start in range(0, texts, size):
                    batch = [made(task, kind, context, depth, i) for i in range(start, min(texts, start + size))]
                    shares += _shares(continues, tokenizer, batch)
                    distances += [each.distance for each in batch]
                    progress.advance(len(batch))
                means = float(np.mean(distances)), texts, float(np.mean(shares))
                yield NeedleRow(name, task, kind, context, depth, *means)

    return measured()


def write_needles(path: str | os.PathLike[str], rows: Iterable[NeedleRow]) -> None:
    """Writes the rows as a table, a line each, when they come."""
    cells = ([*row[:5], f"{row.distance:.1f}", row.texts, f"{row.accuracy:.4f}"] for row in rows)
    write_table(path, NeedleRow._fields, cells)


Statements = list[tuple[float, str]]


def _facts(values: str, depth: float, rng: np.random.Generator, count: int) -> tuple[Statements, str, tuple[str, ...]]:
    """Returns statements with their places, the one that is asked for first, the question and the answer."""
    kind = "number" if values == "digits" else "word"
    words = [WORDS[i] for i in rng.permutation(len(WORDS))]
    keys, rest = words[:count], words[count:]
    # words are different ones, as long as there are enough
    answers = [draw_number(rng, DIGITS) if values == "digits" else rest[i % len(rest)] for i in range(count)]
    places = [depth, *rng.random(count - 1)]
    facts = zip(keys, answers, strict=True)
    statements = [FACT.statement.format(kind=kind, key=key, answer=answer) for key, answer in facts]
    question = FACT.question.format(kind=kind, key=keys[0])
    return list(zip(places, statements, strict=True)), question, (answers[0],)


def _chain(values: str, depth: float, rng: np.random.Generator, hops: int) -> tuple[Statements, str, tuple[str, ...]]:
    """Returns statements with their places, in the order of the chain, the question and the answers."""
    value = draw_number(rng, DIGITS) if values == "digits" else str(rng.choice(WORDS))
    names = draw_names(rng, hops + 1, LETTERS)
    places = np.linspace(depth, 1, hops + 2)[:-1].tolist()
    statements, question = chain_texts(CHAIN, names, value)
    return list(zip(places, statements, strict=True)), question, tuple(names)


def chain_texts(form: ChainForm, names: Sequence[str], value: str) -> tuple[list[str], str]:
    """Returns the sentences that give a value to the first name and then to every further one, and the question."""
    statements = [form.first.format(name=names[0], value=value)]
    statements += [form.further.format(name=name, before=before) for before, name in pairwise(names)]
    return statements, form.question.format(value=value)


def draw_names(rng: np.random.Generator, count: int, letters: int) -> list[str]:
    """Draws `count` different names of capital letters."""
    names: list[str] = []
    while len(names) < count:
        name = "".join(chr(65 + i) for i in rng.integers(26, size=letters))
        names += [] if name in names else [name]
    return names


def draw_number(rng: np.random.Generator, digits: int) -> str:
    """Draws a number with so many digits."""
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def _shares(continues: Continue, tokenizer: Tokenizer, texts: Sequence[NeedleText]) -> list[float]:
    """Returns the share of its answers that the model gives to each text. The rows of a batch are equally long."""
    shares: dict[int, float] = {}
    for count in {each.new_tokens for each in texts}:
        places = [place for place, each in enumerate(texts) if each.new_tokens == count]
        batch = torch.from_numpy(np.stack([texts[place].tokens for place in places]))
        for place, row in zip(places, continues(batch, count).tolist(), strict=True):
            words = _words(tokenizer, row)
            shares[place] = float(np.mean([answer in words for answer in texts[place].answers]))
    return [shares[place] for place in range(len(texts))]


def _words(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Returns the words in tokens. A model can have more embeddings than there are tokens; these end a word."""
    size = getattr(tokenizer, "vocab_size", math.inf)
    parts = [tokenizer.decode(list(part)) for known, part in groupby(tokens, lambda token: token < size) if known]
    return [word for part in parts for word in re.findall(r"\w+", part)]
