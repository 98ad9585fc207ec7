"""The contract of all blocks of a body (`Block`), and the base class of most blocks (`PreNormBlock`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from sympow.layers import MixerState, make_mixer
from sympow.layers.auxiliary import auxiliary_losses, collecting
from sympow.layers.base import Mixer, multiplies, takes_kernels_of_step
from sympow.layers.initial import init_linear
from sympow.layers.state import After, Device, DType, RowStates
from sympow.models.config import ModelConfig
from sympow.models.norms import kernel_norm
from sympow.ops.fused.step_products import SWIGLU, Product, step_products


class Block(nn.Module, ABC):
    """Maps [B, T, d] to [B, T, d]: a block of a language model, with a mixer and the parts around it.

    Weights are parameters, and constants that are saved with them are buffers, as in a mixer.

    Attributes:
        mixer: the block's mixer.
        recompute: whether the backward computes the whole block again.
        norms_embedding: whether the body has a norm after the embedding.
    """

    norms_embedding: ClassVar[bool]
    mixer: Mixer

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False

    @staticmethod
    @abstractmethod
    def norm(config: ModelConfig) -> nn.Module:
        """Makes a norm as the body has it, also after the embedding and before the head."""

    @staticmethod
    @abstractmethod
    def other_weights(config: ModelConfig) -> int:
        """Counts the elements of a block's matrices, without those of its mixer."""

    @abstractmethod
    def step(self, x: Tensor, state: Any, tokens: Tensor | None = None) -> tuple[Tensor, MixerState]:
        """Continues sequences by T' >= 1 tokens, as `Mixer.step` does: x [B, T', d], int64 tokens [B, T']."""

    @abstractmethod
    def try_step(self, x: Tensor, state: Any, tokens: Tensor | None = None) -> tuple[Tensor, After]:
        """Continues sequences by tokens that can still be taken back, as `Mixer.try_step` does."""

    @abstractmethod
    def reset_parameters(self, *, std: float, residual_std: float, generator: torch.Generator) -> None:
        """Draws the weights: N(0, std), and N(0, residual_std) into the residual stream.

        A body may have rules of its own.
        """

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Computes whole sequences x [B, T, d]; cu_seqlens as for `Mixer.forward`, int64 tokens [B, T]."""
        if self.recompute and torch.is_grad_enabled():
            contexts: dict[str, Any] = {}
            if not torch.compiler.is_compiling() and collecting():
                contexts["context_fn"] = _contexts
            return checkpoint(self._whole, x, cu_seqlens, tokens, use_reentrant=False, **contexts)
        return self._whole(x, cu_seqlens, tokens)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MixerState:
        """Gives the state before the first token, as `Mixer.init_state` does."""
        return self.mixer.init_state(batch_size, device=device, dtype=dtype)

    def state_size(self, context: int) -> int:
        """Counts the elements of the state per sequence after `context` tokens."""
        return self.mixer.state_size(context)

    def split_context(self, group: dist.ProcessGroup) -> None:
        """Makes `forward` take this rank's part of every row from now on, see `Mixer.split_context`."""
        self.mixer.split_context(group)

    def fused(self) -> dict[str, list[int]]:
        """Names the linear layers whose weight holds several matrices, those of the mixer left out.

        See `Mixer.fused`.
        """
        return {}

    @abstractmethod
    def _whole(self, x: Tensor, cu_seqlens: Tensor | None, tokens: Tensor | None) -> Tensor:
        """Computes what `forward` returns."""

    def _recomputed(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Returns function(hidden). Only `hidden` is kept for the backward, which computes the rest again.

        The function is the nonlinearity of an MLP and the matrix product after it. Keeping its output too would add a
        fifth to the memory of a block, and computing it costs little.
        """
        if self.recompute or not torch.is_grad_enabled():
            return function(hidden)
        return checkpoint(function, hidden, use_reentrant=False, preserve_rng_state=False)


class PreNormBlock(Block):
    """Computes x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
        config: the model.
        layer: 0, 1, ...
        hidden: width of the output of the first linear map of the MLP; 0 for a block without MLP.
        bias: biases in the MLP.

    Attributes:
        step_function: the nonlinearity of the MLP, as a function of `sympow.ops.fused.step_products`.
    """

    step_function: ClassVar[int]

    def __init__(self, config: ModelConfig, layer: int, *, hidden: int, bias: bool):
        super().__init__()
        self.mixer_norm = self.norm(config)
        self.mixer = block_mixer(config, layer)
        self.has_mlp = hidden > 0
        if self.has_mlp:
            self.mlp_norm = self.norm(config)
            self.mlp_in = nn.Linear(config.d_model, hidden, bias=bias)
            self.mlp_out = nn.Linear(config.mlp_width, config.d_model, bias=bias)

    @override
    def step(self, x: Tensor, state: MixerState, tokens: Tensor | None = None) -> tuple[Tensor, MixerState]:
        few = takes_kernels_of_step(x) and isinstance(self.mixer, Mixer) and not isinstance(state, RowStates)
        norm = kernel_norm(self.mixer_norm) if few else None
        if norm is not None and self.mixer.steps_in_block(x):
            x, state = self.mixer.step_in_block(x, norm, state)
        else:
            y, state = step_mixer(self.mixer, self.mixer_norm(x), state, tokens)
            x = x + y
        return self._stepped_mlp(x), state

    @override
    def try_step(self, x: Tensor, state: MixerState, tokens: Tensor | None = None) -> tuple[Tensor, After]:
        y, after = self.mixer.try_step(self.mixer_norm(x), state, **self.mixer.extras(tokens))
        return self.with_mlp(x + y), after

    def reset_parameters(self, *, std: float, residual_std: float, generator: torch.Generator) -> None:
        """Draws as GPT-2 does: N(0, std), but N(0, residual_std) into the residual stream; biases 0, norms 1."""
        reset_norm(self.mixer_norm)
        self.mixer.reset_parameters(std=std, out_std=residual_std, generator=generator)
        if self.has_mlp:
            reset_norm(self.mlp_norm)
            init_linear(self.mlp_in, std, generator)
            init_linear(self.mlp_out, residual_std, generator)

    def mixed(self, x: Tensor, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Computes the output of the mixer for the block's input x [B, T, d]; arguments as for `forward`."""
        return self._mixed(x, cu_seqlens, tokens)

    def with_mlp(self, x: Tensor) -> Tensor:
        """Computes the second half of the block: x [B, T, d], the mixer's output included, plus the MLP's output."""
        return x + self.mlp(x) if self.has_mlp else x

    def mlp(self, x: Tensor) -> Tensor:
        """Computes the MLP's output for x [B, T, d], which contains the mixer's output, in a block with an MLP."""
        return self._recomputed(self._narrowed, self.mlp_in(self.mlp_norm(x)))

    def _stepped_mlp(self, x: Tensor) -> Tensor:
        """Computes `with_mlp` of a step; where kernels take it, by one kernel for each product."""
        # A subclass may override any part of an MLP, so its MLP is taken only if it names the nonlinearity itself.
        if not (self.has_mlp and "step_function" in vars(type(self)) and takes_kernels_of_step(x)):
            return self.with_mlp(x)
        norm = kernel_norm(self.mlp_norm)
        if norm is None or not self._is_as_made(x.shape[2]):
            return self.with_mlp(x)
        into, out = (Product(linear.weight, linear.bias) for linear in (self.mlp_in, self.mlp_out))
        if not takes_kernels_of_step(x, (norm.weight, norm.bias, *into[:2], *out[:2])):
            return self.with_mlp(x)
        hidden = step_products(x, into._replace(function=self.step_function), norm=norm).first
        return step_products(hidden, out, residual=x.contiguous()).first

    def _is_as_made(self, width: int) -> bool:
        """Tells whether the layers of the MLP are those that the block has made, for inputs of this width."""
        paired, hidden = self.step_function == SWIGLU, getattr(self.mlp_in, "out_features", 0)
        if not (multiplies(self.mlp_in, hidden, width) and multiplies(self.mlp_out, width, hidden // (1 + paired))):
            return False
        return self.mlp_in.bias is None or not paired

    def _whole(self, x: Tensor, cu_seqlens: Tensor | None, tokens: Tensor | None) -> Tensor:
        return self.with_mlp(x + self._mixed(x, cu_seqlens, tokens))

    def _mixed(self, x: Tensor, cu_seqlens: Tensor | None, tokens: Tensor | None) -> Tensor:
        # Separate from `mixed`: FSDP treats `mixed` as a forward, before which weights are gathered and after which
        # they are freed.
        return self.mixer(self.mixer_norm(x), cu_seqlens=cu_seqlens, **self.mixer.extras(tokens))

    @abstractmethod
    def _narrowed(self, hidden: Tensor) -> Tensor:
        """Computes the nonlinearity of the MLP, then `mlp_out`."""


def step_mixer(mixer: Mixer, x: Tensor, state: Any, tokens: Tensor | None) -> tuple[Tensor, MixerState]:
    """Calls `mixer.step`, on `RowStates` row by row."""
    if not isinstance(state, RowStates):
        return mixer.step(x, state, **mixer.extras(tokens))
    rows = zip(x.split(1), state.rows, [None] * len(x) if tokens is None else tokens.split(1), strict=True)
    stepped = [mixer.step(row, held, **mixer.extras(ids)) for row, held, ids in rows]
    return torch.cat([y for y, _ in stepped]), RowStates([after for _, after in stepped])


def block_mixer(config: ModelConfig, layer: int) -> Mixer:
    """Makes the mixer of a layer."""
    mixer = make_mixer(config.mixer(layer).name, config.d_model, config.n_heads, config.mixer_options(layer))
    mixer.set_layer(layer)
    return mixer


def reset_norm(norm: nn.Module) -> None:
    """Fills the weight of a norm with 1, and its bias with 0."""
    cast(Callable[[], None], norm.reset_parameters)()


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Returns contexts for a forward pass and for its recomputation, which computes auxiliary losses too.

    Those of the recomputation are added to no loss.
    """
    return nullcontext(), auxiliary_losses()
