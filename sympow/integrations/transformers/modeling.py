"""The language models of sympow as models of transformers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from sympow.integrations.transformers.cache import CACHE, SympowCache, moved, one_cache
from sympow.integrations.transformers.configuration import SympowConfig
from sympow.integrations.transformers.padding import document_starts, first_tokens, kept, scattered
from sympow.integrations.transformers.stepping import logits_by_graph
from sympow.integrations.transformers.weight_files import check_dtypes, stored_weights
from sympow.integrations.transformers.weights import is_loaded, native_name, weights
from sympow.layers import MixerState, trust_code
from sympow.layers.initial import draw_normal
from sympow.layers.registry import UntrustedCodeError
from sympow.models import LanguageModel
from sympow.models.bodies import Block
from sympow.models.lm import Undrawn
from sympow.models.weight_shapes import check_shapes


class SympowBlock(GradientCheckpointingLayer):
    """A block of a body, as a layer that transformers can place on a device and checkpoint.

    Args:
        block: the block.
    """

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(
        self, x: Tensor, tokens: Tensor | None = None, cu_seqlens: Tensor | None = None, state: MixerState | None = None
    ) -> Any:
        """Computes whole sequences x [B, T, d] as `Block.forward`, or continues a state as `Block.step`."""
        if state is None:
            return self.block(x, cu_seqlens, tokens)
        return self.block.step(x, state, tokens)


class SympowPreTrainedModel(PreTrainedModel):
    """Holds what the models of sympow share: the configuration and the initialization of weights."""

    config_class = SympowConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SympowBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # no assisted generation: a state cannot take tokens back

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Loads a model as `transformers.PreTrainedModel.from_pretrained` does.

        With `trust_remote_code=True`, the modules of mixers that config.json names by import path are imported.

        Raises ValueError for a config.json that names such a mixer without this argument (see
        `sympow.layers.trust_code`), and for one that describes a larger model than the weights in a folder.
        """
        with trust_code(bool(kwargs.get("trust_remote_code"))):
            plain = not any(kwargs.get(each) for each in ("subfolder", "variant", "ignore_mismatched_sizes"))
            if plain and pretrained_model_name_or_path is not None and os.path.isdir(pretrained_model_name_or_path):
                cls._check_sizes(pretrained_model_name_or_path, kwargs.get("config"))
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def _check_sizes(cls, folder: str | os.PathLike[str], config: Any) -> None:
        found = stored_weights(folder)
        if found is None:
            return
        config = config if isinstance(config, SympowConfig) else SympowConfig.from_pretrained(config or folder)
        if getattr(config, "quantization_config", None) is None:
            check_dtypes(found, str(folder))
        try:
            check_shapes(config.model_config, {native_name(name): each.shape for name, each in found.items()})
        except UntrustedCodeError:
            raise
        except ValueError as error:
            raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from None

    def _init_weights(self, module: nn.Module) -> None:
        """Draws the weights as `LanguageModel.reset_parameters` does, except weights that were loaded.

        The weights of a whole model are drawn at once, from a seed of torch's default generator. The same generator
        gives the same weights as in the native model.
        """
        if module is self:
            self._draw()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # False, as for the models in transformers: with True, modules without weights of their own are skipped, and
        # the whole model is such a module.
        super()._initialize_weights(module, False)

    def _draw(self) -> None:
        raise NotImplementedError


