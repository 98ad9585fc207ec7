"""Power attention: linear attention whose state size is chosen by one number, p."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympow import ops as ops
    from sympow.ops import DecodingState, PowerOutput, PowerState, power_attention, power_attention_step

__version__ = "0.2.0"
__all__ = ["DecodingState", "PowerOutput", "PowerState", "__version__", "power_attention", "power_attention_step"]

if not TYPE_CHECKING:  # so that a type checker still refuses names that do not exist

    def __getattr__(name: str) -> object:
        """Imports `sympow.ops` and its names at their first use, because `sympow --help` needs no torch."""
        if name != "ops" and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        ops = import_module("sympow.ops")
        return ops if name == "ops" else getattr(ops, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "ops"})
