"""A corpus that trains recall: what its rows ask, what they answer, and where; and training on it beside others."""

import re
from collections import Counter

import numpy as np
import pytest
import zarr

from sympow.cli import main
from sympow.data import Batches, BPETokenizer, DataConfig, build_corpus, open_corpus
from sympow.evaluation import needles, passkey
from sympow.evaluation.needles import Prose
from sympow.recall import needle_corpus
from sympow.recall.needle_corpus import FACTS, PASSKEY, build_needle_corpus, needle_row, words_of
from tests.data.builders.trees import contents

WORDS = "the of a road hill ship stone mud light wind house grass night morning field path roof bread voice"
DRAW = np.random.default_rng(0)
PROSE = [" ".join([*DRAW.choice(WORDS.split(), 9), "end. "]) for _ in range(400)]
TEXT = "".join(PROSE)
SENTENCES = [sentence for form in FACTS for sentence in form] + [
    f"{first} {further} {question}" for first, further, question in needle_corpus.CHAINS
]
# with the words of statements, so that a fact has about as many tokens as it has with a real vocabulary
BPE = BPETokenizer.train([" ".join([*PROSE, *SENTENCES * 9, *needle_corpus.WORDS])], 3000)
LINK = re.compile(
    r"(?P<name>[A-Z]{4}|[A-Z]{6}) (?:stands for the same as |= |contains what the box )"
    r"(?P<before>(?:[A-Z]{4}|[A-Z]{6})\b)"
)


def pattern(text: str) -> re.Pattern:
    """A form of sentences as an expression: the same key and answer wherever they occur in it."""
    groups = {"kind": "number|word", "key": r"[a-z]+(?: [a-z]+)?", "answer": r"\w+"}
    found = re.escape(text).replace(r"\ ", " ")
    for name, words in groups.items():
        found = found.replace(rf"\{{{name}\}}", f"(?P<{name}>{words})", 1).replace(rf"\{{{name}\}}", f"(?P={name})")
    return re.compile(found)


def row(seed=0, tokens=4096, text=TEXT, words=needle_corpus.WORDS, **options):
    made = needle_row(Prose(BPE, text), BPE, tokens, np.random.default_rng(seed), words, **options)
    assert made.shape == (tokens,) and made.dtype == np.int64
    return BPE.decode(made.tolist())


def asked(text: str) -> list[tuple[int, int, str]]:
    """The places of a statement and of the question that it answers, and the answer, of all facts in a text."""
    found = []
    for form in FACTS:
        question = pattern(form.question + " {answer}. ")
        for match in question.finditer(text):
            known = match.groupdict()
            statements = [each for each in pattern(form.statement).finditer(text[: match.start()])
                          if each["key"] == known["key"]]  # fmt: skip
            assert [each["answer"] for each in statements] == [known["answer"]], match[0]
            found.append((statements[0].end(), match.start(), known["answer"]))
    return found


def test_every_question_is_answered_by_the_one_statement_before_it():
    pairs = [pair for seed in range(12) for pair in asked(row(seed))]
    assert len(pairs) > 80
    assert {answer.isdigit() for *_, answer in pairs} == {True, False}
    lengths = {len(answer) for *_, answer in pairs if answer.isdigit()}
    assert lengths == set(range(3, 10))  # also those of the evaluation


def test_every_row_has_a_pass_key_and_chains_give_their_names_in_order():
    chains = 0
    for seed in range(12):
        text = row(seed)
        key = re.search(r"The pass key is (\d+)\. Remember it\. \1 is the pass key\. ", text)
        assert key and 3 <= len(key[1]) <= 9
        assert text.index(f"{PASSKEY.question} {key[1]}. ") >= key.end()
        for end in re.finditer(r"(?:stand for|with|equal) (\w+)(?: are|:) ((?:[A-Z]{4,6}, )+[A-Z]{4,6})\. ", text):
            names = end[2].split(", ")
            before = text[: end.start()]
            links = {match["name"]: match["before"] for match in LINK.finditer(before)}
            assert [links.get(name) for name in names] == [None, *names[:-1]]
            first = f"{names[0]} (?:stands for|contains|=) {end[1]}\\. "
            assert re.search(first, before)
            chains += 1
    assert chains > 20


