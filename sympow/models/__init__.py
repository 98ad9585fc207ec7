"""Language models built from a config, and generation."""

from sympow.models.config import PRESETS, MixerConfig, ModelConfig, preset
from sympow.models.generation import Drawn, Generation, generate, stream
from sympow.models.lm import LanguageModel, ModelState
from sympow.models.recall import RecallModel

__all__ = [
    "PRESETS",
    "Drawn",
    "Generation",
    "LanguageModel",
    "MixerConfig",
    "ModelConfig",
    "ModelState",
    "RecallModel",
    "generate",
    "preset",
    "stream",
]
