"""The states of mixers in vLLM's pages. A page contains all tensors of one request's state in one layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from sympow.integrations.vllm.pages import Part, page_of, step_on_pages
from sympow.layers import MixerState
from sympow.layers.base import Mixer


@dataclass
class StateMetadata:
    """Holds what layers need to know of a batch: its parts."""

    parts: list[Part]


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Finds the parts of a batch."""

    def __init__(self, *args: Any, **kwargs: Any):  # abstract in the base class
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateMetadata:
        """Collects the requests of a batch in parts, by the number of tokens that they read.

        `common_prefix_len` and `fast_build` are not used.
        """
        batch = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode)
        rows_of: dict[int, list[int]] = {}
        for row, (start, stop) in enumerate(pairwise(batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist())):
            if start < stop:  # rows without tokens pad the batch
                rows_of.setdefault(stop - start, []).append(row)
        parts = []
        for length, rows in rows_of.items():
            index = torch.tensor(rows, device=self.device)
            first = batch.query_start_loc[index].long()[:, None]
            tokens = first + torch.arange(length, device=self.device)
            parts.append(Part(tokens, table[index, 0].long(), batch.seq_lens[index].long() - length))
        return StateMetadata(parts)


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


class PagedMixer(MambaBase):
    """Steps a mixer with a state of constant size on vLLM's pages.

    The states have the same tensors as in `sympow generate`. The number of tokens read comes from vLLM.

    Args:
        mixer: the mixer, on its device.
        name: the name of the layer, unique in the model.
        vllm_config: the configuration of the engine, in which the layer registers itself.
    """

    def __init__(self, mixer: Mixer, name: str, vllm_config: VllmConfig):
        self.mixer, self.name = mixer, name
        self.first: MixerState = mixer.init_state(1).with_all_room()
        self.kv_cache: tuple[Tensor, ...] = ()  # vLLM puts the tensors of all pages there
        vllm_config.compilation_config.static_forward_context[name] = self

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mixes the tokens x [N, d] of a batch: [N, d]. The positions follow from the metadata and are not read."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # before there are pages, vLLM measures how much memory a batch takes
            return self.mixer.step(x[None], self.first.clone())[0][0]
        return step_on_pages(self.mixer, self.first, self.kv_cache, x, metadata[self.name].parts)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of each tensor in a page, without the dimension of the pages."""
        return page_of(self.first).shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Returns the dtype of each tensor in a page."""
        return page_of(self.first).dtypes

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Returns the backend, which names the builder of the metadata."""
        return StateBackend

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Returns the kind of the layer: a custom one."""
        return MambaAttentionBackendEnum.CUSTOM
