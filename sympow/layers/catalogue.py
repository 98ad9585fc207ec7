"""The mixers of this package, entered in the registry by their names."""

from __future__ import annotations

from sympow.layers.base_conv import BaseConv
from sympow.layers.blocked_window import BlockedWindowAttention
from sympow.layers.fla import GLA, DeltaNet, GatedDeltaNet, Mamba2
from sympow.layers.h3 import H3
from sympow.layers.hyena import Hyena
from sympow.layers.input_dependent_conv import AutocorrelationConv, ProgrammaticConv
from sympow.layers.linear import LinearAttention
from sympow.layers.liquid_s4 import LiquidS4
from sympow.layers.long_convolution import LongConvolution
from sympow.layers.power import PowerAttention
from sympow.layers.power_delta import PowerDeltaAttention
from sympow.layers.registry import FLA_MIXERS, MIXERS
from sympow.layers.retnet import RetNet
from sympow.layers.rwkv4 import RWKV4
from sympow.layers.rwkv7 import RWKV7
from sympow.layers.selection import SelectiveAttention
from sympow.layers.short_convolution import ShortConvolution
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.window import WindowAttention

MIXERS.update(
    {
        "power": PowerAttention,
        "softmax": SoftmaxAttention,
        "linear": LinearAttention,
        "window": WindowAttention,
        "power_delta": PowerDeltaAttention,
        "short_convolution": ShortConvolution,
        "long_convolution": LongConvolution,
        "base_conv": BaseConv,
        "hyena": Hyena,
        "h3": H3,
        "liquid_s4": LiquidS4,
        "rwkv4": RWKV4,
        "rwkv7": RWKV7,
        "retnet": RetNet,
        "blocked_window": BlockedWindowAttention,
        "programmatic_conv": ProgrammaticConv,
        "autocorrelation_conv": AutocorrelationConv,
        "selection": SelectiveAttention,
    }
)

# From flash-linear-attention: they need the extra `fla` and a GPU.
FLA_MIXERS.update(
    {
        "gla": GLA,
        "delta_net": DeltaNet,
        "gated_delta_net": GatedDeltaNet,
        "mamba2": Mamba2,
    }
)
