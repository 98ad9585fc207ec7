"""Needles on models whose answers are known: where statements are, what is asked for, and what counts."""

import csv
import re

import numpy as np
import pytest
import torch

from sympow.data import ByteTokenizer
from sympow.evaluation.needles import (
    DIGITS,
    TASKS,
    VALUES,
    WORDS,
    NeedleRow,
    Prose,
    needle_recall,
    needle_text,
    write_needles,
)
from sympow.evaluation.passkey import FILLER

BYTES = ByteTokenizer()
PROSE = "It was late. Who had seen the ship? Nobody, he said! The long road went on and on through the hills.\n\n" * 2
FACT = re.compile(r"The secret (number|word) of the (\w+) is (\w+)\. ")
LINK = re.compile(r"([A-Z]{5}) stands for (the same as )?(\w+)\. ")


def made(task, values, context=2000, depth=0.5, seed=0, **options):
    rng = np.random.default_rng(seed)
    return needle_text(Prose(BYTES, PROSE), BYTES, task, values, context, depth, rng, **options)


def answers_of(words: str) -> list[str]:
    """What a reader answers to the end of a text, from the statements before it."""
    asked = re.search(r"The secret \w+ of the (\w+) is$", words)
    if asked:
        return [value for _, key, value in FACT.findall(words) if key == asked[1]]
    value, names = re.search(r"The names that stand for (\w+) are$", words)[1], []
    for name, same, what in LINK.findall(words):
        if what in names if same else what == value:
            names.append(name)
    return names


