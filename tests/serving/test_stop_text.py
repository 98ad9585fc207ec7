"""Stop sequences: cut where they first stand, whatever the cut into tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sympow.data import BPETokenizer, ByteTokenizer
from sympow.serving.prefixes import PrefixKeys
from sympow.serving.requests import Output, Request
from sympow.serving.sequence import Sequence
from sympow.serving.stop_text import AnswerText

TOKENIZER = ByteTokenizer()


def given_back(text: str, stop: tuple[str, ...], tokenizer=TOKENIZER) -> tuple[list[str], bool]:
    answer, pieces = AnswerText(tokenizer, stop), []
    for token in tokenizer.encode(text).tolist():
        pieces.append(answer.push(token))
        if answer.stopped:
            break
    return [*pieces, answer.finish()], answer.stopped


@given(st.text("ab±", max_size=12), st.lists(st.text("ab±", min_size=1, max_size=4), max_size=3))
def test_the_text_up_to_the_first_stop_sequence(text, stop):
    """The one that is complete first ends the answer, and of those that end together the longest."""
    pieces, stopped = given_back(text, tuple(stop))
    ends = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
    assert stopped == bool(ends)
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)


BPE = BPETokenizer.train(["aaaa abab ±aba bbba"] * 9, 300)


@given(st.text("ab±", max_size=12), st.lists(st.text("ab±", min_size=1, max_size=4), max_size=3))
def test_the_cut_into_tokens_does_not_matter(text, stop):
    assert ["".join(each[0]) for each in (given_back(text, tuple(stop), BPE), given_back(text, tuple(stop)))] == [
        "".join(given_back(text, tuple(stop))[0])
    ] * 2


def test_long_stop_sequences_take_little_work():
    """The work on a character does not grow with their length: the thread of the engine does it for all requests."""
    stop, comparisons = tuple("a" * 1023 + chr(ord("b") + i) for i in range(16)), 0

    class Counted(str):
        def __getitem__(self, place):
            nonlocal comparisons
            comparisons += 1
            return str(self)[place]

    answer = AnswerText(TOKENIZER, [Counted(each) for each in stop])
    comparisons = 0
    for _ in range(2000):
        answer.push(ord("a"))
    assert answer.given == 2000 - 1023 and comparisons <= 16 * 2000 * 4


def test_text_is_given_as_soon_as_it_is_certain():
    answer = AnswerText(TOKENIZER, ("stop",))
    assert [answer.push(token) for token in b"a stage"] == ["a", " ", "", "", "sta", "g", "e"]


def test_a_character_comes_once_it_is_whole():
    answer = AnswerText(TOKENIZER)
    assert [answer.push(token) for token in "±".encode()] == ["", "±"]
    assert answer.push(0xC2) == "" and answer.finish() == "�"


def test_a_stop_sequence_that_the_last_bytes_complete_ends_the_answer():
    """A character that is not finished becomes U+FFFD when the answer ends."""
    outputs: list[Output] = []
    request = Request(tokens=torch.tensor([1]), max_new_tokens=2, deliver=outputs.append, stop=("\ufffd",))
    sequence = Sequence(request, PrefixKeys(request.tokens, [b""]), TOKENIZER, torch.device("cpu"))
    for token in (ord("a"), 0xF0):
        sequence.push(token, None, frozenset(), 1)
    sequence.end()
    assert (outputs[-1].text, outputs[-1].finish) == ("a", "stop")
