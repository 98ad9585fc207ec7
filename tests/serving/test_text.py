"""Stop sequences: cut where they first stand, whatever the cut into tokens."""

from hypothesis import given
from hypothesis import strategies as st

from sympow.data import ByteTokenizer
from sympow.serving.text import AnswerText

TOKENIZER = ByteTokenizer()


def given_back(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    answer, pieces = AnswerText(TOKENIZER, stop), []
    for token in TOKENIZER.encode(text).tolist():
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


def test_text_is_given_as_soon_as_it_is_certain():
    answer = AnswerText(TOKENIZER, ("stop",))
    assert [answer.push(token) for token in b"a stage"] == ["a", " ", "", "", "sta", "g", "e"]


def test_a_character_comes_once_it_is_whole():
    answer = AnswerText(TOKENIZER)
    assert [answer.push(token) for token in "±".encode()] == ["", "±"]
    assert answer.push(0xC2) == "" and answer.finish() == "�"
