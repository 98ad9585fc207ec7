"""What a language model is: its shape, and the mixer of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sympow.layers import check_mixer


def _with_lists(value: Any) -> Any:
    """`value` with lists for tuples, as JSON gives them back: a config equals itself after a round trip."""
    if isinstance(value, Mapping):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class MixerConfig:
    """A mixer by its name in `sympow.layers.MIXERS`, with options of its constructor (JSON values).

    Raises ValueError for a name or an option that does not exist.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_mixer(self.name, self.options)
        object.__setattr__(self, "options", _with_lists(self.options))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "options": _with_lists(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MixerConfig:
        return cls(**_known_fields(cls, data))


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2-shaped language model.

    Attributes:
        vocab_size: tokens in the vocabulary.
        d_model: width of the residual stream.
        n_layers: blocks of a mixer and an MLP.
        n_heads: query heads of every mixer; their width is d_model / n_heads unless a mixer's options give
        `head_dim`.
        mixers: a pattern repeated over the layers; of length 1 all layers are alike, longer ones make
        hybrids.
        mlp_ratio: hidden width of the MLP over d_model; 0 for blocks without one.

    Raises ValueError for sizes that are not positive and for an empty pattern.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    mixers: tuple[MixerConfig, ...] = (MixerConfig("power"),)
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "mlp_ratio"):
            value = getattr(self, name)
            least = 0 if name == "mlp_ratio" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
        object.__setattr__(self, "mixers", tuple(self.mixers))
        if not self.mixers or not all(isinstance(mixer, MixerConfig) for mixer in self.mixers):
            raise ValueError(f"mixers is a tuple of at least one MixerConfig; got {self.mixers!r}")

    def mixer(self, layer: int) -> MixerConfig:
        """The mixer of layer 0, 1, ..."""
        return self.mixers[layer % len(self.mixers)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON keeps them; `from_dict` gives back an equal config."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return values | {"mixers": [mixer.to_dict() for mixer in self.mixers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Raises ValueError for a field that is missing or unknown."""
        values = _known_fields(cls, data)
        if "mixers" in values:
            values["mixers"] = tuple(MixerConfig.from_dict(mixer) for mixer in values["mixers"])
        return cls(**values)


# name: (d_model, n_layers, n_heads). The last three are GPT-2's; see `preset` for their parameters.
PRESETS: dict[str, tuple[int, int, int]] = {
    "nano": (64, 2, 2),
    "tiny": (128, 4, 4),
    "mini": (384, 6, 6),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
}


def preset(
    name: str, vocab_size: int = 50_257, mixers: Sequence[MixerConfig] | MixerConfig = MixerConfig("power")
) -> ModelConfig:
    """A shape of `PRESETS` with a vocabulary and mixers.

    With 50,257 tokens and softmax attention "small" counts 123,654,912 parameters, "medium" 353,776,640 and
    "large" 772,721,920. They are published as 124M, 335M and 774M: the first as counted, the last with the
    1,024 learned positions that rotation replaces here, while no count of the medium shape gives 335M (354M,
    or 302M without the embedding). The gate adds 0.09% to "small", gate and data-dependent rotation together
    0.18%.
    """
    if name not in PRESETS:
        raise ValueError(f"a preset is one of {', '.join(PRESETS)}; got {name!r}")
    d_model, n_layers, n_heads = PRESETS[name]
    pattern = (mixers,) if isinstance(mixers, MixerConfig) else tuple(mixers)
    return ModelConfig(vocab_size, d_model, n_layers, n_heads, pattern)


def _known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of dataclass `cls` in `data`; refuses others by name, and missing ones."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{cls.__name__} is read from a dictionary; got {type(data).__name__}")
    entries = {entry.name: entry for entry in fields(cls)}
    unknown = _listed(name for name in data if name not in entries)
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {unknown}; it has {', '.join(entries)}")
    required = (name for name, entry in entries.items() if entry.default is entry.default_factory)
    missing = _listed(name for name in required if name not in data)
    if missing:
        raise ValueError(f"{cls.__name__} needs the field {missing}")
    return dict(data)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
