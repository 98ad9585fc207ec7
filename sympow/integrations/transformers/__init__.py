"""Models of sympow in Hugging Face transformers.

`import sympow.integrations.transformers` registers `SympowConfig`, `SympowModel` and `SympowForCausalLM` with
AutoConfig, AutoModel and AutoModelForCausalLM under the model type "sympow". It needs the extra
`transformers`.
"""

from sympow.packages import from_extra as _from_extra

with _from_extra("transformers", "models in Hugging Face transformers need transformers"):
    import transformers as _transformers
if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"sympow works with transformers 5.17 and later; found {_transformers.__version__}")

from sympow.integrations.transformers.cache import SympowCache, SympowCacheLayer
from sympow.integrations.transformers.configuration import SympowConfig
from sympow.integrations.transformers.contexts import LoadedContext, load_context, save_context
from sympow.integrations.transformers.folders import from_transformers, to_native, to_transformers
from sympow.integrations.transformers.modeling import SympowForCausalLM, SympowModel, SympowPreTrainedModel

__all__ = [
    "LoadedContext",
    "SympowCache",
    "SympowCacheLayer",
    "SympowConfig",
    "SympowForCausalLM",
    "SympowModel",
    "SympowPreTrainedModel",
    "from_transformers",
    "load_context",
    "register",
    "save_context",
    "to_native",
    "to_transformers",
]


def register() -> None:
    """Registers the classes with the Auto classes. The import calls this function; further calls have no effect."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    AutoConfig.register(SympowConfig.model_type, SympowConfig, exist_ok=True)
    AutoModel.register(SympowConfig, SympowModel, exist_ok=True)
    AutoModelForCausalLM.register(SympowConfig, SympowForCausalLM, exist_ok=True)
    # Here the Trainer looks whether it shifts the labels of a loss that it computes itself, as in label smoothing.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SympowConfig.model_type] = SympowForCausalLM.__name__


register()
