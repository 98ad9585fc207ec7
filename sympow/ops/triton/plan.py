"""The plan of a call: layout, variant, rows of the states, and launches. It depends only on the shapes of the tensors
and on the options. A plan is made once for all calls with the same shapes and options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton import knobs

from sympow.ops.runtime.launcher import Launcher
from sympow.ops.triton import config
from sympow.ops.triton import gate as gate_kernels
from sympow.ops.triton.config import padded_key_dim
from sympow.ops.triton.levels import Levels, level_count, levels_of
from sympow.ops.triton.rows import Rows, row_count, rows_of

T = TypeVar("T")
# Which kernels a call takes, by name; `launch.py` has the kernel of every stage.
#   plain             on any GPU
#   hopper            p = 2 on Hopper
#   hopper_quadratic  its quadratic form with gradient passes of its own
#   levels            p = 3 and 4 on Hopper, with rows by levels
#   levels_quadratic  their quadratic form, whose gradients take the plain passes
Variant = Literal["plain", "hopper", "hopper_quadratic", "levels", "levels_quadratic"]

LAST_PROGRAMS = 4  # programs for each SM that start first because they take longest
_MOST = 256  # plans that are kept: a server sees many lengths


@dataclass(frozen=True)
class Tokens:
    """Describes the layout of tokens: B rows of T, or N documents packed in one row."""

    sequences: int
    length: int  # T
    tokens: int  # over all sequences
    packed: bool

    def blocks(self, size: int) -> int:
        """Returns the number of blocks of `size` tokens over all sequences. For packed documents it is an upper limit,
        which is known without waiting for their lengths."""
        if self.packed:
            return self.tokens // size + self.sequences
        return self.sequences * config.ceil_div(self.length, size)


class Shapes:
    """Holds what the fake operators need too: layout, launch configuration, and the rows of the states.

    Args:
        gradient_rows: takes the rows that the gradients need, not those that are best for the output alone. The
            quadratic form has none.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, p: int, chunk: int, gradient_rows: bool
    ):
        """Reads only shapes, dtypes and devices of q [B, T, H, K], k [B, T, G, K], v [B, T, G, V]."""
        b, t, self.H, self.key_dim = q.shape
        self.K = padded_key_dim(self.key_dim)
        self.skip = self.K - self.key_dim  # only for rows by levels; other kernels get a K that fits tiles
        self.G, self.V, self.p = k.shape[2], v.shape[3], p
        self.R = self.H // self.G
        self.device, self.dtype = q.device, q.dtype
        sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.layout = Tokens(sequences, t, b * t, cu_seqlens is not None)
        self.columns = max(16, config.next_power_of_2(self.V))
        self.config = config.INTERPRETER if knobs.runtime.interpret else config.choose(self.K, self.columns, q.dtype)
        self.variant: Variant = self._variant(chunk)
        self.parts = 2
        if self.of_two:
            own = config.HOPPER[self.K]
            self.parts = own.gradient_parts if gradient_rows or not chunk else own.parts
        # Whether the parts of the gate's sums are those for Hopper (`gate.gate_sums`), and the numbers of a token.
        self.tiled = self.variant != "plain"
        self.sums = 3 if self.tiled else 2
        if type(chunk) is int and chunk >= t:  # torch.compile would compile for every size
            chunk = config.one_chunk(chunk)
        self.chunk = chunk
        if chunk:
            launches = self.config
            if self.tiled:
                launches = config.HOPPER[self.K] if self.of_two else config.HOPPER_POWERS[p, self.key_dim]
            multiple = launches.chunk_multiple
            if self.of_two:  # loops of the state pass are unrolled over its buffers
                multiple = max(multiple, launches.state.step * launches.state.stages)
            self.chunk = config.ceil_div(chunk, multiple) * multiple
            if self.chunk < config.WEIGH_BLOCK:  # a block of tokens is then the chunk, and its length a power of two
                self.chunk = config.next_power_of_2(self.chunk)
        # Short kernels of the quadratic form may start before the last kernel ends. Not for packed documents: other
        # kernels, which make their tables, run in between.
        self.overlap = self.of_two and not chunk and cu_seqlens is None

    def _variant(self, chunk: int) -> Variant:
        if not config.on_hopper(self.device) or self.dtype != torch.bfloat16:
            return "plain"
        if self.p == 2 and self.K == self.V and self.K in config.HOPPER:
            whole = not chunk and not self.layout.packed
            return "hopper_quadratic" if whole and self.K in config.HOPPER_GRADIENTS else "hopper"
        if (self.p, self.key_dim) in config.HOPPER_POWERS and self.V in (16, 32, 64):
            return "levels" if chunk else "levels_quadratic"
        return "plain"

    @property
    def of_two(self) -> bool:
        """Returns whether the kernels are those for p = 2 on Hopper, in either form."""
        return self.variant in ("hopper", "hopper_quadratic")

    @cached_property
    def rows(self) -> Rows | Levels:
        """Returns the rows; only for the chunked form, because a high p has many."""
        return self.levels if self.variant == "levels" else rows_of(self.K, self.p, self.parts)

    @property
    def levels(self) -> Levels:
        """Returns the levels of p = 3 and 4 on Hopper, in the chunked form."""
        return levels_of(self.key_dim, self.p)

    @property
    def row_count(self) -> int:
        """Returns `rows.count` without making the tables, for torch.compile, which needs only shapes."""
        return level_count(self.key_dim, self.p) if self.variant == "levels" else row_count(self.K, self.p, self.parts)

    def state_shapes(self, z: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of S and Z at the boundaries of chunks, as in `launch.states`."""
        return self._shapes(self.layout.blocks(self.chunk), z)

    def end_shapes(self, z: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of S and Z at the end of every sequence."""
        return self._shapes(self.layout.sequences, z)

    def _shapes(self, count: int, z: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # The pass on Hopper computes Z in the same programs.
        return (count, self.G, self.row_count, self.V), (count if z or self.of_two else 0, self.G, self.K, self.K)

    def keeps(self, z: bool) -> bool:
        """Returns whether the forward keeps its states for the backward.

        It does not where they are too large, nor for p > 2 unless rows are by levels.
        """
        if not self.chunk or (self.p > 2 and self.variant != "levels"):
            return False
        size = math.prod(self.state_shapes(z and self.p == 2)[0]) * self.dtype.itemsize
        most = config.most_kept(self.device)
        # For p > 2, a state pass is a fifth of the time of forward and backward, so more memory is worth it.
        return size <= (2 * most if self.p > 2 else most)


class Plan(Shapes):
    """Describes all calls with tensors of these shapes and strides, and these options."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, p: int, chunk: int, gradient_rows: bool, *,
        strides: tuple[tuple[int, ...], ...], gated: bool, scale: float, tf32: bool,
    ):  # fmt: skip
        """Makes the plan; `strides` are those of q, k and v as the kernels take them. No tensor is kept."""
        super().__init__(q, k, v, cu_seqlens, p, chunk, gradient_rows)
        names = ("q_st", "q_sh", "k_st", "k_sh", "v_st", "v_sh")
        by_token_and_head = (y for x in strides for y in x[1:3])
        self.of_strides = strides
        self.strides: dict[str, Any] = dict(zip(names, by_token_and_head, strict=True))
        self.gated = gated
        # For p > 4 scores are scaled when they are computed, to stay in range; otherwise the result is scaled once.
        self.score_scale = scale if p > 4 else 1.0
        self.out_scale = 1.0 if p > 4 else scale**p
        self.grad_scale = p * (scale if p > 4 else 1.0)
        self.precision = "tf32" if tf32 else "ieee"
        # -log2 of a decay that the passes treat as 0, with a margin for rounding: those for Hopper flush subnormals.
        self.vanishing = 127.0 if self.tiled else 150.0
        # In the quadratic form: whether the range of keys for each tile of queries, and of queries for each tile of
        # keys, is computed.
        self.reaches = gated and not chunk and not self.layout.packed and self.layout.length >= config.LEAST_REACH
        # Whether the sum of the gate's gradient starts again at every chunk. For p > 2 it does not: the states may be
        # too large to be in memory together with their gradients, and chunks are long.
        self.restarts = gated and chunk > 0 and p <= 2
        # Whether the gradient of positions does, by `position_gradient.py`.
        self.turns = 0 < chunk < self.layout.length and p <= 2 and not self.layout.packed
        self._made: dict[tuple, Any] = {}

    def new(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns an uninitialized tensor, of the dtype of q unless another is given.

        All results of kernels are made by this one function of PyTorch, so that its code is in the processor's caches.
        """
        return torch.empty(*sizes, device=self.device, dtype=self.dtype if dtype is None else dtype)

    def new_rows(self, heads: int) -> Tensor:
        """Returns an uninitialized float32 tensor [heads, B T]."""
        return self.new(heads, self.layout.tokens, dtype=torch.float32)

    def has_rows(self, given: bool) -> bool:
        """Returns whether a pass reads states, of which the first or last is `given`.

        A length of 1 is a constant of a kernel. The compiler fails on code for states that it then sees never to run.
        """
        return self.chunk > 0 and (given or self.layout.length > 1)

    def once(self, make: Callable[..., T], *options: Any) -> T:
        """Returns make(self, *options), such as a launcher, which is made once for the same options."""
        key = (make, options)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make(self, *options)
        return found

    @property
    def hopper_launches(self) -> config.Config:
        if self.p > 2:
            return config.HOPPER_POWERS[self.p, self.key_dim] if self.chunk else config.POWERS
        if self.variant == "hopper_quadratic":
            return config.HOPPER_GRADIENTS[self.K]
        return (config.HOPPER if self.chunk else config.HOPPER_QUADRATIC)[self.K]

    @property
    def half(self) -> int:
        """Returns the constants of plain rows."""
        return self.rows.half if self.chunk and isinstance(self.rows, Rows) else self.K

    def counts(self) -> dict[str, Any]:
        """Returns the numbers of lower and upper prefixes of plain rows."""
        lower, upper = (self.rows.lower, self.rows.upper) if self.chunk and isinstance(self.rows, Rows) else (0, 0)
        return {"lower": lower, "upper": upper}

    @cached_property
    def tables(self) -> tuple[Tensor | None, ...]:
        """Returns the tables of the rows, on the device."""
        return self.rows.on(self.device) if self.chunk else (None,) * 4

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Returns rows and entries of `levels.Slopes`, on the device."""
        return self.levels.slopes_on(config.slopes_group(self.K), self.device)

    def early(self, after: bool = True) -> dict[str, bool]:
        """Returns options of a launch: whether it starts early, that is, before the previous kernel of this call has
        ended."""
        return {"OVERLAP": True, "launch_pdl": True} if self.overlap and after else {"OVERLAP": False}

    def sequences(self) -> dict[str, Any]:
        return {"T": self.layout.length, "tokens": self.layout.tokens}

    def heads(self) -> dict[str, Any]:
        return {"H": self.H, "G": self.G}

    def spread(self, launch: config.Launch, heads: int) -> dict[str, Any]:
        """Returns the number of heads, of all sequences, whose longest programs come first.

        These heads have LAST_PROGRAMS programs for every SM.
        """
        blocks = max(1, config.ceil_div(self.layout.length, launch.block))
        spread = config.ceil_div(LAST_PROGRAMS * config.processors(self.device), blocks)
        return {"spread": min(spread, self.layout.sequences * heads)}

    def dims(self) -> dict[str, Any]:
        """Returns constants of the kernels for any GPU."""
        dims = {"K": self.K, "V": self.V, "P": self.p, "HALF": self.half, "COLUMNS": self.columns, "R": self.R}
        return dims | {"CHUNK": self.chunk, "PRECISION": self.precision, "GATED": self.gated}

    def hopper_dims(self, launch: config.Launch) -> dict[str, Any]:
        """Returns constants of the kernels for Hopper."""
        dims = {"K": self.K, "V": self.V, "PARTS": self.parts, "R": self.R, "CHUNK": self.chunk}
        dims |= {"BLOCK": launch.block, "TILE": launch.tile, "STAGES": launch.stages, "num_warps": launch.warps}
        return dims | {"GATED": self.gated, "PACKED": self.layout.packed}

    def leveled_dims(self, launch: config.Launch) -> dict[str, Any]:
        """Returns constants of the gradient passes that process rows by levels."""
        group = config.slopes_group(self.K)
        per = max(1, launch.tile * 32 // max(32, self.V) // (group * self.K))
        dims = {"K": self.K, "V": self.V, "P": self.p, "ROWS": self.row_count, "GROUP": group, "PER": per}
        dims |= {"SKIP": self.skip, "R": self.R, "BLOCK": launch.block, "CHUNK": self.chunk, "STAGES": launch.stages}
        return dims | {"GATED": self.gated, "PACKED": self.layout.packed, "num_warps": launch.warps}


_plans: dict[tuple, Plan] = {}


def plan_of(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, p: int, chunk: int, gradient_rows: bool, *,
    strides: tuple[tuple[int, ...], ...], gated: bool, scale: float, tf32: bool,
) -> Plan:  # fmt: skip
    """Returns the plan of these arguments, see `Plan`."""
    gradient_rows = gradient_rows or not chunk  # the same rows for both
    documents = None if cu_seqlens is None else cu_seqlens.shape[0]
    tensors = (q.shape, k.shape, v.shape, strides, q.dtype, q.device, documents)
    key = (*tensors, p, chunk, gradient_rows, gated, scale, tf32)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(q, k, v, cu_seqlens, p, chunk, gradient_rows, strides=strides, gated=gated, scale=scale, tf32=tf32)
        if len(_plans) >= _MOST:
            _plans.pop(next(iter(_plans)))  # the oldest
        _plans[key] = plan
    return plan


def forget_plans() -> None:
    """Forgets all plans, for tests that change what plans are made of."""
    _plans.clear()


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
