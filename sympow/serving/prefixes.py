"""The prefix cache: states of prompts that were read before, so that the same prefix is not read again.

A state is kept after a prompt, after an answer, and after the common prefix of two prompts (such as a shared system
prompt), when the second prompt arrives. If the memory is full, the least recently used state is dropped first. With a
folder, a dropped state is written to a context file, and can be loaded from this file.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue

import torch
from torch import Tensor

from sympow.models import Context, ContextError, LanguageModel, ModelState, load_context, save_context
from sympow.models.context import NO_TOKENS, extended_digest
from sympow.models.context_file import fingerprint

BLOCK = 32  # tokens hashed at a time; shorter prefixes are not kept
_SEEN = 1 << 17  # blocks of prompts that are remembered, to find common prefixes
_WAITING = 16  # prefixes that may wait to be written; others are dropped
_SUFFIX = ".ctx"


class PrefixKeys:
    """Names all prefixes of a sequence of tokens.

    Equal prefixes of the same model have equal names.

    Args:
        tokens: integers [T], on the CPU.
        blocks: first a hash of everything else that distinguishes prefixes, such as the model, then the known hashes of
            the first blocks of tokens.
    """

    def __init__(self, tokens: Tensor, blocks: Sequence[bytes]):
        self.tokens = tokens.to(torch.int32)
        self._bytes = self.tokens.numpy().tobytes()
        self.blocks = list(blocks)
        for start in range(BLOCK * (len(blocks) - 1), len(tokens) // BLOCK * BLOCK, BLOCK):
            self.blocks.append(_hash(self.blocks[-1], self._slice(start, start + BLOCK)))

    def extended(self, tokens: Tensor) -> PrefixKeys:
        """Returns the names for these tokens followed by `tokens`."""
        return PrefixKeys(torch.cat([self.tokens, tokens.to(torch.int32)]), self.blocks)

    def __getitem__(self, length: int) -> str:
        """Returns the name of the first `length` tokens."""
        whole = length // BLOCK
        return _hash(self.blocks[whole], self._slice(whole * BLOCK, length), b"end").hex()

    def _slice(self, start: int, stop: int) -> bytes:
        return self._bytes[4 * start : 4 * stop]


@dataclass(frozen=True)
class Prefix:
    """Holds the state of a model after `tokens`, int32 [T], and the logits [1, vocab_size] of the next token.

    The tensors are never changed; a clone of the state is continued.
    """

    tokens: Tensor
    state: ModelState
    logits: Tensor

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all tensors of the prefix."""
        return self.state.nbytes + self.logits.nbytes + self.tokens.nbytes

    def context(self) -> Context:
        """Returns the prefix as a context, for a file."""
        digest = extended_digest(NO_TOKENS, self.tokens[None].to(torch.int64))
        return Context(self.state, self.logits, len(self.tokens), digest)


