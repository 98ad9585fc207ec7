"""A mixer of sympow in Zoology's harness (github.com/HazyResearch/zoology). The harness needs no changes.

A config of the harness names the mixer by its import path:

    ModelConfig(
        sequence_mixer=ModuleConfig(
            name="sympow.integrations.zoology.SequenceMixer",
            kwargs={"mixer": "power", "n_heads": 2, "options": {"p": 2}},
        ),
        ...
    )

Nothing of the harness is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sympow.layers import auxiliary_losses, make_mixer


class SequenceMixer(nn.Module):
    """Wraps a mixer as a sequence mixer of the harness.

    The harness draws the weights of all linear layers again with `model.apply(...)`. This module keeps the values that
    its mixer drew: a function that is passed to `apply` is called on the mixer's modules, but then the values of the
    weights are restored. To change the weights with a function, call `apply` of the attribute `mixer`.

    Args:
        d_model: d, the width of the input and of the output; the harness gives it.
        layer_idx: the number of the layer; the harness gives it. See `Mixer.set_layer`.
        mixer: the name of a mixer, as in `MixerConfig`, or the import path of one.
        n_heads: its heads.
        options: its options.

    Raises ValueError for a mixer or an option that does not exist, and for a mixer that reads tokens, which the harness
    does not give.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int | None = None,
        *,
        mixer: str = "power",
        n_heads: int = 1,
        options: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.layer_idx = layer_idx
        self.mixer = make_mixer(mixer, d_model, n_heads, options or {})
        self.mixer.set_layer(layer_idx or 0)
        if self.mixer.reads_tokens:
            raise ValueError(f"the {mixer} mixer reads tokens, and the harness gives vectors only")
        self._extra: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Mixes x [B, T, d]: [B, T, d]."""
        with auxiliary_losses() as extra:
            y = self.mixer(x)
        self._extra = sum(extra, 0.0)
        return y

    def get_auxiliary_loss(self) -> Tensor | float:
        """Returns what the mixer's last forward adds to the loss; the harness asks every module for it."""
        return self._extra

    def state_size(self, batch_size: int = 1, sequence_length: int = 2048) -> int:
        """Counts the elements of a sequence's state after `sequence_length` tokens, whatever `batch_size` is."""
        return self.mixer.state_size(sequence_length)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls `fn` on every module, as all modules of torch do, and puts back weights that it changed in place."""
        before = [(parameter, parameter.detach().clone()) for parameter in self.parameters()]
        super().apply(fn)
        with torch.no_grad():
            for parameter, value in before:
                # Those alone that changed: a backward pass needs the others as they are.
                alike = (parameter.shape, parameter.dtype, parameter.device) == (value.shape, value.dtype, value.device)
                if alike and not torch.equal(parameter, value):
                    parameter.copy_(value)
        return self
