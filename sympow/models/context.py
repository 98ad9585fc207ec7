"""The context of a model: what it knows of the tokens that it has read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sympow.fields import is_integer
from sympow.models.lm import LanguageModel, ModelState

NO_TOKENS = hashlib.blake2b(digest_size=16).hexdigest()


@dataclass(frozen=True)
class Context:
    """Holds what a model knows after some tokens.

    Attributes:
        state: the state of the model.
        logits: [B, vocab_size] of the next token; None before the first token.
        tokens: the number of tokens of every row that were read.
        digest: a hash of these tokens, which does not depend on the chunks in which they were read.
    """

    state: ModelState
    logits: Tensor | None
    tokens: int
    digest: str

    @property
    def rows(self) -> int:
        """Returns the number of sequences held, B."""
        return next((tensor.shape[0] for tensor in self.state.tensors()), 1)

    @classmethod
    def begin(cls, model: LanguageModel, rows: int = 1) -> Context:
        """Returns the context before the first token of `rows` sequences."""
        return cls(model.init_state(rows), None, 0, NO_TOKENS)

    @torch.no_grad()
    def read(self, model: LanguageModel, tokens: Tensor, *, chunk: int = 1024) -> Context:
        """Reads further int64 tokens [B, T], `chunk` at a time.

        The method overwrites the state of this context. Use the context that it returns, or call it on a `clone()`.
        Raises ValueError for a chunk below 1 and for another number of rows, TypeError for what is no tensor, and the
        errors of `LanguageModel.step`.
        """
        if not is_integer(chunk) or chunk < 1:
            raise ValueError(f"chunk must be an integer of at least 1; got {chunk!r}")
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a torch.Tensor, int64 [B, T]; got {type(tokens).__name__}")
        if tokens.ndim != 2 or tokens.shape[0] != self.rows:
            raise ValueError(f"tokens must be [B = {self.rows}, T], as the rows read before; got {list(tokens.shape)}")
        state, logits = self.state, self.logits
        for piece in tokens.split(chunk, dim=1) if tokens.shape[-1] else ():
            logits, state = model.step(piece.to(model.embedding.weight.device), state)
        digest = extended_digest(self.digest, tokens)
        return Context(state, logits, self.tokens + tokens.shape[1], digest)

    def clone(self) -> Context:
        """Copies the context, so that both can be continued."""
        return replace(self, state=self.state.clone(), logits=None if self.logits is None else self.logits.clone())


def extended_digest(digest: str, tokens: Tensor) -> str:
    """Hashes int64 tokens [B, T] that follow tokens with the hash `digest`.

    Every way to cut the tokens gives the same hash.
    """
    if not tokens.numel():
        return digest
    columns = tokens.detach().t().contiguous().to(device="cpu", dtype=torch.int64).numpy().astype("<i8").tobytes()
    size = 8 * tokens.shape[0]
    value = bytes.fromhex(digest)
    for start in range(0, len(columns), size):
        value = hashlib.blake2b(value + columns[start : start + size], digest_size=16).digest()
    return value.hex()
