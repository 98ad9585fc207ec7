"""Comparators and sorting networks as arithmetic circuits, and recall by them (H.31 to H.37, Theorem 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sympow.recall.theory.circuits import Circuit
from sympow.recall.theory.instances import NONE, Instances

Record = list[int]  # wires of bits, the most significant first


def network(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the steps of Batcher's odd-even merge sort of `count` entries (H.34): pairs of places (i, j), i < j.

    A step exchanges the entries of each pair that is in the wrong order. It has log n (log n + 1) / 2 steps for n the
    next power of two. The source takes the network of Ajtai et al., which needs O(log n) steps (H.35), and no fewer
    than this one at any size that can be computed.
    """
    merged = 1
    while merged < count:
        for step in _merging(1 << (count - 1).bit_length(), merged):
            within = [(i, j) for i, j in step if j < count]
            if within:
                yield within
        merged *= 2


def _merging(size: int, merged: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the steps that merge sorted neighbours of `merged` entries each, for powers of two."""
    stride = merged
    while stride:
        start = stride % merged
        pairs = [
            (i, i + stride) for first in range(start, size - stride, 2 * stride) for i in range(first, first + stride)
        ]
        yield [(i, j) for i, j in pairs if i // (2 * merged) == j // (2 * merged)]
        stride //= 2


def less(circuit: Circuit, x: Record, y: Record) -> int:
    """Returns the wire of 1 if x < y and 0 otherwise, for numbers of equally many bits (H.32).

    Each bit gives two wires: x_i < y_i, and x_i = y_i. A tree then joins neighbours, so that the depth is O(log d).
    """
    found = [(circuit.multiply(circuit.add(circuit.one, a, 1.0, -1.0), b), _same(circuit, a, b))
             for a, b in zip(x, y, strict=True)]  # fmt: skip
    while len(found) > 1:
        joined = []
        for (less_high, same_high), (less_low, same_low) in zip(found[::2], found[1::2], strict=False):
            smaller = circuit.add(less_high, circuit.multiply(same_high, less_low))
            joined.append((smaller, circuit.multiply(same_high, same_low)))
        found = joined + found[len(found) - len(found) % 2 :]
    return found[0][0]


def equal(circuit: Circuit, x: Record, y: Record) -> int:
    """Returns the wire of 1 if x = y and 0 otherwise, for equally many bits."""
    found = [_same(circuit, a, b) for a, b in zip(x, y, strict=True)]
    while len(found) > 1:
        joined = [circuit.multiply(*pair) for pair in zip(found[::2], found[1::2], strict=False)]
        found = joined + found[len(found) - len(found) % 2 :]
    return found[0]


def _same(circuit: Circuit, a: int, b: int) -> int:
    """Returns the wire of 1 if two bits are equal and 0 otherwise: a b + (1 - a) (1 - b)."""
    not_a, not_b = (circuit.add(circuit.one, bit, 1.0, -1.0) for bit in (a, b))
    return circuit.add(circuit.multiply(a, b), circuit.multiply(not_a, not_b))


def comparator(circuit: Circuit, x: Record, y: Record, bits: int) -> tuple[Record, Record]:
    """Returns x and y in order, of the numbers that their first `bits` wires make (H.31): x' = min, y' = max.

    The other wires of a record go with it. Equal records stay where they are.
    """
    return _swapped(circuit, less(circuit, y[:bits], x[:bits]), x, y)


def _swapped(circuit: Circuit, swaps: int, x: Record, y: Record) -> tuple[Record, Record]:
    """Returns y and x where the wire `swaps` is 1, and x and y where it is 0."""
    low, high = [], []
    for a, b in zip(x, y, strict=True):
        moved = circuit.multiply(swaps, circuit.add(b, a, 1.0, -1.0))
        low.append(circuit.add(a, moved))
        high.append(circuit.add(b, moved, 1.0, -1.0))
    return low, high


def sort(circuit: Circuit, records: Sequence[Record], bits: int) -> list[Record]:
    """Returns the records in the order of the numbers that their first `bits` wires make."""
    records = list(records)
    for step in network(len(records)):
        for i, j in step:
            records[i], records[j] = comparator(circuit, records[i], records[j], bits)
    return records


def search_circuit(queries: int, keys: int, bits: int) -> Circuit:
    """Makes the circuit that counts the keys below each query, for sorted queries and sorted keys (H.33).

    The inputs are the queries and then the keys, `bits` bits each. The outputs are the counts, one wire each. The
    source translates the recursion of Algorithm 10, whose bounds depend on the data. Here queries and keys are merged
    in O(log n) steps, a query before a key that is equal. A running sum counts the keys up to each place. Then the
    merge runs backwards, and brings the counts to the queries. The size and the depth are those of H.33.
    """
    circuit = Circuit((queries + keys) * bits)
    zero = circuit.add(circuit.one, circuit.one, 1.0, -1.0)
    inputs = [list(range(i * bits, (i + 1) * bits)) for i in range(queries + keys)]
    records = [[*record, zero if i < queries else circuit.one] for i, record in enumerate(inputs)]
    half = 1 << max(0, max(queries, keys) - 1).bit_length()
    first = half - queries  # places before it, and those after the keys, would hold -inf and inf, which never move
    swaps: list[tuple[int, int, int]] = []
    for step in _merging(2 * half, half):
        for i, j in ((i - first, j - first) for i, j in step if i >= first and j < half + keys):
            x, y = records[i], records[j]
            swaps.append((i, j, less(circuit, y, x)))
            records[i], records[j] = _swapped(circuit, swaps[-1][2], x, y)
    counts, reach = [record[-1] for record in records], 1
    while reach < len(counts):
        counts = counts[:reach] + list(map(circuit.add, counts[reach:], counts[:-reach]))
        reach *= 2
    held = [[count] for count in counts]
    for i, j, wire in reversed(swaps):
        held[i], held[j] = _swapped(circuit, wire, held[i], held[j])
    circuit.outputs = [wire for (wire,) in held[:queries]]
    return circuit


def recall_circuit(triples: int, bits: int) -> Circuit:
    """Makes the circuit that answers the queries of a row of `triples` triples (H.36).

    The inputs are the tokens of key, value and query 0, then 1, ..., `bits` bits each, as `written` gives them. The
    outputs are, for every query, whether it has an answer, and the bits of the answer.

    Keys and queries are sorted together, by their token and then by their place in the row, query i before key i. All
    of one token are then neighbours, and its key comes before the queries that see it. A running sum within each token
    brings the key's value to them, because a row has a token at most once as a key. A second sort brings the queries
    back to their places. This replaces the blocks and the searches of Algorithm 11 (H.33, `search_circuit`).
    """
    circuit = Circuit(3 * triples * bits)
    zero = circuit.add(circuit.one, circuit.one, 1.0, -1.0)
    order = (2 * triples - 1).bit_length()
    records = []
    for i in range(triples):
        key, value, query = (list(range((3 * i + part) * bits, (3 * i + part + 1) * bits)) for part in range(3))
        for token, place, stored in ((query, 2 * i, [zero] * bits), (key, 2 * i + 1, value)):
            in_bits = [circuit.one if place >> bit & 1 else zero for bit in reversed(range(order))]
            records.append([*token, *in_bits, *stored])
    records = sort(circuit, records, bits + order)
    # A record passes on whether it is a key, which is the last bit of its place, and the value of a key.
    held = [[is_key, *(circuit.multiply(is_key, bit) for bit in record[bits + order :])]
            for record in records for is_key in (record[bits + order - 1],)]  # fmt: skip
    held = _sums_within_tokens(circuit, [record[:bits] for record in records], held)
    placed = [[*record[bits : bits + order], *found] for record, found in zip(records, held, strict=True)]
    circuit.outputs = [wire for record in sort(circuit, placed, order)[::2] for wire in record[order:]]
    return circuit


def _sums_within_tokens(circuit: Circuit, tokens: list[Record], held: list[Record]) -> list[Record]:
    """Returns the running sums of what records hold, begun anew where the token changes: log n steps."""
    count, reach = len(tokens), 1
    joined = [circuit.one, *(equal(circuit, tokens[i - 1], tokens[i]) for i in range(1, count))]
    while reach < count:
        passed = [[circuit.multiply(joined[i], wire) for wire in held[i - reach]] for i in range(reach, count)]
        summed = [list(map(circuit.add, before, more)) for before, more in zip(held[reach:], passed, strict=True)]
        joined = joined[:reach] + [circuit.multiply(joined[i], joined[i - reach]) for i in range(reach, count)]
        held, reach = held[:reach] + summed, 2 * reach
    return held


def written(instances: Instances, bits: int) -> Tensor:
    """Writes rows of triples as bits, float64 [n, 3 M bits], the inputs of `recall_circuit`.

    Raises ValueError for a vocabulary with more than 2**bits tokens.
    """
    if instances.vocab_size > 1 << bits:
        raise ValueError(f"{bits} bits hold {1 << bits} tokens; the vocabulary has {instances.vocab_size}")
    tokens = torch.stack(instances[:3], dim=2)
    return (tokens[..., None] >> torch.arange(bits).flip(0) & 1).flatten(1).double()


def answers(outputs: Tensor, bits: int) -> Tensor:
    """Reads the outputs of `recall_circuit` [n, M (1 + bits)]: the tokens [n, M], NONE where there is no answer."""
    found = outputs.unflatten(1, (-1, 1 + bits)).round().long()
    token = (found[..., 1:] << torch.arange(bits).flip(0)).sum(-1)
    return torch.where(found[..., 0] > 0, token, NONE)
