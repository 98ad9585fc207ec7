"""Training FLOPs and parameters of language models by mixer, as Zoology counts them.

These are the tables of its appendix, with their slips corrected (Arora et al., 2023, arXiv 2312.04927).

Conventions of the source, which are not those of `cost.py`: 6 FLOPs a multiply-add in training (2 forward, 4 backward);
the whole square of scores counts, not its causal half; a long convolution is three Fourier transforms and what stands
between them, 10 N log2(N) a channel; the embedding costs as much as the head. Letters: N tokens, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

VOCABULARY, LENGTH = 50_257, 2048

_STATE = 64  # states of each model of H3
_ORDER, _FEATURES = 64, 33  # width and inputs of the network of an implicit filter
_SHORT = 3  # taps of a short convolution


@dataclass(frozen=True)
class ZoologyModel:
    """A language model of Zoology: blocks of a mixer and a SwiGLU MLP (RWKV-4: its channel mixing), LayerNorms.

    Attributes:
        mixer: one of `MULTIPLY_ADDS`.
        mlp_hidden: inner width of the MLP; None for RWKV-4.
        mlp_cost: its multiply-adds a token over D**2, as the source counts them, without the rounding of mlp_hidden.
        tied: whether the head is the embedding.
    """

    mixer: str
    d_model: int
    n_layers: int
    n_heads: int
    mlp_hidden: int | None
    mlp_cost: int
    tied: bool = True


def _model(mixer: str, d_model: int, n_layers: int, n_heads: int = 1, *, mlp_cost: int = 8) -> ZoologyModel:
    """SwiGLU of hidden width mlp_cost D / 3, which makes mlp_cost D**2 weights, rounded up to a multiple of 256."""
    return ZoologyModel(mixer, d_model, n_layers, n_heads, -(-mlp_cost * d_model // (3 * 256)) * 256, mlp_cost)


# By the millions of parameters that the source gives. Printed shapes are corrected where no count gives its numbers:
# BaseConv 168 is 864 wide (not 852), long convolution 128 is 768 (not 864), Hyena 358 has 36 layers (not 24) and an MLP
# whose width is not rounded.
ZOOLOGY_MODELS: dict[tuple[str, int], ZoologyModel] = {
    ("attention", 73): _model("attention", 704, 6, 8),
    ("attention", 125): _model("attention", 768, 12, 12),
    ("attention", 360): _model("attention", 1024, 24, 16),
    ("long_convolution", 76): _model("long_convolution", 704, 6),
    ("long_convolution", 128): _model("long_convolution", 768, 12),
    ("long_convolution", 360): _model("long_convolution", 1024, 24),
    ("base_conv", 168): _model("base_conv", 864, 30, mlp_cost=4),
    ("base_conv", 354): _model("base_conv", 1080, 48, mlp_cost=4),
    ("hyena", 158): _model("hyena", 864, 18, mlp_cost=4),
    ("hyena", 358): ZoologyModel("hyena", 1024, 36, 1, 1365, 4),
    ("h3", 72): _model("h3", 720, 8, mlp_cost=4),
    ("h3", 168): _model("h3", 864, 19, mlp_cost=4),
    ("h3", 357): _model("h3", 1024, 33, mlp_cost=4),
    ("rwkv4", 169): ZoologyModel("rwkv4", 768, 12, 1, None, 9, tied=False),
    ("rwkv4", 351): ZoologyModel("rwkv4", 984, 20, 1, None, 9, tied=False),
}


def _long(n: int, d: int) -> float:
    return 10 * n * log2(n) * d


# Multiply-adds of a mixer over a sequence, by (N, D, H). BaseConv: every other layer's filter is long; one gate. Hyena:
# three short convolutions of 3 taps, two gates and the skip weight. H3 has four long convolutions' worth.
MULTIPLY_ADDS: dict[str, Callable[[int, int, int], float]] = {
    "attention": lambda n, d, h: 4 * n * d * d + 2 * n * n * d + h * n * n,
    "long_convolution": lambda n, d, h: n * d * d + _long(n, d),
    "base_conv": lambda n, d, h: n * d * d + _long(n, d) / 2 + n * d,
    "hyena": lambda n, d, h: 4 * n * d * d + _long(n, d) + 12 * n * d,
    "h3": lambda n, d, h: 4 * n * d * d + 4 * _long(n, d),
    "rwkv4": lambda n, d, h: 4 * n * d * d,
}


def _implicit(d: int) -> float:
    return (_FEATURES + 1) * _ORDER + 2 * (_ORDER + 1) * _ORDER + _ORDER * d + _ORDER + d


# Parameters of a mixer by (N, D), biases included, those of `sympow.layers`.
PARAMETERS: dict[str, Callable[[int, int], float]] = {
    "attention": lambda n, d: 4 * d * d + 4 * d,
    "long_convolution": lambda n, d: 2 * d * d + 2 * d + n * d,
    "base_conv": lambda n, d: d * d + 2 * d + (_implicit(d) + _SHORT * d) / 2,
    "hyena": lambda n, d: 4 * d * d + 4 * d + 3 * d * (_SHORT + 1) + _implicit(d),
    "h3": lambda n, d: 4 * d * d + 4 * d + d * (4 * _STATE + 2),
    "rwkv4": lambda n, d: 4 * d * d + 5 * d,
}


def zoology_flops(model: ZoologyModel, time: int = LENGTH, vocabulary: int = VOCABULARY) -> float:
    """Returns the FLOPs of training on one sequence: 6 (2 V N D + L (mixer + MLP)).

    The first term is that of embedding and head.
    """
    n, d = time, model.d_model
    block = MULTIPLY_ADDS[model.mixer](n, d, model.n_heads) + model.mlp_cost * n * d * d
    return 6 * (2 * vocabulary * n * d + model.n_layers * block)


def zoology_parameters(model: ZoologyModel, time: int = LENGTH, vocabulary: int = VOCABULARY) -> int:
    """Returns the number of parameters, with filters of `time` taps where they are explicit."""
    d = model.d_model
    mlp = 9 * d * d + 2 * d if model.mlp_hidden is None else 3 * d * model.mlp_hidden
    block = PARAMETERS[model.mixer](time, d) + mlp + 4 * d  # two LayerNorms
    return round(vocabulary * d * (1 if model.tied else 2) + model.n_layers * block + 2 * d)
