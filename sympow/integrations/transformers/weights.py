"""The weights of a model by name, and the mapping of names between transformers and this package."""

from __future__ import annotations

from torch import Tensor, nn


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Lists the parameters and buffers of a model by name. A tied head is not listed a second time."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def native_name(name: str) -> str:
    """Translates the name of a weight into that in `LanguageModel`."""
    if name == "lm_head.weight":
        return "head.weight"
    parts = name.removeprefix("model.").split(".")
    return ".".join(["blocks", parts[1], *parts[3:]] if parts[0] == "layers" else parts)


def is_loaded(tensor: Tensor) -> bool:
    """Returns whether transformers has read a weight from a file."""
    return getattr(tensor, "_is_hf_initialized", False)
