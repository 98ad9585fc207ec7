"""Block sizes, warps and pipeline depth of every kernel: chosen offline, by head dims and dtype, never by T."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched: tokens a program owns, tokens a step of its inner loop takes, warps, stages."""

    block: int
    step: int
    warps: int
    stages: int
    tile: int = 0  # rows of a state a step of its loop takes; in the state pass, of a prefix

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Config:
    output: Launch
    query: Launch
    key: Launch
    state: Launch  # block: tiles of rows a program owns, 1, 2 or 4

    @property
    def chunk_multiple(self) -> int:
        return max(self.output.block, self.query.block, self.key.block, self.state.step)


INTERPRETER = Config(Launch(32, 16, 4, 1), Launch(32, 16, 4, 1), Launch(32, 16, 4, 1), Launch(2, 16, 4, 1))


def choose(key_dim: int, columns: int, dtype: torch.dtype) -> Config:
    """The configuration for padded head dims and the dtype of q, k and v."""
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


# p = 2 in bfloat16 on Hopper, K = V; by K. Two programs of 4 warps a multiprocessor where they fit: they fill each
# other's waits. Where too much of a state is then read again for each block of tokens, one program of 8 warps.
HOPPER = {
    32: Config(
        output=Launch(128, 64, 4, 2, 256),
        query=Launch(128, 64, 4, 3, 128),
        key=Launch(64, 64, 4, 3, 256),
        state=Launch(4, 32, 4, 4, 32),
    ),
    64: Config(
        output=Launch(128, 64, 4, 2, 128),
        query=Launch(256, 64, 8, 2, 256),
        key=Launch(64, 64, 4, 2, 128),
        state=Launch(4, 64, 4, 4, 64),
    ),
    128: Config(
        output=Launch(128, 64, 8, 2, 128),
        query=Launch(128, 32, 8, 2, 128),
        key=Launch(128, 32, 8, 2, 128),
        state=Launch(2, 64, 4, 4, 64),
    ),
}
_NONE = Launch(0, 0, 4, 0)
# p = 3 and 4, by p and K; no gradients.
_POWERS = Config(Launch(128, 64, 4, 2, 128), _NONE, _NONE, Launch(4, 32, 4, 4))
HOPPER_POWERS = {(3, 16): _POWERS, (3, 32): _POWERS, (3, 64): _POWERS, (4, 16): _POWERS, (4, 32): _POWERS}
# Quadratic: small programs, of which a multiprocessor runs several at once.
HOPPER_QUADRATIC = {
    32: Config(Launch(128, 64, 4, 3, 128), Launch(128, 64, 4, 3, 128), Launch(64, 64, 4, 3, 128), _NONE),
    64: Config(Launch(128, 64, 4, 3, 128), Launch(64, 64, 4, 3, 128), Launch(64, 64, 4, 3, 128), _NONE),
    128: Config(Launch(128, 32, 4, 3, 128), Launch(64, 32, 4, 3, 128), Launch(64, 32, 4, 3, 128), _NONE),
}


# Tokens of a chunk where states pay, by p and K: a larger state is read and written less often. Measured on an H200.
_CHUNKS = {
    1: {16: 128, 32: 128, 64: 128, 128: 256},
    2: {16: 256, 32: 256, 64: 1024, 128: 2048},
    3: {16: 1024, 32: 2048, 64: 16384},
    4: {16: 2048, 32: 16384},
}
# Up to here the quadratic form is the faster one, where it is not 4 chunks.
_QUADRATIC = {(2, 32): 2048, (2, 128): 16384, (3, 32): 16384, (3, 64): 262144, (4, 16): 16384, (4, 32): 524288}


def chunk_size(key_dim: int, p: int, time: int) -> int:
    """The chunk size for a padded key dim; `time` where the quadratic form is faster or the only one."""
    chunk = _CHUNKS.get(p, {}).get(key_dim)
    return time if chunk is None or time <= _QUADRATIC.get((p, key_dim), 4 * chunk) else chunk


def on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
