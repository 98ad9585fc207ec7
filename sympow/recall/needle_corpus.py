"""A corpus that trains recall: rows of prose with statements, and later in the row questions with their answers.

A row has about one fact for each 250 tokens (`EVERY`). The distance between the statement and the question of a fact is
between 64 tokens and the whole row, all orders of magnitude alike. After an answer the prose goes on. The facts have
the tasks of `sympow.evaluation.needles`, and passkeys. Each has the sentences of the evaluation or others. Keys and
values are words of the prose, of which there are many, so that a model cannot learn them by heart instead of copying.
Keys, words and names are never those of the evaluation: its words are left out, and names have other lengths. Numbers
have 3 to 9 digits, each drawn anew. In some rows the prose is one short piece, repeated, as in the texts of
`sympow passkey`. Some rows begin with a statement, without prose before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sympow.data import Tokenizer
from sympow.data.builders.corpus_folder import VOCAB_SIZE, write_corpus
from sympow.data.builders.own_corpus import Texts
from sympow.data.builders.sources import HELD_OUT, SourceDocument
from sympow.evaluation import needles, passkey
from sympow.evaluation.needles import (
    CHAIN,
    FACT,
    ChainForm,
    FactForm,
    Prose,
    chain_texts,
    draw_names,
    draw_number,
    interleaved,
)
from sympow.ops.memory import check_memory
from sympow.progress import Progress

ROWS = 1000
ROW_TOKENS = 16_384
EVERY = 250  # tokens of a row for each fact, if the caller names no other number
NEAREST = 64  # tokens between the statement and the question of a fact, about, at least
REPEATED = 8  # one row in so many has a repeated piece of prose
BEGIN = 4  # one row in so many begins with a statement
PIECE = (20, 120)  # tokens of this piece

DIGITS = tuple(range(3, 10))  # of numbers, those of the evaluation (5 and 7) among them
LETTERS = (4, 6)  # of names; those of the evaluation have 5
KEYS = (2, 5)  # statements of a fact of the task multikey: at least, and less than
HOPS = (1, 4)  # names after the first of a chain: at least, and less than
TASKS = ("single", "multikey", "tracing")
LEAST_WORDS = 500  # of texts; a model learns fewer by heart
ROW_WORDS = 400  # words in a row at most: half of them are for keys, half are values

PASSKEY = FactForm(passkey.NEEDLE, passkey.QUESTION)
FACTS = (
    FACT,
    FactForm("Remember that the {kind} of the {key} is {answer}. ", "Do you remember the {kind} of the {key}? It is"),
    FactForm("Somebody wrote {answer} on the {key}. ", "What did somebody write on the {key}? Somebody wrote"),
    FactForm("{key}: {answer}. ", "Look above for what belongs to this key. {key}:"),
    FactForm("Note the {kind} {answer}, it is for the {key}. ", "Question: which {kind} is for the {key}? Answer:"),
    FactForm(
        "The pass key of the {key} is {answer}. Remember it. {answer} is the pass key of the {key}. ",
        "What is the pass key of the {key}? The pass key of the {key} is",
    ),
)
CHAINS = (
    CHAIN,
    ChainForm(
        "The box {name} contains {value}. ",
        "The box {name} contains what the box {before} contains. ",
        "In which boxes is {value}? The boxes with {value} are",
    ),
    ChainForm("{name} = {value}. ", "{name} = {before}. ", "List all that equal {value}. These equal {value}:"),
)

_NOUNS = (
    "acorn almond anvil apron armor badge bagel balloon bamboo banana banjo banner barley beard beaver beetle bench "
    "berry biscuit blossom bonnet boulder bracelet branch brick broom brush bubble buckle buffalo bullet bundle "
    "cabbage cabin cactus cage candy canoe carriage carrot cattle celery cellar cello chalk chapel cheese chestnut "
    "chimney clarinet clover cobweb coconut collar comet compass coral cottage cricket crown cucumber "
    "cushion daisy deer dolphin donkey dough drum duck easel elbow elephant falcon faucet fence fern ferry flag flask "
    "flute fossil fox freckle frog galaxy garlic gazelle geyser giraffe glove goat goblet grape gravel guitar gull "
    "hamster hazel hedge helm herring hinge hornet igloo iris jar jasmine jelly jewel kayak kernel kite koala lagoon "
    "lake lamb lark lavender leaf leopard lettuce lime lobster locket lotus magnet maple mask mattress melon mint "
    "mitten moose moss moth muffin mushroom napkin nectar nest nutmeg oak oar oasis olive onion otter owl oyster panda "
    "panther parcel parsley peach peacock pearl pebble pelican penguin piano pigeon pine plum pony poppy porch potato "
    "pretzel puzzle quilt raccoon radish raven reed rooster rope ruby saffron sandal scarf seal shell shovel sieve "
    "spoon squirrel stool stove swan tambourine teapot thimble thistle toast tomato torch trumpet tulip turnip "
    "umbrella vase wagon walrus wheat wheel zipper"
)
_COLORS = "amber azure black blue bronze brown gray green indigo lilac pink purple red scarlet teal white"
WORDS = tuple(_NOUNS.split())  # for texts with few words
_SENTENCES = " ".join(["number word", *(sentence for form in (*FACTS, *CHAINS, PASSKEY) for sentence in form)])
_OTHERS = {*needles.WORDS, *_COLORS.split(), *re.findall("[a-z]+", f"{passkey.FILLER} {_SENTENCES}".lower())}
_VERSION = "needles-6"  # of the rules in this file; change it if they make other rows
_ENTRY_BYTES = 200  # of memory for each row in the list of rows, at least
_TOKEN_BYTES = 32  # of memory for each token of a row, at least, while it is made


class _Fact(NamedTuple):
    """Holds the sentences of a fact in their order, and its question with the answer."""

    statements: list[str]
    question: str


def build_needle_corpus(
    out: str | os.PathLike[str],
    texts: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    rows: int = ROWS,
    row_tokens: int = ROW_TOKENS,
    every: int = EVERY,
    seed: int = 0,
    progress: bool = False,
    remark: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Writes rows that train recall as a corpus into the folder `out`, or continues, as `write_corpus` does.

    A twentieth as many rows are held out, at least one. Their prose is from other documents than that of the rows for
    training. Their words are those of `words_of` the texts, or those of `WORDS` if the texts have fewer than
    `LEAST_WORDS`, which a remark says.

    Args:
        out: the folder: a new one, or one that an earlier call with the same arguments started.
        texts: the file or the folder with the prose, see `find_texts`.
        tokenizer: the tokenizer of the model to train.
        rows: the number of rows for training.
        row_tokens: the number of tokens in a row.
        every: the number of tokens of a row for each fact.
        seed: of facts and places.
        progress: whether to show the progress on stderr, see `Progress`.
        remark: called with each line on what is left out of the folder of texts, and on texts with few words.

    Returns the content of `corpus.json`. Raises the errors of `write_corpus`, `find_texts` and `needle_row`, and
    ValueError for numbers out of range.
    """
    if rows < 1 or seed < 0 or every < 1:
        raise ValueError(
            f"expected at least one row, a seed of at least 0 and a token for each fact; got {rows}, {seed} and {every}"
        )
    check_memory(f"row_tokens = {row_tokens:,}", _TOKEN_BYTES * row_tokens)
    check_memory(f"rows = {rows:,}", _ENTRY_BYTES * rows)
    filler = Prose(tokenizer)
    for number in range(min(rows, 8)):  # so that rows which are too short leave no unfinished folder
        needle_row(filler, tokenizer, row_tokens, np.random.default_rng([seed, 0, number]), every=every)
    settings = {"version": _VERSION, "row_tokens": row_tokens, "rows": rows, "every": every, "seed": seed}
    settings |= {"words": {"tokenizer": tokenizer.fingerprint}}

    def open_source(_: Path) -> _Rows:
        tell = remark or (lambda line: None)
        prose = Texts(texts, "file", (), "text", progress, tell)
        return _Rows(prose, tokenizer, rows, row_tokens, every, seed, progress, tell)

    return write_corpus(
        out, settings, open_source, row_tokens=row_tokens, vocab_size=VOCAB_SIZE, tokenizer=tokenizer, texts=texts
    )


