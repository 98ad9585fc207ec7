"""The language models of sympow as a model of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.platforms import current_platform

from sympow.integrations.transformers.modeling import native_name
from sympow.integrations.transformers.weight_files import check_weight
from sympow.integrations.vllm.attention import CachedAttention
from sympow.integrations.vllm.blocks import page_size, rank_blocks, trusted_config
from sympow.integrations.vllm.inputs import keeps_cache
from sympow.integrations.vllm.ranks import rank_part
from sympow.integrations.vllm.states import PagedMixer
from sympow.models.bodies import BODIES
from sympow.models.bodies.base import PreNormBlock


class ServedBlock(nn.Module):
    """Computes a block with this rank's heads on tokens of many requests.

    Args:
        block: the block.
        size: the bytes of a page of the engine.
        name: the name of the layer.
        vllm_config: the configuration of the engine.
    """

    def __init__(self, block: PreNormBlock, size: int, name: str, vllm_config: VllmConfig):
        super().__init__()
        self.block = block
        mixer: Any = block.mixer
        self.mix = (CachedAttention if keeps_cache(mixer) else PagedMixer)(mixer, size, name, vllm_config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Maps tokens [N, d] at positions [N] to [N, d]."""
        x = x + tensor_model_parallel_all_reduce(self.mix(self.block.mixer_norm(x), positions))
        return x + tensor_model_parallel_all_reduce(self.block.mlp(x)) if self.block.has_mlp else x


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class SympowForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """Computes a language model of sympow in vLLM, with the body gpt2 or llama.

    A mixer must have a state of constant size, or be softmax attention or a window. The model declares itself a hybrid,
    even if it has no layer of softmax attention. Then vLLM chooses the size of its pages.

    Args:
        vllm_config: the configuration of the engine.
        prefix: the prefix of the layers' names.

    Raises ValueError for other bodies and mixers. `SympowModelConfig` refuses these earlier.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = trusted_config(vllm_config.model_config)
        self.source = str(vllm_config.model_config.model)
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.d_model)
        normed = BODIES[config.body].norms_embedding and config.embedding_norm
        self.embedding_norm = BODIES[config.body].norm(config) if normed else None
        blocks, device = rank_blocks(config, get_tensor_model_parallel_world_size()), torch.get_default_device()
        size = _page_size(vllm_config)
        self.blocks = nn.ModuleList(
            ServedBlock(block.to_empty(device=device), size, f"{prefix}blocks.{layer}.mixer", vllm_config)
            for layer, block in enumerate(blocks)
        )
        self.final_norm = BODIES[config.body].norm(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.d_model)
        if config.tie_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.embedding)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings [N, d] of tokens [N], before the norm of the embedding."""
        return self.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Computes hidden states [N, d] of N tokens of many requests, at their positions [N]."""
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, positions)
        return self.final_norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Returns logits [N, vocab_size] of hidden states [N, d]; vLLM may return None on some ranks."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads this rank's part of every weight, by names in transformers. Returns the names of loaded weights.

        Raises ValueError for a weight that the model does not have, of another shape, of a dtype from which a cast
        would lose something, or with values that are not finite.
        """
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        for name, tensor in own.items():
            if name.endswith("qkv_start"):
                tensor.zero_()  # older weights lack it: their biases include the initial value
        tables = {"embedding.weight": self.embedding, "head.weight": self.lm_head}
        loaded = set()
        for theirs, whole in weights:
            check_weight(whole, theirs, self.source)
            name, part, served = native_name(theirs), whole, None
            if name in tables:
                table = tables[name]
                self._check_shape(theirs, whole, (table.org_vocab_size, table.embedding_dim))
                table.weight_loader(table.weight, whole)
                loaded.add("lm_head.weight" if name == "head.weight" else name)
                continue
            if name.startswith("blocks."):
                _, layer, inner = name.split(".", 2)
                name = f"blocks.{layer}.block.{inner}"
                served = cast(ServedBlock, self.blocks[int(layer)]) if name in own else None
            if name not in own:
                raise ValueError(f"{self.source} cannot be read: its weight {theirs} is not one of the model")
            if served is not None and whole.ndim == own[name].ndim:
                part = rank_part(inner, whole, own[name], served.block, rank, ranks)
            self._check_shape(theirs, part, own[name].shape)
            own[name].data.copy_(part)
            loaded.add(name)
        return loaded

    def _check_shape(self, key: str, weight: Tensor, wanted: Sequence[int]) -> None:
        """Raises ValueError for a weight of another shape, of which a copy could be repeated along an axis."""
        if tuple(weight.shape) != tuple(wanted):
            wrong = f"its weight {key} has shape {list(weight.shape)}, the model needs {list(wanted)}"
            raise ValueError(f"{self.source} cannot be read: {wrong}")

    def get_mamba_state_copy_funcs(self, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """Tells vLLM that a page is copied as a whole."""
        return {each: (get_temporal_copy_spec,) for each in mamba_types}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of a page."""
        return ((_page_size(vllm_config),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Returns the dtype of a page, int8."""
        return (torch.int8,)


def _page_size(vllm_config: VllmConfig) -> int:
    """Returns the bytes of a page of this rank."""
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    return page_size(rank_blocks(trusted_config(model), ranks), current_platform.device_type, model.dtype)
