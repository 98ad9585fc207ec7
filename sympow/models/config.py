"""What a language model is: its body, its shape, and the mixer of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from sympow.fields import is_integer, is_number, read_fields, with_lists
from sympow.layers import check_mixer
from sympow.layers.registry import check_complete, check_trusted, fill_options

Body = Literal["gpt2", "llama", "rwkv7"]

# The bodies that have a field; every body has those that are not listed.
_FIELDS_OF: dict[str, tuple[Body, ...]] = {
    "mlp_ratio": ("gpt2", "rwkv7"),
    "mlp_hidden": ("llama",),
    "norm_eps": ("llama",),
    "embedding_norm": ("gpt2",),
}


@dataclass(frozen=True)
class MixerConfig:
    """Names a mixer by its name in `sympow.layers.MIXERS`, with options of its constructor (JSON values).

    Raises ValueError for a name or an option that does not exist, and for a value of another type than the option's.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_mixer(self.name, self.options)
        object.__setattr__(self, "options", with_lists(self.options))

    def to_dict(self) -> dict[str, Any]:
        """Gives plain values only, as JSON keeps them."""
        return {"name": self.name, "options": with_lists(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MixerConfig:
        """Reads what `to_dict` gives.

        Raises ValueError for a field that is missing or unknown, UntrustedCodeError for a mixer whose module is
        imported within `sympow.layers.trust_code` only.
        """
        values = read_fields(cls, data, "mixer")
        check_trusted(values.get("name"), values.get("options"))
        return cls(**values)


@dataclass(frozen=True)
class ModelConfig:
    """Describes a language model: a body (docs/guides/bodies.md), its sizes, and the mixers in it.

    Attributes:
        vocab_size: tokens in the vocabulary.
        d_model: width of the residual stream.
        n_layers: blocks.
        n_heads: number of query heads of every mixer; their width is d_model / n_heads unless a mixer's options give
            `head_dim`.
        mixers: a pattern that is repeated over the layers. With a pattern of length 1 all layers have the same mixer;
            longer patterns make hybrids.
        mlp_ratio: hidden width of the MLP over d_model; 0 for blocks without one. Not in the llama body.
        body: "gpt2", "llama" or "rwkv7": norms, MLP, and the other parts around the mixers.
        n_kv_heads: key/value heads of every mixer that has such heads and whose options do not name them.
            None leaves the choice to the mixers.
        mlp_hidden: hidden width of the MLP of the llama body; 0 for blocks without one. None takes 8/3 of
            d_model, rounded up to a multiple of 64: as many weights as `mlp_ratio` 4 gives the other bodies.
        norm_eps: what the RMSNorms of the llama body add to the mean square.
        tie_embeddings: whether the head is the embedding. If not, it has weights of its own.
        embedding_norm: whether the gpt2 body has a norm after the embedding.

    Raises ValueError for sizes out of range, an empty pattern, a mixer without an option that it needs, and a field
    that the body does not have.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    mixers: tuple[MixerConfig, ...] = (MixerConfig("power"),)
    mlp_ratio: int = 4
    body: Body = "gpt2"
    n_kv_heads: int | None = None
    mlp_hidden: int | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    embedding_norm: bool = True

    def __post_init__(self) -> None:
        if self.body not in get_args(Body):
            raise ValueError(f"body is one of {', '.join(get_args(Body))}; got {self.body!r}")
        for entry in fields(self):
            if not self.has(entry.name) and getattr(self, entry.name) != entry.default:
                raise ValueError(self._lacks(self.body, entry.name))
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "mlp_ratio", "n_kv_heads", "mlp_hidden"):
            value = getattr(self, name)
            least = 0 if name.startswith("mlp") else 1
            if value is None and name in ("n_kv_heads", "mlp_hidden"):
                continue
            if not is_integer(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
            if value >= 2**63:
                raise ValueError(f"{name} must be below 2**63; got {value}")
        if not is_number(self.norm_eps) or not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be a number between 0 and 1; got {self.norm_eps!r}")
        for name in ("tie_embeddings", "embedding_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false; got {getattr(self, name)!r}")
        mixers = tuple(self.mixers) if isinstance(self.mixers, list | tuple) else ()
        if not mixers or not all(isinstance(mixer, MixerConfig) for mixer in mixers):
            raise ValueError(f"mixers is a tuple of at least one MixerConfig; got {self.mixers!r}")
        object.__setattr__(self, "mixers", mixers)
        for mixer in mixers:
            check_complete(mixer.name, mixer.options)
        if self.n_kv_heads is not None and all(self._filled(m, n_kv_heads=1) == m.options for m in self.mixers):
            names = ", ".join(dict.fromkeys(mixer.name for mixer in self.mixers))
            raise ValueError(f"n_kv_heads = {self.n_kv_heads} reaches none of the mixers: {names}")

    @property
    def mlp_width(self) -> int:
        """Returns the hidden width of the MLP; 0 if the blocks have none."""
        if self.body != "llama":
            return self.mlp_ratio * self.d_model
        return -(-8 * self.d_model // (3 * 64)) * 64 if self.mlp_hidden is None else self.mlp_hidden

    def has(self, field: str) -> bool:
        """Tells whether the body has a field."""
        return self.body in _FIELDS_OF.get(field, (self.body,))

    def mixer(self, layer: int) -> MixerConfig:
        """Gives the mixer of layer 0, 1, ..."""
        return self.mixers[layer % len(self.mixers)]

    def mixer_options(self, layer: int) -> dict[str, Any]:
        """Gives the options of the mixer of a layer, with those that the model gives all its mixers.

        The model gives `n_kv_heads`, and in the rwkv7 body `depth`, from 0 for the first layer to 1 for the last. The
        mixer's own options take precedence.
        """
        given: dict[str, Any] = {} if self.n_kv_heads is None else {"n_kv_heads": self.n_kv_heads}
        if self.body == "rwkv7":
            given["depth"] = layer / max(1, self.n_layers - 1)
        return self._filled(self.mixer(layer), **given)

    def to_dict(self) -> dict[str, Any]:
        """Gives the fields of the body as plain values, as JSON keeps them; `from_dict` gives back an equal config."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if self.has(entry.name)}
        # The body comes first, because the other fields depend on it.
        return {"body": self.body} | values | {"mixers": [mixer.to_dict() for mixer in self.mixers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Reads the result of `to_dict`.

        Raises ValueError for a field that is missing or unknown, or that the body does not have.
        """
        values = read_fields(cls, data, "model")
        body = values.get("body", "gpt2")
        for name in values:
            if body in get_args(Body) and body not in _FIELDS_OF.get(name, (body,)):
                raise ValueError(cls._lacks(body, name))
        if "mixers" in values:
            if not isinstance(values["mixers"], list | tuple):
                raise TypeError(f"the mixers of a model config must be a list, got {values['mixers']!r}")
            values["mixers"] = tuple(MixerConfig.from_dict(mixer) for mixer in values["mixers"])
        return cls(**values)

    @classmethod
    def _lacks(cls, body: Body, name: str) -> str:
        has = ", ".join(entry.name for entry in fields(cls) if body in _FIELDS_OF.get(entry.name, (body,)))
        return f"the {body} body has no field {name!r}; it has {has}"

    @staticmethod
    def _filled(mixer: MixerConfig, **given: Any) -> dict[str, Any]:
        return fill_options(mixer.name, mixer.options, given)
