"""Weights by name: those that a model holds, and their names here and in transformers."""

from __future__ import annotations

from torch import Tensor, nn

from sympow.models import LanguageModel


class Undrawn(LanguageModel):
    """A language model whose weights are not drawn: they are loaded, or drawn by `_init_weights`."""

    def reset_parameters(self, seed: int | None = None) -> None:
        """Keeps the weights as they are."""
        return


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Lists the parameters of a model by name, a tied head not again, and the constants saved with them."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def native_name(name: str) -> str:
    """Translates the name of a weight into that in `LanguageModel`."""
    if name == "lm_head.weight":
        return "head.weight"
    parts = name.removeprefix("model.").split(".")
    return ".".join(["blocks", parts[1], *parts[3:]] if parts[0] == "layers" else parts)
