import io
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sympow.data import BPETokenizer, ByteTokenizer, StreamDecoder, encode_stream, encode_text, load_tokenizer
from sympow.data.tokens import cut_text, encode_document

TEXTS = ["def power(x, p):\n    return x ** p\n\n\n" * 20, "naïve café, 力, 🙂 and {} again\n" * 20]
BPE = BPETokenizer.train(TEXTS, vocab_size=300)
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])


@BOTH
@given(text=st.text())
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.ndim == 1 and ids.dtype == np.min_scalar_type(tokenizer.vocab_size - 1)
    assert tokenizer.decode(ids) == text


@BOTH
@given(data=st.data())
def test_stream_joins_to_decode_whatever_the_tokens(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    stream = StreamDecoder(tokenizer)
    assert "".join([stream.push([i]) for i in ids] + [stream.finish()]) == tokenizer.decode(ids)


def test_stream_never_shows_half_a_character():
    stream = StreamDecoder(ByteTokenizer())
    assert [stream.push([i]) for i in "é力".encode()] == ["", "é", "", "", "力"]
    assert stream.push("力".encode()[:2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(b"a") + stream.finish() == "a"


def test_bytes_that_are_not_utf8_are_shown_as_replaced():
    assert ByteTokenizer().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    assert BPE.decode(BPE.encode("\udcff")) == ByteTokenizer().decode(ByteTokenizer().encode("\udcff")) == "?"


@BOTH
@pytest.mark.parametrize("token", [-1, 1000])
def test_decode_refuses_a_token_outside_the_vocabulary(tokenizer, token):
    with pytest.raises(ValueError, match=rf"^token {token} is outside the tokenizer's vocabulary of \d+$"):
        tokenizer.decode([token])


def test_bpe_learns_pairs_and_the_same_each_time():
    assert BPE.vocab_size == 300 and BPE.name == "bpe300"
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert BPETokenizer.train(TEXTS, vocab_size=300).fingerprint == BPE.fingerprint
    assert BPETokenizer.train(TEXTS, vocab_size=301).fingerprint != BPE.fingerprint


def test_bpe_of_a_tiny_corpus_says_how_many_tokens_there_are():
    assert BPETokenizer.train(["ab"], vocab_size=2048).vocab_size == 257


def test_bpe_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match="at least the 256 bytes, got vocab_size=255"):
        BPETokenizer.train(TEXTS, vocab_size=255)


@given(st.text(alphabet="a1. \n\t_é", max_size=60))
def test_long_texts_are_cut_without_changing_a_token(text):
    pieces = list(cut_text(text, size=4))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text).tolist()


def test_long_texts_are_cut():
    pieces = list(cut_text("word\n" * 1000, size=50))
    assert len(pieces) > 90 and max(map(len, pieces)) <= 55


@BOTH
def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert (loaded.name, loaded.fingerprint) == (tokenizer.name, tokenizer.fingerprint)
        assert loaded.encode(TEXTS[1]).tolist() == tokenizer.encode(TEXTS[1]).tolist()


def spec(**changes) -> dict:
    """What `BPE` writes to a file, with changes."""
    with TemporaryDirectory() as folder:
        BPE.save(folder)
        return json.loads(Path(folder, "tokenizer.json").read_text("utf-8")) | changes


def test_truncation_padding_and_special_tokens_of_a_file_do_not_touch_the_text(tmp_path):
    special = {"id": 300, "content": "<|endoftext|>", "special": True, "single_word": False}
    special |= {"lstrip": False, "rstrip": False, "normalized": False}
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single + single[1:]}
    template["special_tokens"] = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [300], "tokens": ["<|endoftext|>"]}}
    content = spec(truncation=truncation, added_tokens=[special], post_processor=template)
    (tmp_path / "t.json").write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert loaded.vocab_size == 301
    assert loaded.encode(TEXTS[0]).tolist() == BPE.encode(TEXTS[0]).tolist()
    assert loaded.decode([300, *BPE.encode("a")]) == "<|endoftext|>a"
    assert loaded.start == (300,) and ByteTokenizer().start == BPE.start == ()
    for text in ("a", "<|endoftext|>a"):
        assert encode_text(loaded, text).tolist() == [300, *BPE.encode("a")]
    assert encode_text(loaded, "").tolist() == [300] and encode_text(BPE, "").tolist() == []
    behind, textless, empty = r"\[\d+, 300\] for \[\d+\]", r"\[300\] for \[\]", r"\[\] for \[\]"
    for kept, got in ((single[::-1], behind), (single[:1], textless), ([], empty)):
        template["single"] = kept
        with pytest.raises(ValueError, match=f"that adds tokens before a text only, got {got}"):
            BPETokenizer(json.dumps(content))


