"""Power attention, its feature maps, rotary positions, and the costs of all of them."""

from sympow.ops.decoding_state import DecodingState
from sympow.ops.delta_rule import power_delta_rule, power_delta_rule_step
from sympow.ops.delta_types import DeltaOutput
from sympow.ops.fused.rotation import rotate, rotate_alike, rotate_heads
from sympow.ops.power import power_attention, power_attention_step, prefers_tail
from sympow.ops.rotary import rotary_frequencies, rotary_positions
from sympow.ops.types import OutOfRangeError, PowerOutput, PowerState, Rotation

__all__ = [
    "DecodingState",
    "DeltaOutput",
    "OutOfRangeError",
    "PowerOutput",
    "PowerState",
    "Rotation",
    "power_attention",
    "power_attention_step",
    "power_delta_rule",
    "power_delta_rule_step",
    "prefers_tail",
    "rotary_frequencies",
    "rotary_positions",
    "rotate",
    "rotate_alike",
    "rotate_heads",
]
