"""Tokenizers: bytes, and byte-level BPE by Hugging Face `tokenizers`.

Each token is a fixed string of bytes. Decoding joins these bytes and reads them as UTF-8, so a stream can be decoded
token by token without showing half a character. Encoding and decoding are lossless, with three exceptions. If the
vocabulary of a BPE lacks single bytes, as that of SmolLM2 does, characters with such a byte become U+FFFD. The
tokenizers of Qwen put texts into the form NFC, which writes a letter and its accent as one character. An added token
may remove the white space beside it.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from sympow.data.byte_level import EXPECTED, byte_characters, check_byte_level, cuts_at_lines, normalizes, strips
from sympow.files import digest, write_text
from sympow.packages import from_extra

TOKENIZER_FILE = "tokenizer.json"
MOST_START = 64  # tokens before a text
BYTES_TAG = {"type": "sympow.bytes", "version": 1}
"""The content of the file that `ByteTokenizer.save` writes."""


class Tokenizer(Protocol):
    """Turns text into tokens and back. This is the interface of all tokenizers.

    `token_bytes[i]` are the bytes of token `i`. `fingerprint` changes if the bytes of any token change. `start` are the
    tokens that every text begins with, such as a token for the beginning; `encode` does not add them, `encode_text`
    does.
    """

    @property
    def start(self) -> Sequence[int]:
        """Returns the tokens that every text begins with, possibly none."""
        ...

    @property
    def name(self) -> str:
        """Returns the kind of the tokenizer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """Returns a hash of what the tokens mean."""
        ...

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """Returns the bytes of every token."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, 1-D, of the smallest unsigned dtype that holds the vocabulary."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for a token outside the vocabulary.
        """
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, atomically; a folder gets a `tokenizer.json`."""
        ...


class ByteTokenizer:
    """Takes UTF-8 bytes as tokens, a vocabulary of 256."""

    name = "bytes"
    vocab_size = 256
    fingerprint = digest(["bytes"])
    token_bytes = tuple(bytes([i]) for i in range(256))
    start = ()

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of a text, uint8, 1-D. A lone surrogate becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens, as `Tokenizer.decode`."""
        return _join(self.token_bytes, ids).decode("utf-8", errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `load_tokenizer` reads, as `Tokenizer.save`."""
        _save(path, json.dumps(BYTES_TAG))


class BPETokenizer:
    """Encodes by byte-level byte pairs, as GPT-2's tokenizer does.

    `train` and `load` make one.

    Args:
        serialized: the text of a `tokenizer.json`. It must contain a byte-level BPE that keeps the text, or puts it
            into the form NFC (`normalizes` then is True), and that takes no merge by chance. Its added tokens may
            remove the white space beside them (`strips` then is True). Its vocabulary must contain all bytes, except
            bytes that only control characters or characters above U+FFFF use. Truncation and padding in the file are
            switched off. Tokens that its post-processor puts before a text are `start`;
            it must put none behind a text.

    Raises ValueError for a text that does not meet these conditions.
    """

    def __init__(self, serialized: str):
        tokenizers = tokenizers_library()
        try:
            spec = json.loads(serialized)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected the text of a tokenizer.json, got what is no JSON: {error}") from None
        try:
            check_byte_level(spec)
        except RecursionError as error:
            raise ValueError(f"{EXPECTED}, got {_one_line(error)}") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{EXPECTED}, got {_one_line(error)}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        merged = self._tokenizer.get_vocab(with_added_tokens=False)
        self._lacking = _lacking_bytes(merged)
        if max(vocabulary.values()) >= len(serialized):  # an id without gaps takes several characters
            raise ValueError(
                f"{EXPECTED}, got the id {max(vocabulary.values()):,} in a file of {len(serialized):,} characters"
            )
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self.token_bytes = _token_bytes(vocabulary, added, merged)
        self.vocab_size = len(self.token_bytes)
        self.name = f"bpe{self.vocab_size}"
        self._serialized = self._tokenizer.to_str()
        self.fingerprint = digest([self._serialized])
        self._dtype = np.min_scalar_type(self.vocab_size - 1)
        self.start = _start(self._tokenizer, spec)
        if any(token >= self.vocab_size for token in self.start):
            raise ValueError(f"{EXPECTED}, got a start of {self.start} outside its {self.vocab_size} tokens")
        self.normalizes, self.strips = normalizes(spec), strips(spec)
        self.cuts_at_lines = cuts_at_lines(spec)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learns merges from texts; the same texts give the same tokenizer.

        A small corpus may have fewer pairs than requested; then the result's `vocab_size` is smaller than the
        argument. Raises ValueError if `vocab_size` is below 256, the number of single bytes.
        """
        if vocab_size < 256:
            raise ValueError(f"a byte-level BPE vocabulary holds at least the 256 bytes, got vocab_size={vocab_size}")
        tokenizers = tokenizers_library()
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[], show_progress=False
        )
        model.train_from_iterator(texts, trainer)
        return cls(model.to_str())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BPETokenizer:
        """Reads a `tokenizer.json`.

        Raises FileNotFoundError, or ValueError naming the file.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"tokenizer file {path}: {error}") from None

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, as `Tokenizer.encode`.

        A lone surrogate becomes a question mark. A character with a byte that the vocabulary lacks becomes U+FFFD.

        Raises ValueError for a text that the pattern of the tokenizer cannot split, such as millions of spaces.
        """
        data = text.encode("utf-8", errors="replace")  # lone surrogates, as from a terminal
        text = data.decode("utf-8")
        if self._lacking is not None and self._lacking.search(data):
            text = "".join("\ufffd" if self._lacking.search(each.encode()) else each for each in text)
        pieces = list(cut_text(text)) if self.cuts_at_lines else [text] if text else []
        with _panics_are_errors():
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return np.concatenate([np.array(e.ids, dtype=self._dtype) for e in encodings] or [np.empty(0, self._dtype)])

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens, as `Tokenizer.decode`."""
        return _join(self.token_bytes, ids).decode("utf-8", errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a `tokenizer.json`, as `Tokenizer.save`."""
        _save(path, self._serialized)


