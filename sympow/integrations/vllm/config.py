"""The hooks of a model that vLLM calls before it makes its processes."""

from __future__ import annotations

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from sympow.integrations.vllm.attention import keeps_cache
from sympow.integrations.vllm.blocks import common_page, rank_blocks, trusted_config


class SympowModelConfig(VerifyAndUpdateConfig):
    """Refuses configurations that cannot be served, and tells vLLM the heads of softmax attention."""

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
        common_page(blocks, current_platform.device_type, model.dtype)

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Sets the heads from which vLLM computes page sizes. Pages of caches and of states have the same size."""
        for block in rank_blocks(trusted_config(model_config), 1):
            if keeps_cache(block.mixer):
                model_config.model_arch_config.total_num_kv_heads = block.mixer.n_kv_heads
                model_config.model_arch_config.head_size = block.mixer.head_dim
                return
