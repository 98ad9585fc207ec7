"""Compares a config with the shapes of weights in a file, before a model of this config takes memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sympow.models.bodies import BODIES, Block
from sympow.models.config import ModelConfig

_SIZES = ("head_dim", "value_dim", "n_kv_heads")  # options of mixers that are sizes of weights


def check_shapes(config: ModelConfig, found: Mapping[str, Sequence[int]]) -> None:
    """Raises ValueError if a model would be larger than the weights that are to be loaded into it.

    Only the weights of the first layers are compared, one for each mixer of the pattern, and none that the file lacks:
    loading them finds all other differences.

    Args:
        config: the config of the model.
        found: the shapes of the weights, by their names in `LanguageModel.state_dict`.
    """
    layers = {name.split(".")[1] for name in found if name.startswith("blocks.")}
    if config.n_layers > len(layers):
        raise ValueError(f"the config has {config.n_layers:,} layers, the weights are of {len(layers):,}")
    largest = max((size for shape in found.values() for size in shape), default=0)
    for name, value in _sizes(config):
        if value > largest:
            raise ValueError(f"the config has {name} = {value:,}, and no axis of a weight is longer than {largest:,}")
    table = config.vocab_size, config.d_model
    expected = {"embedding.weight": table, "head.weight": table}
    body: Callable[[ModelConfig, int], Block] = BODIES[config.body]
    for name, shape in expected.items():
        _compare(name, shape, found)
    with torch.device("meta"):
        blocks = [body(config, layer) for layer in range(min(config.n_layers, len(config.mixers)))]
    for layer, block in enumerate(blocks):
        for name, tensor in block.state_dict().items():
            _compare(f"blocks.{layer}.{name}", tuple(tensor.shape), found)


def _compare(name: str, shape: tuple[int, ...], found: Mapping[str, Sequence[int]]) -> None:
    if name in found and tuple(found[name]) != shape:
        raise ValueError(f"{name!r} has shape {list(found[name])}, the model needs {list(shape)}")


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    yield "n_heads", config.n_heads
    for mixer in config.mixers:
        options: Any = mixer.options
        while isinstance(options, Mapping):
            yield from ((name, options[name]) for name in _SIZES if isinstance(options.get(name), int))
            options = options.get("options")