def test_no_two_chains_of_a_row_have_a_value_or_a_name_in_common():
    """Also where there are fewer words than chains: further chains have numbers."""
    for seed in range(6):
        text = row(seed, 16_384, words=MANY[:40], every=60)
        firsts = []
        for first, *_ in needle_corpus.CHAINS:
            firsts += re.findall(first.replace(".", r"\.").format(name=r"\b([A-Z]{4,6})", value="([a-z0-9]+)"), text)
        names = [match["name"] for match in LINK.finditer(text)] + [name for name, _ in firsts]
        values = [value for _, value in firsts]
        assert len(values) > 15
        assert len(set(values)) == len(values) and len(set(names)) == len(names)


@pytest.mark.parametrize("every", [250, 125])
def test_distances_have_all_orders_of_magnitude_and_facts_their_density(every):
    distances = []
    for seed in range(16):
        text = row(seed, 8192, every=every)
        pairs = asked(text)
        statements = [len(BPE.encode(text[begin:end])) for begin, end, _ in pairs]
        distances += statements
        questions = len(re.findall(r"\? |Answer: |this key\. |equal \w+: ", text))
        assert 20 < questions * every / 250 < 8192 / 200
    shares = [np.mean([low <= d < 4 * low for d in distances]) for low in (64, 256, 1024)]
    assert min(shares) > 0.15 and np.mean([d < 32 for d in distances]) < 0.1, (shares, min(distances))


def test_some_rows_begin_with_a_statement():
    """Else a model learns to copy from everywhere but the first words of a text."""
    statements = [pattern(form.statement) for form in (*FACTS, PASSKEY)]
    statements += [re.compile(first.replace(".", r"\.").format(name="[A-Z]+", value=r"\w+"))
                   for first, *_ in needle_corpus.CHAINS]  # fmt: skip
    begins = [any(each.match(row(seed)) for each in statements) for seed in range(32)]
    assert 1 / 8 < np.mean(begins) < 1 / 2


def test_the_text_goes_on_after_the_last_answer():
    for seed in range(20):
        assert row(seed, 1024).rstrip().endswith("end.")


def test_no_word_or_name_that_the_evaluation_asks_for_occurs():
    own = set(needle_corpus.WORDS)
    assert not own & set(needles.WORDS) and len(own) == len(needle_corpus.WORDS)
    assert not own & set(re.findall(r"\w+", passkey.FILLER.lower()))
    text = " ".join(row(seed) for seed in range(12))
    assert not re.search(rf"\b[A-Z]{{{needles.LETTERS}}}\b", text)
    assert not set(re.findall(r"\w+", text)) & set(needles.WORDS)


SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
MANY = [first + second for first in SYLLABLES for second in SYLLABLES[:20]]  # 1,400 words


def test_the_words_of_texts_are_those_in_lower_case_without_the_evaluation():
    text = "Stone stone's can't_be the mill wind-swept ROADS naive na\u00efves x1234 abcd abcdefghijkl abcdefghijklm "
    text += f"purple number {' '.join(needles.WORDS)} {passkey.FILLER} caf\u00e9s road isn\u2019t ever.ever (seven)"
    assert words_of([text, "seven eight"]) == [
        "abcd",
        "abcdefghijkl",
        "eight",
        "ever",
        "naive",
        "road",
        "seven",
        "swept",
    ]
    assert words_of([]) == []


