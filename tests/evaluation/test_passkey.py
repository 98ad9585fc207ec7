"""Passkey recall on models whose answers are known, and on a small language model."""

import csv
import re
import struct

import numpy as np
import pytest
import torch

from sympow.data import ByteTokenizer
from sympow.evaluation.passkey import (
    QUESTION,
    PasskeyRow,
    native,
    passkey_recall,
    passkey_text,
    plot_passkeys,
    transformers,
    write_passkeys,
)
from sympow.models import LanguageModel, ModelConfig

BYTES = ByteTokenizer()
NUMBER = re.compile(r"The pass key is (\d{5})\. Remember it\. (\d{5}) is the pass key\. ")


def reads_back(reach: int):
    """Names the number where it stands among the last `reach` tokens, else a wrong one."""

    def continues(texts, count):
        answers = []
        for row in texts:
            found = NUMBER.search(BYTES.decode(row[-reach:].tolist()))
            answers.append(BYTES.encode(f" {found[1] if found else 'xxxxx'}")[:count])
        return torch.from_numpy(np.stack(answers).astype(np.int64))

    return continues


@pytest.mark.parametrize("context", [200, 201, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_a_text_has_its_length_and_its_number_in_place(context, depth):
    text, answer = passkey_text(BYTES, "12345", context, depth)
    words = BYTES.decode(text.tolist())
    found = NUMBER.search(words)
    assert len(text) + len(answer) == context and BYTES.decode(answer.tolist()) == " 12345"
    assert found and found[1] == found[2] == "12345" and words.endswith(QUESTION)
    room = context - len(found[0]) - len(QUESTION) - len(answer)
    assert abs(found.start() - depth * room) <= 0.5
    assert found.start() == 0 or words[: found.start()].endswith("hurry. ")


def test_recall_by_context_and_depth():
    rows = list(passkey_recall("near", reads_back(400), BYTES, [300, 600], depths=(0.0, 1.0), texts=3))
    assert [(row.context, row.depth, row.texts, row.accuracy) for row in rows] == [
        (300, 0.0, 3, 1.0),
        (300, 1.0, 3, 1.0),
        (600, 0.0, 3, 0.0),
        (600, 1.0, 3, 1.0),
    ]
    assert rows[2].digits == pytest.approx(1 / 6) and rows[0].digits == 1.0  # of a wrong number the space is right


def test_a_row_comes_and_is_written_when_it_is_measured(tmp_path):
    read = []

    def watches(texts, count):
        read.append(len(texts))
        return torch.zeros(len(texts), count, dtype=torch.int64)

    def watched(rows):
        for number, row in enumerate(rows, start=1):
            assert len(read) == number
            yield row
            assert (tmp_path / "a.csv").read_text().count("\n") == number + 1

    rows = passkey_recall("any", watches, BYTES, [300], depths=(0.0, 0.5, 1.0), texts=2)
    assert read == []
    write_passkeys(tmp_path / "a.csv", watched(rows))
    assert read == [2, 2, 2]
    with pytest.raises(ValueError, match="needs a context of at least"):  # at once
        passkey_recall("any", watches, BYTES, [300, 20])


def test_a_file_stays_as_it_is_until_there_is_a_row(tmp_path):
    def fails():
        raise RuntimeError("no row")
        yield

    (tmp_path / "a.csv").write_text("earlier")
    with pytest.raises(RuntimeError):
        write_passkeys(tmp_path / "a.csv", fails())
    assert (tmp_path / "a.csv").read_text() == "earlier"


def test_texts_depend_on_the_seed_alone():
    seen = []

    def watches(texts, count):
        seen.append(texts.clone())
        return torch.zeros(len(texts), count, dtype=torch.int64)

    for seed in (0, 0, 1):
        list(passkey_recall("any", watches, BYTES, [300], depths=(0.5,), texts=2, seed=seed))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[0][1])


def test_a_small_model_and_its_form_in_transformers():
    """A native model reads the text as one forward would; the other form is asked for what it continues."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(256, 16, 1, 2), seed=0)
    texts = torch.randint(256, (2, 40))
    first = model(texts)[:, -1].argmax(-1)
    assert torch.equal(native(model)(texts, 3)[:, 0], first)
    rows = list(passkey_recall("mini", native(model), BYTES, [200], depths=(0.5,), texts=2))
    assert rows[0].accuracy == 0.0

    class Form:
        device = torch.device("cpu")

        def generate(self, tokens, max_new_tokens, do_sample, **options):
            assert not do_sample and options["attention_mask"].all()
            return torch.cat([tokens, native(model)(tokens, max_new_tokens)], dim=1)

    assert torch.equal(transformers(Form())(texts, 3), native(model)(texts, 3))


def test_what_cannot_be_measured_is_refused():
    for arguments, message in (
        (dict(contexts=[100]), r"^a passkey needs a context of at least 1\d\d tokens, got 100$"),
        (dict(contexts=[300], depths=(1.5,)), "^a depth must be from 0 to 1, got 1.5$"),
        (dict(contexts=[]), "^expected at least one text, context and depth"),
        (dict(contexts=[300], texts=0), "^expected at least one text, context and depth"),
    ):
        with pytest.raises(ValueError, match=message):
            passkey_recall("any", reads_back(1), BYTES, **arguments)
    with pytest.raises(ValueError, match=r"^a plot needs at least one row$"):
        plot_passkeys([], "a.png")


def test_table_and_image(tmp_path):
    rows = list(passkey_recall("near", reads_back(400), BYTES, [300, 600], depths=(0.0, 1.0), texts=2))
    rows += passkey_recall("far", reads_back(9999), BYTES, [300], depths=(0.0,), texts=2)
    write_passkeys(tmp_path / "a.csv", rows)
    with (tmp_path / "a.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 5 and table[2] == {
        "model": "near", "context": "600", "depth": "0.0", "texts": "2", "accuracy": "0.0000", "digits": "0.1667"
    }  # fmt: skip
    plot_passkeys(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_images_of_many_models_are_no_wider_than_those_of_two(tmp_path):
    """Of more models than lengths, a panel is a length."""
    sizes = []
    for models, lengths in ((2, 4), (4, 4), (9, 4), (9, 2)):
        rows = [PasskeyRow(f"model {i}", 300 + n, 0.5, 2, 0.5, 0.5) for i in range(models) for n in range(lengths)]
        plot_passkeys(rows, tmp_path / "a.png")
        sizes.append(struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24]))
    assert sizes[0] == sizes[3] and sizes[1] == sizes[2]
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]
