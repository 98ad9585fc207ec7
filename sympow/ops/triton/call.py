"""The tensors of one call, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.triton import config
from sympow.ops.triton import gate as gate_kernels
from sympow.ops.triton.launcher import Launcher
from sympow.ops.triton.levels import padded_key_dim
from sympow.ops.triton.plan import Plan, plan_of

SUM_BLOCK, LONG_SUM_BLOCK = 1024, 4096  # tokens of a block of the gate's sums, within chunks and along whole rows


class Gate(NamedTuple):
    """Holds sums of the gate's logarithms, and the keys and queries that the gate leaves (`gate.gate_sums`)."""

    sums: Tensor  # float32 [2 or 3, G, tokens]: log2 of the decay within the chunk; empty without a gate
    begins: Tensor | None  # int32 [G, tiles], like `ends`; for the quadratic form of long rows
    ends: Tensor | None


class Call:
    """Holds what all launches of one call share.

    Attributes:
        plan: what depends only on shapes and options.
        q, k, v: with batch and time as one axis; heads and channels have strides that all kernels take.
        gate: the sums of the gate.
        cu_seqlens: int32 [N + 1], or None.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, cu_seqlens: Tensor | None, p: int, scale: float,
        chunk: int, tf32: bool, gradient_rows: bool = False, gate: Gate | None = None, plan: Plan | None = None,
    ):  # fmt: skip
        """Args:
        chunk: tokens of a chunk; 0 for the quadratic form.
        gate: that of another call with the same log_g, which is not read then.
        plan: that of a call with the same shapes and options."""
        self.cu_seqlens = cu_seqlens
        skip = padded_key_dim(q.shape[3]) - q.shape[3] if plan is None else plan.skip
        given = q
        if skip:
            q, k = (pad(x, (skip, 0)) for x in (q, k))
        self.q, self.k, self.v = _flat(q), _flat(k), _flat(v)
        strides = (self.q.stride(), self.k.stride(), self.v.stride())
        if plan is None or plan.of_strides != strides:
            plan = plan_of(
                given, k, v, cu_seqlens, p, chunk, gradient_rows,
                strides=strides, gated=log_g is not None, scale=scale, tf32=tf32,
            )  # fmt: skip
        self.plan = plan
        self._tables: dict[int, Tensor] = {}
        self._chunk_starts: Tensor | None = None
        self.gate = self._gate(log_g) if gate is None else gate

    def _gate(self, log_g: Tensor | None) -> Gate:
        plan = self.plan
        if log_g is None:
            return Gate(plan.new(0, dtype=torch.float32), None, None)
        sums = plan.new(plan.sums, plan.G, plan.layout.tokens, dtype=torch.float32)
        begins = ends = None
        if plan.reaches:
            tiles = plan.layout.blocks(gate_kernels.REACH_TILE.value)
            begins, ends = (plan.new(plan.G, tiles, dtype=torch.int32) for _ in range(2))
        # The call keeps the copy of log_g. With overlapping launches, a later kernel may write before this kernel has
        # read everything, so the memory of the copy must not be reused.
        self.log_g = log_g.float().contiguous()
        plan.once(_gate_sums)(
            log_g=self.log_g, sums=sums, begins=begins, ends=ends, starts=self.cu_seqlens,
            chunks=self.table(plan.chunk or plan.layout.length),
        )  # fmt: skip
        return Gate(sums, begins, ends)

    def table(self, size: int) -> Tensor | None:
        """Returns for packed documents the sequence of each block and the index of the block in it, int32 [blocks, 2].

        Blocks after the last document have an index beyond its end. The table is made on the device, so the host does
        not wait for the lengths of the documents.
        """
        if self.cu_seqlens is None:
            return None
        if size not in self._tables:
            counts = (self.cu_seqlens.diff() + size - 1) // size
            ends = counts.cumsum(0)
            layout = self.plan.layout
            block = torch.arange(layout.blocks(size), device=ends.device)
            n = torch.searchsorted(ends, block, right=True).clamp_(max=layout.sequences - 1)
            self._tables[size] = torch.stack([n, block - (ends - counts)[n]], 1).int()
        return self._tables[size]

    def chunk_starts(self) -> Tensor | None:
        """Returns for packed documents in chunks the number of the first chunk of each document, int32 [N]."""
        size = self.plan.chunk
        if self.cu_seqlens is None or not size:
            return None
        if self._chunk_starts is None:
            counts = (self.cu_seqlens.diff() + size - 1) // size
            self._chunk_starts = (counts.cumsum(0) - counts).int()
        return self._chunk_starts

    def sequences(self, size: int) -> dict[str, Tensor | None]:
        """Returns the tables that a kernel of blocks of `size` tokens reads; None unless documents are packed."""
        if self.cu_seqlens is None:
            return _NOT_PACKED
        return {"starts": self.cu_seqlens, "chunk_starts": self.chunk_starts(), "blocks": self.table(size)}

    def own_channels(self, x: Tensor) -> Tensor:
        """Returns x [..., K] without the channels of zeros that the call has added."""
        return x[..., self.plan.skip :].contiguous() if self.plan.skip else x


_NOT_PACKED: dict[str, Tensor | None] = {"starts": None, "chunk_starts": None, "blocks": None}


def _flat(x: Tensor) -> Tensor:
    """Returns x, or a copy of it, with strides that kernels take.

    Batch and time are one axis, so stride(0) = T stride(1). Channels are contiguous, and rows of channels start at
    multiples of 32 bytes.
    """
    if x.data_ptr() % 16 == 0:
        if x.is_contiguous():
            return x
        batch, time, head, channel = x.stride()
        fits = channel == 1 and (x.shape[0] == 1 or batch == x.shape[1] * time)
        if fits and time % 16 == 0 and head % 16 == 0:
            return x
    return x.clone(memory_format=torch.contiguous_format)


def _gate_sums(plan: Plan) -> Launcher:
    size = plan.chunk or plan.layout.length
    numbers = plan.sequences() | {"G": plan.G, "CHUNK": size, "most": plan.vanishing}
    block = min(SUM_BLOCK if plan.chunk else LONG_SUM_BLOCK, config.next_power_of_2(size))
    constants = {"BLOCK": max(block, gate_kernels.REACH_TILE.value), "PACKED": plan.layout.packed}
    constants |= {"TILED": plan.tiled, "num_warps": 8 if block > SUM_BLOCK else 4}
    grid = (plan.layout.blocks(size), plan.G)
    return Launcher(gate_kernels.gate_sums, grid, numbers | constants | {"OVERLAP": plan.overlap})
