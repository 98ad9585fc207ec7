"""Draws the next tokens of many requests, each with its own options and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sympow.models.generation import sample
from sympow.serving.requests import Sampling, TokenLogprob


class Draws:
    """Holds the options and random numbers of one request.

    A seed gives the tokens that `sympow.models.stream` gives.

    Args:
        options: how to draw.
        device: of the logits.
    """

    def __init__(self, options: Sampling, device: torch.device):
        self.options = options
        self.generator = torch.Generator(device=device).manual_seed(options.seed)


def draw(logits: Tensor, draws: Sequence[Draws]) -> list[int | None]:
    """Draws a token from each row of logits [B, vocab].

    A row that is not finite gives None.

    The call waits for a GPU once.
    """
    tokens = logits.argmax(-1)
    for row, each in enumerate(draws):
        if each.options.temperature > 0:
            tokens[row] = sample(
                logits[row : row + 1].nan_to_num(),  # which a GPU would stop at, for all rows
                temperature=each.options.temperature,
                top_k=each.options.top_k,
                top_p=each.options.top_p,
                generator=each.generator,
            )[0]
    drawn = torch.where(logits.isfinite().all(-1), tokens, -1).tolist()
    return [None if token < 0 else token for token in drawn]


def logprob_of(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Computes the log probability of a token under logits [vocab], and those of the `top` likeliest tokens."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(pairs))
