"""Draws the next tokens of many requests, each with its own options and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sympow.models.generation import is_greedy, probabilities
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


class DrawnTokens:
    """Holds a token for each row of a step. A GPU may still be drawing them.

    Attributes:
        next: int64 [B] on the device: what the next step reads. A row without a token has a 0.
    """

    def __init__(
        self, tokens: Tensor, shown: Mapping[int, int], own: Tensor | None, best: tuple[Tensor, Tensor] | None
    ):
        """Starts the copies to the host.

        Args:
            tokens: int64 [B] on the device, -1 for none.
            shown: the rows whose log probabilities are asked for, each with how many of the likeliest tokens.
            own: log probabilities of the tokens of these rows, [R].
            best: the likeliest tokens of these rows and their log probabilities, [R, K] each.
        """
        self.next = tokens.clamp_min(0)
        self._tokens, self._shown = _to_host(tokens), shown
        self._own = None if own is None else _to_host(own)
        self._best = None if best is None else (_to_host(best[0]), _to_host(best[1]))
        self._wait = begun(tokens.device)

    def tokens(self) -> list[int | None]:
        """Waits for the device, and returns the tokens; None for a row that was not finite."""
        self._wait()
        return [None if token < 0 else token for token in self._tokens.tolist()]

    def logprobs(self) -> dict[int, TokenLogprob]:
        """Returns the log probabilities by row, where they are asked for. Call `tokens` first."""
        if self._own is None or self._best is None:
            return {}
        tokens, own = self._tokens.tolist(), self._own.tolist()
        best = [list(zip(*pair, strict=True)) for pair in zip(*(each.tolist() for each in self._best), strict=True)]
        rows = enumerate(self._shown.items())
        return {row: TokenLogprob(tokens[row], own[i], tuple(best[i][:top])) for i, (row, top) in rows}


def draw(logits: Tensor, draws: Sequence[Draws | None], shown: Sequence[int | None]) -> DrawnTokens:
    """Draws a token from each row of logits [B, vocab], without waiting for a GPU.

    Args:
        logits: of the next tokens. A row that is not finite gives no token.
        draws: how to draw, by row; None where the token is of no use.
        shown: how many of the likeliest tokens are asked for, by row; None for no log probabilities.
    """
    tokens = logits.argmax(-1)
    used = ((row, each) for row, each in enumerate(draws) if each is not None)
    random = {row: each for row, each in used if not is_greedy(each.options.temperature)}
    if random:
        places = to_device(torch.tensor(list(random)), logits.device)
        tokens[places] = _random(logits[places], list(random.values()))
    asked = {row: top for row, top in enumerate(shown) if top is not None}
    own = best = None
    if asked:
        rows = list(asked)
        logprobs = logits[rows].float().log_softmax(-1)
        own = logprobs.gather(1, tokens[rows, None])[:, 0]
        values, indices = logprobs.topk(min(max(asked.values()), logprobs.shape[1]))
        best = indices, values
    return DrawnTokens(torch.where(logits.isfinite().all(-1), tokens, -1), asked, own, best)


def _random(logits: Tensor, draws: Sequence[Draws]) -> Tensor:
    """Draws a token from each row, as `sympow.models.generation.sample` does from a row alone.

    `torch.multinomial` would wait for a GPU in every row. It takes the token with the largest quotient of probability
    and exponential noise. This function does the same, so the tokens are the same.
    """
    vocabulary = logits.shape[1]
    options = [each.options for each in draws]
    columns = [
        [each.temperature for each in options],
        [each.top_k or vocabulary for each in options],
        [float("inf") if each.top_p is None else each.top_p for each in options],
    ]
    temperature, top_k, top_p = to_device(torch.tensor(columns), logits.device)[..., None]
    # A row that is not finite gives no token.
    probability = probabilities(logits.nan_to_num(), temperature, top_k, top_p)
    noise = torch.empty_like(probability)
    for row, each in zip(noise, draws, strict=True):
        row.exponential_(generator=each.generator)
    return (probability / noise).argmax(1)


def begun(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits until the device has done all work that it got before this call."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _to_host(tensor: Tensor) -> Tensor:
    """Returns a copy on the host. A GPU fills it later, see `begun`."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a tensor of the host on the device, without waiting for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
