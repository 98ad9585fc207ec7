"""What a call launches: its form, the sizes of its launches, and its plan.

The tables at the top have the longest rows of the quadratic form, the tokens of a chunk, and block sizes, warps and
pipeline depth of every kernel. They were chosen by measurements for head dims, dtypes and devices. Sizes of launches do
not depend on T.

A plan has the layout of the tokens, the variant of the kernels, the rows of the states, and the launches. It depends
only on the shapes of the tensors and on the options, and is made once for all calls with the same shapes and options.
A `Call` has the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton import knobs

from sympow.ops.runtime.launcher import Launcher, cast, ceil_div, next_power_of_2, padded_key_dim, processors
from sympow.ops.triton import gate as gate_kernels
from sympow.ops.triton.levels import Levels, level_count, levels_of
from sympow.ops.triton.rows import Rows, row_count, rows_of


@dataclass(frozen=True)
class Launch:
    """Describes one launch: tokens of a program, tokens of an iteration of its inner loop, warps, stages."""

    block: int
    step: int
    warps: int
    stages: int
    tile: int = 0  # rows of a state in an iteration; in the state pass, rows of a prefix

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Config:
    output: Launch
    query: Launch
    key: Launch
    state: Launch  # block: tiles of rows of a program, 1, 2 or 4
    # Parts of K in the rows of a state (`rows.py`), in the forward and in the backward. Only p = 2 on Hopper has more.
    parts: int = 2
    gradient_parts: int = 2

    @property
    def chunk_multiple(self) -> int:
        return max(self.output.block, self.query.block, self.key.block, self.state.step)


WEIGH_BLOCK = 128  # the largest number of tokens that the kernels which weigh tokens process at once

INTERPRETER = Config(Launch(32, 16, 4, 1), Launch(32, 16, 4, 1), Launch(32, 16, 4, 1), Launch(2, 16, 4, 1))


def choose(key_dim: int, columns: int, dtype: torch.dtype) -> Config:
    """Returns the configuration for padded head dims and the dtype of q, k and v."""
    wide = max(key_dim, columns)
    if dtype == torch.float32:
        block = 64 if wide <= 64 else 32
        step = 32 if wide <= 64 else 16
        return Config(
            output=Launch(block, step, 4, 2),
            query=Launch(block, step, 4, 2),
            key=Launch(block, step, 4, 2),
            state=Launch(1, 32, 4, 2),
        )
    if wide <= 64:
        return Config(
            output=Launch(128, 64, 4, 3),
            query=Launch(128, 64, 4, 3),
            key=Launch(128, 64, 8, 3),
            state=Launch(4, 64, 4, 3),
        )
    return Config(
        output=Launch(128, 64, 4, 3),
        query=Launch(64, 32, 4, 3),
        key=Launch(64, 32, 4, 2),
        state=Launch(1, 64, 4, 3),
    )


# Of the delta rule, by the wider of K and V: the passes that connect groups of tokens, and those that solve a group. Of
# these, a block is a group, and a step the channels of a program. Products of float32 take much code, so its groups are
# smaller.
HOPPER_DELTA = {
    64: (Launch(128, 64, 8, 3), Launch(256, 32, 4, 1)),
    128: (Launch(128, 64, 8, 2), Launch(256, 32, 4, 1)),
}
DELTA = {
    (torch.bfloat16, 64): (Launch(64, 64, 4, 2), Launch(256, 32, 4, 1)),
    (torch.bfloat16, 128): (Launch(64, 64, 8, 2), Launch(256, 32, 4, 1)),
    (torch.float32, 64): (Launch(32, 64, 4, 2), Launch(128, 32, 8, 1)),
    (torch.float32, 128): (Launch(32, 32, 4, 2), Launch(64, 32, 8, 1)),
}


def delta_launches(
    key_dim: int, columns: int, dtype: torch.dtype, device: torch.device, heads: int
) -> tuple[Launch, Launch]:
    """Returns the launches of both kinds of passes, for padded head dims and the key/value heads of all rows."""
    wide = 64 if max(key_dim, columns) <= 64 else 128
    if dtype != torch.bfloat16 or not on_hopper(device):
        return DELTA[dtype, wide]
    groups, solution = HOPPER_DELTA[wide]
    if 2 * heads < processors(device):  # smaller tiles for more programs
        groups = replace(groups, block=64, warps=4)
    return groups, solution


# For p = 2 in bfloat16 on Hopper with K = V, by K. Where they fit, two programs of 4 warps run on an SM, so that one
# computes while the other waits. Where every block of tokens would then read too much of a state again, one program of
# 8 warps runs. With 4 gradient parts, a tile of the query and the key pass has K rows.
HOPPER = {
    32: Config(
        output=Launch(128, 64, 4, 4, 128),
        query=Launch(128, 64, 4, 3, 128),
        key=Launch(64, 64, 4, 3, 256),
        state=Launch(4, 32, 4, 4, 32),
    ),
    64: Config(
        output=Launch(128, 64, 4, 4, 64),
        query=Launch(256, 64, 8, 4, 128),
        key=Launch(64, 64, 4, 4, 64),
        state=Launch(4, 64, 4, 4, 64),
        parts=4,
    ),
    128: Config(
        output=Launch(128, 64, 8, 4, 128),
        query=Launch(128, 64, 8, 3, 128),
        key=Launch(128, 32, 8, 2, 128),
        state=Launch(2, 64, 4, 4, 64),
        parts=8,
        gradient_parts=4,
    ),
}
_NONE = Launch(0, 0, 4, 0)
# Registers of a thread with which three programs of 4 warps fit on an SM.
THREE_PROGRAMS = 168
# For p = 3 and 4, by p and K. The numbers of tiles of the state pass and of the gradients are those for V = 32; wider
# values have fewer. A program of the gradients has as many tokens as registers allow, because each program reads the
# whole state.
POWERS = Config(Launch(128, 64, 4, 2, 128), _NONE, _NONE, Launch(4, 32, 4, 4))
# For p = 4 and K above 16, the products u take most of the shared memory. So the output pass and the key pass have one
# program of eight warps on an SM.
_LEVELED = replace(POWERS, query=Launch(256, 64, 8, 3, 256), key=Launch(256, 32, 8, 3, 256))
_NARROW = replace(POWERS, query=Launch(256, 64, 8, 3, 128), key=Launch(256, 32, 8, 3, 128))
_PAIRS = replace(_LEVELED, output=Launch(128, 32, 8, 2, 128), key=Launch(128, 32, 8, 2, 128))
HOPPER_POWERS = {
    (3, 16): _NARROW,
    (3, 24): _LEVELED,
    (3, 32): _LEVELED,
    (3, 64): replace(POWERS, query=Launch(128, 64, 8, 3, 256), key=Launch(128, 32, 8, 3, 256)),
    (4, 16): _NARROW,
    (4, 24): _PAIRS,
    (4, 32): _PAIRS,
}


def leveled_key_dim(key_dim: int, p: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Returns the K to which keys are padded with zeros for the chunked form of p = 3 and 4 on Hopper; None for calls
    that do not take these kernels."""
    fitting = [k for power, k in HOPPER_POWERS if power == p and k >= key_dim] if p > 2 else []
    if not fitting or dtype != torch.bfloat16 or not on_hopper(device):
        return None
    return min(fitting)  # no min(default=...), which torch.compile of torch 2.11 does not trace


