"""Errors for arguments as other libraries name them: they say how the same thing is written here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter
from typing import Any

from sympow.layers.option_types import certainly_wrong, wanted

_REFUSAL = re.compile(r"unexpected keyword argument|missing \d+ required")  # in the words of Python

# What an option of a layer is called here -> what other libraries call it.
_OPTIONS = {
    "d_model": ("hidden_size", "dim", "embed_dim", "model_dim", "n_embd", "d", "hidden_dim", "in_features", "emb_dim"),
    "n_heads": ("num_heads", "nheads", "heads", "nhead", "n_head", "num_attention_heads", "num_q_heads"),
    "n_kv_heads": ("kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_head", "num_kv", "n_head_kv", 
                   "num_heads_kv", "kv_n_heads", "n_groups", "num_query_groups", "groups"),
    "head_dim": ("head_size", "dim_head", "d_head", "key_dim", "kdim", "d_k", "headdim", "head_width", "head_k_dim"),
    "value_dim": ("vdim", "v_dim", "d_v", "value_size", "head_v_dim", "v_head_dim"),
    "p": ("power", "degree", "deg", "exponent"),
    "window": ("window_size", "sliding_window", "window_length"),
    "rope_base": ("rope_theta", "rotary_base", "rotary_emb_base", "theta"),
    "rotary_fraction": ("partial_rotary_factor", "rotary_pct", "rotary_percent", "rotary_emb_fraction"),
    "short_convolution": ("conv_size", "d_conv", "kernel_size", "conv_width", "use_short_conv"),
    "bias": ("qkv_bias", "use_bias", "attention_bias", "qkv_proj_bias"),
    "output_gate": ("use_output_gate", "use_gate", "gated"),
    "chunk_size": ("chunk", "chunk_len", "block_size"),
    "max_length": ("max_position_embeddings", "max_seq_len", "max_seqlen", "seq_len", "l_max"),
}  # fmt: skip
_NO_OPTION = {
    ("dropout", "attn_dropout", "attention_dropout", "dropout_p"): "the layers have no dropout",
    ("causal", "is_causal"): "every layer that can be stepped is causal",
    ("batch_first",): "the input is always [B, T, d]",
    ("device", "dtype"): "use layer.to(...)",
}
_CALL = {
    ("attention_mask", "attn_mask", "mask", "padding_mask", "key_padding_mask", "src_key_padding_mask", "src_mask"):
        "there are no masks; layers are causal, padding belongs on the right, and documents packed into one row are "
        "kept apart by cu_seqlens, int [N + 1]",
    ("cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seqlens", "cu_seqlen",
     "sequence_lengths", "seq_idx", "lengths"): "borders of packed documents are cu_seqlens, int [N + 1]",
    ("is_causal", "causal"): "every layer that can be stepped is causal",
    ("position_ids", "position_embeddings", "positions", "rotary_pos_emb", "freqs_cis"):
        "the layer rotates by itself; documents packed into one row are kept apart by cu_seqlens, int [N + 1]",
    ("past_key_value", "past_key_values", "layer_past", "use_cache", "cache", "cache_params", "kv_cache", "state",
     "initial_state", "inference_params"): "for decoding use init_state and step",
    ("hidden_states", "input", "inputs", "query", "src"): "the input is the first argument, x [B, T, d]",
    ("key", "value", "encoder_hidden_states", "kv"): "a layer mixes one sequence, x [B, T, d]",
    ("need_weights", "output_attentions", "return_weights"): "the weights of attention are never formed",
}  # fmt: skip


def explained(init: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of a mixer with more errors.

    Its TypeError for an option that it does not have names the one it has. It raises TypeError for an option of another
    type, or a too large integer, which names the option, also where Python would take the value for another one.
    """

    @wraps(init)
    def explaining(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            init(self, *arguments, **options)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            known = ["d_model", "n_heads", *self.option_names()]
            for name in options if _REFUSAL.search(str(error)) else ():
                if name not in known and (hint := option_hint(name, known)):
                    raise TypeError(f"{type(self).__name__} has no option {name!r}{hint}") from error
            for name, line in _mistyped(self, options, wanted):
                if name not in str(error):
                    raise TypeError(line) from error
            raise
        for _, line in _mistyped(self, options, certainly_wrong):
            raise TypeError(line)

    return explaining


def _mistyped(
    owner: Any, options: dict[str, Any], wrong: Callable[[Parameter, object], object]
) -> list[tuple[str, str]]:
    """Returns the options with values that are `wrong` for them, each with an error."""
    known, kind = owner.option_parameters(), type(owner).__name__
    return [
        (name, f"the option {name!r} of {kind} must be {wanted(known[name], value)}; got {value!r:.200}")
        for name, value in options.items()
        if name in known and wrong(known[name], value)
    ]


def option_hint(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error for the unknown option `name`, which says what to write; "" where nothing is known.

    `known` are the options there are.
    """
    known = list(known)
    for ours, theirs in _OPTIONS.items():
        if name in theirs and ours in known:
            return f"; it is called {ours}"
    reason = _found(_NO_OPTION, name)
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f": {reason}" if reason else f"; did you mean {close[0]}?" if close else ""


def renamed_call(owner: object, error: TypeError, given: dict[str, Any]) -> TypeError:
    """Returns the error of a call of a layer with the keywords `given`, which says what to pass instead."""
    for name in given if _REFUSAL.search(str(error)) else ():
        if hint := _found(_CALL, name):
            return TypeError(f"{type(owner).__name__} takes no {name}: {hint}")
    return error


def _found(table: dict[tuple[str, ...], str], name: str) -> str | None:
    return next((text for names, text in table.items() if name in names), None)
