"""Pretrained models of transformers, and of GGUF files, as native models with the same function."""

from sympow.integrations.transformers.pretrained.loading import Pretrained, load_pretrained

__all__ = ["Pretrained", "load_pretrained"]