class PrefixCache:
    """Keeps prefixes in memory, and those dropped from memory in a folder.

    All methods work from any thread.

    Args:
        model: the model of the states.
        memory_bytes: the largest size in memory; 0 keeps nothing.
        folder: the folder of context files, which is made if it is missing; None: use memory only.
        disk_bytes: the largest size of the folder.
        state_dtype: of the sums of power attention in the slots whose states are kept, as in `Engine`. States of
            another dtype in the folder are not found.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory_bytes: int,
        folder: Path | None = None,
        disk_bytes: int = 0,
        state_dtype: torch.dtype | None = None,
    ):
        self._model, self._limit = model, memory_bytes
        known = fingerprint(model)
        self._salt = "".join((*known, str(state_dtype or ""))).encode()
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        self._disk = None if folder is None else _Disk(model, known, folder, disk_bytes)

    @property
    def nbytes(self) -> int:
        """Returns the bytes held in memory."""
        return self._nbytes

    def __len__(self) -> int:
        """Returns the number of prefixes in memory."""
        return len(self._prefixes)

    def keys(self, tokens: Tensor) -> PrefixKeys:
        """Starts the names of the prefixes of int64 tokens [T]."""
        return PrefixKeys(tokens, [self._salt])

    def fetch(self, keys: PrefixKeys) -> None:
        """Loads the longest prefix in the folder into memory, if it is longer than the longest one in memory."""
        if self._disk is None:
            return
        here = self._longest(keys)
        found = self._disk.load(keys, longer_than=0 if here is None else here)
        if found is not None:
            self._insert(keys[len(found.tokens)], found)

    def find(self, keys: PrefixKeys) -> Prefix | None:
        """Returns the longest prefix in memory, or None."""
        length = self._longest(keys)
        if length is None:
            return None
        with self._lock:
            key = keys[length]
            if key in self._prefixes:
                self._prefixes.move_to_end(key)
            return self._prefixes.get(key)

    def parting(self, keys: PrefixKeys) -> int:
        """Returns how many tokens, in whole blocks, are a prefix of an earlier call's tokens. Remembers the tokens."""
        if not self._limit:
            return 0
        with self._lock:
            own = keys.blocks[1:]
            known = next((i for i, block in enumerate(own) if block not in self._seen), len(own))
            for block in own:
                self._seen[block] = None
                self._seen.move_to_end(block)
            while len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        return known * BLOCK

    def keeps(self, length: int) -> bool:
        """Returns whether prefixes of this length are kept."""
        return length >= BLOCK and self._limit > 0

    def keep(self, keys: PrefixKeys, length: int, state: ModelState, logits: Tensor) -> None:
        """Keeps the state after the first `length` tokens. The caller must not change it afterwards."""
        if self.keeps(length):
            self._insert(keys[length], Prefix(keys.tokens[:length], state, logits))

    def close(self) -> None:
        """Writes the prefixes in memory into the folder, if there is one."""
        if self._disk is not None:
            for key, prefix in self._prefixes.items():
                self._disk.save(key, prefix, wait=True)
            self._disk.close()

    def _longest(self, keys: PrefixKeys) -> int | None:
        with self._lock:
            lengths = {len(prefix.tokens) for prefix in self._prefixes.values()}
            fitting = sorted((n for n in lengths if n <= len(keys.tokens)), reverse=True)
            return next((n for n in fitting if keys[n] in self._prefixes), None)

    def _insert(self, key: str, prefix: Prefix) -> None:
        dropped = []
        with self._lock:
            if key in self._prefixes:
                self._prefixes.move_to_end(key)
                return
            if prefix.nbytes > self._limit:
                return
            self._prefixes[key] = prefix
            self._nbytes += prefix.nbytes
            while self._nbytes > self._limit:
                dropped.append(self._prefixes.popitem(last=False))
                self._nbytes -= dropped[-1][1].nbytes
        if self._disk is not None:
            for pair in dropped:
                self._disk.save(*pair)


class _Disk:
    """Keeps context files `KEY-TOKENS.ctx` in a folder. A thread writes them and removes the least recently used."""

    def __init__(self, model: LanguageModel, known: tuple[str, str], folder: Path, limit: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._model, self._known, self._folder, self._limit = model, known, folder, limit
        self._waiting: Queue[tuple[str, Prefix] | None] = Queue(_WAITING)
        self._writer = threading.Thread(target=self._write, name="prefix files", daemon=True)
        self._writer.start()

    def save(self, key: str, prefix: Prefix, *, wait: bool = False) -> None:
        with suppress(Full):  # a slow disk only means fewer hits
            self._waiting.put((key, prefix), block=wait)

    def load(self, keys: PrefixKeys, longer_than: int) -> Prefix | None:
        """Loads the longest prefix that is longer than `longer_than`, or returns None."""
        names = {path.name for path in self._folder.glob(f"*{_SUFFIX}")}
        lengths = {int(name.removesuffix(_SUFFIX).rpartition("-")[2]) for name in names if _is_own(name)}
        for length in sorted(lengths, reverse=True):
            if not longer_than < length <= len(keys.tokens):
                continue
            path = self._path(keys[length], length)
            if path.name not in names:
                continue
            try:
                context = load_context(path, self._model, known=self._known)
                path.touch()
            except (OSError, ContextError):  # removed or damaged: as if it were not there
                continue
            if context.tokens == length and context.logits is not None:
                return Prefix(keys.tokens[:length], context.state, context.logits)
        return None

    def close(self) -> None:
        self._waiting.put(None)
        self._writer.join()

    def _path(self, key: str, length: int) -> Path:
        return self._folder / f"{key}-{length}{_SUFFIX}"

    def _write(self) -> None:
        while (pair := self._waiting.get()) is not None:
            key, prefix = pair
            path = self._path(key, len(prefix.tokens))
            try:
                if not path.exists():
                    save_context(path, self._model, prefix.context(), known=self._known)
                    self._drop_oldest()
            except (OSError, ContextError):  # a full disk only means fewer hits
                continue

    def _drop_oldest(self) -> None:
        files = sorted((path.stat().st_mtime, path) for path in self._folder.glob(f"*{_SUFFIX}") if _is_own(path.name))
        total = sum(path.stat().st_size for _, path in files)
        for _, path in files:
            if total <= self._limit:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


def _is_own(name: str) -> bool:
    key, _, length = name.removesuffix(_SUFFIX).rpartition("-")
    return len(key) == 32 and length.isdecimal()


def _hash(*parts: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(part)
    return hashed.digest()
