"""Text from a model: the prompt is read in chunks, then tokens are drawn one by one from a carried state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from numbers import Real
from time import perf_counter
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from sympow.fields import is_integer
from sympow.models.context import Context
from sympow.models.lm import LanguageModel, ModelState
from sympow.models.slots import Slots
from sympow.models.speculation import Drafts, speculative_steps
from sympow.ops.cost import counted

_GRAPHED = 16  # tokens, because making a graph of a step takes as long as some steps


class Drawn(NamedTuple):
    """Holds a token as `stream` yields it.

    Attributes:
        token: int64 [B], the next token of every row.
        held: a function that returns `state`.
    """

    token: Tensor
    held: Callable[[], ModelState]

    @property
    def state(self) -> ModelState:
        """Returns the state from which the token was drawn.

        It has not read the token itself. The next step overwrites the state.

        With drafts the state may have read accepted tokens too.
        """
        return self.held()


@dataclass(frozen=True)
class Generation:
    """Holds what `generate` returns.

    Attributes:
        tokens: int64 [B, max_new_tokens], without the prompt.
        state_nbytes: bytes of the state at the end, over the whole batch.
        prefill_seconds: the time until the first new token.
        decode_seconds: the time for all other tokens.
        tokens_per_second: tokens decoded per second over the whole batch; nan if there was only one new token.
    """

    tokens: Tensor
    state_nbytes: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float


class StreamOptions(TypedDict, total=False):
    """Lists the keywords of `stream`, which documents them."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    prefill_chunk: int
    vocab_size: int | None
    context: Context | None
    drafts: Drafts | None


def generate(model: LanguageModel, prompt: Tensor, max_new_tokens: int, **options: Unpack[StreamOptions]) -> Generation:
    """Continues every row of a prompt and returns all new tokens. Arguments and errors are those of `stream`."""
    for name in options:
        if name not in StreamOptions.__annotations__:  # Python's error would name `stream`
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
    started = perf_counter()
    drawn = stream(model, prompt, max_new_tokens, **options)
    last = next(drawn)
    tokens = [last.token.cpu()]  # waits for the device
    decoding = perf_counter()
    for last in drawn:
        tokens.append(last.token)
    result = torch.stack([token.cpu() for token in tokens], dim=1)
    ended = perf_counter()
    decoded = prompt.shape[0] * (max_new_tokens - 1)
    return Generation(
        tokens=result,
        state_nbytes=last.state.nbytes,
        prefill_seconds=decoding - started,
        decode_seconds=ended - decoding,
        tokens_per_second=decoded / (ended - decoding) if decoded else math.nan,
    )


