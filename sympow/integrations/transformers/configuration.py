"""The configuration of a model of sympow as transformers keeps it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from sympow.layers.registry import UntrustedCodeError
from sympow.models import ModelConfig, preset


class SympowConfig(PreTrainedConfig):
    """Wraps a `ModelConfig`, whose fields are stored under "model" in config.json.

    Args:
        model: a `ModelConfig`, or the result of `ModelConfig.to_dict`; None: the preset "mini" over bytes.
        use_cache: whether a forward pass in evaluation mode returns a cache if its argument `use_cache` is None.
        pad_token_id: as in transformers.
        bos_token_id: as in transformers.
        eos_token_id: as in transformers.

    Other keyword arguments are those of `transformers.PreTrainedConfig`. `vocab_size` and `tie_word_embeddings`
    replace the values in `model`.

    A config.json may name mixers by import path. Such a model is only checked when it is made, because the check would
    import the modules of the mixers; `sympow.layers.trust_code` says who may do this.

    Raises ValueError for a model that `ModelConfig` refuses, and for other fields of `ModelConfig` outside of `model`,
    which transformers would keep without an effect.
    """

    model_type = "sympow"
    # Without annotation: a dataclass would take it as a field.
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    model: Any = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        own = {entry.name for entry in fields(ModelConfig)} - {"vocab_size"}
        if misplaced := sorted(own & kwargs.keys()):
            where = "SympowConfig(model=ModelConfig(...))"
            raise ValueError(f"{misplaced[0]} is a field of the model, as in {where}; got it outside")
        model = preset("mini", vocab_size=256) if self.model is None else self.model
        if isinstance(model, ModelConfig):
            self.model = model.to_dict()
        else:
            try:
                self.model = ModelConfig.from_dict(model).to_dict()
            except UntrustedCodeError:
                self.model = dict(model)
        super().__post_init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """Returns the model as sympow describes it."""
        return ModelConfig.from_dict(self.model)

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens in the vocabulary."""
        return self.model["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.model = {**self.model, "vocab_size": value}

    @property
    def tie_word_embeddings(self) -> bool:
        """Returns whether the head has the weights of the embedding."""
        return self.model["tie_embeddings"]

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, value: bool) -> None:
        self.model = {**self.model, "tie_embeddings": value}

    @property
    def hidden_size(self) -> int:
        """Returns the width of the model."""
        return self.model["d_model"]

    @property
    def num_hidden_layers(self) -> int:
        """Returns the number of blocks."""
        return self.model["n_layers"]

    @property
    def num_attention_heads(self) -> int:
        """Returns the number of heads."""
        return self.model["n_heads"]
