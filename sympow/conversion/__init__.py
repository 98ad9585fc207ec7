"""Turns pretrained models into models with power attention, and trains these on their teachers."""

from sympow.conversion.distillation import Distillation, distill, distillation_run
from sympow.conversion.swap import parse_pattern, swap_mixers

__all__ = ["Distillation", "distill", "distillation_run", "parse_pattern", "swap_mixers"]
