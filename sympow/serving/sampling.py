"""Draws the next tokens of many requests, each with its own options and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sympow.models.generation import sample
from sympow.serving.requests import Sampling, TokenLogprob


class Draws:
    """The draws of one request: the same seed gives the tokens that `sympow.models.stream` gives.

    Args:
        options: how to draw.
        device: of the logits.
    """

    def __init__(self, options: Sampling, device: torch.device):
        self.options = options
        self.generator = torch.Generator(device=device).manual_seed(options.seed)


def draw(logits: Tensor, draws: Sequence[Draws]) -> list[int]:
    """Draws a token from each row of logits [B, vocab]."""
    tokens = logits.argmax(-1).tolist() if any(each.options.temperature == 0 for each in draws) else [0] * len(draws)
    drawn = {
        row: sample(
            logits[row : row + 1],
            temperature=each.options.temperature,
            top_k=each.options.top_k,
            top_p=each.options.top_p,
            generator=each.generator,
        )
        for row, each in enumerate(draws)
        if each.options.temperature > 0
    }
    if drawn:
        for row, token in zip(drawn, torch.cat(list(drawn.values())).tolist(), strict=True):
            tokens[row] = token
    return tokens


def logprob_of(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """The log probability of a token under logits [vocab], with those of the `top` likeliest tokens."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(pairs))
