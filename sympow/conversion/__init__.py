"""Pretrained models turned into models with power attention, and what they learn from their teachers."""

from sympow.conversion.distillation import Distillation, distill, distillation_run
from sympow.conversion.swap import parse_pattern, swap_mixers

__all__ = ["Distillation", "distill", "distillation_run", "parse_pattern", "swap_mixers"]
