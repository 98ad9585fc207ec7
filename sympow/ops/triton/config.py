"""Block sizes, warps and pipeline depth of every kernel. They were chosen by measurements for head dims and dtypes, and
do not depend on T."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton import knobs

from sympow.ops.runtime.launcher import ceil_div, next_power_of_2, processors


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


# For p = 2 in bfloat16 on Hopper with K = V, by K. Where they fit, two programs of 4 warps run on an SM, so that one
# computes while the other waits. Where every block of tokens would then read too much of a state again, one program of
# 8 warps runs. With 4 gradient parts, a tile of the query and the key pass has K rows.
HOPPER = {
    32: Config(
        output=Launch(128, 64, 4, 2, 256),
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


def level_dim(key_dim: int, p: int, dtype: torch.dtype, device: torch.device) -> int | None:
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


def padded_key_dim(key_dim: int) -> int:
    """Returns the K of tiles: a power of two, at least 16."""
    return max(16, 1 << (key_dim - 1).bit_length())


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
