"""Adds the incoming state of a rank to the states of all its chunks, and in the same way the incoming gradient.

States are linear in the incoming state. The state at the start of a chunk is the state without an incoming one, plus
the incoming state times the decay from the start of the row to the chunk. So states that were computed before the
incoming state was known need no second pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops.triton import config
from sympow.ops.triton.call import Call

_LN_2 = tl.constexpr(0.6931471805599453)
_CHUNKS, _BLOCK = 8, 512  # of a program's tile


def chunk_decays(call: Call, log_decay: Tensor, reverse: bool = False) -> Tensor:
    """Returns log2 of the decay from the row's start to each chunk's start, [B, G, chunks], float32.

    In reverse it is the decay from each chunk's end to the row's end. Rows have a gate. The decay of the whole row
    goes to log_decay [B G], as a natural logarithm.
    """
    plan, sums = call.plan, call.gate.sums
    rows = plan.layout.sequences
    chunks = plan.layout.blocks(plan.chunk) // max(rows, 1)
    decays = sums.new_empty(rows, plan.G, chunks)
    sum_decays[(rows, plan.G)](
        sums, decays, log_decay, plan.layout.length, plan.layout.tokens, plan.G, chunks,
        CHUNK=plan.chunk, COUNT=config.next_power_of_2(max(chunks, 1)), REVERSE=reverse,
    )  # fmt: skip
    return decays


def carried(states: Tensor, incoming: Tensor, decays: Tensor | None) -> Tensor:
    """Returns states [B chunks, G, m, n] + incoming [B G m n] times 2**decays [B, G, chunks].

    The sum is in float32, and rounded once.
    """
    if not states.numel():
        return torch.empty_like(states)
    total, G, width = states.shape[0], states.shape[1], states.shape[2] * states.shape[3]
    rows = incoming.numel() // (G * width)
    chunks = total // rows
    out = torch.empty_like(states)
    carry_states[(rows * G, config.ceil_div(width, _BLOCK), config.ceil_div(chunks, _CHUNKS))](
        states, incoming, decays, out, G, chunks, width, CHUNKS=_CHUNKS, BLOCK=_BLOCK, GATED=decays is not None
    )
    return out


@triton.jit
def sum_decays(
    sums, decays, log_decay, T, tokens, G, chunks, CHUNK: tl.constexpr, COUNT: tl.constexpr, REVERSE: tl.constexpr
):
    """Sums the decays of chunks. Grid: rows, key/value heads. `sums` [G, tokens] start again at every chunk, so the
    last sum of a chunk is the decay of the chunk."""
    n = tl.program_id(0)
    g = tl.program_id(1)
    row = sums + tl.cast(g, tl.int64) * tokens + tl.cast(n, tl.int64) * T
    c = tl.arange(0, COUNT)
    before = c + 1 if REVERSE else c - 1
    between = tl.load(row + tl.minimum((before + 1) * CHUNK, T) - 1, mask=(before >= 0) & (before < chunks), other=0.0)
    # Summed from the side of the incoming state: a difference of sums would lose the precision of small ones.
    decay = tl.cumsum(between, 0, reverse=REVERSE)
    tl.store(decays + (n * G + g) * chunks + c, decay, mask=c < chunks)
    own = tl.load(row + tl.minimum((c + 1) * CHUNK, T) - 1, mask=c < chunks, other=0.0)
    tl.store(log_decay + n * G + g, tl.sum(own, 0) * _LN_2)


@triton.jit
def carry_states(
    states, incoming, decays, out, G, chunks, width,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Adds the incoming state. Grid: pairs of rows and key/value heads, blocks of the width, chunks."""
    pair = tl.cast(tl.program_id(0), tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CHUNKS + tl.arange(0, CHUNKS)
    here = (c < chunks)[:, None] & (i < width)[None, :]
    offsets = ((pair // G * chunks + c) * G + pair % G)[:, None] * width + i[None, :]
    came = tl.load(incoming + pair * width + i, mask=i < width, other=0.0)[None, :]
    if GATED:
        decay = tl.load(decays + pair * chunks + c, mask=c < chunks, other=0.0)
        came = came * tl.exp2(decay)[:, None]
    state = tl.load(states + offsets, mask=here, other=0.0).to(tl.float32)
    tl.store(out + offsets, (state + came).to(out.dtype.element_ty), mask=here)