def test_keys_and_values_are_words_of_the_texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(4):
        found = [
            f"{MANY[j]} {MANY[j + 1]} {needles.WORDS[j % len(needles.WORDS)]}. " for j in range(350 * i, 350 * i + 349)
        ]
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(found))
    remarks = []
    for name in ("one", "two"):
        build_needle_corpus(tmp_path / name, tmp_path / "texts", BPE, rows=30, row_tokens=2048, remark=remarks.append)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") and remarks == []
    rows = zarr.open_array(tmp_path / "one" / "train.zarr", mode="r")[:]
    words = Counter(answer for tokens in rows for *_, answer in asked(BPE.decode(tokens.tolist())) if answer.isalpha())
    assert words.keys() <= set(MANY) and words.total() > 60
    assert len(words) > 0.9 * words.total()
    text = " ".join(BPE.decode(tokens.tolist()) for tokens in rows)
    keys = set(re.findall(r"secret (?:number|word) of the (?:\w+ )?(\w+) is ", text))
    assert len(keys) > 40 and keys <= set(MANY)


def test_texts_with_few_words_get_the_list(sources, tmp_path):
    remarks = []
    build_needle_corpus(tmp_path / "n", sources / "texts", BPE, rows=12, row_tokens=2048, remark=remarks.append)
    known = len(words_of([TEXT]))
    assert known < 20 and [line for line in remarks if f"the texts have {known} different words" in line] == remarks
    rows = zarr.open_array(tmp_path / "n" / "train.zarr", mode="r")[:]
    answers = {answer for tokens in rows for *_, answer in asked(BPE.decode(tokens.tolist())) if answer.isalpha()}
    assert len(remarks) == 1 and answers and answers <= set(needle_corpus.WORDS)
    with pytest.raises(ValueError, match=r"^expected at least two words, for a key and a value; got 1$"):
        row(words=["stone"])


def test_a_row_has_no_more_facts_than_half_of_it_holds():
    class Letters:
        start = ()

        def encode(self, text):
            return np.frombuffer(text.encode(), dtype=np.uint8)

    text = bytes(needle_row(Prose(Letters(), "".join(PROSE)), Letters(), 600, np.random.default_rng(0)).tolist())
    assert text.count(b"pass key") >= 4
    with pytest.raises(ValueError, match=r"row_tokens must be at least \d+, so that a fact fits; got 100"):
        needle_row(Prose(Letters(), "".join(PROSE)), Letters(), 100, np.random.default_rng(0))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("needles")
    (folder / "texts").mkdir()
    for i in range(4):
        (folder / "texts" / f"{i}.txt").write_text("".join(PROSE[100 * i : 100 * i + 100]))
    BPE.save(folder / "tokenizer.json")
    return folder


def test_the_same_command_gives_the_same_rows_also_after_a_stop(sources, tmp_path, monkeypatch):
    options = {"rows": 9, "row_tokens": 512, "seed": 3}
    made = build_needle_corpus(tmp_path / "whole", sources / "texts", BPE, **options)
    assert (made["train"]["rows"], made["heldout"]["rows"]) == (9, 1)
    done = []

    def killed(*arguments, **named):
        done.append(1)
        if len(done) == 8 + 5:  # 8 are tried before
            raise KeyboardInterrupt
        return needle_row(*arguments, **named)

    monkeypatch.setattr(needle_corpus, "needle_row", killed)
    with pytest.raises(KeyboardInterrupt):
        build_needle_corpus(tmp_path / "again", sources / "texts", BPE, **options)
    build_needle_corpus(tmp_path / "again", sources / "texts", BPE, **options)
    assert len(done) == 8 + 5 + 8 + 6
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    rows = zarr.open_array(tmp_path / "whole" / "train.zarr", mode="r")[:]
    assert rows.shape == (9, 512) and len({each.tobytes() for each in rows}) == 9
    with pytest.raises(ValueError, match="holds a corpus of seed 3, not 4: remove it"):
        build_needle_corpus(tmp_path / "whole", sources / "texts", BPE, **options | {"seed": 4})
    with pytest.raises(ValueError, match="holds a corpus of every 250, not 100: remove it"):
        build_needle_corpus(tmp_path / "whole", sources / "texts", BPE, **options | {"every": 100})


