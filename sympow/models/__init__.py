"""Language models built from a config, and generation."""

from sympow.models.bodies import BODIES
from sympow.models.config import MixerConfig, ModelConfig
from sympow.models.context import Context
from sympow.models.context_file import ContextError, load_context, save_context
from sympow.models.generation import Drawn, Generation, generate, stream
from sympow.models.lm import LanguageModel, ModelState
from sympow.models.presets import HYBRID, PRESETS, preset
from sympow.models.recall import RecallModel
from sympow.models.speculation import Drafts, ModelDrafts, NgramDrafts

__all__ = [
    "BODIES",
    "HYBRID",
    "PRESETS",
    "Context",
    "ContextError",
    "Drafts",
    "Drawn",
    "Generation",
    "LanguageModel",
    "MixerConfig",
    "ModelConfig",
    "ModelDrafts",
    "ModelState",
    "NgramDrafts",
    "RecallModel",
    "generate",
    "load_context",
    "preset",
    "save_context",
    "stream",
]
