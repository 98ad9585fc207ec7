"""How fast a whole model decodes after a long text."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks.common.measure import synchronize
from sympow.layers.cache import KVCache
from sympow.layers.state import MixerState
from sympow.models import LanguageModel, ModelState
from sympow.models.slots import Slots


@torch.no_grad()
def decoding(model: LanguageModel, batch: int, context: int, tokens: int, *, grows: bool = False) -> dict[str, Any]:
    """Returns tokens a second after `context` tokens, whose keys and values are random, and the bytes of the states.

    A token is read as `generate` does: by a CUDA graph if all states can be stepped as one batch. If `grows`, caches of
    all tokens have no room from the start, so that they cannot. Both numbers are None if the device has too little
    memory.
    """
    device = model.embedding.weight.device
    try:
        state = _state_after(model, batch, context)
        drawn = torch.arange(batch, device=device)[:, None]
        most = None if grows else context + 2 * tokens
        state_bytes, slots = state.nbytes, Slots.with_graphs(model, state, context, most)
        for step in range(2 * tokens):
            if step == tokens:
                synchronize(device.type)
                began = time.perf_counter()
            if slots is None:
                _, state = model.step(drawn, state)
            else:
                slots.step(drawn[:, 0])
        synchronize(device.type)
    except torch.OutOfMemoryError:
        return {"tokens_per_second": None, "state_bytes": None, "graph": False}
    rate = batch * tokens / (time.perf_counter() - began)
    return {"tokens_per_second": rate, "state_bytes": state_bytes, "graph": slots is not None}


def _state_after(model: LanguageModel, batch: int, context: int) -> ModelState:
    return ModelState([_filled(layer, context) for layer in model.init_state(batch).layers])


def _filled(state: MixerState, context: int) -> MixerState:
    """Returns a state in which all caches, also those of its parts, hold random keys and values of `context` tokens."""
    if isinstance(state, KVCache):
        held = context if state.limit is None else min(context, state.limit)
        shapes = [(*x.shape[:2], held, x.shape[3]) for x in (state.k, state.v)]
        return state.extend(*(torch.randn(shape, device=state.k.device, dtype=state.k.dtype) for shape in shapes))
    parts = {field.name: getattr(state, field.name) for field in fields(state)}
    return replace(state, **{n: _filled(x, context) for n, x in parts.items() if isinstance(x, MixerState)})
