"""The language model for tasks of recall: with optional learned positions, and with logits only at given positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sympow.layers.initial import draw_normal
from sympow.models.config import ModelConfig
from sympow.models.lm import LanguageModel, ModelState

# Added to the seed for the positions, which would otherwise be drawn as the first rows of the embedding are. The
# generator reads the lowest 32 bits.
_POSITIONS_SEED = 1 << 31


class RecallModel(LanguageModel):
    """Computes logits as `LanguageModel` does, for tasks in which few tokens have a target.

    Args:
        config: the shape and the mixers.
        positions: number of rows in a table of learned positions, drawn from N(0, 0.02) and added to the embedding; 0:
            no table. With a table, the model takes sequences of at most so many tokens, and has no `step`.
        seed: as in `LanguageModel`.
    """

    def __init__(self, config: ModelConfig, *, positions: int = 0, seed: int | None = None):
        super().__init__(config, seed)
        self.positions: nn.Parameter | None = None
        if positions:
            like = self.embedding.weight
            self.positions = nn.Parameter(torch.empty(positions, config.d_model, dtype=like.dtype, device=like.device))
            generator = None if seed is None else torch.Generator("cpu").manual_seed(seed + _POSITIONS_SEED)
            draw_normal(self.positions.data, 0.02, generator)

    def query_logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Returns logits [B, Q, vocab_size] of the tokens after the positions [B, Q] in tokens [B, T]; both int64.

        The head is the largest matrix product of a small model. With Q of T positions it takes Q / T of the time.

        Raises TypeError or ValueError for places of another dtype or shape, and on a CPU for places that are not from 0
        to T - 1.
        """
        hidden = self._hidden(tokens, None)
        _check_places(places, tokens)
        return self._head(hidden.gather(1, places.unsqueeze(2).expand(-1, -1, hidden.shape[2])))

    def _embed_next(self, tokens: Tensor, state: ModelState) -> Tensor:
        """Returns the vectors of tokens that follow a state. Raises ValueError with learned positions."""
        if self.positions is not None:
            raise ValueError("a model with learned positions has no step: its state does not say where it stands")
        return super()._embed_next(tokens, state)

    def _vectors(self, tokens: Tensor) -> Tensor:
        vectors = super()._vectors(tokens)
        if self.positions is None:
            return vectors
        if tokens.shape[1] > self.positions.shape[0]:
            raise ValueError(f"the model has {self.positions.shape[0]} positions; got {tokens.shape[1]} tokens")
        return vectors + self.positions[: tokens.shape[1]]

    def _check_vocabulary(self, tokens: Tensor, name: str) -> None:
        """Checks the tokens; on a GPU their dtype only.

        A task fixes the range of tokens. To check it, every step would wait for the GPU.
        """
        if not tokens.is_cuda:
            super()._check_vocabulary(tokens, name)
        elif tokens.dtype != torch.int64:
            raise TypeError(f"{name} must be int64; got {tokens.dtype}")


def _check_places(places: Tensor, tokens: Tensor) -> None:
    batch, time = tokens.shape
    if places.dtype != torch.int64:
        raise TypeError(f"places must be int64; got {places.dtype}")
    if places.ndim != 2 or places.shape[0] != batch:
        raise ValueError(f"places must be [B, Q] with B = {batch} as in tokens; got {list(places.shape)}")
    if places.device.type != "cpu" or places.numel() == 0 or torch.compiler.is_dynamo_compiling():
        return
    low, high = (bound.item() for bound in places.aminmax())
    if low < 0 or high >= time:
        raise ValueError(f"places must be from 0 to {time - 1}; got {low} to {high}")