class StreamDecoder:
    """Decodes a stream of tokens. `push` returns a character as soon as its last byte has arrived.

    The concatenated results of all calls of `push` and of a last `finish` equal `tokenizer.decode` of all tokens.

    Args:
        tokenizer: the tokenizer of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete, possibly empty."""
        return self._decoder.decode(_join(self._token_bytes, ids))

    def finish(self) -> str:
        """Returns what a last unfinished character becomes: U+FFFD or nothing.

        The decoder is then as new.
        """
        return self._decoder.decode(b"", final=True)


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """Reads a file that `save` wrote, or any byte-level BPE `tokenizer.json`.

    Args:
        path: of the file, or of a folder with a `tokenizer.json`.
        vocab_size: of the model that reads the tokens; None: any.

    Raises FileNotFoundError, or ValueError naming a file that is truncated, contains another kind of tokenizer, or has
    more tokens than `vocab_size`.
    """
    file = _file_at(path)
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer file does not exist: {file}")
    try:
        spec = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"tokenizer file {file} is not JSON: truncated, or not a tokenizer.json") from None
    tokenizer = ByteTokenizer() if spec == BYTES_TAG else BPETokenizer.load(file)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{file} has {tokenizer.vocab_size:,} tokens, and the model knows {vocab_size:,}: "
                         "it is not the model's tokenizer")  # fmt: skip
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Returns the tokens of a text from its beginning: those of `encode`, behind the tokenizer's `start`.

    A text that begins with the start itself does not get it twice.
    """
    tokens, start = tokenizer.encode(text), list(tokenizer.start)
    if not start or tokens[: len(start)].tolist() == start:
        return tokens
    return np.concatenate([np.array(start, dtype=tokens.dtype), tokens])


def encode_document(tokenizer: Tokenizer, name: str, text: str) -> np.ndarray:
    """Returns the tokens of `encode_text`, whose error names the document here."""
    try:
        return encode_text(tokenizer, text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def encode_stream(tokenizer: Tokenizer, text: TextIO, size: int = 1 << 20) -> Iterator[np.ndarray]:
    r"""Encodes a text that is read `size` characters at a time. The arrays together are the tokens of the whole text.

    Memory is bounded if lines of the text end in "\n"; otherwise, also with "\r\n", the whole text is in memory. It is
    also in memory for a tokenizer that is not known to cut at these line ends (`BPETokenizer.cuts_at_lines`). The
    tokenizer's `start` is not added.

    Raises ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1 character; got {size}")
    if isinstance(tokenizer, BPETokenizer) and not tokenizer.cuts_at_lines:
        if whole := text.read():
            yield tokenizer.encode(whole)
        return
    rest = ""
    while block := text.read(size):
        rest += block
        end = _last_seam(rest, len(rest) - len(block))
        if end:
            yield tokenizer.encode(rest[:end])
            rest = rest[end:]
    if rest:
        yield tokenizer.encode(rest)