class SympowModel(SympowPreTrainedModel):
    """Computes hidden states after the last norm: a language model without its head.

    Tokens that `attention_mask` leaves out are not read. They have no effect on keys, values, gates, convolutions or
    token shifts, and positions do not count them. Without a cache, the remaining tokens are computed as packed
    documents, one for each sequence. With a cache, sequences that read different numbers of tokens are stepped in
    groups (`SympowCache`). Rows in which `position_ids` start again hold several documents, which do not see each
    other.

    Args:
        config: the configuration of the model.
    """

    def __init__(self, config: SympowConfig):
        super().__init__(config)
        native = Undrawn(replace(config.model_config, tie_embeddings=True))
        self.embedding = native.embedding
        self.embedding_norm = native.embedding_norm
        self.layers = nn.ModuleList(SympowBlock(block) for block in native.blocks)
        self.final_norm = native.final_norm
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SympowCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: SympowCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Computes hidden states [B, T, d] of tokens [B, T].

        Args:
            input_ids: int64 [B, T], T >= 1. Exactly one of `input_ids` and `inputs_embeds` is given.
            attention_mask: [B, S >= T], 0 for tokens to leave out; the last T columns are those of the tokens. Columns
                before them are those of the tokens that the cache has seen, if there are as many.
            position_ids: [B or 1, T]; a position that is not greater than the one before it begins a document. Without
                such a position they change nothing: the position of a token is the number of tokens read before it.
            past_key_values: the cache to continue; it is changed.
            inputs_embeds: [B, T, d], instead of `input_ids`.
            use_cache: whether to return a cache; None: as the configuration says, but not in training and not of
                packed documents.
            output_hidden_states: whether to return the input of every block, and the output of the last norm.
            cu_seq_lens_q: the bounds of packed documents, as `cu_seqlens` of `LanguageModel.forward`. Then
                `position_ids` and `seq_idx` are not read.
            seq_idx: [B or 1, T], a number for each document, which changes where another document begins.
            cache: the name of `past_key_values` from transformers 5.24 on.
            **kwargs: not read; transformers passes further arguments.

        Raises ValueError for arguments that do not fit together, TypeError for a cache of another model.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        past_key_values = one_cache(past_key_values, cache)
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        given = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        name, axes = ("input_ids", "[B, T]") if inputs_embeds is None else ("inputs_embeds", "[B, T, d]")
        if given.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} must be {axes}; got {list(given.shape)}")
        rows, time = given.shape[:2]
        keep = kept(attention_mask, rows, time)
        starts = None if cu_seq_lens_q is not None else document_starts(position_ids, seq_idx, keep, rows, time)
        packed = cu_seq_lens_q is not None or starts is not None
        if packed and use_cache is None and past_key_values is None and (starts is not None or rows == 1):
            use_cache = False  # what is packed by bounds lies in one row
        use_cache = self._uses_cache(use_cache, past_key_values)
        if input_ids is not None and keep is not None:
            input_ids = input_ids.masked_fill(~keep, 0)  # a padding token may lie outside the vocabulary
        x = self._embedded(input_ids) if inputs_embeds is None else self._normed(inputs_embeds)
        if use_cache:
            if packed:
                how = "cu_seq_lens_q" if cu_seq_lens_q is not None else "position_ids that start again"
                raise ValueError(f"packed documents ({how}) are computed without a cache: use_cache=False")
            past_key_values = SympowCache(self.config) if past_key_values is None else past_key_values
            past_key_values.check_mask(attention_mask, time)
            hidden = self._continue(x, input_ids, keep, past_key_values, output_hidden_states)
        else:
            hidden = self._whole(x, input_ids, keep, cu_seq_lens_q, starts, output_hidden_states)
        last = self.final_norm(hidden[-1])
        return BaseModelOutputWithPast(
            last_hidden_state=last,
            hidden_states=(*hidden[:-1], last) if output_hidden_states else None,
            **{CACHE: past_key_values if use_cache else None},
        )

    def step(self, tokens: Tensor, states: list[MixerState]) -> tuple[Tensor, list[MixerState | None]]:
        """Reads tokens [B, T] from incoming states; returns hidden states [B, T, d] after the last norm, and states."""
        hidden, after = self._step(self._embedded(tokens), tokens, list(states), 0, False)
        return self.final_norm(hidden[-1]), after

    def _embedded(self, tokens: Tensor | None) -> Tensor:
        return self._normed(self.embedding(tokens))

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _uses_cache(self, use_cache: bool | None, past: Any) -> bool:
        if past is not None and not isinstance(past, SympowCache):
            raise TypeError(f"past_key_values must be a SympowCache, which generate makes; got {type(past).__name__}")
        if past is not None and len(past.layers) != len(self.layers):
            raise TypeError(f"past_key_values is of {len(past.layers)} blocks; the model has {len(self.layers)}")
        if past is not None and use_cache is False:
            raise ValueError("past_key_values was given with use_cache=False: the states would be lost")
        if use_cache is None:
            use_cache = past is not None or (self.config.use_cache and not self.training)
        if use_cache and self.gradient_checkpointing and self.training:
            if past is not None:
                raise ValueError("gradient checkpointing cannot continue a cache: call model.eval() first")
            return False
        return use_cache

    def _whole(
        self,
        x: Tensor,
        tokens: Tensor | None,
        keep: Tensor | None,
        cu_seqlens: Tensor | None,
        starts: Tensor | None,
        every: bool,
    ) -> list[Tensor]:
        """Returns the output of the last block for whole sequences; with `every`, after the inputs of all blocks.

        `starts` is the result of `document_starts`.
        """
        if keep is not None and cu_seqlens is not None:
            raise ValueError("give one of attention_mask and cu_seq_lens_q")
        if starts is not None:
            keep = torch.ones_like(starts) if keep is None else keep
            begins = starts[keep].nonzero()[:, 0].to(torch.int32)
            bounds = F.pad(begins, (0, 1), value=int(keep.sum()))
            return self._packed(x, tokens, keep, bounds.to(x.device), every)
        if keep is None or (self._causal and bool((keep[:, 1:] <= keep[:, :-1]).all())):
            # Padding is at the end of sequences, and does not change the tokens before it.
            return self._through(x, tokens, cu_seqlens, every)
        counts = keep.sum(1, dtype=torch.int32)
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        return self._packed(x, tokens, keep, bounds, every)

    def _packed(self, x: Tensor, tokens: Tensor | None, keep: Tensor, bounds: Tensor, every: bool) -> list[Tensor]:
        """Computes the kept tokens of all rows as documents with the bounds, an int32 tensor; see `_whole`."""
        packed = self._through(x[keep][None], None if tokens is None else tokens[keep][None], bounds, every)
        return [scattered(keep, part[0]) for part in packed]

    def _continue(
        self, x: Tensor, tokens: Tensor | None, keep: Tensor | None, cache: SympowCache, every: bool
    ) -> list[Tensor]:
        """Computes the same as `_whole` from the states in the cache, and stores the states after the tokens."""
        rows, time = x.shape[:2]
        counts = None if keep is None else keep.sum(1).tolist()
        parts = cache.parts(rows, counts, time)
        if len(parts) == 1 and keep is None and parts[0][0] == list(range(rows)):
            hidden, states = self._step(x, tokens, parts[0][1], 0, every)
            cache.fill([(parts[0][0], states)], time)
            return hidden
        after = []
        results: list[Tensor] = []
        for index, states in parts:
            count = time if counts is None else counts[index[0]]
            if count == 0:
                after.append((index, states))
                continue
            at = torch.zeros(rows, time, dtype=torch.bool, device=x.device)
            at[index] = True if keep is None else keep[index]
            column = at[index].nonzero()[:, 1].view(len(index), count)
            row = torch.tensor(index, device=x.device)[:, None]
            given = None if tokens is None else tokens[row, column]
            hidden, states = self._step(x[row, column], given, states, cache.columns + time - count, every)
            after.append((index, states))
            if not results:
                results = [h.new_zeros(rows, time, h.shape[-1]) for h in hidden]
            results = [r.index_put((row, column), h.to(r.dtype)) for r, h in zip(results, hidden, strict=True)]
        if not results:  # nothing but padding
            results = [torch.zeros_like(x) for _ in range(len(self.layers) + 1 if every else 1)]
        cache.fill(after, time, keep)
        return results

    def _step(
        self, x: Tensor, tokens: Tensor | None, states: list[MixerState | None], start: int, every: bool
    ) -> tuple[list[Tensor], list[MixerState | None]]:
        """Steps the sequences of one group. If the group has no state, its position is `start`."""
        hidden, after = [x], []
        for layer, state in zip(self.layers, states, strict=True):
            if state is None:
                state = moved(cast(SympowBlock, layer).block.init_state(x.shape[0]), start)
            x, state = layer(x, tokens, None, state)
            hidden = [*hidden, x] if every else [x]
            after.append(state)
        return hidden, after

    def _through(self, x: Tensor, tokens: Tensor | None, cu_seqlens: Tensor | None, every: bool) -> list[Tensor]:
        hidden = [x]
        for layer in self.layers:
            x = layer(x, tokens, cu_seqlens)
            hidden = [*hidden, x] if every else [x]
        return hidden

    @property
    def _causal(self) -> bool:
        return all(cast(SympowBlock, layer).block.mixer.causal for layer in self.layers)

    @torch.no_grad()
    def _draw(self) -> None:
        own = weights(self)
        missing = {name: tensor for name, tensor in own.items() if not tensor.is_meta and not is_loaded(tensor)}
        for name in list(missing):
            bias = own.get(name.removesuffix("qkv_start") + "qkv.bias") if name.endswith("qkv_start") else None
            if bias is not None and is_loaded(bias):
                missing.pop(name).zero_()  # in older weights `qkv.bias` includes the initial value
        if not missing:
            return  # a second model would not fit into memory beside a large one
        native = weights(LanguageModel(replace(self.config.model_config, tie_embeddings=True)))
        for name, tensor in missing.items():
            tensor.copy_(native[native_name(name)])


