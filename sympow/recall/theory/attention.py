"""Multi-query associative recall by attention with explicit weights (H.27), for every power of the scores."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from sympow.layers.power import PowerAttention
from sympow.layers.short_convolution import ShortConvolution
from sympow.ops import power_attention
from sympow.recall.theory.base_conv import shift_down
from sympow.recall.theory.instances import Instances, read, tape

Weights = tuple[Tensor, Tensor, Tensor]


def recall_weights(vocab_size: int) -> Weights:
    """Returns the projections of queries, keys and values, [3 C, C] each, that read the three parts of the tape."""
    parts = torch.eye(3 * vocab_size, dtype=torch.float64).split(vocab_size, dim=1)
    return parts[2], parts[0], parts[1]


def recall_by_attention(instances: Instances, p: int | None) -> Tensor:
    """Answers the queries of rows of triples with one layer of attention: [n, M], NONE where there is no answer.

    Keys are moved down by 3 rows and values by 2, so that key and value of triple j are in row 3 j + 3. Query i is in
    row 3 i + 2. Because of the causal mask it attends to the triples j < i only. Scores of one-hot tokens are 1 for the
    key that equals the query and 0 for all others, so every power of the scores is the same.

    Args:
        instances: the rows.
        p: the power of power attention, normalized where p is even; None for softmax attention, whose scores are
            multiplied by 2 ln N, so that all rows that do not match weigh at most 1 / N together.
    """
    u = tape(instances)
    rows, size = u.shape[1], instances.vocab_size
    q, k, v = (u @ weight for weight in recall_weights(size))
    k, v = shift_down(rows, size, 3)(k), shift_down(rows, size, 2)(v)
    if p is None:
        sharpness = 2 * math.log(rows)
        return read(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=sharpness))
    q, k, v = (part[:, :, None] for part in (q, k, v))
    out = power_attention(q, k, v, p=p, scale=1.0, normalize=p % 2 == 0, chunk_size=rows).out
    return read(out[:, :, 0])


def recall_layer(vocab_size: int, p: int) -> ShortConvolution:
    """Makes a layer of this project that answers the rows of `sympow.data.mqar`: power attention behind a convolution.

    The layer takes tokens as vectors of 2 C channels: a one-hot vector twice, or 0 for filler. The convolution keeps
    the first half and moves the second half down by one token, so that the row of a value also contains its key. A
    query matches this key, and the output contains the value in the first C channels.
    """
    options = {"p": p, "head_dim": vocab_size, "gate": False, "rotation": "none", "qk_norm": False, "bias": False,
               "short_convolution": 0, "head_norm": False, "output_gate": False, "initial_score": 0.0}  # fmt: skip
    layer = ShortConvolution(2 * vocab_size, 1, width=2, mixer="power", options=options).double()
    mixer, half = cast(PowerAttention, layer.mixer), vocab_size
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.convolution.weight[:half, -1] = 1  # the token itself
        layer.convolution.weight[half:, -2] = 1  # the token before
        identity = torch.eye(half, dtype=torch.float64)
        query, key, value = mixer.qkv.weight.split(half)
        query[:, :half] = math.sqrt(half) * identity  # undoes the scale of the scores
        key[:, half:] = identity
        value[:, :half] = identity
        mixer.out.weight[:half] = identity
    return layer
