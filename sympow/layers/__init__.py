"""What holds weights: the sequence mixers, one file each, under one contract (`base.Mixer`)."""

from sympow.layers.base import Mixer, MixerState
from sympow.layers.linear import LinearAttention
from sympow.layers.power import PowerAttention
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.window import WindowAttention

MIXERS: dict[str, type[Mixer]] = {
    "power": PowerAttention,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "window": WindowAttention,
}

__all__ = [
    "MIXERS",
    "LinearAttention",
    "Mixer",
    "MixerState",
    "PowerAttention",
    "SoftmaxAttention",
    "WindowAttention",
]