def _last_seam(text: str, start: int) -> int:
    """Returns the last position at or after `start` where `cut_text` may cut, or 0 if there is none."""
    end = len(text)
    while (end := text.rfind("\n", max(0, start - 2), end)) > 0:
        if end + 1 < len(text) and not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
    return 0


def tokenizers_library() -> Any:
    """Returns the package tokenizers. Raises ImportError naming the extra if it is not installed."""
    with from_extra("train", "BPE tokenizers need tokenizers"):
        import tokenizers
    return tokenizers


def _file_at(path: str | os.PathLike[str]) -> Path:
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def _save(path: str | os.PathLike[str], text: str) -> None:
    write_text(_file_at(path), text)


def _join(token_bytes: Sequence[bytes], ids: Iterable[int]) -> bytes:
    parts = []
    for token in ids:
        if not 0 <= token < len(token_bytes):
            raise ValueError(f"token {int(token)} is outside the tokenizer's vocabulary of {len(token_bytes)}")
        parts.append(token_bytes[int(token)])
    return b"".join(parts)


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Raises ValueError in place of a panic of the library, which no `except Exception` catches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer's pattern cannot split this text: {_one_line(error)}") from None


def _start(tokenizer: Any, spec: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens that the post-processor puts before a text.

    Raises ValueError if it puts others elsewhere, or more than MOST_START.
    """
    most = _most_added(spec.get("post_processor"))
    if most > MOST_START:
        raise ValueError(f"{EXPECTED} that adds at most {MOST_START} tokens to a text, got one that adds {most:,}")
    with _panics_are_errors():
        plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    count = len(whole) - len(plain)
    if not plain or count < 0 or whole[count:] != plain:
        raise ValueError(f"{EXPECTED} that adds tokens before a text only, got {whole} for {plain}")
    return tuple(whole[:count])


def _most_added(processor: Any) -> int:
    """Returns how many tokens the templates of a post-processor of a `tokenizer.json` add to a text of one token."""
    if not isinstance(processor, Mapping):
        return 0
    if processor.get("type") == "Sequence":
        return sum(map(_most_added, processor["processors"]))
    if processor.get("type") != "TemplateProcessing":
        return 0
    ids = {name: len(token["ids"]) for name, token in processor["special_tokens"].items()}
    added = [ids.get(piece["SpecialToken"]["id"], 0) for piece in processor["single"] if "SpecialToken" in piece]
    again = len(processor["single"]) - len(added) - 1  # copies of the text, which each processor would multiply
    return sum(added) + max(0, again) * (MOST_START + 1)


def _lacking_bytes(vocabulary: dict[str, int]) -> re.Pattern[bytes] | None:
    """Returns a pattern of the bytes that the vocabulary lacks, or None if it has all bytes that UTF-8 uses.

    Raises ValueError if the vocabulary lacks a byte of ordinary text.
    """
    lacking = {byte for character, byte in byte_characters().items() if character not in vocabulary}
    ordinary = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF0)}
    if lacking & ordinary:
        raise ValueError(
            f"expected a vocabulary with all bytes of ordinary text, got one without {len(lacking & ordinary)} of them"
        )
    used = lacking - {0xC0, 0xC1, *range(0xF5, 0x100)}
    return re.compile(b"[" + re.escape(bytes(sorted(used))) + b"]") if used else None


def _token_bytes(vocabulary: Mapping[str, int], added: Set[str], merged: Container[str]) -> list[bytes]:
    """Returns the bytes of every token. An added token stands for its own text, any other one for a string of bytes.

    Args:
        vocabulary: the numbers of all tokens.
        added: the added tokens among them.
        merged: the tokens that merges may give.

    Raises ValueError for a token that is both, with different bytes, and for two tokens of the same number.
    """
    characters = byte_characters()
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError(f"{EXPECTED}, got several tokens with the same id")
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        text = token.encode("utf-8")
        level = bytes(map(characters.__getitem__, token)) if all(each in characters for each in token) else text
        if token in added and token in merged and text != level:
            raise ValueError(f"{EXPECTED}, got the added token {token!r}, which also stands for {level!r}")
        table[index] = text if token in added else level
    return table


def cut_text(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Cuts a long text at positions where byte-level pre-tokenizers always cut, to encode the pieces in parallel.

    Such a position follows a single line end between two characters that are not white space. No pre-token of
    GPT-2's pattern, or of its successors, spans such a position. Therefore the tokens are those of the whole text.
    """
    seam = re.compile(r"(?<=\S)\n(?=\S)")
    start = 0
    while len(text) - start > size and (match := seam.search(text, start + size)):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
