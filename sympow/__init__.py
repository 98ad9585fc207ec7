"""Power attention: linear attention whose state size is chosen by one number, p."""

from sympow.ops import PowerOutput, PowerState, power_attention, power_attention_step

__version__ = "0.1.0"
__all__ = ["PowerOutput", "PowerState", "__version__", "power_attention", "power_attention_step"]
