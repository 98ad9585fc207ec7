"""Algorithms 9 and 11 and all pairs against a dictionary, and what they cost."""

import math

import pytest
import torch

from sympow.recall.theory.instances import NONE, draw
from sympow.recall.theory.parallel import (
    Cost,
    binary_search,
    parallel_binary_search,
    recall_all_pairs,
    recall_in_blocks,
    recall_one_by_one,
)


@pytest.mark.parametrize("recall", [recall_one_by_one, recall_all_pairs, recall_in_blocks])
@pytest.mark.parametrize(("triples", "vocab_size"), [(16, 20), (13, 40), (1, 3)])
def test_algorithms_are_exact_on_random_rows(recall, triples, vocab_size, scanned):
    instances = draw(10_000, triples, vocab_size, seed=triples)
    answers = scanned(instances)
    assert triples == 1 or 0.1 < (answers != NONE).double().mean() < 0.9
    assert torch.equal(recall(instances)[0], answers)


def test_binary_search_counts_smaller_entries_and_its_steps():
    ordered = torch.randint(20, (50, 9, 16), generator=torch.Generator().manual_seed(0)).sort(-1).values
    wanted = torch.randint(-2, 22, (50, 9, 3), generator=torch.Generator().manual_seed(1))
    cost = Cost()
    assert torch.equal(binary_search(ordered, wanted, cost), (ordered[:, :, None] < wanted[..., None]).sum(-1))
    assert (cost.work, cost.depth) == (9 * 3 * 5, 5)


@pytest.mark.parametrize("keys", [0, 1, 5, 16])
def test_one_recursion_searches_for_sorted_queries(keys):
    """Algorithm 10 against equation 12, with keys that are equal, too."""
    generator = torch.Generator().manual_seed(keys)
    for count in (0, 1, 2, 7, 16) * 200:
        ordered = torch.randint(12, (keys,), generator=generator).sort().values
        wanted = torch.randint(-1, 13, (count,), generator=generator).sort().values
        counts, _ = parallel_binary_search(wanted.tolist(), ordered.tolist())
        assert counts == torch.searchsorted(ordered, wanted).tolist()


def test_the_recursion_takes_n_log_m_work():
    for size in (2**4, 2**8, 2**12):
        ordered, wanted = (torch.randint(4 * size, (size,), generator=torch.Generator().manual_seed(seed)).sort().values
                           for seed in (0, 1))  # fmt: skip
        counts, cost = parallel_binary_search(wanted.tolist(), ordered.tolist())
        assert counts == torch.searchsorted(ordered, wanted).tolist()
        assert size <= cost.work <= 3 * size * math.log2(size)
        assert cost.depth <= 2 * (math.log2(size) + 1) * (math.log2(size) + 2)


def test_work_in_blocks_is_n_log_squared_and_less_than_all_pairs():
    for bits in range(6, 15):
        size = 2**bits
        instances = draw(1, size, 2 * size, seed=0)
        answers, cost = recall_in_blocks(instances)
        assert torch.equal(answers, recall_one_by_one(instances)[0])
        assert size * math.log2(size) < cost.work <= 2 * size * math.log2(size) ** 2
        assert cost.depth <= 2 * math.log2(size) ** 2
    assert cost.work < size * (size - 1) // 2 // 10
