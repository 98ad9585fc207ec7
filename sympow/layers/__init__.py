"""What holds weights: the sequence mixers, one file each, under one contract (`base.Mixer`)."""

from sympow.layers.base import AttentionMixer, Mixer, MixerState
from sympow.layers.linear import LinearAttention
from sympow.layers.power import PowerAttention
from sympow.layers.registry import MIXERS, check_mixer, make_mixer
from sympow.layers.short_convolution import ShortConvolution
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.window import WindowAttention

__all__ = [
    "MIXERS",
    "AttentionMixer",
    "LinearAttention",
    "Mixer",
    "MixerState",
    "PowerAttention",
    "ShortConvolution",
    "SoftmaxAttention",
    "WindowAttention",
    "check_mixer",
    "make_mixer",
]
