"""The states of layers in vLLM's pages. A page contains all tensors of one request's state in one layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CompilationConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from sympow.integrations.vllm.pages import DecodingPart, Part, page_of, parts_of, step_on_pages
from sympow.layers import MixerState
from sympow.layers.base import Mixer


@dataclass
class StateMetadata:
    """Holds what layers need to know of a batch: its parts."""

    parts: list[Part]


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Finds the parts of a batch.

    A batch whose requests read one token each is one part, in tensors that stay where they are. So vLLM can replay a
    CUDA graph of such a step.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._decoding = DecodingPart(self.vllm_config.scheduler_config.max_num_seqs, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateMetadata:
        """Collects the requests of a batch in parts, by the number of tokens that they read.

        `common_prefix_len` and `fast_build` are not used.
        """
        batch = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode)
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        if batch.max_query_len == 1 and batch.num_reqs <= len(self._decoding.pages):
            part = self._decoding.of(table[:, 0], batch.seq_lens, starts[-1] - starts[0], batch.num_reqs)
            return StateMetadata([part])
        return StateMetadata(parts_of(starts, table[:, 0], batch.seq_lens))


class StateBackend(AttentionBackend):
    """Names the builder of the metadata. The layers compute themselves."""

    @staticmethod
    def get_name() -> str:
        """Returns the name of the backend."""
        return "SYMPOW_STATES"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """Returns the class that builds the metadata."""
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Returns True: vLLM treats the layers as state space models."""
        return True


class PagedStates(MambaBase):
    """Steps states of constant size on vLLM's pages.

    The states have the same tensors as in `sympow generate`. The number of tokens read comes from vLLM.

    Args:
        first: the state before the first token, of one sequence, with all room.
        size: the bytes of a page of the engine, the same in all layers.
        name: the name of the layer, unique in the model.
        vllm_config: the configuration of the engine, in which the layer registers itself.
    """

    def __init__(self, first: MixerState, size: int, name: str, vllm_config: VllmConfig):
        self.name, self.first, self.size = name, first, size
        self.kv_cache: tuple[Tensor, ...] = ()  # vLLM puts the bytes of all pages there
        vllm_config.compilation_config.static_forward_context[name] = self

    @abstractmethod
    def stepped(self, x: Tensor, state: Any) -> tuple[Sequence[Tensor], Any]:
        """Maps x [B, T', d] and a state of B sequences to outputs [B, T', ...] and the states after them."""

    def step_batch(self, x: Tensor, outs: list[Tensor]) -> None:
        """Computes the outputs [N, ...] for the tokens x [N, d] of a batch. vLLM tells which requests they are of."""
        metadata = get_forward_context().attn_metadata
        # Before there are pages, vLLM measures how much memory a batch takes. Attention then leaves its output unset.
        if metadata is None:
            any_x = torch.zeros_like(x)[None]
            for out, values in zip(outs, self.stepped(any_x, self.first.clone())[0], strict=True):
                out.copy_(values[0])
            return
        pages = page_of(self.first).tensors(self.kv_cache[0])
        step_on_pages(self.stepped, self.first, pages, x, metadata[self.name].parts, outs)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of a page."""
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Returns the dtype of a page, int8."""
        return (torch.int8,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Returns the backend, which names the builder of the metadata."""
        return StateBackend

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Returns the kind of the layer: a custom one."""
        return MambaAttentionBackendEnum.CUSTOM


class MixerStates(PagedStates):
    """Steps a mixer with a state of constant size. Arguments as in `PagedMixer`."""

    def __init__(self, mixer: Mixer, size: int, name: str, vllm_config: VllmConfig):
        super().__init__(mixer.init_state(1).with_all_room(), size, name, vllm_config)
        self.mixer = mixer

    def stepped(self, x: Tensor, state: Any) -> tuple[Sequence[Tensor], Any]:
        """Steps the mixer; see `PagedStates.stepped`."""
        y, after = self.mixer.step(x, state)
        return (y,), after


class PagedMixer(nn.Module):
    """Computes a mixer with a state of constant size, as one operator of a graph.

    Args:
        mixer: the mixer, on its device.
        size: the bytes of a page of the engine, the same in all layers.
        name: the name of the layer, unique in the model.
        vllm_config: the configuration of the engine.
    """

    def __init__(self, mixer: Mixer, size: int, name: str, vllm_config: VllmConfig):
        super().__init__()
        self.states = MixerStates(mixer, size, name, vllm_config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mixes the tokens x [N, d] of a batch: [N, d]. The positions follow from the metadata and are not read."""
        return step_states(self.states.name, x, [torch.empty_like(x)])[0]


def step_states(name: str, x: Tensor, outs: list[Tensor]) -> list[Tensor]:
    """Steps the states of the layer `name` by one operator, which writes into `outs`, and returns these."""
    torch.ops.vllm.sympow_states(x, outs, name)
    return outs


@eager_break_during_capture
def sympow_states(x: Tensor, outs: list[Tensor], name: str) -> None:
    """Steps the states of a layer by the tokens x [N, d], and writes the outputs; see `PagedStates.step_batch`."""
    get_forward_context().no_compile_layers[name].step_batch(x, outs)


def _fake_states(x: Tensor, outs: list[Tensor], name: str) -> None:
    return


direct_register_custom_op("sympow_states", sympow_states, mutates_args=["outs"], fake_impl=_fake_states)
# vLLM divides a compiled graph at the operators that it lists here, and calls them between the CUDA graphs of the rest.
CompilationConfig._attention_ops.append("vllm::sympow_states")