def test_texts_of_which_a_part_has_no_words_are_refused(tmp_path):
    (tmp_path / "short.txt").write_text("A stone fell. \n")  # of which the end of the line is held out
    with pytest.raises(ValueError, match=r"^the texts that are held out have no words to hide statements in: "):
        build_needle_corpus(tmp_path / "n", tmp_path / "short.txt", BPE, rows=1, row_tokens=512)
    (tmp_path / "short.txt").write_text("A stone fell. It was late. " * 40)
    build_needle_corpus(tmp_path / "n", tmp_path / "short.txt", BPE, rows=1, row_tokens=512)  # into the same folder


def test_rows_beyond_memory_are_refused_at_once(sources, tmp_path):
    with pytest.raises(ValueError, match=r"row_tokens = 10,000,000,000,000 needs .* of memory; this machine has"):
        build_needle_corpus(tmp_path / "long", sources / "texts", BPE, row_tokens=10**13)
    with pytest.raises(ValueError, match=r"^rows = 1,000,000,000,000 needs .* of memory; this machine has"):
        build_needle_corpus(tmp_path / "long", sources / "texts", BPE, rows=10**12)
    assert not (tmp_path / "long").exists()


def test_rows_of_other_lengths_are_mixed(sources, tmp_path):
    build_corpus(tmp_path / "docs", sources / "texts", tokenizer=BPE, row_tokens=300)
    build_needle_corpus(tmp_path / "recall", sources / "texts", BPE, rows=4, row_tokens=1024)
    config = DataConfig(kind="zarr", paths=(f"{tmp_path}/docs/train.zarr", f"{tmp_path}/recall/train.zarr"),
                        weights=(1, 3), held_out_path=f"{tmp_path}/docs/heldout.zarr", tokenizer=f"{tmp_path}/docs",
                        pack=False)  # fmt: skip
    splits = open_corpus(config)
    batches = Batches(splits.train, 100, 8, pack=False)
    long = zarr.open_array(tmp_path / "recall" / "train.zarr", mode="r")[:].ravel().tolist()
    whole = " ".join(map(str, long))
    share = np.mean([" ".join(map(str, tokens.tolist())) in whole for i in range(8) for tokens in batches[i].tokens])
    assert abs(share - 0.75) < 0.05


def test_the_command(sources, tmp_path, capsys):
    words = ["needle-corpus", f"{sources}/texts", "--tokenizer", f"{sources}/tokenizer.json", "--quiet"]
    made = [*words, "--out", f"{tmp_path}/n", "--rows", "3", "--row-tokens", "512"]
    for _ in range(2):
        assert main(made) == 0
        out = capsys.readouterr().out.splitlines()
        rows = {"train": "3 rows", "heldout": "1 row"}
        assert out == [f"{tmp_path}/n/{split}.zarr: {each} of 512 tokens" for split, each in rows.items()]
    (tmp_path / "empty.txt").write_text(" ")
    for more, line in (
        (["--out", f"{tmp_path}/short", "--row-tokens", "40"], "row_tokens must be at least"),
        (["--out", f"{tmp_path}/n"], "holds a corpus of row_tokens 512, not 16384"),
        (["--out", f"{tmp_path}/n", "--rows", "3", "--row-tokens", "512", "--every", "9"], "holds a corpus of every "),
        (["--out", f"{sources}/texts"], "holds something else than a corpus"),
    ):
        assert main([*words, *more]) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1, error
    assert not list(tmp_path.glob("*.partial"))
    assert main(["needle-corpus", f"{tmp_path}/nothing", *words[2:], "--out", f"{tmp_path}/x"]) == 2
    assert "text corpus does not exist" in capsys.readouterr().err
    assert main(["needle-corpus", f"{tmp_path}/empty.txt", *words[2:], "--out", f"{tmp_path}/y"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sympow: error: ") and error.count("\n") == 1, error