def slopes_group(key_dim: int) -> int:
    """Returns the number of consecutive k in an iteration of their gradients (`levels.Slopes`), for a padded K. The
    accumulator is that number times K wide."""
    return min(4, 128 // key_dim)


# Quadratic form: small programs, several of which run on one SM.
HOPPER_QUADRATIC = {
    32: Config(Launch(128, 64, 4, 3, 128), Launch(128, 64, 4, 3, 128), Launch(64, 64, 4, 3, 128), _NONE),
    64: Config(Launch(128, 64, 4, 3, 128), Launch(64, 32, 4, 3, 128), Launch(64, 64, 4, 3, 128), _NONE),
    128: Config(Launch(128, 32, 4, 3, 128), Launch(64, 32, 4, 3, 128), Launch(64, 32, 4, 3, 128), _NONE),
}
# The same for the passes of `hopper.gradients_quadratic`. They have these K, and rows that are not packed, because the
# positions of packed documents take registers (docs/decisions/0003-gpu-kernels.md). At K = 128 the passes do not fit.
HOPPER_GRADIENTS = {64: Config(HOPPER_QUADRATIC[64].output, Launch(64, 64, 4, 3), Launch(64, 64, 4, 3), _NONE)}


# By p and K, for calls without gradients and for training: the longest row for which the quadratic form is the fastest,
# and the tokens of a chunk for longer rows. The larger a state is, the less often it should be read and written.
# Measured on an H200 for the shapes of `python -m benchmarks.chunks`, estimated for other p and K.
_FORMS = {
    (1, 16): ((512, 128), (512, 128)),
    (1, 32): ((512, 128), (512, 128)),
    (1, 64): ((512, 128), (512, 128)),
    (1, 128): ((1024, 256), (1024, 256)),
    (2, 16): ((1024, 256), (1024, 256)),
    (2, 32): ((2048, 256), (1536, 256)),
    (2, 64): ((4096, 768), (4096, 768)),
    (2, 128): ((16384, 1024), (16384, 2048)),
    (3, 16): ((4096, 1024), (4096, 1024)),
    (3, 24): ((8192, 1024), (8192, 1024)),
    (3, 32): ((16384, 2048), (8192, 2048)),
    (3, 64): ((262144, 8192), (262144, 8192)),
    (4, 16): ((32768, 2048), (8192, 2048)),
    (4, 24): ((65536, 2048), (65536, 2048)),
    (4, 32): ((524288, 16384), (524288, 16384)),
}
# The same for calls in which the quadratic form skips tiles that a gate has decayed to nothing, where it differs. The
# gates are those of new layers.
_FORMS_GATED = {
    (2, 64): ((8192, 768), (8192, 1024)),
    (2, 128): ((32768, 1024), (16384, 2048)),
    (3, 32): ((32768, 2048), (8192, 2048)),
}
# Chunk sizes for training in which states are small enough to be kept, for cases in which those of the sizes above are
# too large.
KEPT_CHUNKS = {(2, 32): 512, (2, 128): 4096}
# The number of tokens of a row from which the quadratic form computes which tiles its gate leaves. This takes a few
# microseconds, and the first copies wait for the result.
LEAST_REACH = 2048


def chunk_size(key_dim: int, p: int, time: int, gradient: bool, reach: bool, has_state: bool = False) -> int:
    """Returns the chunk size for a padded key dim, with the backward or without. It is `time` where the quadratic form
    is faster, or the only form. `reach` tells whether that form would skip tiles that a gate has decayed to nothing,
    `has_state` whether a state is computed in either form, which leaves the quadratic form less to save."""
    forms = _FORMS.get((p, key_dim))
    if forms is None:
        return time
    if reach:
        forms = _FORMS_GATED.get((p, key_dim), forms)
    forward, training = forms
    longest, chunk = training if gradient else forward
    if has_state and not gradient:
        longest //= 2
    return time if time <= longest else chunk


def position_chunk(key_dim: int) -> int:
    """Returns the most tokens of a chunk in training with data-dependent positions, for a padded key dim. The sum of
    their gradient starts again at every chunk, and its rounding errors grow with the tokens of a chunk."""
    return 8 * key_dim


def packed_chunk(time: int, documents: int) -> int:
    """Returns the most tokens of a chunk of packed documents, `time` tokens in all, whose states are needed.

    The state pass reads whole chunks of every document, so chunks much longer than the documents would waste its time.
    A pass over the shortest chunk takes about as long as writing the state of a document.
    """
    size = 256
    while size * documents < time:
        size *= 2
    return size


def one_chunk(time: int) -> int:
    """Returns the tokens of a chunk that holds a row of `time` tokens: few more, so that few sizes occur.

    Kernels are compiled for every size of a chunk, and a prompt has any length.
    """
    size, step = 0, 64
    while size < time:
        step = 2 * step if size == 8 * step else step
        size += step
    return size


def most_kept(device: torch.device) -> int:
    """Returns the largest number of bytes of states that the forward keeps for the backward: 1/256 of the memory of the
    GPU. So a model of 32 layers uses at most an eighth of the memory for states, and for p > 2, for which
    `Shapes.keeps` takes twice the number, a quarter."""
    return torch.cuda.get_device_properties(device).total_memory // 256 if device.type == "cuda" else 1 << 30


def on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(frozen=True)
class Decoding:
    """Describes the launch of a step of decoding."""

    rows: int  # rows of a tile of the state
    lanes: int  # rows of a tile that its threads sum separately; a thread reads 16 bytes of a row
    tiles: int  # tiles of a program
    splits: int  # programs for each key/value head, without those of the tail
    tokens: int  # tokens of a tile of the tail
    folded: int  # tokens of the tail that are folded together
    ranks: int  # parts of the output that are added together
    warps: int
    registers: int | None  # registers of a thread, at most
    stages: int  # tiles of the state, of the tail or of the parts that are in memory or on their way


@dataclass(frozen=True)
class DecodingLimits:
    elements: int  # elements of a tile of the state, at most; fewer for more than 4 query heads that share it
    programs: int  # programs for each SM, over all heads
    tail: int  # elements of a tile of the tail, at most
    warps: int
    registers: int | None  # registers of a thread, at most, with up to 8 query heads
    stages: int


# With few key/value heads (fewer than SMs) the latency of a program matters; with many heads, the bytes that it reads.
DECODING = {"few": DecodingLimits(4096, 3, 2048, 2, 168, 3), "many": DecodingLimits(4096, 32, 2048, 2, 168, 3)}
_OF_FLOAT32 = 224  # registers of a thread with float32 inputs; with 168, hundreds of bytes would spill
_DECODING_INTERPRETER = DecodingLimits(128, 2, 32, 4, None, 1)


def decoding(
    pairs: int, dim: int, heads: int, padded_heads: int, key_dim: int, columns: int, width: int, wide: bool,
    device: torch.device,
) -> Decoding:  # fmt: skip
    """Returns the launch for `pairs` of sequences and key/value heads, D rows of state, the query heads of a pair,
    padded head dims, the bytes of an element of the state, and whether queries, keys and values are float32."""
    limits = DECODING["few" if pairs < processors(device) else "many"]
    if knobs.runtime.interpret:
        limits = _DECODING_INTERPRETER
    rows = max(1, limits.elements // (max(1, padded_heads // 4) * columns))
    lanes = max(1, min(rows, limits.warps * 32 * 16 // (width * columns)))
    total = ceil_div(dim, rows)
    # Each split writes a part of the output that another program reads. These parts should have fewer rows than the
    # state.
    splits = max(1, min(total, ceil_div(limits.programs * processors(device), pairs), dim // (4 * heads)))
    tiles = ceil_div(total, splits)
    splits = ceil_div(total, tiles)
    tokens = max(1, limits.tail // max(key_dim, columns))
    ranks = max(1, min(next_power_of_2(splits + 1), limits.elements // (padded_heads * columns)))
    folded = 4
    registers = limits.registers if padded_heads <= 8 else None
    if registers is not None and wide:
        registers = max(registers, _OF_FLOAT32)
    return Decoding(rows, lanes, tiles, splits, tokens, folded, ranks, limits.warps, registers, limits.stages)


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
        return self.sequences * ceil_div(self.length, size)


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
        self.columns = max(16, next_power_of_2(self.V))
        self.config = INTERPRETER if knobs.runtime.interpret else choose(self.K, self.columns, q.dtype)
        self.variant: Variant = self._variant(chunk)
        self.parts = 2
        if self.of_two:
            own = HOPPER[self.K]
            self.parts = own.gradient_parts if gradient_rows or not chunk else own.parts
        # Whether the parts of the gate's sums are those for Hopper (`gate.gate_sums`), and the numbers of a token.
        self.tiled = self.variant != "plain"
        self.sums = 3 if self.tiled else 2
        if type(chunk) is int and chunk >= t:  # torch.compile would compile for every size
            chunk = one_chunk(chunk)
        self.chunk = chunk
        if chunk:
            launches = self.config
            if self.tiled:
                launches = HOPPER[self.K] if self.of_two else HOPPER_POWERS[p, self.key_dim]
            multiple = launches.chunk_multiple
            if self.of_two:  # loops of the state pass are unrolled over its buffers
                multiple = max(multiple, launches.state.step * launches.state.stages)
            self.chunk = ceil_div(chunk, multiple) * multiple
            if self.chunk < WEIGH_BLOCK:  # a block of tokens is then the chunk, and its length a power of two
                self.chunk = next_power_of_2(self.chunk)
        # Short kernels of the quadratic form may start before the last kernel ends. Not for packed documents: other
        # kernels, which make their tables, run in between.
        self.overlap = self.of_two and not chunk and cu_seqlens is None

    def _variant(self, chunk: int) -> Variant:
        if not on_hopper(self.device) or self.dtype != torch.bfloat16:
            return "plain"
        if self.p == 2 and self.K == self.V and self.K in HOPPER:
            whole = not chunk and not self.layout.packed
            return "hopper_quadratic" if whole and self.K in HOPPER_GRADIENTS else "hopper"
        if (self.p, self.key_dim) in HOPPER_POWERS and self.V in (16, 32, 64):
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
        most = most_kept(self.device)
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
        self.reaches = gated and not chunk and not self.layout.packed and self.layout.length >= LEAST_REACH
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
    def processors(self) -> int:
        """Returns the number of SMs of the GPU."""
        return processors(self.device)

    @property
    def hopper_launches(self) -> Config:
        if self.p > 2:
            return HOPPER_POWERS[self.p, self.key_dim] if self.chunk else POWERS
        if self.variant == "hopper_quadratic":
            return HOPPER_GRADIENTS[self.K]
        return (HOPPER if self.chunk else HOPPER_QUADRATIC)[self.K]

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
        return self.levels.slopes_on(slopes_group(self.K), self.device)

    def early(self, after: bool = True) -> dict[str, bool]:
        """Returns options of a launch: whether it starts early, that is, before the previous kernel of this call has
        ended."""
        return {"OVERLAP": True, "launch_pdl": True} if self.overlap and after else {"OVERLAP": False}

    @property
    def row_chunks(self) -> int:
        """Returns the number of chunks of a row; 1 for the quadratic form."""
        return ceil_div(self.layout.length, self.chunk) if self.chunk else 1

    def sequences(self) -> dict[str, Any]:
        return {"T": self.layout.length, "tokens": self.layout.tokens}

    def heads(self) -> dict[str, Any]:
        return {"H": self.H, "G": self.G}

    def spread(self, launch: Launch, heads: int) -> dict[str, Any]:
        """Returns the number of heads, of all sequences, whose longest programs come first.

        These heads have LAST_PROGRAMS programs for every SM.
        """
        blocks = max(1, ceil_div(self.layout.length, launch.block))
        spread = ceil_div(LAST_PROGRAMS * self.processors, blocks)
        return {"spread": min(spread, self.layout.sequences * heads)}

    def dims(self) -> dict[str, Any]:
        """Returns constants of the kernels for any GPU."""
        dims = {"K": self.K, "V": self.V, "P": self.p, "HALF": self.half, "COLUMNS": self.columns, "R": self.R}
        return dims | {"CHUNK": self.chunk, "PRECISION": self.precision, "GATED": self.gated}

    def hopper_dims(self, launch: Launch) -> dict[str, Any]:
        """Returns constants of the kernels for Hopper."""
        dims = {"K": self.K, "V": self.V, "PARTS": self.parts, "R": self.R, "CHUNK": self.chunk}
        dims |= {"BLOCK": launch.block, "TILE": launch.tile, "STAGES": launch.stages, "num_warps": launch.warps}
        return dims | {"GATED": self.gated, "PACKED": self.layout.packed}

    def leveled_dims(self, launch: Launch) -> dict[str, Any]:
        """Returns constants of the gradient passes that process rows by levels."""
        group = slopes_group(self.K)
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


# Tokens of a block of the gate's sums: within chunks, for one head and for several, and along whole rows.
SUM_BLOCK, HEADS_SUM_BLOCK, LONG_SUM_BLOCK = 1024, 128, 4096


def heads_together(groups: int, chunks: int, processors: int) -> int:
    """Returns how many of `groups` heads a program of the gate's passes takes: four if every SM then has a program.

    The gates of a token are next to one another in memory, and a program of one head reads eight to use one.
    """
    return 4 if groups % 4 == 0 and chunks * groups >= 4 * processors else 1


class Gate(NamedTuple):
    """Holds sums of the gate's logarithms, and the keys and queries that the gate leaves (`gate.gate_sums`)."""

    sums: Tensor  # float32 [2 or 3, G, tokens]: log2 of the decay within the chunk; empty without a gate
    begins: Tensor | None  # int32 [G, tiles], like `ends`; for the quadratic form of long rows
    ends: Tensor | None


class Options(NamedTuple):
    """Holds the arguments of `power_forward` after its tensors."""

    p: int
    scale: float
    normalize: bool
    eps: float
    chunk: int
    final: bool
    tf32: bool
    wide: bool
    gradient: bool


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
        log_g = cast(log_g, torch.float32)
        self.log_g = log_g if log_g.is_contiguous() else log_g.contiguous()
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
    heads = 1 if plan.reaches else heads_together(plan.G, plan.layout.blocks(size), plan.processors)
    constants = sums_block(size, heads, not plan.chunk) | {"TILED": plan.tiled, "PACKED": plan.layout.packed}
    grid = (plan.layout.blocks(size), plan.G // heads)
    return Launcher(gate_kernels.gate_sums, grid, numbers | constants | {"OVERLAP": plan.overlap})


def sums_block(size: int, heads: int, whole: bool) -> dict[str, int]:
    """Returns the options of `gate.gate_sums` for chunks of `size` tokens, `whole` rows or not, and heads together."""
    most = HEADS_SUM_BLOCK if heads > 1 else LONG_SUM_BLOCK if whole else SUM_BLOCK
    block = max(gate_kernels.REACH_TILE.value, min(most, next_power_of_2(size)))
    warps = 2 if heads > 1 else 4 if block <= 2 * SUM_BLOCK else 8
    return {"BLOCK": block, "HEADS": heads, "num_warps": warps}
