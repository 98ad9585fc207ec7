"""Sequential and parallel algorithms for multi-query associative recall, with counts of their work and depth.

These are Algorithms 9 to 11, and the comparison of all pairs, which is not in the appendix. Work counts comparisons and
written elements. Depth counts the steps that depend on each other, with as many processors as a step can use. All rows
of a batch run the same steps, so the counts are those of a single row of N triples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.recall.theory.instances import NONE, Instances


@dataclass
class Cost:
    """Counts what an algorithm does on one row.

    Attributes:
        work: operations of all processors together.
        depth: steps that follow each other.
    """

    work: int = 0
    depth: int = 0

    def add(self, work: int, depth: int = 1) -> None:
        """Counts `work` operations done within `depth` steps."""
        self.work += work
        self.depth += depth


def recall_one_by_one(instances: Instances) -> tuple[Tensor, Cost]:
    """Scans every row with a sorted list of the keys so far (Algorithm 9, H.28).

    A search or an insertion counts the comparisons of a binary search, and work and depth are the same. Returns the
    answers [n, M] and the cost of the row that costs most.
    """
    answers, most = torch.full_like(instances.queries, NONE), Cost()
    for row, (keys, values, queries) in enumerate(zip(*(part.tolist() for part in instances[:3]), strict=True)):
        cost, seen, value_of = Cost(), list[int](), dict[int, int]()
        for i, (key, value, query) in enumerate(zip(keys, values, queries, strict=True)):
            steps = ceil(log2(i + 2))
            place = bisect_left(seen, query)
            if place < len(seen) and seen[place] == query:
                answers[row, i] = value_of[query]
            insort(seen, key)
            value_of[key] = value
            cost.add(2 * steps, 2 * steps)
        most = max(most, cost, key=lambda c: c.work)
    return answers, most


def recall_all_pairs(instances: Instances) -> tuple[Tensor, Cost]:
    """Compares every query with every earlier key at once: N N / 2 comparisons in a single step.

    The answer is then found among the N comparisons of a query by a tree of depth log N.
    """
    size = instances.keys.shape[1]
    same = (instances.queries[:, :, None] == instances.keys[:, None]).tril(-1)
    found, place = same.max(-1)
    pairs, levels = size * (size - 1) // 2, ceil(log2(max(size, 2)))
    cost = Cost()
    cost.add(pairs)
    cost.add(pairs, levels)
    return torch.where(found, instances.values.gather(1, place), NONE), cost


def recall_in_blocks(instances: Instances) -> tuple[Tensor, Cost]:
    """Sorts the keys of all dyadic blocks, and searches for each query in the blocks before it (Algorithm 11, H.30).

    The row is cut into blocks of 1, 2, 4, ... triples. A block is sorted by merging its two halves. The triples before
    triple i form one block for every bit that is 1 in i; the largest block, of the most significant bit, is the first.
    A binary search in each block finds the key or shows that the block does not contain it. The source also sorts the
    queries of a block, and searches for all of them by one recursion (Algorithm 10). Sorting and searching take
    O(N log^2 N) work each, and O(log^2 N) and O(log N) depth.
    """
    triples = instances.keys.shape[1]
    levels = ceil(log2(max(triples, 2)))
    spare = (0, (1 << levels) - triples)
    keys = pad(instances.keys, spare, value=instances.vocab_size)[..., None]  # [n, blocks, size], each block sorted
    values = pad(instances.values, spare)[..., None]
    queries = pad(instances.queries, spare, value=NONE)
    answers, cost, searching = torch.full_like(queries, NONE), Cost(), 0
    for level in range(levels):
        # Triples of odd blocks have a 1 in this bit, and ask the even block before theirs.
        asking, asked = queries.unflatten(1, (-1, 2, 1 << level))[:, :, 1], (keys[:, ::2], values[:, ::2])
        search = Cost()
        place, found = _look_up(asked[0], asking, search)
        answer = answers.unflatten(1, (-1, 2, 1 << level))[:, :, 1]
        answer.copy_(torch.where(found, asked[1].gather(2, place), answer))
        cost.work += search.work
        searching = max(searching, search.depth)  # all blocks are searched at the same time
        if level + 1 < levels:
            keys, values = _merged(keys, values, cost)
    cost.add(queries.shape[1] * levels, searching + levels)  # joins what the searches of a query found
    return answers[:, :triples], cost


def binary_search(ordered: Tensor, wanted: Tensor, cost: Cost) -> Tensor:
    """Counts the entries of ordered [n, m, size] below those of wanted [n, m, k], all at once.

    These are the numbers that `parallel_binary_search` finds for sorted queries (equation 12). Here each query is
    searched for by itself, so that queries need not be sorted, and all searches have the same number of steps. Returns
    int64 [n, m, k].
    size is a power of two. Every step halves what is left, and is one comparison for each of the m k searches.
    """
    size = step = ordered.shape[-1]
    count = torch.zeros_like(wanted)
    while step:
        tried = ordered.gather(2, (count + step - 1).clamp(max=size - 1))
        count = torch.where((count + step <= size) & (tried < wanted), count + step, count)
        cost.add(wanted[0].numel())
        step //= 2
    return count


def parallel_binary_search(queries: Sequence[int], keys: Sequence[int]) -> tuple[list[int], Cost]:
    """Counts the sorted keys below each of the sorted queries by one recursion (Algorithm 10).

    The query in the middle is searched for first. It divides the keys between the queries on its left and on its right,
    which are then searched for at the same time. Line 7 prints j where the first of the keys is meant.

    Returns the counts, and the cost: O(n log m) work and O(log n log m) depth.
    """
    counts, cost = [len(keys)] * len(queries), Cost()

    def search(s: int, t: int, x: int, y: int) -> int:
        """Returns the depth of the search for queries s to t - 1 in keys x to y - 1."""
        if s >= t:
            return 0
        if x >= y:
            counts[s:t] = [x] * (t - s)
            cost.work += t - s
            return 1
        mid, wanted = (s + t - 1) // 2, queries[(s + t - 1) // 2]
        if wanted <= keys[x]:
            counts[s : mid + 1] = [x] * (mid + 1 - s)
            cost.work += 1 + mid + 1 - s
            return 2 + search(mid + 1, t, x, y)
        if wanted > keys[y - 1]:
            counts[mid:t] = [y] * (t - mid)
            cost.work += 2 + t - mid
            return 3 + search(s, mid, x, y)
        counts[mid] = z = bisect_left(keys, wanted, x, y)
        steps = 2 + ceil(log2(y - x + 1))
        cost.work += steps
        return steps + max(search(s, mid, x, z), search(mid + 1, t, z, y))

    cost.depth = search(0, len(queries), 0, len(keys))
    return counts, cost


def _look_up(ordered: Tensor, wanted: Tensor, cost: Cost) -> tuple[Tensor, Tensor]:
    """Returns the positions of wanted [n, m, k] in ordered [n, m, size], and whether ordered contains them.

    A search only counts the smaller keys, so the key at the position is compared too.
    """
    place = binary_search(ordered, wanted, cost).clamp(max=ordered.shape[-1] - 1)
    cost.add(wanted[0].numel())
    return place, ordered.gather(2, place) == wanted


def _merged(keys: Tensor, values: Tensor, cost: Cost) -> tuple[Tensor, Tensor]:
    """Merges neighbouring blocks of keys [n, blocks, size], and their values. A search finds the rank of every key.

    The rank of a key is its position in its own block plus the number of smaller keys in the other block. If keys are
    equal, as in the padding of a row, those of the left block come first.
    """
    left, right = keys.unflatten(1, (-1, 2)).unbind(2)
    own = torch.arange(keys.shape[2])
    search = Cost()
    among_right = binary_search(right, left, search)
    cost.depth += search.depth  # the ranks of both blocks are searched at the same time
    among_left = binary_search(left, right + 1, search)  # keys are integers: below k + 1 is up to k
    cost.work += search.work
    rank = torch.cat([own + among_right, own + among_left], dim=2)
    cost.add(keys[0].numel())
    keys, values = (part.unflatten(1, (-1, 2)).flatten(2) for part in (keys, values))
    return torch.empty_like(keys).scatter_(2, rank, keys), torch.empty_like(values).scatter_(2, rank, values)
