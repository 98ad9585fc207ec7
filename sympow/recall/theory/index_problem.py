"""The index problem (H.23, H.24): how well a state of few bits answers questions about N stored bits.

Alice has N bits and sends a message. Bob has an index and must name the bit at this index. If the message has far fewer
than N bits, Bob can do little better than guess, for any computations of Alice and Bob. A recurrent mixer that has read
N pairs of a key and a bit corresponds to Alice, and its state to the message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import Any, cast

import torch
from torch import Tensor

from sympow.ops import PowerState, power_attention
from sympow.ops.feature_map import spow_dim

_QUERIES = 512  # bits asked for in a row, at most
_CHUNK = 256  # tokens
_WIDTH_BITS = 64  # a state is written with the width of a level, in float64


@dataclass(frozen=True)
class Memory:
    """Describes a mixer with a state of fixed size, and how its state is written down.

    Attributes:
        label: its name in tables.
        p: power of the scores.
        key_dim: K.
        log_gate: logarithm of the decay of each of the heads; 0 for none. Every head holds the same pairs.
        bits: of every element of the state, which is rounded to 2**bits - 1 levels of equal width.
    """

    label: str
    p: int
    key_dim: int
    log_gate: tuple[float, ...] = (0.0,)
    bits: int = 8

    @property
    def state_bits(self) -> int:
        """Returns the bits of the whole state: its elements and the width of a level.

        They are the same after any number of stored bits.
        """
        return len(self.log_gate) * spow_dim(self.key_dim, self.p) * self.bits + _WIDTH_BITS


def retnet(key_dim: int, heads: int) -> Memory:
    """Returns RetNet's state: power 1, and the decay 1 - 2**(-5 - h) of head h."""
    gates = tuple(float(torch.log1p(torch.tensor(-(2.0 ** (-5 - h)), dtype=torch.float64))) for h in range(heads))
    return Memory("RetNet", 1, key_dim, gates)


def accuracy(memory: Memory, stored: int, rows: int, seed: int) -> float:
    """Returns the share of right answers when `memory` has read `stored` bits.

    It is measured over `rows` rows of random bits and keys.

    A bit is stored as 1 or -1 behind a random key of entries 1 and -1. After the last pair the state is rounded to its
    bits, and up to 512 of the stored bits are asked for: the answer is the sign of the sum of the heads' outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = len(memory.log_gate)
    options: dict[str, Any] = {"p": memory.p, "scale": 1 / memory.key_dim, "normalize": False}
    bit, key = _signs(rows, stored, 1, generator), _signs(rows, stored, memory.key_dim, generator)
    k = key[:, :, None].expand(-1, -1, heads, -1)
    v = bit[:, :, None].expand(-1, -1, heads, -1)
    gate = torch.tensor(memory.log_gate, dtype=torch.float64).expand(rows, stored, heads)
    read = power_attention(k, k, v, gate, **options, chunk_size=_CHUNK, return_state=True)
    state = cast(PowerState, read.state)
    asked = torch.rand(rows, stored, generator=generator).argsort(1)[:, :_QUERIES]
    held = replace(state, s=_rounded(state.s, memory.bits), z=torch.zeros_like(state.z))
    q = key.gather(1, asked[..., None].expand(-1, -1, memory.key_dim))
    # Reading: queries follow all pairs. Their keys are 0 and add nothing to the state.
    q = q[:, :, None].expand(-1, -1, heads, -1)
    out = power_attention(q, 0 * q, 0 * q[..., :1], **options, initial_state=held).out.sum(2)
    return ((out > 0) == (bit.gather(1, asked[..., None]) > 0)).double().mean().item()


def most_possible(bits_per_stored: float) -> float:
    """Returns the accuracy that no state of so many bits for every stored bit exceeds.

    It is the a with 1 - H(a) = bits, H in bits.

    Fano's inequality: N random bits of which each is told rightly with probability a need N (1 - H(a)) bits.
    """
    low, high = 0.5, 1.0
    for _ in range(60):
        a = (low + high) / 2
        entropy = -a * log2(a) - (1 - a) * log2(1 - a) if a < 1 else 0.0
        low, high = (a, high) if 1 - entropy < bits_per_stored else (low, a)
    return low


def best_protocol(stored: int, message_bits: int) -> float:
    """Returns the highest share of right answers of any protocol for `stored` random bits and a random index (H.23).

    All protocols are tried: every map from the rows of bits to messages, each with the answers that are right most
    often. A protocol with random choices is an average of these, and so not better. There are 2**(message_bits
    2**stored) maps; ValueError for more than 2**16.
    """
    rows, messages = 1 << stored, 1 << message_bits
    if rows * message_bits > 16:
        raise ValueError(f"all maps of {rows} rows to {messages} messages are too many to be tried")
    bits = torch.arange(rows)[:, None] >> torch.arange(stored) & 1
    maps = torch.arange(messages**rows)[:, None] // messages ** torch.arange(rows) % messages
    sent = torch.nn.functional.one_hot(maps, messages)  # [maps, rows, messages]
    ones = torch.einsum("arm,ri->ami", sent.float(), bits.float())
    right = torch.maximum(ones, sent.sum(1)[..., None] - ones).sum((1, 2))
    return right.max().item() / (rows * stored)


def _signs(rows: int, count: int, width: int, generator: torch.Generator) -> Tensor:
    """Returns random entries 1 and -1, float64 [rows, count, width]."""
    return 2.0 * torch.randint(2, (rows, count, width), generator=generator).double() - 1


def _rounded(s: Tensor, bits: int) -> Tensor:
    """Returns s [B, G, D, V] rounded to 2**bits - 1 levels between the largest magnitude of its row and minus that."""
    width = s.abs().amax((1, 2, 3), keepdim=True) / (2 ** (bits - 1) - 1)
    return (s / width).round() * width