def words_of(texts: Iterable[str]) -> list[str]:
    """Returns the words of texts that rows may have as keys and values, sorted, each once.

    They have 4 to 12 letters from a to z, all lower-case. Words that the evaluation asks for, and those of the
    sentences around keys and values, are left out.
    """
    found = {word for text in texts for word in re.findall(r"(?<![\w'\u2019])[a-z]{4,12}(?![\w'\u2019])", text)}
    return sorted(found - _OTHERS)


def needle_row(
    prose: Prose,
    tokenizer: Tokenizer,
    row_tokens: int,
    rng: np.random.Generator,
    words: Sequence[str] = WORDS,
    every: int = EVERY,
) -> np.ndarray:
    """Makes a row of `row_tokens` tokens, int64 1-D.

    Facts take at most half of the row, so that a tokenizer with many tokens a word gets fewer of them.

    Args:
        prose: the text around the facts.
        tokenizer: the tokenizer of the model to train.
        row_tokens: the number of tokens.
        rng: draws facts and places.
        words: different words, for keys and values.
        every: the number of tokens for each fact.

    Raises ValueError for fewer than two words, and if no fact fits.
    """
    if len(words) < 2:
        raise ValueError(f"expected at least two words, for a key and a value; got {len(words)}")
    start = np.array(tokenizer.start, dtype=np.int64)
    texts: list[tuple[float, np.ndarray]] = []
    room = row_tokens // 2 - len(start)
    nouns = [words[i] for i in rng.choice(len(words), min(len(words), ROW_WORDS), replace=False)]
    half = len(nouns) // 2
    phrases = [*nouns[:half], *(f"{color} {noun}" for color in _COLORS.split() for noun in nouns[:half])]
    keys = [phrases[i] for i in rng.permutation(len(phrases))]
    chained: set[str] = set()
    for number in range(max(1, row_tokens // every)):
        if len(keys) < KEYS[1]:
            break
        fact = _passkey(rng) if number == 0 else _fact(rng, keys, nouns[half:], chained)
        encoded = [tokenizer.encode(text).astype(np.int64) for text in (*fact.statements, fact.question)]
        if sum(map(len, encoded)) > room:
            if not texts:
                least = 2 * (row_tokens // 2 + sum(map(len, encoded)) - room)
                raise ValueError(f"row_tokens must be at least {least}, so that a fact fits; got {row_tokens}")
            break
        room -= sum(map(len, encoded))
        texts += zip(_places(rng, len(encoded), row_tokens), encoded, strict=True)
    if rng.integers(BEGIN) == 0:
        first = min(range(len(texts)), key=lambda i: texts[i][0])
        texts[first] = 0.0, texts[first][1]
    left = row_tokens - len(start) - sum(len(tokens) for _, tokens in texts)
    sentences = _repeated(prose, left, rng) if rng.integers(REPEATED) == 0 else prose.cut(left, rng)
    last = 1 - len(sentences[-1]) / left  # the end of the row is prose
    pieces, _ = interleaved(sentences, [(place * last, tokens) for place, tokens in texts])
    return np.concatenate([start, *pieces])


def _places(rng: np.random.Generator, count: int, row_tokens: int) -> list[float]:
    """Returns the places of the statements of a fact, evenly spaced, and of its question."""
    distance = float(np.exp(rng.uniform(np.log(min(NEAREST, row_tokens)), np.log(row_tokens)))) / row_tokens
    first = rng.uniform(0, 1 - distance)
    return np.linspace(first, first + distance, count).tolist()


def _passkey(rng: np.random.Generator) -> _Fact:
    value = draw_number(rng, int(rng.choice(DIGITS)))
    return _Fact([PASSKEY.statement.format(key=value)], f"{PASSKEY.question} {value}. ")


def _fact(rng: np.random.Generator, keys: list[str], words: Sequence[str], chained: set[str]) -> _Fact:
    """Draws a fact of a task. Its keys are taken out of the list.

    `chained` holds the names and values of the chains of the row. A chain gets others, which are added: a second chain
    of the same value would make two answers right.
    """
    task, of_digits = TASKS[rng.integers(len(TASKS))], bool(rng.integers(2))

    def value() -> str:
        return draw_number(rng, int(rng.choice(DIGITS))) if of_digits else str(rng.choice(words))

    if task == "tracing":
        of_digits = of_digits or chained.issuperset(words)
        while (shared := value()) in chained:
            pass
        count, letters = 1 + int(rng.integers(*HOPS)), int(rng.choice(LETTERS))
        while not chained.isdisjoint(names := draw_names(rng, count, letters)):
            pass
        chained.update(names, [shared])
        statements, question = chain_texts(CHAINS[rng.integers(len(CHAINS))], names, shared)
        return _Fact(statements, f"{question} {', '.join(names)}. ")
    form = FACTS[rng.integers(len(FACTS))]
    count = 1 if task == "single" else int(rng.integers(*KEYS))
    facts = [{"kind": "number" if of_digits else "word", "key": keys.pop(), "answer": value()} for _ in range(count)]
    asked = facts[rng.integers(count)]
    statements = [form.statement.format(**fact) for fact in facts]
    return _Fact(statements, f"{form.question.format(**asked)} {asked['answer']}. ")


def _repeated(prose: Prose, room: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the sentences of a short piece, repeated to `room` tokens; the first may be a part of the piece."""
    piece = prose.cut(min(room, int(rng.integers(*PIECE))), rng)
    whole = np.concatenate(piece)
    times, rest = divmod(room, len(whole))
    return [*([whole[len(whole) - rest :]] if rest else []), *piece * times]


class _Rows:
    """Gives rows as the documents of a corpus. Their prose is that of a source of texts."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        rows: int,
        row_tokens: int,
        every: int,
        seed: int,
        progress: bool,
        remark: Callable[[str], object],
    ):
        self._texts, self._tokenizer, self._progress, self._remark = texts, tokenizer, progress, remark
        self._rows, self._row_tokens, self._every, self._seed = rows, row_tokens, every, seed

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._texts.sizes

    def survey(self) -> str:
        return self._texts.survey()

    def plan(self) -> list[SourceDocument]:
        self._found = self._read()  # here, so that nothing is begun in the folder if texts are missing
        size = 2 * self._row_tokens  # bytes of the tokens
        counts = (self._rows, False), (max(1, round(HELD_OUT * self._rows)), True)
        return [
            SourceDocument(f"{'heldout' if held_out else 'train'}/{number}", (), size, held_out)
            for count, held_out in counts
            for number in range(count)
        ]

    def _read(self) -> dict[bool, list[str]]:
        """Returns the texts by whether they are held out; ValueError where these have no words."""
        found: dict[bool, list[str]] = {False: [], True: []}
        for document, text in self._texts.texts(self._texts.plan(), 0):
            found[document.held_out].append(text)
        for held_out, parts in found.items():
            if not any(part.strip() for part in parts):
                which = "held out" if held_out else "for training"
                raise ValueError(f"the texts that are {which} have no words to hide statements in: give more texts")
        return found

    def sample(self, files: Collection[str]) -> Iterator[str]:
        return self._texts.sample(files)

    def texts(self, documents: Sequence[SourceDocument], start: int) -> Iterator[tuple[SourceDocument, np.ndarray]]:
        found = self._found
        words: Sequence[str] = words_of(text for parts in found.values() for text in parts)
        if len(words) < LEAST_WORDS:
            self._remark(
                f"the texts have {len(words)} different words of 4 to 12 letters, too few to learn copying from: "
                f"keys and values are {len(WORDS)} other words"
            )
            words = WORDS
        prose = {held_out: Prose(self._tokenizer, "\n\n".join(parts)) for held_out, parts in found.items()}
        with Progress("making rows", "row", total=len(documents), done=start, quiet=not self._progress) as progress:
            for document in documents[start:]:
                number = int(document.directory.partition("/")[2])
                rng = np.random.default_rng([self._seed, document.held_out, number])
                around = prose[document.held_out]
                yield document, needle_row(around, self._tokenizer, self._row_tokens, rng, words, self._every)
                progress.advance()
