"""The blocks of a model for one of vLLM's ranks, and the hooks that refuse models that vLLM cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from vllm.config import ModelConfig as EngineModel
from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

from sympow.integrations.vllm.attention import head_size
from sympow.integrations.vllm.inputs import gate_of, input_state, keeps_cache, keeps_input
from sympow.integrations.vllm.pages import keeps_state, page_of
from sympow.integrations.vllm.ranks import rank_config
from sympow.layers import trust_code
from sympow.models import ModelConfig
from sympow.models.bodies import BODIES
from sympow.models.bodies.base import PreNormBlock


def trusted_config(model_config: Any) -> ModelConfig:
    """Returns the model in vLLM's `ModelConfig`. With `trust_remote_code`, modules of mixers are imported.

    Raises ValueError for a mixer that is named by import path without it; see `sympow.layers.trust_code`.
    """
    with trust_code(bool(model_config.trust_remote_code)):
        return model_config.hf_config.model_config


def rank_blocks(config: ModelConfig, ranks: int) -> list[PreNormBlock]:
    """Makes the blocks of a model with the heads of one of several ranks, on the meta device.

    Args:
        config: the model.
        ranks: how many share a layer.

    Raises ValueError for bodies and mixers that vLLM cannot serve.
    """
    if not issubclass(BODIES[config.body], PreNormBlock):
        raise ValueError(f"vLLM serves the bodies gpt2 and llama; got {config.body!r}")
    body = cast(Callable[[ModelConfig, int], PreNormBlock], BODIES[config.body])
    shared = rank_config(config, ranks)
    with torch.device("meta"):
        blocks = [body(shared, layer) for layer in range(config.n_layers)]
    for layer, block in enumerate(blocks):
        if not keeps_state(block.mixer) and not keeps_cache(block.mixer):
            raise ValueError(
                "vLLM serves mixers with a state of constant size, softmax attention and windows; "
                f"got {config.mixer(layer).name!r} in layer {layer}"
            )
    return blocks


def page_size(blocks: Sequence[PreNormBlock], device: str, dtype: torch.dtype) -> int:
    """Returns the bytes of the largest state of a layer. All layers have pages of this size.

    Args:
        blocks: the result of `rank_blocks`.
        device: the device of the model.
        dtype: the dtype of the weights.

    Raises ValueError if no layer has a state.
    """
    sizes, options = [0], cast(dict[str, Any], {"device": device, "dtype": dtype})
    for block in blocks:
        mixer: Any = block.mixer
        if not keeps_cache(mixer):
            sizes.append(page_of(mixer.init_state(1, **options).with_all_room()).size)
        elif keeps_input(mixer):
            sizes.append(page_of(input_state(mixer, **options)).size)
    if max(sizes) == 0:
        raise ValueError("vLLM serves models of which a layer keeps a state; this one has none")
    return max(sizes)


class SympowModelConfig(VerifyAndUpdateConfig):
    """Refuses configurations that cannot be served, and tells vLLM the heads of softmax attention.

    vLLM calls both methods before it makes its processes.
    """

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raises ValueError for bodies, mixers and options that the model cannot be served with."""
        if vllm_config.num_speculative_tokens:
            raise ValueError("models of sympow cannot take back drafted tokens in vLLM: leave speculative_config out")
        if vllm_config.lora_config is not None:
            raise ValueError("models of sympow take no LoRA in vLLM: merge the adapter, and leave enable_lora out")
        model = vllm_config.model_config
        if model.quantization is not None:
            raise ValueError(f"models of sympow are served in float32 or bfloat16; got {model.quantization=}")
        blocks = rank_blocks(trusted_config(model), vllm_config.parallel_config.tensor_parallel_size)
        page_size(blocks, current_platform.device_type, model.dtype)
        kept, mixers = vllm_config.cache_config.cache_dtype, [cast(Any, block.mixer) for block in blocks]
        if is_quantized_kv_cache(kept) and any(keeps_cache(mixer) and gate_of(mixer) is not None for mixer in mixers):
            raise ValueError(
                f"the keys of gated softmax attention hold sums, which 8 bits round; got cache_dtype={kept!r}"
            )

    @staticmethod
    def verify_and_update_model_config(model_config: EngineModel) -> None:
        """Sets the heads from which vLLM computes page sizes. Pages of caches and of states have the same size."""
        mixers: list[Any] = [block.mixer for block in rank_blocks(trusted_config(model_config), 1)]
        heads = [(mixer.n_kv_heads, head_size(mixer)) for mixer in mixers if keeps_cache(mixer)]
        if heads:
            n_kv_heads, size = max(heads, key=prod)
            model_config.model_arch_config.total_num_kv_heads = n_kv_heads
            model_config.model_arch_config.head_size = size
