"""Context files of models in transformers: those of `sympow.models.context_file`, read and written by either kind."""

from __future__ import annotations

import os
from typing import NamedTuple, cast

from torch import Tensor

from sympow.integrations.transformers.cache import SympowCache
from sympow.integrations.transformers.folders import native_view
from sympow.integrations.transformers.modeling import SympowForCausalLM
from sympow.layers import MixerState
from sympow.models import Context, ModelState, context_file
from sympow.models.context_file import extended_digest


class LoadedContext(NamedTuple):
    """What a model has read, as `load_context` gives it.

    Attributes:
        cache: goes to `forward` or `generate` as `past_key_values`, with the tokens that follow alone as input: it
            counts those from 0. As all caches it is changed by a forward.
        logits: [B, vocab_size] of the token behind the context.
        tokens: how many tokens of every row were read.
    """

    cache: SympowCache
    logits: Tensor | None
    tokens: int


def save_context(
    path: str | os.PathLike[str],
    model: SympowForCausalLM,
    cache: SympowCache,
    input_ids: Tensor,
    logits: Tensor,
    *,
    dtype: str = "float32",
) -> None:
    """Writes what a cache holds into a context file, which `sympow.models.load_context` reads too.

    Args:
        path: of the file to write.
        model: the one that has filled the cache.
        cache: of rows without padding.
        input_ids: int64 [B, T], all tokens that the cache has read since it was made or loaded.
        logits: [B, vocab_size] of the next token, the last ones that the model gave.
        dtype: of the file, as in `sympow.models.save_context`.

    Raises ValueError where these do not fit together, and as `sympow.models.save_context` does.
    """
    rows, columns = cache.batch_size, cache.columns
    if cache.groups != [list(range(rows))]:
        raise ValueError("a context holds rows that have read the same number of tokens, without padding")
    if tuple(input_ids.shape) != (rows, columns):
        raise ValueError(f"input_ids must be what the cache has read, [{rows}, {columns}]; got {list(input_ids.shape)}")
    vocabulary = model.config.vocab_size
    if tuple(logits.shape) != (rows, vocabulary):
        raise ValueError(f"logits must be those of the next token, [{rows}, {vocabulary}]; got {list(logits.shape)}")
    tokens, digest = cache.before
    state = ModelState(cast(list[MixerState], cache.states(0)))
    context = Context(state, logits, tokens + columns, extended_digest(digest, input_ids))
    context_file.save_context(path, native_view(model), context, dtype=dtype)


def load_context(path: str | os.PathLike[str], model: SympowForCausalLM) -> LoadedContext:
    """Reads a context file of this model, written here or by `sympow read`; every call gives a cache of its own.

    Raises as `sympow.models.load_context` does.
    """
    context = context_file.load_context(path, native_view(model))
    cache = SympowCache(model.config)
    cache.fill([(list(range(context.rows)), list(context.state.layers))], 0)
    cache.before = (context.tokens, context.digest)
    return LoadedContext(cache, context.logits, context.tokens)