@pytest.mark.parametrize(
    ("ids", "single"),
    [([300] * 65, "sA"), ([300], "s" * 65 + "A"), ([300], "AA")],
    ids=["a token of many ids", "many tokens", "two copies of the text"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_post_processor_that_adds_many_tokens_is_refused_before_it_runs(ids, single, nested):
    pieces = {"s": {"SpecialToken": {"id": "s", "type_id": 0}}, "A": {"Sequence": {"id": "A", "type_id": 0}}}
    template: dict = {"type": "TemplateProcessing", "single": [pieces[each] for each in single]}
    template |= {"pair": [pieces["A"], {"Sequence": {"id": "B", "type_id": 1}}]}
    template["special_tokens"] = {"s": {"id": "s", "ids": ids, "tokens": ["s"] * len(ids)}}
    if nested:
        template = {"type": "Sequence", "processors": [template]}
    with pytest.raises(ValueError, match=r"that adds at most 64 tokens to a text, got one that adds 65$"):
        BPETokenizer(json.dumps(spec(post_processor=template)))


def slow_pattern() -> BPETokenizer:
    """A tokenizer whose pattern takes exponential time, so that the library gives up with a panic."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    parts = [split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    return BPETokenizer(json.dumps(spec(pre_tokenizer={"type": "Sequence", "pretokenizers": parts})))


def test_a_text_that_the_pattern_cannot_split_is_an_error():
    with pytest.raises(ValueError, match=r"^the tokenizer's pattern cannot split this text: .*retry-limit"):
        slow_pattern().encode("a" * 40 + "b")
    with pytest.raises(ValueError, match=r"^notes.txt: the tokenizer's pattern cannot split this text"):
        encode_document(slow_pattern(), "notes.txt", "a" * 40 + "b")


BPE_VOCABULARY = spec()["model"]["vocab"]
ADDED = {"id": 300, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern, behavior="Isolated", invert=False):
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [step, LEVEL]}


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"pre_tokenizer": split(QWEN)}, True),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, LEVEL | {"use_regex": True}]}}, True),
        ({"pre_tokenizer": split(QWEN, "Removed", invert=True)}, True),
        ({"pre_tokenizer": LEVEL}, False),
        ({"pre_tokenizer": split(r"[a-z]+\n[a-z]+|.")}, False),
        ({"pre_tokenizer": split(QWEN, "MergedWithPrevious")}, False),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Punctuation", "behavior": "Contiguous"}, LEVEL]}}, False),
        ({"added_tokens": [ADDED | {"content": "b\na"}]}, False),
        ({"added_tokens": [ADDED | {"content": "a", "lstrip": True}]}, False),
        ({"added_tokens": [ADDED | {"content": "<x>"}]}, True),
    ],
)  # fmt: skip
def test_long_texts_have_the_tokens_of_the_library(changes, cut):
    """Also where a tokenizer's pieces, merges or added tokens span lines."""
    text = json.dumps(spec(**changes))
    own, library = BPETokenizer(text), tokenizers.Tokenizer.from_str(text)
    assert own.cuts_at_lines is cut
    draw = random.Random(1)
    for words in (["ab\nab"], ["a", "b\n", "b\na", "x1\n", "<x>\n", " ", "!\n", "\n\n", "é\n"]):
        long = "".join(draw.choices(words, k=14_000 if len(words) == 1 else 36_000))
        assert len(long) > 1 << 16  # more than a piece of `cut_text`
        expected = library.encode(long, add_special_tokens=False).ids
        assert own.encode(long).tolist() == expected
        pieces = list(encode_stream(own, io.StringIO(long, newline=""), 10_000))
        assert np.concatenate(pieces).tolist() == expected and (len(pieces) > 1) is cut


def test_the_form_nfc_is_told():
    own = BPETokenizer(json.dumps(spec(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})))
    assert own.normalizes and not BPE.normalizes
    assert own.decode(own.encode("cafe\u0301")) == "caf\xe9"


def test_added_tokens_that_remove_white_space_are_told():
    own = BPETokenizer(json.dumps(spec(added_tokens=[ADDED | {"content": "<x>", "rstrip": True}])))
    assert own.strips and not BPE.strips
    assert own.decode(own.encode("one <x> two")) == "one <x>two"


@pytest.mark.parametrize("content", ["naïve", "Ġbe", "\u0106", "<é>", "<x>", "力"])
def test_an_added_token_is_its_own_text(content):
    """Its letters are not those by which other tokens write bytes."""
    model = without_a_byte("\u0106")
    model["vocab"] = {token: place for place, token in enumerate(model["vocab"])}
    own = BPETokenizer(json.dumps(spec(model=model, added_tokens=[ADDED | {"content": content}])))
    tokens = own.encode(f"a {content} b")
    assert own.token_bytes[tokens[2]] == content.encode() and own.decode(tokens) == f"a {content} b"
    assert own.decode(own.encode("\x06")) == "\ufffd"  # by no merge
    decoder = StreamDecoder(own)
    assert "".join(decoder.push([token]) for token in tokens) + decoder.finish() == f"a {content} b"


def without_a_byte(character: str = "!") -> dict:
    model = spec()["model"]
    del model["vocab"][character]
    return model


def test_rare_bytes_may_lack_and_their_characters_are_replaced(tmp_path):
    """As in SmolLM2's vocabulary; \u0106 stands for byte 6 of GPT-2's table."""
    (tmp_path / "t.json").write_text(json.dumps(spec(model=without_a_byte("\u0106"))))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert loaded.decode(loaded.encode("one \x06 caf\xe9\x05")) == "one \ufffd caf\xe9\x05"
    assert loaded.encode(TEXTS[0]).tolist() == BPE.encode(TEXTS[0]).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(spec())[:500], "is not JSON: truncated, or not a tokenizer.json"),
        ("[1, 2]", "expected a byte-level BPE tokenizer.json, got model type None"),
        ('{"type": "sympow.bytes", "version": 2}', "expected a byte-level BPE tokenizer.json"),
        (json.dumps(spec(model={"type": "WordPiece"})), "got model type 'WordPiece'"),
        (json.dumps(spec(decoder={"type": "Metaspace"})), "got decoder type 'Metaspace'"),
        (json.dumps(spec(decoder=None)), "got decoder type None"),
        (json.dumps(spec(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True})), "add_prefix_space"),
        (json.dumps(spec(model=without_a_byte())), "all bytes of ordinary text, got one without 1 of them"),
        (json.dumps(spec(model={"type": "BPE", "merges": 3})), "expected a byte-level BPE tokenizer.json"),
        (json.dumps(spec(model=spec()["model"] | {"dropout": 0.1})), "without chance, got dropout = 0.1"),
        (json.dumps(spec(model=spec()["model"] | {"end_of_word_suffix": "</w>"})), "got end_of_word_suffix = '</w>'"),
        (json.dumps(spec(model=spec()["model"] | {"vocab": spec()["model"]["vocab"] | {"zz": 2**31 - 1}})),
         r"got the id 2,147,483,647 in a file of [\d,]+ characters"),
        (json.dumps(spec(normalizer={"type": "Lowercase"})), "keeps the text as it is, got the normalizer 'Lowercase'"),
        (json.dumps(spec(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]})),
         "got the normalizer 'Strip'"),
        (json.dumps(spec(normalizer=[1])), r"got a normalizer that holds \[1\]"),
        (json.dumps(spec(pre_tokenizer=None)), "got 0 pre-tokenizers of the type 'ByteLevel'"),
        (json.dumps(spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [1]})), "a pre_tokenizer that holds 1"),
        (json.dumps(spec(pre_tokenizer={"type": "Sequence", "pretokenizers": {"a": 1}})), "with pretokenizers = {'a'"),
        (json.dumps(spec(pre_tokenizer={"type": "Sequence"})), "with pretokenizers = None"),
        (json.dumps(spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, LEVEL]})),
         "got the pre-tokenizer 'Whitespace'"),
        (json.dumps(spec(pre_tokenizer=split(" ", "Removed"))), "got the pre-tokenizer 'Split'"),
        (json.dumps(spec(pre_tokenizer=split("[a-z]+", "Removed", invert=True))), "got the pre-tokenizer 'Split'"),
        (json.dumps(spec(pre_tokenizer=split(QWEN, "Removed"))), "got the pre-tokenizer 'Split'"),
        ("[" * 100_000, "is not JSON"),
        (json.dumps(spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}, LEVEL]})),
         "got the pre-tokenizer 'UnicodeScripts'"),
        (json.dumps(spec(model=spec()["model"] | {"vocab": BPE_VOCABULARY | {"zz": 5}})), "several tokens with the s"),
        (json.dumps(spec(model=without_a_byte("\u0106"), added_tokens=[ADDED | {"content": "<x>"}])), "the same id"),
        (json.dumps(spec(added_tokens=[ADDED | {"id": BPE_VOCABULARY["Ġ"], "content": "Ġ"}])),
         "got the added token 'Ġ', which also stands for b' '"),
    ],
)  # fmt: skip
def test_foreign_files_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_binary_and_missing_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer file does not exist"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not JSON"):
        load_tokenizer(tmp_path)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"BPE tokenizers need tokenizers: pip install 'sympow\[train\]'"):
        BPETokenizer.train(TEXTS, vocab_size=300)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(size):
    draw = random.Random(0)
    words = ["the", " ", "\n", "\n\n", "state", "±", "  ", "\r\n", "'s", "12"]
    text = "".join(draw.choice(words) for _ in range(600))
    for tokenizer in (ByteTokenizer(), BPETokenizer.train([text, *TEXTS], 300)):
        pieces = list(encode_stream(tokenizer, io.StringIO(text, newline=""), size))
        assert np.array_equal(np.concatenate(pieces), tokenizer.encode(text))
        assert len(pieces) > 3 or size == 10_000
    assert list(encode_stream(ByteTokenizer(), io.StringIO(""))) == []


def test_pieces_of_no_characters_are_refused():
    with pytest.raises(ValueError, match="size must be at least 1 character; got 0"):
        list(encode_stream(ByteTokenizer(), io.StringIO("abc"), 0))
