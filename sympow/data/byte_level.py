"""Byte-level BPEs in a tokenizer.json: their alphabet, and checks, such as whether they keep a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EXPECTED = "expected a byte-level BPE tokenizer.json"

# Steps before the merges that keep every character. Others drop some: "Whitespace", or "UnicodeScripts" at the end.
_KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation")
# Patterns of Llama 3 and of Qwen. GPT-2's is within "ByteLevel". A line end between two characters that are not white
# space is the last character of its match, whatever follows.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN = (WORDS % r"\p{N}{1,3}", WORDS % r"\p{N}")


def byte_characters() -> dict[str, int]:
    """Returns GPT-2's table: the byte that each character of a byte-level vocabulary represents.

    Printable Latin-1 characters represent themselves; characters from U+0100 represent the other bytes in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bpe_model(vocabulary: Mapping[str, int], merges: Sequence[Any], ignore_merges: bool = False) -> dict[str, Any]:
    """Returns the part `model` of a tokenizer.json, of a BPE whose tokens are strings of the characters of bytes.

    Args:
        vocabulary: the numbers of the tokens.
        merges: the merges, in their order.
        ignore_merges: whether a whole word that is a token needs no merges.
    """
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def check_byte_level(spec: Any) -> None:
    """Refuses every tokenizer whose tokens are not fixed strings of bytes, or that changes the text.

    The form NFC of a text is the one change that is allowed.

    Args:
        spec: the content of a tokenizer.json.

    Raises ValueError in one line.
    """
    spec = spec if isinstance(spec, dict) else {}
    model, decoder = _part(spec, "model"), _part(spec, "decoder")
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ValueError(f"{EXPECTED}, got model type {model.get('type')!r}")
    if decoder.get("type") != "ByteLevel":
        raise ValueError(f"{EXPECTED}, got decoder type {decoder.get('type')!r}")
    if model.get("dropout") not in (None, 0):
        raise ValueError(f"{EXPECTED} without chance, got dropout = {model['dropout']!r}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"{EXPECTED}, got {name} = {model[name]!r}")
    for step in _steps(spec, "normalizer", "normalizers"):
        if step.get("type") != "NFC":
            raise ValueError(f"{EXPECTED} that keeps the text as it is, got the normalizer {step.get('type')!r}")
    steps = _steps(spec, "pre_tokenizer", "pretokenizers")
    for step in steps:
        if step.get("add_prefix_space") and step.get("type") == "ByteLevel":
            raise ValueError(f"{EXPECTED} that keeps the text as it is, got add_prefix_space=true")
        if step.get("type") not in _KEEPING or (step.get("behavior") == "Removed" and not _is_known(step)):
            raise ValueError(f"{EXPECTED} that keeps the text as it is, got the pre-tokenizer {step.get('type')!r}")
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(levels) != 1:
        raise ValueError(f"{EXPECTED}, got {len(levels)} pre-tokenizers of the type 'ByteLevel'")


def normalizes(spec: Any) -> bool:
    """Tells whether a tokenizer.json, which `check_byte_level` has checked, puts texts into the form NFC."""
    return bool(_steps(spec, "normalizer", "normalizers"))


def strips(spec: Any) -> bool:
    """Tells whether an added token of a tokenizer.json removes the white space beside it in a text."""
    return any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or ())


def cuts_at_lines(spec: Any) -> bool:
    """Tells whether a text may be cut behind a line end between two characters that are not white space.

    The parts then have the tokens of the whole text. This is known of the patterns of GPT-2, Llama 3 and Qwen. No added
    token may span such a place or swallow the white space before it.

    Args:
        spec: the content of a tokenizer.json, which `check_byte_level` has checked.
    """
    for token in spec.get("added_tokens") or ():
        if token.get("lstrip") or "\n" in token.get("content", ""):
            return False
    cut = False
    for step in _steps(spec, "pre_tokenizer", "pretokenizers"):
        kind = step.get("type")
        if kind == "ByteLevel":
            return cut or step.get("use_regex", True)  # behind it no character is white space
        if kind == "Split":
            if not _is_known(step):
                return False
            cut = True
        elif kind != "Digits":
            return False
    return False


def _is_known(step: dict[str, Any]) -> bool:
    """Tells whether a step keeps the matches of one of `_KNOWN` apart. Every character belongs to a match of these."""
    pattern = step.get("pattern")
    known = step.get("type") == "Split" and isinstance(pattern, dict) and pattern.get("Regex") in _KNOWN
    return known and (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))


def _part(spec: dict[str, Any], name: str) -> dict[str, Any]:
    value = spec.get(name)
    return value if isinstance(value, dict) else {}


def _steps(spec: dict[str, Any], name: str, parts: str) -> list[dict[str, Any]]:
    """Returns the steps of a part of a tokenizer.json, also those within sequences.

    Raises ValueError for a part that is no object, and for a sequence that is no list of objects.
    """
    return [] if spec.get(name) is None else _flat(spec[name], name, parts)


def _flat(step: Any, name: str, parts: str) -> list[dict[str, Any]]:
    if not isinstance(step, dict):
        raise ValueError(f"{EXPECTED}, got a {name} that holds {step!r}")
    if step.get("type") != "Sequence":
        return [step]
    inner = step.get(parts)
    if not isinstance(inner, list):
        raise ValueError(f"{EXPECTED}, got a {name} with {parts} = {inner!r}")
    return [each for part in inner for each in _flat(part, name, parts)]
