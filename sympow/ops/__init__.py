"""Power attention, its feature maps, rotary positions, and the costs of all of them."""

from sympow.ops.decoding_state import DecodingState
from sympow.ops.power import power_attention, power_attention_step, prefers_tail
from sympow.ops.rotary import Rotation, rotary_frequencies, rotary_positions, rotate, rotate_alike, rotate_heads
from sympow.ops.types import OutOfRangeError, PowerOutput, PowerState

__all__ = [
    "DecodingState",
    "OutOfRangeError",
    "PowerOutput",
    "PowerState",
    "Rotation",
    "power_attention",
    "power_attention_step",
    "prefers_tail",
    "rotary_frequencies",
    "rotary_positions",
    "rotate",
    "rotate_alike",
    "rotate_heads",
]
