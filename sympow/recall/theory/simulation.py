"""BaseConv and Hyena compute the same functions (H.12), and BaseConv computes RetNet (H.22)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sympow.layers.zoology.base_conv import BaseConv
from sympow.layers.zoology.filters import ExplicitFilter
from sympow.layers.zoology.hyena import Hyena
from sympow.recall.theory.base_conv import Layer, convolution, linear


def hyena_as_base_conv(mixer: Hyena, rows: int) -> list[Layer]:
    """Makes the 4 + R BaseConv layers, of (R + 2) d channels, that compute what `mixer` does on `rows` tokens.

    R is the number of its recurrences. The input and the output are in the first d channels. The layers are: the
    projections, their short convolution, k * v, each long convolution with its gate, and the output's projection.

    Raises ValueError for a Hyena with heads, whose state is no product of channels.
    """
    if mixer.heads != mixer.d_model:
        raise ValueError(f"Hyena must have a filter for every channel; got {mixer.heads} heads for {mixer.d_model}")
    d, count = mixer.d_model, mixer.recurrences
    with torch.no_grad():
        inward, outward = torch.zeros(2, (count + 2) * d, (count + 2) * d, dtype=torch.float64)
        inward[:d] = mixer.projections.weight.T
        short = convolution(rows, mixer.short.weight.T.flip(0).double())
        if mixer.short.bias is not None:
            short = replace(short, bias=short.bias + mixer.short.bias)
        outward[count * d : (count + 1) * d, :d] = mixer.out.weight.T
        bias = torch.zeros((count + 2) * d, dtype=torch.float64)
        bias[:d] = mixer.out.bias
        filters = mixer.filter(rows).double().chunk(count, dim=1)
        return [
            linear(rows, inward, mixer.projections.bias.double()),
            short,
            _gated(rows, d, count, source=count + 1, kernel=torch.ones(1, d).double(), kept=count),
            *(_gated(rows, d, count, source=count - r, kernel=h, kept=count - r) for r, h in enumerate(filters, 1)),
            linear(rows, outward, bias),
        ]


def _gated(rows: int, d: int, count: int, *, source: int, kernel: torch.Tensor, kept: int) -> Layer:
    """Convolves block `count` of d channels with `kernel` and gates it by block `source`; keeps the first `kept` ones.

    There are count + 2 blocks: the gates q_count, ..., q_1, then k and v. Blocks that are not kept become zero.
    """
    channels, block = (count + 2) * d, slice(count * d, (count + 1) * d)
    weight = torch.zeros(channels, channels, dtype=torch.float64)
    weight[source * d : (source + 1) * d, block] = torch.eye(d)
    gate = torch.zeros(rows, channels, dtype=torch.float64)
    gate[:, : kept * d] = 1.0
    taps = torch.zeros(kernel.shape[0], channels, dtype=torch.float64)
    taps[0, : kept * d], taps[:, block] = 1, kernel
    return Layer(weight, gate, taps, torch.zeros(rows, channels, dtype=torch.float64))


def base_conv_as_hyena(mixer: BaseConv) -> Hyena:
    """Makes the Hyena layer, of 2 d channels, that computes what `mixer` does.

    The input and the output are in the first d channels. q is x W + b_1 in both halves, k is 1, and v is x in the first
    half and 1 in the second. The filter is that of `mixer` in the first half and the identity in the second. Therefore
    the two halves are q * (h (*) x) and q. The output is the first half plus b_2 times the second.
    """
    d, length = mixer.d_model, mixer.filter.max_length
    hyena = Hyena(2 * d, 1, max_length=length).double()
    explicit = ExplicitFilter(2 * d, length).double()
    hyena.filter = explicit  # type: ignore[assignment]
    with torch.no_grad():
        for parameter in hyena.parameters():
            parameter.zero_()
        hyena.short.weight[:, -1] = 1
        query, _, value = hyena.projections.weight.split(2 * d)
        query_bias, key_bias, value_bias = hyena.projections.bias.split(2 * d)
        for half in (slice(0, d), slice(d, 2 * d)):
            query[half, :d] = mixer.projection.weight
            query_bias[half] = mixer.projection.bias
        key_bias.fill_(1)
        value[:d, :d] = torch.eye(d)
        value_bias[d:] = 1
        taps = mixer.filter(length)
        explicit.weight[: len(taps), :d] = taps.double()
        explicit.weight[0, d:] = 1
        hyena.out.weight[:d] = torch.cat([torch.eye(d).double(), torch.diag(mixer.bias.double())], dim=1)
    return hyena


def retnet_as_base_conv(a: Tensor, c: Tensor, v: Tensor, decay: float, rows: int) -> list[Layer]:
    """Makes the four BaseConv layers, of 3 d d channels, that compute RetNet (Algorithm 6) on `rows` tokens (H.22).

    The input and the output are in the first d channels. The layers are: A, V and C of every token, each repeated so
    that channel i d + j holds A_i, V_j and C_i; the products A_i V_j; the states, which are the convolutions of these
    products with the powers of the decay, times C_i; and the sum over i. The source goes by a circuit of O(N) steps
    instead, and so has O(N log d) layers.

    Args:
        a: the weights of keys, float64 [d, d].
        c: those of queries.
        v: those of values.
        decay: gamma.
        rows: N.
    """
    d = a.shape[0]
    size = d * d
    weights = (a.repeat_interleave(d, 1), v.repeat(1, d), c.repeat_interleave(d, 1))
    inward, gate, read, outward = torch.zeros(4, 3 * size, 3 * size, dtype=torch.float64)
    inward[:d] = torch.cat(weights, dim=1)
    identity = torch.eye(size, dtype=torch.float64)
    gate[size : 2 * size, :size] = identity
    read[2 * size :, :size] = identity
    outward[:size, :d] = torch.eye(d, dtype=torch.float64).repeat(d, 1)
    kept = torch.zeros(rows, 3 * size, dtype=torch.float64)
    kept[:, 2 * size :] = 1  # C passes the products
    powers = torch.zeros(rows, 3 * size, dtype=torch.float64)
    powers[:, :size] = decay ** torch.arange(rows, dtype=torch.float64)[:, None]
    return [
        linear(rows, inward),
        Layer(gate, kept, torch.ones(1, 3 * size, dtype=torch.float64), 0 * kept),
        Layer(read, 0 * kept, powers, 0 * kept),
        linear(rows, outward),
    ]