def reader(reach: int, between: str = ", "):
    """Answers from the last `reach` tokens."""

    def continues(texts, count):
        rows = []
        for row in texts:
            found = between.join(answers_of(BYTES.decode(row[-reach:].tolist())))
            rows.append(BYTES.encode(f" {found}.".ljust(count))[:count].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    return continues


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_text_has_its_length_and_what_it_asks_for(task, values, depth):
    text = made(task, values, depth=depth)
    words = BYTES.decode(text.tokens.tolist())
    assert len(text.tokens) + text.new_tokens == 2000
    assert tuple(answers_of(words)) == text.answers
    statements = list((LINK if task == "tracing" else FACT).finditer(words))
    assert len(statements) == {"single": 1, "multikey": 4, "tracing": 5}[task]
    first = next(each for each in statements if text.answers[0] in each[0])
    assert len(words) - first.end() == text.distance
    # A statement is between two sentences, next to its depth.
    assert first.start() == 0 or words[: first.start()].endswith(("? ", ". ", "! "))
    room = 2000 - text.new_tokens - sum(len(each[0]) for each in statements) - len(words[words.rindex(". ") + 2 :])
    assert task != "single" or abs(first.start() - depth * room) < 80
    value = answers_of(words)[0] if task != "tracing" else re.search(r"stand for (\w+) are$", words)[1]
    assert value.isdigit() == (values == "digits") and (values == "words" or len(value) == DIGITS)


def test_the_statements_of_a_chain_are_spread_and_in_order():
    words = BYTES.decode(made("tracing", "digits", context=6000, depth=0.2, hops=3).tokens.tolist())
    links = list(LINK.finditer(words))
    assert [link[3] for link in links[1:]] == [link[1] for link in links[:-1]]
    starts = np.array([link.start() for link in links]) / len(words)
    np.testing.assert_allclose(starts, [0.2, 0.4, 0.6, 0.8], atol=0.05)


def test_all_keys_and_names_differ():
    for seed in range(20):
        words = BYTES.decode(made("multikey", "words", seed=seed, keys=20).tokens.tolist())
        keys = [key for _, key, _ in FACT.findall(words)]
        assert len(set(keys)) == 20
        values = [value for _, _, value in FACT.findall(words)]
        assert not set(values) & set(keys) and len(set(values)) == 20


@pytest.mark.parametrize("values", VALUES)
def test_there_are_as_many_keys_as_the_message_says(values):
    with pytest.raises(ValueError, match="expected 1 to 106 keys"):
        needle_recall("a", reader(10), BYTES, [9000], keys=107)
    words = BYTES.decode(made("multikey", values, context=9000, keys=106).tokens.tolist())
    assert len(FACT.findall(words)) == 106 and len(answers_of(words)) == 1


@pytest.mark.parametrize("task", TASKS)
def test_what_is_within_reach_is_found(task):
    options = {"tasks": [task], "depths": (0.0, 1.0), "text": PROSE, "texts": 5, "hops": 1}
    rows = list(needle_recall("near", reader(700), BYTES, [650, 1500], **options))
    assert len(rows) == 8
    for row in rows:
        assert row.accuracy == (row.distance < 650), row
        assert (row.task, row.texts) == (task, 5)


def test_a_part_of_a_chain_counts_as_its_share_and_a_part_of_a_word_as_nothing():
    def first_name(texts, count):
        names = [answers_of(BYTES.decode(row.tolist()))[0] for row in texts]
        return torch.from_numpy(np.stack([BYTES.encode(f" {name}".ljust(count)).astype(np.int64) for name in names]))

    (row,) = needle_recall("one", first_name, BYTES, [1000], tasks=["tracing"], values=["words"], depths=[0], hops=3)
    assert row.accuracy == 0.25
    rows = needle_recall("joined", reader(9000, ""), BYTES, [1000], tasks=["tracing"], depths=[0])
    assert {row.accuracy for row in rows} == {0.0}


def test_a_model_may_name_tokens_that_the_tokenizer_does_not_have():
    def continues(texts, count):
        (answer,) = answers_of(BYTES.decode(texts[0].tolist()))
        return torch.tensor([[999, *BYTES.encode(answer).tolist(), 1000, *[999] * count][:count]])

    (row,) = needle_recall("a", continues, BYTES, [900], tasks=["single"], values=["digits"], depths=[0], texts=1)
    assert row.accuracy == 1


def test_models_get_the_same_texts_and_texts_differ():
    seen = []

    def keeps(texts, count):
        seen.append(texts)
        return texts[:, :count]

    for _ in range(2):
        list(needle_recall("a", keeps, BYTES, [900], tasks=["single"], values=["digits"], depths=[0.5], texts=3))
    assert torch.equal(seen[0], seen[1]) and len({tuple(row.tolist()) for row in seen[0]}) == 3


def test_a_row_comes_when_it_is_measured():
    read = []

    def keeps(texts, count):
        read.append(count)
        return texts[:, :count]

    rows = needle_recall("a", keeps, BYTES, [900], tasks=["single"], values=["digits"], texts=2)
    assert read == []
    assert next(rows).depth == 0.0 and len(read) == 1
    assert next(rows).depth == 0.25 and len(read) == 2


def test_no_word_is_in_the_filler():
    assert not set(WORDS) & set(re.findall(r"\w+", FILLER.lower()))


def test_prose_fills_any_room_and_repeats():
    prose = Prose(BYTES, PROSE)
    for room in (0, 1, 5, 30, 1000):
        for seed in range(8):
            sentences = prose.cut(room, np.random.default_rng(seed))
            assert sum(map(len, sentences)) == room and all(map(len, sentences))


@pytest.mark.parametrize(
    "text", ["a road through the hills\n" * 90, "昨天晚上我们去了河边看船。风很大\uff01" * 40, "船" * 900]
)
def test_statements_are_at_their_depth_in_prose_without_ends_of_sentences(text):
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        rng = np.random.default_rng(0)
        tokens = needle_text(Prose(BYTES, text), BYTES, "single", "digits", 6000, depth, rng).tokens
        place = bytes(tokens.tolist()).index(b"The secret number")
        assert abs(place - depth * 5850) < 350, depth  # half of 200 characters of 3 bytes, and the question


def test_a_division_of_prose_leaves_out_no_word():
    words = [f"word{i}" for i in range(400)]
    pieces = Prose(BYTES, " ".join(words)).cut(len(" ".join(words)) + 1, np.random.default_rng(0))
    assert len(pieces) > 10 and max(map(len, pieces)) <= 201
    assert sorted(BYTES.decode(np.concatenate(pieces).tolist()).split()) == sorted(words)


def test_contexts_are_checked_before_the_model_reads_a_text():
    def never(texts, count):
        raise AssertionError("the model read a text")

    with pytest.raises(ValueError, match="a text of tracing needs a context of at least"):
        needle_recall("a", never, BYTES, [2000, 250], tasks=["single", "tracing"])


def test_a_text_without_tokens_is_refused():
    class Nothing:
        def encode(self, text):
            return BYTES.encode(text if "secret" in text or text[0] == " " else "")

    with pytest.raises(ValueError, match="expected a text that the tokenizer turns into tokens"):
        needle_text(Prose(Nothing(), PROSE), Nothing(), "single", "digits", 900, 0.5, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"contexts": [60]}, r"a text of single needs a context of at least \d+ tokens, got 60"),
        ({"tasks": ["double"]}, "a task must be one of single, multikey, tracing; got 'double'"),
        ({"values": ["names"]}, "a kind of values must be one of digits, words; got 'names'"),
        ({"depths": [1.5]}, "depths from 0 to 1"),
        ({"texts": 0}, "expected texts"),
        ({"keys": 1000}, "expected 1 to"),
        ({"text": " \n"}, "expected a text with words"),
    ],
)
def test_refusals(options, line):
    with pytest.raises(ValueError, match=line):
        needle_recall("a", reader(10), BYTES, **({"contexts": [500]} | options))


def test_file(tmp_path):
    write_needles(tmp_path / "a.csv", [NeedleRow("a", "single", "words", 1024, 0.25, 760.5, 20, 0.85)])
    with (tmp_path / "a.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row == {"model": "a", "task": "single", "values": "words", "context": "1024", "depth": "0.25",
                   "distance": "760.5", "texts": "20", "accuracy": "0.8500"}  # fmt: skip
