"""The sequence mixers, one file for each. All of them follow one contract (`base.Mixer`).

Names are imported at their first use, because a program needs few of the mixers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympow.layers.attention import AttentionMixer
    from sympow.layers.auxiliary import auxiliary_losses
    from sympow.layers.base import Mixer
    from sympow.layers.contract import ContractError, check_contract
    from sympow.layers.hybrid_heads import HybridHeads
    from sympow.layers.linear import LinearAttention
    from sympow.layers.power import PowerAttention
    from sympow.layers.power_delta import PowerDeltaAttention
    from sympow.layers.registry import FLA_MIXERS, MIXERS, check_mixer, make_mixer, trust_code
    from sympow.layers.short_convolution import ShortConvolution
    from sympow.layers.softmax import SoftmaxAttention
    from sympow.layers.state import MixerState
    from sympow.layers.window import WindowAttention

__all__ = [
    "FLA_MIXERS",
    "MIXERS",
    "AttentionMixer",
    "ContractError",
    "HybridHeads",
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

_FILES = {
    "attention": ("AttentionMixer",),
    "auxiliary": ("auxiliary_losses",),
    "base": ("Mixer",),
    "contract": ("ContractError", "check_contract"),
    "hybrid_heads": ("HybridHeads",),
    "linear": ("LinearAttention",),
    "power": ("PowerAttention",),
    "power_delta": ("PowerDeltaAttention",),
    "registry": ("FLA_MIXERS", "MIXERS", "check_mixer", "make_mixer", "trust_code"),
    "short_convolution": ("ShortConvolution",),
    "softmax": ("SoftmaxAttention",),
    "state": ("MixerState",),
    "window": ("WindowAttention",),
}

if not TYPE_CHECKING:  # so that a type checker still refuses names that do not exist

    def __getattr__(name: str) -> object:
        """Imports a public name from its file."""
        for file, names in _FILES.items():
            if name in names:
                found = globals()[name] = getattr(import_module(f"sympow.layers.{file}"), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
