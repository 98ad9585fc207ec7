"""Context files of models in transformers. The format is that of `sympow.models.context_file`."""

from __future__ import annotations

import os
from typing import NamedTuple, cast

from torch import Tensor

from sympow.integrations.transformers.cache import SympowCache
from sympow.integrations.transformers.folders import native_view
from sympow.integrations.transformers.modeling import SympowForCausalLM
from sympow.layers import MixerState
from sympow.models import Context, ModelState, context_file
from sympow.models.context import extended_digest


class LoadedContext(NamedTuple):
    """Holds a context that `load_context` has read.

    Attributes:
        cache: the `past_key_values` for `forward` or `generate`. The input then consists only of the tokens after the
            context, which the cache counts from 0. A forward pass changes the cache.
        logits: [B, vocab_size], the logits of the next token after the context.
        tokens: the number of tokens of every sequence that were read.
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
        path: the path of the file to write.
        model: the model that has filled the cache.
        cache: a cache of sequences without padding.
        input_ids: int64 [B, T], all tokens that were read since the cache was made or loaded.
        logits: [B, vocab_size], the logits of the next token, which the model returned last.
        dtype: the dtype of the file, as for `sympow.models.save_context`.

    Raises TypeError for another cache, ValueError if these arguments do not fit together, and the errors of
    `sympow.models.save_context`.
    """
    if not isinstance(cache, SympowCache):
        raise TypeError(f"cache must be a SympowCache, which use_cache=True returns; got {type(cache).__name__}")
    rows, columns = cache.batch_size, cache.columns
    if cache.padded or cache.groups != [list(range(rows))]:
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
    """Reads a context file of this model, from `save_context` or `sympow read`. Every call returns a new cache.

    Raises the errors of `sympow.models.load_context`.
    """
    context = context_file.load_context(path, native_view(model))
    cache = SympowCache(model.config)
    cache.fill([(list(range(context.rows)), list(context.state.layers))], 0)
    cache.before = (context.tokens, context.digest)
    return LoadedContext(cache, context.logits, context.tokens)
