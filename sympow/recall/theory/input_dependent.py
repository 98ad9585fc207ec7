"""Multi-query associative recall by convolutions whose filters depend on the input (H.8, Theorem H.38)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.recall.theory.base_conv import Layer, apply, convolution, taps
from sympow.recall.theory.instances import Instances, read, tape

_OWN = 3  # rows of a triple: at smaller lags a query would be compared with the key of its own triple


def matches_by_lag(u: Tensor) -> Tensor:
    """Counts, for every lag, the queries of tapes u [n, N, 3 C] that equal the key `lag` rows before: [n, N].

    It is the cross-correlation of queries with keys, summed over the channels, by fast Fourier transforms in
    O(C N log N). Lags below 3 are set to 0.
    """
    rows, size = u.shape[1], u.shape[2] // 3
    query, key = (torch.fft.rfft(part, n=2 * rows, dim=1) for part in (u[..., 2 * size :], u[..., :size]))
    counts = torch.fft.irfft((query * key.conj()).sum(-1), n=2 * rows, dim=1)[:, :rows]
    counts[:, :_OWN] = 0
    return counts


def largest_lags(u: Tensor, count: int) -> Tensor:
    """Returns the `count` lags with the most matches, as Top in H.8.2: int64 [n, count].

    All lags at which a query finds its key are among them if a row has no more than `count` of them.
    """
    return matches_by_lag(u).topk(count, dim=1).indices


def recall_by_filters(instances: Instances, lags: int) -> Tensor:
    """Answers queries by four BaseConv layers whose first filters are 1 at the `lags` largest lags (H.38): [n, M].

    Every lag gets its own block of the tape, in which all keys and values are moved down by the lag. In this block each
    query is compared with only one key. The answers are correct if a row has at most `lags` different lags.
    """
    u = tape(instances)
    rows, size = u.shape[1], instances.vocab_size
    longer = pad(u, (0, 0, 0, (2 * lags - 1) * rows))
    out = apply(filter_layers(largest_lags(u, lags), rows, size), longer)
    return read(out[:, :rows, size : 2 * size])


def filter_layers(lags: Tensor, rows: int, size: int) -> list[Layer]:
    """Makes the layers for lags [n, t] of tapes of `rows` rows: the tape has 2 t rows for each of them, 3 C channels.

    Blocks start 2 N rows apart, so that keys that a lag moves beyond the end of its block reach no query of the next.
    """
    n, count = lags.shape
    long = 2 * count * rows
    starts = 2 * rows * torch.arange(count)
    none, identity = torch.zeros(size, size).double(), torch.eye(size).double()
    kernel = torch.zeros(n, long, 3, size, dtype=torch.float64)
    places = (starts + lags, starts + lags - 1, starts.expand(n, -1))  # a value stands one row below its key
    for part, place in enumerate(places):
        kernel[:, :, part].scatter_(1, place[..., None].expand(-1, -1, size), 1.0)
    # The first C channels are keys, then values, then queries; a weight's rows are what is read.
    onto_query = torch.cat([torch.cat(row, 1) for row in ([none, none, identity], [none] * 3, [none] * 3)])
    onto_value = torch.cat([torch.cat(row, 1) for row in ([none] * 3, [none] * 3, [none, none + 1, none])])
    value = torch.cat([torch.zeros(size), torch.ones(size), torch.zeros(size)]).double()
    same = taps(3 * size, 0)
    nothing = torch.zeros(long, 3 * size).double()
    first = (torch.arange(long) < rows).double()[:, None]
    return [
        convolution(long, kernel.flatten(2)),
        Layer(onto_query, nothing + value, same, nothing),  # the query's channels: the key where both are equal
        Layer(onto_value, nothing, same, nothing),  # the value's channels: the value where any key was equal
        convolution(long, taps(3 * size, *((long - starts) % long).tolist()), first, circular=True),
    ]