def stream(
    model: LanguageModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    prefill_chunk: int = 1024,
    vocab_size: int | None = None,
    context: Context | None = None,
    drafts: Drafts | None = None,
) -> Iterator[Drawn]:
    """Continues every row of a prompt and yields each token when it is drawn.

    Args:
        model: the model that continues.
        prompt: int64 [B, T], T >= 1; T may be 0 after a context.
        max_new_tokens: tokens to draw, at least 1.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: of these, draw from the fewest tokens whose probabilities add up to this number, in (0, 1].
        seed: the seed of the draws. The same arguments give the same tokens.
        prefill_chunk: tokens of the prompt read at a time.
        vocab_size: draw only from the first `vocab_size` tokens. This is needed if the model has more tokens than the
            tokenizer. None: draw from all tokens of the model.
        context: the context that the model has read before the prompt. A copy is continued, and `context` is not
            changed.
        drafts: for speculative decoding, which draws the same tokens in fewer steps (`sympow.models.speculation`). The
            prompt has one row, and an object of drafts serves one stream at a time.

    Raises ValueError for arguments out of range and TypeError for a prompt, a context or drafts of another type, both
    at the call; with the first token ValueError for tokens outside the vocabulary, and for logits after the prompt that
    are not finite.
    """
    if not isinstance(prompt, Tensor):
        raise TypeError(f"prompt must be a torch.Tensor, int64 [B, T]; got {type(prompt).__name__}")
    if not isinstance(context, Context | None):
        raise TypeError(f"context must be a Context, such as load_context returns; got {type(context).__name__}")
    if not isinstance(drafts, Drafts | None):
        raise TypeError(f"drafts must be an object of Drafts, such as NgramDrafts(); got {drafts!r:.80}")
    continues = context is not None and context.tokens > 0
    if prompt.ndim != 2 or 0 in prompt.shape[: 1 if continues else 2]:
        raise ValueError(f"prompt must be [B, T], of at least one token; got {list(prompt.shape)}")
    if context is not None and context.rows != prompt.shape[0]:
        raise ValueError(f"the context has {counted(context.rows, 'row')}; got a prompt of {prompt.shape[0]}")
    if drafts is not None and prompt.shape[0] != 1:
        raise ValueError(f"drafts are of a single row; got a prompt of {prompt.shape[0]}")
    counts = {"max_new_tokens": max_new_tokens, "prefill_chunk": prefill_chunk}
    counts |= {name: x for name, x in {"top_k": top_k, "vocab_size": vocab_size}.items() if x is not None}
    for name, value in counts.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")
    if not (_is_number(temperature) and math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be a finite number of at least 0; got {temperature!r}")
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be a number above 0 and at most 1; got {top_p!r}")
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1; got {seed!r}")
    prompt = prompt.to(model.embedding.weight.device)
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    draw = partial(_sample_of, vocab_size, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    if drafts is not None:
        drafts.begin(model)
    return _steps(model, prompt, context, prefill_chunk, max_new_tokens, draw, drafts)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a token from each row of logits [B, vocab]: int64 [B]. Arguments as in `stream`."""
    if is_greedy(temperature):
        return logits.argmax(-1)
    probability = probabilities(logits, temperature, top_k, top_p)
    return torch.multinomial(probability, 1, generator=generator).squeeze(-1)


def is_greedy(temperature: float) -> bool:
    """Returns whether a temperature means the likeliest token: 0, and what float32 cannot divide by."""
    return temperature < torch.finfo(torch.float32).tiny


def probabilities(
    logits: Tensor, temperature: float | Tensor, top_k: int | Tensor | None, top_p: float | Tensor | None
) -> Tensor:
    """Returns the probabilities of the tokens [B, vocab], which need not add up to 1.

    They are in the order of the tokens. If they were sorted by size, rounding errors of the logits would change which
    token gets which random number.

    Args:
        logits: [B, vocab].
        temperature: above 0; one number for all rows, or [B, 1]. The same holds for the other options.
        top_k: ranks from which on the probability is 0; None for no limit.
        top_p: share of the sum from which on the probability is 0; None for no limit.
    """
    logits, tokens = logits.float().sort(dim=-1, descending=True)
    probability = ((logits - logits[..., :1]) / temperature).softmax(-1)  # at most 0, so that nothing overflows
    if isinstance(top_k, int):
        top_k = min(top_k, logits.shape[-1])  # larger ones may not fit into 64 bits
    if top_k is not None:
        probability.masked_fill_(torch.arange(logits.shape[-1], device=logits.device) >= top_k, 0)
    if top_p is not None:
        before = probability.cumsum(-1) - probability
        beyond = before >= top_p * probability.sum(-1, keepdim=True)
        probability[..., 1:].masked_fill_(beyond[..., 1:], 0)  # the likeliest token always stays
    return torch.empty_like(probability).scatter_(-1, tokens, probability)


def _is_number(value: object) -> bool:
    """Returns whether a value is a real number, also one of NumPy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _sample_of(vocab_size: int | None, logits: Tensor, **options: Any) -> Tensor:
    """Returns `sample` of the first `vocab_size` tokens."""
    return sample(logits[:, :vocab_size], **options)


@torch.no_grad()
def _steps(
    model: LanguageModel,
    prompt: Tensor,
    context: Context | None,
    chunk: int,
    max_new_tokens: int,
    draw: Callable[[Tensor], Tensor],
    drafts: Drafts | None,
) -> Iterator[Drawn]:
    """Yields the tokens drawn. `chunk` is in tokens of the prompt; `draw` maps logits [B, vocab] to tokens [B]."""
    before = Context.begin(model, prompt.shape[0]) if context is None else context.clone()
    logits, state = before.logits, before.state
    if prompt.shape[1]:
        for piece in prompt.split(chunk, dim=1):
            logits, state = model.step(piece, state)
    if logits is None:
        raise RuntimeError("nothing was read before the first token was drawn")
    if not bool(logits.isfinite().all()):  # the likeliest token of NaN would be the first one of the vocabulary
        raise ValueError(
            "the logits after the prompt are not finite: the model's weights are not finite, or its numbers overflow"
        )
    token = draw(logits)
    yield Drawn(token, partial(_same, state))
    if drafts is not None:
        text = [*prompt[0].tolist(), int(token)]
        more = speculative_steps(model, token, state, max_new_tokens - 1, draw, drafts, text)
        yield from (Drawn(token, partial(_same, after)) for token, after in more)
        return
    read = before.tokens + prompt.shape[1]
    most = read + max_new_tokens - 1  # the last token is drawn and not read
    slots = Slots.with_graphs(model, state, read, most) if max_new_tokens >= _GRAPHED else None
    if slots is not None:
        del before, state  # the slots have copies, so the first ones need not stay in memory
        for _ in range(max_new_tokens - 1):
            token = draw(slots.step(token))
            yield Drawn(token, slots.equal)
        return
    for _ in range(max_new_tokens - 1):
        logits, state = model.step(token[:, None], state)
        token = draw(logits)
        yield Drawn(token, partial(_same, state))


def _same(state: ModelState) -> ModelState:
    return state
