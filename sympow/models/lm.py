"""A language model: token embedding, the blocks of a body on any mixers, a final norm and a head.

There are no learned positions: the mixers rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sympow.fields import check_integer
from sympow.layers import MixerState
from sympow.layers.base import is_as_made, refuse_other_kinds, takes_kernels_of_step
from sympow.layers.initial import draw_normal
from sympow.layers.state import After, Device, DType, check_batch, check_room, of_tried
from sympow.models.bodies import BODIES, Block
from sympow.models.bodies.base import PreNormBlock, reset_norm
from sympow.models.config import ModelConfig
from sympow.models.cross_entropy import IGNORE, CrossEntropy, Divergence, cross_entropy_sum, divergence_sum
from sympow.models.norms import kernel_norm
from sympow.ops.availability import has_values
from sympow.ops.cost import counted
from sympow.ops.fused.step_products import Product, step_products
from sympow.ops.memory import check_memory

# Logits formed at once: 128 MiB in float32; more on a GPU, which takes large products to be busy: 1 GiB in bfloat16.
LOGIT_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 29}
# Of compiled parts: each kind of layer, with and without gradients, of a model and its teacher, and at two lengths.
GRAPHS = 64
_MODULE_BYTES = 2_000  # of Python's objects for a module, without its weights, at least


@dataclass
class ModelState(MixerState):
    """Holds a state for each block: the state of its mixer, and the state of the body if it has one."""

    layers: list[MixerState]


class LanguageModel(nn.Module):
    """Computes logits of the next token for every token of a sequence.

    Args:
        config: the body, the shape and the mixers.
        seed: of the initial weights, which do not depend on the device. None draws one from torch's default
            generator, as torch's own modules do.

    Raises ValueError if there is not enough memory for the weights.
    """

    def __init__(self, config: ModelConfig, seed: int | None = None):
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # no memory and no random numbers for weights that are drawn below
            # Not nn.Embedding(...): drawing from N(0, 1) on the meta device imports torch._dynamo, for seconds.
            table = torch.empty(config.vocab_size, config.d_model)
            self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
            body: Callable[[ModelConfig, int], Block] = BODIES[config.body]
            norm, normed = BODIES[config.body].norm, BODIES[config.body].norms_embedding and config.embedding_norm
            self.embedding_norm = norm(config) if normed else None
            pattern = min(config.n_layers, len(config.mixers))
            blocks = [body(config, layer) for layer in range(pattern)]
            _check_memory(config, blocks, device)
            blocks += [body(config, layer) for layer in range(pattern, config.n_layers)]
            self.blocks = cast(Sequence[Block], nn.ModuleList(blocks))
            self.final_norm = norm(config)
            untied = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
            self.head = untied
        self.cross_entropy, self.divergence = CrossEntropy(), Divergence()
        # Not to_empty: an empty_like of a meta tensor imports sympy.
        empty = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in self.state_dict().items()}
        self.load_state_dict(empty, assign=True)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draws the weights: embedding and head N(0, 0.02), the rest as the docstring of the body's block describes.

        In the gpt2 and the llama body it is GPT-2's initialisation: N(0, 0.02), but N(0, 0.02 / sqrt(2 n_layers)) into
        the residual stream.
        """
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        generator = torch.Generator(device="cpu").manual_seed(seed)
        std = 0.02
        draw_normal(self.embedding.weight, std, generator)
        for norm in self._norms():
            reset_norm(norm)
        for block in self.blocks:
            block.reset_parameters(std=std, residual_std=std / sqrt(2 * self.config.n_layers), generator=generator)
        if self.head is not None:
            draw_normal(self.head.weight, std, generator)

    def forward(self, tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns logits [B, T, vocab_size] of the token after each of tokens [B, T].

        Args:
            tokens: int64 [B, T], T >= 1.
            cu_seqlens: int [N + 1], N documents packed into a single row (B = 1) that do not see each other.
        """
        return self._head(self._hidden(tokens, cu_seqlens))

    def token_losses(self, tokens: Tensor, targets: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns -log p(target) in nats of every target [B, T], 0 where the target is -100.

        The dtype is float32, or float64 for a model in float64.

        Only a slice of the logits is in memory at a time; the backward recomputes them.

        Args:
            tokens: as for `forward`.
            cu_seqlens: as for `forward`.
            targets: int64 [B, T]: tokens of the vocabulary, or -100.
        """
        self._check_targets(targets, tokens)
        hidden = self._hidden(tokens, cu_seqlens).flatten(0, 1)
        rows = self._logit_rows(hidden)
        slices = zip(hidden.split(rows), targets.flatten().split(rows), strict=True)
        losses = [
            checkpoint(self._losses, h, t, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else self._losses(h, t)
            for h, t in slices
        ]
        return torch.cat(losses).view_as(targets).clone()  # FSDP hooks what is returned, which must not be a view

    def loss_sum(self, tokens: Tensor, targets: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the sum of `token_losses`, a scalar, for training.

        The gradient is computed together with the sum, so that the logits are computed only once.
        """
        self._check_targets(targets, tokens)
        hidden = self._hidden(tokens, cu_seqlens).flatten(0, 1)
        rows, weight = self._logit_rows(hidden), self.head_weight
        return cross_entropy_sum(hidden, weight, targets.flatten(), rows=rows, cross_entropy=self.cross_entropy)

    def divergence_sum(
        self,
        tokens: Tensor,
        targets: Tensor,
        teacher: LanguageModel,
        *,
        cu_seqlens: Tensor | None = None,
        teacher_context: int | None = None,
    ) -> Tensor:
        """Sums up KL(teacher || model) over all tokens whose target is not -100, in nats; a scalar, as `loss_sum`.

        Args:
            tokens: as for `token_losses`.
            targets: as for `token_losses`.
            cu_seqlens: as for `token_losses`.
            teacher: a model of the same vocabulary, on the same device; it gets no gradient.
            teacher_context: the teacher reads rows as pieces of so many tokens, each by itself; None: whole rows.

        Raises ValueError where the vocabularies differ, and where rows cannot be cut into such pieces.
        """
        self._check_targets(targets, tokens)
        self._check_teacher(teacher)
        self._check_vocabulary(tokens, "tokens")
        pieces = tokens
        if teacher_context is not None:
            if teacher_context < 1 or tokens.shape[1] % teacher_context or cu_seqlens is not None:
                what = "packed documents" if cu_seqlens is not None else f"rows of {tokens.shape[1]} tokens"
                raise ValueError(f"expected rows of a multiple of {teacher_context} tokens for the teacher; got {what}")
            pieces = tokens.reshape(-1, teacher_context)
        with torch.no_grad():
            expected = teacher._hidden(pieces, cu_seqlens, checked=True).flatten(0, 1)
        hidden = self._hidden(tokens, cu_seqlens, checked=True).flatten(0, 1)
        real = targets.flatten() != IGNORE
        weights = self.head_weight, teacher.head_weight.detach()
        rows = self._logit_rows(hidden)
        return divergence_sum(hidden, weights[0], expected, weights[1], real, rows=rows, divergence=self.divergence)

    def mixing_error_sum(
        self, tokens: Tensor, targets: Tensor, teacher: LanguageModel, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Sums up the errors of the mixers' outputs over all tokens whose target is not -100.

        Every block gets its input from the teacher. The error of a token is the squared difference between the outputs
        of the two mixers, divided by the mean square of the teacher's output over all tokens. The errors are averaged
        over the layers. Layers whose mixers have the same configuration in the teacher are left out, because their
        error is 0 before training.

        Args:
            tokens: as for `token_losses`.
            targets: as for `token_losses`.
            cu_seqlens: as for `token_losses`.
            teacher: a model with the same blocks except for the mixers, on the same device; it gets no gradient.

        Raises ValueError where blocks, width or vocabularies differ, where the body is neither gpt2 nor llama, and
        where no mixer differs.
        """
        self._check_targets(targets, tokens)
        self._check_teacher(teacher)
        self._check_vocabulary(tokens, "tokens")
        differ = [self.config.mixer(layer) != teacher.config.mixer(layer) for layer in range(len(self.blocks))]
        if not any(differ):
            raise ValueError("all mixers are those of the teacher: there is nothing to compare")
        last = max(layer for layer, other in enumerate(differ) if other)  # nothing behind it is needed
        real = targets != IGNORE
        errors: list[Tensor] = []
        with torch.no_grad():
            x = teacher._embed(tokens, checked=True)
        for layer in range(last + 1):
            own, other = self.blocks[layer], teacher.blocks[layer]
            if not isinstance(own, PreNormBlock) or not isinstance(other, PreNormBlock):
                raise ValueError(f"mixers are compared in the bodies gpt2 and llama; got {self.config.body!r}")
            with torch.no_grad():
                expected = other.mixed(x, cu_seqlens, tokens)
            if differ[layer]:
                size = expected.float().square().mean()
                error = (own.mixed(x, cu_seqlens, tokens) - expected).float().square().mean(-1)
                errors.append((error * real).sum() / size)
            if layer < last:
                with torch.no_grad():
                    x = other.with_mlp(x + expected)
        return torch.stack(errors).mean()

    def split_context(self, group: dist.ProcessGroup) -> None:
        """Makes `forward`, `token_losses` and `loss_sum` take this rank's part of every row from now on.

        See `Mixer.split_context`.
        """
        for block in self.blocks:
            block.split_context(group)

    def checkpoint_activations(self) -> None:
        """Makes the backward recompute every block, so that memory holds the activations of one block."""
        for block in self.blocks:
            block.recompute = True

    def compile_parts(self, **options: Any) -> None:
        """Runs every block, the norms around the blocks and the losses through torch.compile, each as one graph.

        It raises torch's limit of graphs for one function to `GRAPHS`, because all parts count as one function. Parts
        beyond the limit would run without being compiled.

        Args:
            options: the keywords of torch.compile.
        """
        import torch._dynamo.config as limits  # torch.compile loads it too

        limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
        for part in (*self.blocks, *self._norms(), self.cross_entropy, self.divergence):
            part.compile(**options)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ModelState:
        """Returns the state before the first token; `device` and `dtype` as in `Mixer.init_state`.

        Raises TypeError or ValueError for a `batch_size` that is no number of sequences, and ValueError for sums of the
        past, of at least 4 bytes a number, that are larger than the free memory.
        """
        check_integer("batch_size", batch_size, 0)
        layers = counted(self.config.n_layers, "layer")
        check_room(layers, batch_size, self.state_size(0), self.embedding.weight, device)
        return ModelState([block.init_state(batch_size, device=device, dtype=dtype) for block in self.blocks])

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Reads T' >= 1 further tokens [B, T']; returns the logits after the last, [B, vocab_size], and the state.

        If gradients are off, the method overwrites the given state. Use the state that it returns.
        """
        x = self._embed_next(tokens, state)
        layers = []
        for block, before in zip(self.blocks, state.layers, strict=True):
            x, after = block.step(x, before, tokens)
            layers.append(after)
        return self._last_logits(x), ModelState(layers)

    @torch.no_grad()
    def try_step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, After]:
        """Reads T' >= 1 tokens [B, T'] that can still be taken back.

        Returns the logits after each token, [B, T', vocab_size], and `after`. after(n) is the state after the first n
        of these tokens, for n from 0 to T', as if the others had never been read.

        The given state must not be used again, and `after` can be called once. Power attention adds the accepted tokens
        to its state, caches are cut, and other mixers step copies of their states token by token.
        """
        x, afters = self._embed_next(tokens, state), []
        for block, before in zip(self.blocks, state.layers, strict=True):
            x, each = block.try_step(x, before, tokens)
            afters.append(each)
        after = of_tried(lambda n: ModelState([each(n) for each in afters]), tokens.shape[1])
        return self._head(self.final_norm(x)), after

    def state_size(self, context: int) -> int:
        """Returns the number of elements the state holds for a sequence after `context` tokens."""
        return sum(block.state_size(context) for block in self.blocks)

    def num_parameters(self) -> int:
        """Counts the parameters, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def head_weight(self) -> Tensor:
        """Returns the weights of the head [vocab_size, d]: those of the embedding, if it is tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        refuse_other_kinds(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _hidden(self, tokens: Tensor, cu_seqlens: Tensor | None, checked: bool = False) -> Tensor:
        x = self._embed(tokens, checked)
        for block in self.blocks:
            x = block(x, cu_seqlens, tokens)
        return self.final_norm(x)

    def _embed(self, tokens: Tensor, checked: bool = False) -> Tensor:
        """Returns the vectors of tokens. `checked`: the caller has checked that the vocabulary has the tokens.

        Another check would wait for the device where gradients are off.
        """
        _check_tensor(tokens, "tokens")
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens must be [B, T >= 1]; got {list(tokens.shape)}")
        if tokens.device != self.embedding.weight.device:
            device = self.embedding.weight.device
            raise ValueError(f"tokens must be on the device of the weights, {device}; got {tokens.device}")
        if not checked:
            self._check_vocabulary(tokens, "tokens")
        vectors = self._vectors(tokens)
        return vectors if self.embedding_norm is None else self.embedding_norm(vectors)

    def _embed_next(self, tokens: Tensor, state: ModelState) -> Tensor:
        """Returns `_embed`; raises an error for a state of another number of sequences or layers."""
        x = self._embed(tokens)
        check_batch(state, tokens.shape[0])
        held = len(state.layers) if isinstance(state, ModelState) else 0
        if held != len(self.blocks):
            raise ValueError(f"the state of a model holds one for each of its {len(self.blocks)} layers; got {held}")
        return x

    def _norms(self) -> list[nn.Module]:
        """Returns the norms around the blocks."""
        return [norm for norm in (self.embedding_norm, self.final_norm) if norm is not None]

    def _vectors(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    def _last_logits(self, x: Tensor) -> Tensor:
        """Returns the logits [B, vocab_size] after the last of the tokens x [B, T, d]."""
        norm, weight = kernel_norm(self.final_norm) if takes_kernels_of_step(x) else None, self.head_weight
        head = self.embedding if self.head is None else self.head
        plain = type(self)._head is LanguageModel._head and is_as_made(head, nn.Embedding, nn.Linear)
        if norm is None or not plain or not takes_kernels_of_step(x, (norm.weight, norm.bias, weight)):
            return self._head(self.final_norm(x[:, -1]))
        return step_products(x, Product(weight), norm=norm).first[:, -1]

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self._head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")

    def _logit_rows(self, hidden: Tensor) -> int:
        """Returns the number of tokens in a slice: a power of two, so that slices of long rows are alike."""
        most = LOGIT_ELEMENTS["cuda" if hidden.is_cuda else "cpu"] // self.config.vocab_size
        return 1 << max(0, most.bit_length() - 1)

    def check_tokens(self, tokens: Tensor, targets: Tensor) -> None:
        """Raises an error unless tokens and targets [B, T] have one shape, are int64, and are in the vocabulary.

        `token_losses` and `loss_sum` call this method. With gradients on, they do not check values on a GPU, because a
        training step would have to wait for the device.
        """
        self._check_vocabulary(tokens, "tokens")
        self._check_targets(targets, tokens)

    def _check_teacher(self, teacher: LanguageModel) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "body"):
            own, other = getattr(self.config, name), getattr(teacher.config, name)
            if own != other:
                raise ValueError(f"a model and its teacher must have one {name}; got {own} and {other}")

    def _check_targets(self, targets: Tensor, tokens: Tensor) -> None:
        _check_tensor(tokens, "tokens")
        _check_tensor(targets, "targets")
        if targets.shape != tokens.shape:
            shapes = f"{list(targets.shape)} and {list(tokens.shape)}"
            raise ValueError(f"targets and tokens must have one shape; got {shapes}")
        self._check_vocabulary(targets.masked_fill(targets == IGNORE, 0), "targets")

    def _check_vocabulary(self, tokens: Tensor, name: str) -> None:
        _check_tensor(tokens, name)
        if tokens.dtype != torch.int64:
            raise TypeError(f"{name} must be int64; got {tokens.dtype}")
        waits = tokens.is_cuda and (torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing())
        # Not is_compiling(), which is true in every thread while one of them compiles.
        if tokens.numel() == 0 or waits or not has_values(tokens):
            return
        low, high = (bound.item() for bound in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} must lie in a vocabulary of {self.config.vocab_size} tokens; got {wrong}")


class Undrawn(LanguageModel):
    """Makes a language model without drawing its weights, for weights that are loaded or drawn afterwards.

    Args:
        config: as for `LanguageModel`.
        dtype: of the weights; None: the default of torch.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None):
        device = torch.get_default_device()
        with torch.device("meta"):
            super().__init__(config)
        shapes = {name: (each.shape, dtype or each.dtype) for name, each in self.state_dict().items()}
        empty = {name: torch.empty(shape, dtype=kind, device=device) for name, (shape, kind) in shapes.items()}
        self.load_state_dict(empty, assign=True)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Keeps the weights as they are."""
        return


def _check_tensor(given: object, name: str) -> None:
    """Raises TypeError for what is no tensor, such as an array of numpy."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(given).__name__}")


def _check_memory(config: ModelConfig, pattern: Sequence[Block], device: torch.device) -> None:
    """Raises ValueError if a model is larger than the free memory.

    Args:
        config: of the model.
        pattern: the first blocks of the model, one for each mixer of the pattern, on the meta device.
        device: of the weights.
    """
    what = f"a model of {counted(config.n_layers, 'layer')}"
    modules = sum(1 for block in pattern for _ in block.modules()) / len(pattern)
    check_memory(what, _MODULE_BYTES * modules * config.n_layers)
    layer = sum(p.numel() for block in pattern for p in block.state_dict().values()) / len(pattern)
    table = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    what += f" with d_model = {config.d_model:,} and a vocabulary of {config.vocab_size:,}"
    check_memory(what, torch.get_default_dtype().itemsize * (config.n_layers * layer + table), device)
