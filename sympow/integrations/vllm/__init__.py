"""Models of sympow in vLLM, as a plugin.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. From then on it
serves the folders that `sympow export` writes. docs/guides/vllm.md tells what works.
"""

import logging


def register() -> None:
    """Registers the model and its configuration with vLLM. Further calls have no effect.

    If this is not possible, a warning is logged, and vLLM can serve other models.
    """
    try:
        from vllm.model_executor.models import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        import sympow.integrations.transformers  # noqa: F401  # which registers the configuration
        from sympow.integrations.vllm.blocks import SympowModelConfig
    except (ImportError, AttributeError) as error:  # no vLLM, or one of another version
        logging.getLogger(__name__).warning("vLLM cannot serve models of sympow: %s", error)
        return
    ModelRegistry.register_model("SympowForCausalLM", "sympow.integrations.vllm.model:SympowForCausalLM")
    MODELS_CONFIG_MAP["SympowForCausalLM"] = SympowModelConfig
