"""Write weights, inputs and outputs of the mixers of Zoology's published code, which tests hold ours to.

    PYTHONPATH=zoology python scripts/zoology_reference.py tests/layers/zoology/zoology_reference.npz

`zoology` is a checkout of github.com/HazyResearch/zoology at commit dbcb60d2bd10, the one before its head. It needs
torch, einops, pydantic, opt_einsum, scipy, pandas and wandb. No GPU is needed: RWKV's kernel is not built, and only
its initial weights are written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH, TIME, BATCH = 8, 12, 2
# Constants by the paper, although the code registers them as weights: they keep their values.
FIXED = ("pos_emb.z", "ssm_k_kernel.kernel.B")


def mixers() -> Iterator[tuple[str, nn.Module]]:
    """Yields a name and a module of the published code for every mixer with a forward pass on the CPU."""
    from zoology.mixers.attention import MHA
    from zoology.mixers.base_conv import BaseConv
    from zoology.mixers.h3 import H3
    from zoology.mixers.hyena import Hyena
    from zoology.mixers.listing import BaseConv as Listing1
    from zoology.mixers.listing import BaseImplicitConv as Listing2
    from zoology.mixers.slide_attn import SlidingAttn

    yield "attention", MHA(WIDTH, num_heads=2)
    yield "window", SlidingAttn(WIDTH, block_size=4)
    yield "base_conv short", BaseConv(WIDTH, TIME, kernel_size=3)
    yield "base_conv listing 1", Listing1(WIDTH, TIME)
    yield "base_conv listing 2", Listing2(WIDTH, TIME)
    yield "hyena", Hyena(WIDTH, TIME)
    yield "hyena options", Hyena(WIDTH, TIME, emb_dim=5, w=10, fast_decay_pct=0.5, slow_decay_pct=2.0)
    yield "h3", H3(WIDTH, d_state=TIME, l_max=TIME, head_dim=2)


def outputs() -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of every mixer, its input and its output, all weights random."""
    for name, mixer in mixers():
        generator = torch.Generator().manual_seed(len(name))
        mixer.double().eval()
        with torch.no_grad():
            for key, parameter in mixer.named_parameters():
                if not key.endswith(FIXED):
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
            x = torch.randn(BATCH, TIME, WIDTH, generator=generator)
            state = {key: weight.clone() for key, weight in mixer.state_dict().items()}
            yield f"{name}|x", x
            yield f"{name}|y", mixer(x)
        for key, weight in state.items():
            yield f"{name}|w|{key}", weight


def rwkv_starts() -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the initial decay, bonus and token shifts of RWKV-4's layers, in models of 2 and of 12 layers."""
    import torch.utils.cpp_extension as extension

    built: Callable[..., Any] = extension.load
    extension.load = lambda **_: None  # the CUDA kernel, which initial weights do not need
    try:
        from zoology.mixers.rwkv import RWKVTimeMixer
    finally:
        extension.load = built
    for layers in (2, 12):
        for layer in range(layers):
            mixer = RWKVTimeMixer(l_max=TIME, d_model=WIDTH, n_layer=layers, layer_idx=layer)
            for name in ("time_decay", "time_first", "time_mix_k", "time_mix_v", "time_mix_r"):
                yield f"rwkv4|{layers}|{layer}|{name}", getattr(mixer, name).detach().flatten()


def rows() -> Iterator[tuple[str, torch.Tensor]]:
    """Yields inputs and labels of the published data, with zeros and with random tokens as filler."""
    from zoology.data.multiquery_ar import multiquery_ar

    for filler in ("zero", "random"):
        data = multiquery_ar(vocab_size=200, num_examples=50, input_seq_len=32, seed=1, num_kv_pairs=4,
                             random_non_queries=filler == "random")  # fmt: skip
        yield f"mqar {filler}|inputs", data.inputs
        yield f"mqar {filler}|labels", data.labels


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # positional features are computed in it
    found: dict[str, Any] = {name: value.numpy() for name, value in (*outputs(), *rwkv_starts(), *rows())}
    np.savez_compressed(sys.argv[1], **found)


if __name__ == "__main__":
    main()
