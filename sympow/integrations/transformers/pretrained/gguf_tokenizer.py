"""Converts the tokenizer in a GGUF file into the text of a tokenizer.json and of the files beside it.

transformers can convert it too, but then splits texts differently from the file, and loses a space in decoding.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sympow.data.byte_level import WORDS, bpe_model
from sympow.data.tokenizer_files import CONFIG, GENERATION
from sympow.fields import is_integer
from sympow.integrations.transformers.pretrained.gguf_file import short

_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is split


def gguf_beside(fields: Mapping[str, Any], name: str = "the GGUF file") -> dict[str, str]:
    """Makes the files beside a tokenizer.json of special tokens and the chat template, as `read_beside` returns them.

    A text also ends with the token that ends a turn of a chat (eot), and with the one that ends a message before the
    call of a tool (eom), where the file names them.

    Args:
        fields: those of the file, see `GGUFHeader`.
        name: of the file, for the message.

    Raises ValueError for a special token or a template that is none.
    """
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    numbers = {kind: fields.get(f"tokenizer.ggml.{field}_token_id") for kind, field in kinds.items()}
    numbers = {kind: number for kind, number in numbers.items() if number is not None}
    settings = {f"{kind}_token": _token(fields, kinds[kind], name) for kind in numbers}
    template = fields.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{name}: expected a text as tokenizer.chat_template; got {short(template)}")
    settings |= {} if template is None else {"chat_template": template}
    generation: dict[str, Any] = {f"{kind}_token_id": number for kind, number in numbers.items()}
    named = [kind for kind in ("eos", "eot", "eom") if fields.get(f"tokenizer.ggml.{kind}_token_id") is not None]
    for kind in named:
        _token(fields, kind, name)  # refuses a number that is none of a token
    ends = list(dict.fromkeys(fields[f"tokenizer.ggml.{kind}_token_id"] for kind in named))
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {CONFIG: json.dumps(settings, indent=2) + "\n", GENERATION: json.dumps(generation, indent=2) + "\n"}


def gguf_tokenizer(fields: Mapping[str, Any], name: str) -> str:
    """Makes the text of a tokenizer.json of the byte-level BPE in a GGUF file of SmolLM, Llama 3 or Qwen2.

    Texts begin with the token for the beginning if the file says so, and also if it says nothing and is of Llama 3.

    Args:
        fields: those of the file, see `GGUFHeader`.
        name: of the file, for the message.

    Raises ValueError for a tokenizer of another kind.
    """

    def value(field: str) -> Any:
        return fields.get(f"tokenizer.ggml.{field}")

    kind, splitter = value("model"), _splitters().get(str(value("pre")))
    if kind != "gpt2" or splitter is None:
        known = ", ".join(_splitters())
        raise ValueError(
            f"{name} has a tokenizer of the kind {kind!r}, {value('pre')!r}; known are byte-level BPEs of {known}"
        )
    tokens, types = value("tokens"), value("token_type")
    for field, of in (("tokens", str), ("merges", str), ("token_type", int)):
        if not isinstance(value(field), list) or not all(type(each) is of for each in value(field)):
            raise ValueError(f"{name} has no list of {of.__name__} as tokenizer.ggml.{field}")
    for field, of_each in (("token_type", types), ("scores", value("scores"))):
        if of_each is not None and (not isinstance(of_each, list) or len(of_each) != len(tokens)):
            got = f"{len(of_each)}" if isinstance(of_each, list) else short(of_each)
            raise ValueError(f"{name} has {len(tokens)} tokens, and tokenizer.ggml.{field} of {got}")
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ValueError(f"{name} has the token {twice!r} twice in tokenizer.ggml.tokens")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [i for i, each in enumerate(types) if each in (_CONTROL, _USER_DEFINED)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i]} | plain for i in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitter},
        "post_processor": _post_processor(fields, name),
        "decoder": _BYTES | {"add_prefix_space": True},
        "model": bpe_model(vocabulary, value("merges"), value("pre") == "llama-bpe"),
    }
    return json.dumps(spec, ensure_ascii=False)


def _token(fields: Mapping[str, Any], kind: str, name: str) -> str:
    """Returns the text of a special token. Raises ValueError for a number that is none of a token."""
    tokens, number = fields.get("tokenizer.ggml.tokens", ()), fields[f"tokenizer.ggml.{kind}_token_id"]
    if not is_integer(number) or not 0 <= number < len(tokens):
        expected = f"expected a special token below {len(tokens)} as tokenizer.ggml.{kind}_token_id"
        raise ValueError(f"{name}: {expected}; got {short(number)}")
    return str(tokens[number])


def _post_processor(fields: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the part of a tokenizer.json that puts tokens before and behind a text; None if there are none."""

    def token(kind: str, usual: bool) -> list[str]:
        added = fields.get(f"tokenizer.ggml.add_{kind}_token", usual)
        if not isinstance(added, bool):
            expected = f"expected true or false as tokenizer.ggml.add_{kind}_token"
            raise ValueError(f"{name}: {expected}; got {short(added)}")
        if fields.get(f"tokenizer.ggml.{kind}_token_id") is None or not added:
            return []
        return [_token(fields, kind, name)]

    first, last = token("bos", fields.get("tokenizer.ggml.pre") == "llama-bpe"), token("eos", False)
    if not first and not last:
        return None
    texts = {"single": ["A"], "pair": ["A", "B"]}
    parts = {
        kind: [
            *({"SpecialToken": {"id": each, "type_id": 0}} for each in first),
            *({"Sequence": {"id": each, "type_id": 0}} for each in names),
            *({"SpecialToken": {"id": each, "type_id": 0}} for each in last),
        ]
        for kind, names in texts.items()
    }
    numbers = {each: fields["tokenizer.ggml.tokens"].index(each) for each in first + last}
    special = {each: {"id": each, "ids": [number], "tokens": [each]} for each, number in numbers.items()}
    return {"type": "TemplateProcessing", **parts, "special_tokens": special}


def _splitters() -> dict[str, list[dict[str, Any]]]:
    """Returns the rules that split a text before merges, by their names in GGUF files."""

    def words(digits: str) -> list[dict[str, Any]]:
        split = {"type": "Split", "pattern": {"Regex": WORDS % digits}, "behavior": "Isolated", "invert": False}
        return [split, _BYTES | {"use_regex": False}]

    digits = [{"type": "Digits", "individual_digits": True}, _BYTES]
    return {
        "smollm": digits,
        "refact": digits,  # of Granite 3
        "llama-bpe": words(r"\p{N}{1,3}"),
        "dbrx": words(r"\p{N}{1,3}"),  # of Phi-4
        "qwen2": words(r"\p{N}"),
    }
