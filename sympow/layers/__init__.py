"""The sequence mixers, one file for each. All of them follow one contract (`base.Mixer`)."""

from sympow.layers.attention import AttentionMixer
from sympow.layers.auxiliary import auxiliary_losses
from sympow.layers.base import Mixer
from sympow.layers.catalogue import FLA_MIXERS, MIXERS
from sympow.layers.contract import ContractError, check_contract
from sympow.layers.linear import LinearAttention
from sympow.layers.power import PowerAttention
from sympow.layers.power_delta import PowerDeltaAttention
from sympow.layers.registry import check_mixer, make_mixer, trust_code
from sympow.layers.short_convolution import ShortConvolution
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.state import MixerState
from sympow.layers.window import WindowAttention

__all__ = [
    "FLA_MIXERS",
    "MIXERS",
    "AttentionMixer",
    "ContractError",
    "LinearAttention",
    "Mixer",
    "MixerState",
    "PowerAttention",
    "PowerDeltaAttention",
    "ShortConvolution",
    "SoftmaxAttention",
    "WindowAttention",
    "auxiliary_losses",
    "check_contract",
    "check_mixer",
    "make_mixer",
    "trust_code",
]