class SympowForCausalLM(SympowPreTrainedModel, GenerationMixin):
    """Computes logits of the next token: a model of sympow for `generate`, `Trainer` and other users of causal models.

    `generate` uses a `SympowCache`, whose size does not grow if all mixers are recurrences. Greedy search, sampling,
    beam search, padding on the left and prefill in chunks work. Assisted generation does not work, because a state
    cannot remove tokens.

    Args:
        config: the configuration of the model.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: SympowConfig):
        super().__init__(config)
        self.model = SympowModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SympowCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: SympowCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Computes logits [B, T, vocab_size] of the token after each token.

        Args:
            input_ids: as for `SympowModel.forward`.
            attention_mask: as for `SympowModel.forward`.
            position_ids: as for `SympowModel.forward`.
            past_key_values: as for `SympowModel.forward`.
            inputs_embeds: as for `SympowModel.forward`.
            labels: int64 [B, T], the input tokens, or -100 to leave out a token. With labels, `loss` is the loss
                of predicting each token from the tokens before it. The first token of a padded row or of a packed
                document has none before it, and does not count.
            use_cache: as for `SympowModel.forward`.
            output_hidden_states: as for `SympowModel.forward`.
            logits_to_keep: how many of the last tokens to compute logits for, 0 for all; or their indices.
            cache: as for `SympowModel.forward`.
            **kwargs: `cu_seq_lens_q` and `seq_idx` as for `SympowModel.forward`; others are not read.
        """
        past_key_values = one_cache(past_key_values, cache)
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be at least 0; got {logits_to_keep}")
        logits = None
        if input_ids is not None and labels is None and use_cache is not False and not output_hidden_states:
            logits = logits_by_graph(self, input_ids, attention_mask, past_key_values, logits_to_keep)
        if logits is not None:
            return CausalLMOutputWithPast(logits=logits[:, None], **{CACHE: past_key_values})
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            seq_idx=kwargs.get("seq_idx"),
            return_dict=True,
        )
        which = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, which])
        loss = None
        if labels is not None:
            bounds, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
            first = first_tokens(attention_mask, position_ids, bounds, numbers, labels)
            labels = labels if first is None else labels.masked_fill(first, -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: outputs.get(CACHE)}
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """Makes the cache of `generate` if none was given, and tells it how many tokens it will hold at most.

        Raises ValueError for what `generate` would read or continue in a wrong way.
        """
        named = generation_config.cache_implementation
        if named not in (None, "dynamic"):
            raise ValueError(f"models of sympow have a cache of their own; got cache_implementation={named!r}")
        given, mask = model_kwargs.get(CACHE), model_kwargs["attention_mask"]
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
            raise ValueError("attention_mask leaves out the last token of a row, and generate continues from there: "
                             "pad on the left")  # fmt: skip
        # Newer versions of transformers drop a mask of ones, and keep its length.
        columns = generation_config._mask_length if mask is None else mask.shape[1]
        read = given.columns if isinstance(given, SympowCache) else 0
        if read and columns <= read:
            raise ValueError(f"past_key_values has read {read} tokens, and the input with them has {columns}: "
                             "give at least one token more")  # fmt: skip
        if read and generation_config.prefill_chunk_size is not None:
            raise ValueError("prefill_chunk_size would read the tokens of past_key_values again: set it to None")
        if given is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            given = model_kwargs[CACHE] = SympowCache(self.config)
        if isinstance(given, SympowCache):
            given.settle()  # slots of an earlier call have another room
            beams = (generation_config.num_beams or 1) > 1  # they change places, and leave the slots after every token
            given.most = None if beams else given.before[0] + max_cache_length

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: the cache of `generate_batch` is pages of keys and values alone."""
        raise NotImplementedError(
            "continuous batching of transformers keeps keys and values, and no states: use sympow serve, or vLLM"
        )

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepares the arguments of the next forward of `generate`.

        With a cache, the next forward pass reads one generated token of every sequence, and the attention mask leaves
        out none of them. The mask is not passed on, because the host would wait for the GPU to read it.
        """
        if outputs.get(CACHE) is not None:
            unread = ("attention_mask", "position_ids")
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in unread}
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    @torch.no_grad()
    def _draw(self) -> None:
        weight = self.lm_head.weight
        if self.config.tie_word_embeddings or weight.is_meta or is_loaded(weight):
            return
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        draw_normal(weight, 0.02, torch.Generator(device="cpu").manual_seed(seed))
