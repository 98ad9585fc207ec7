"""Recall tasks: what they promise of every row, against the oracle, and the distributions they draw from."""

import math
import tracemalloc
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from sympow.data import mqar
from sympow.data.mqar import IGNORED, RecallTask, generate, mixture, solve

TASKS = [
    RecallTask(length=64, pairs=4, vocab_size=8192),
    RecallTask(length=16, pairs=4, vocab_size=10),  # as tight as can be: every key, every slot
    RecallTask(length=70, pairs=7, vocab_size=100, filler="random", alpha=1.0),
    RecallTask("forgetting", length=32, pairs=5, vocab_size=60, updates=3, filler="random"),
    RecallTask("forgetting", length=12, pairs=2, vocab_size=10, updates=2),
    RecallTask("compositional", length=60, pairs=9, vocab_size=90, filler="random"),
    RecallTask("compositional", length=24, pairs=4, vocab_size=12, alpha=0.01),
    RecallTask(length=70, pairs=4, vocab_size=100, min_distance=55, filler="random"),
    RecallTask("forgetting", length=60, pairs=5, vocab_size=60, updates=3, min_distance=30),
    RecallTask("compositional", length=90, pairs=9, vocab_size=90, min_distance=37, deal="drawn"),
]


def random_task(rng):
    """A small task that can be drawn, with everything chosen at random."""
    kind = str(rng.choice(mqar.KINDS))
    pairs = int(rng.integers(1, 9)) if kind != "compositional" else int(rng.integers(1, 4)) ** 2
    updates = int(rng.integers(1, pairs + 1)) if kind == "forgetting" else 0
    needed = 6 * pairs if kind == "compositional" else 4 * pairs + 2 * updates
    far = int(rng.choice([0, 3, 20]))
    used = (3 if kind == "compositional" else 2) * (pairs + updates + 1)
    return RecallTask(
        kind,
        length=needed + far + far % 2 + 2 * int(rng.integers(0, 12)),
        pairs=pairs,
        vocab_size=used + int(rng.integers(2, 60)),
        alpha=float(rng.choice([0.01, 0.1, 1.0, 2.0])),
        filler=str(rng.choice(mqar.FILLERS)),
        updates=updates,
        min_distance=far,
    )


def chi_square(counts, probabilities):
    """The statistic, and what it exceeds once in 10,000 draws (Wilson and Hilferty's approximation)."""
    counts, expected = np.asarray(counts, float), np.asarray(probabilities) * np.sum(counts)
    free = len(counts) - 1
    bound = free * (1 - 2 / (9 * free) + 3.72 * math.sqrt(2 / (9 * free))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), bound


def power_law(slots, alpha):
    weights = np.arange(1, slots + 1, dtype=float) ** (alpha - 1)
    return weights / weights.sum()


def test_targets_are_the_oracles_on_10_000_rows_of_random_tasks():
    rng = np.random.default_rng(0)
    for seed in range(2_500):
        task = random_task(rng)
        drawn = generate(task, 4, seed)
        assert (drawn.targets == solve(task, drawn.tokens)).all(), (task, seed)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.kind}-{task.length}-{task.filler}")
def test_rows_are_made_as_promised(task):
    n = 200
    drawn = generate(task, n, 3)
    assert drawn.tokens.shape == drawn.targets.shape == (n, task.length)
    assert drawn.tokens.dtype == drawn.targets.dtype == np.int32
    assert (drawn.targets == solve(task, drawn.tokens)).all()
    places, labels = drawn.queries()
    assert places.shape == labels.shape == (n, task.pairs)
    assert (np.take_along_axis(drawn.targets, places, 1) == labels).all()
    keys = task.width - 1
    assert ((places - task.first_slot - (keys - 1)) % task.width == 0).all()  # in slots behind the context
    assert (places >= task.first_slot).all()
    context = drawn.tokens[:, : task.context].reshape(n, -1, task.width)
    assert (context > 0).all() and (drawn.tokens < task.vocab_size).all()
    for row, row_places in zip(drawn.tokens.tolist(), places.tolist(), strict=True):
        given = [tuple(row[i : i + keys]) for i in range(0, task.context, task.width)]
        asked = [tuple(row[i - keys + 1 : i + 1]) for i in row_places]
        assert sorted(asked) == sorted(set(given)) and len(asked) == task.pairs
        written = {key: task.width * i for i, key in enumerate(given)}  # an update comes after the pair
        distances = [at - (keys - 1) - written[key] for at, key in zip(row_places, asked, strict=True)]
        assert min(distances) >= max(task.min_distance, task.width)
        values = row[keys : task.context : task.width]
        assert len(set(values)) == len(values)
    for i, (low, high) in enumerate(zip(task.bounds, task.bounds[1:], strict=False)):
        assert (context[:, :, i] >= low).all() and (context[:, :, i] < high).all()


def test_a_worked_example_of_each_kind():
    """Those of the module's documentation."""
    rows = {
        RecallTask(length=12, pairs=2, vocab_size=10): ([3, 7, 1, 9, 0, 0, 1, 0, 0, 0, 3, 0], {6: 9, 10: 7}),
        RecallTask("forgetting", length=12, pairs=2, vocab_size=10, updates=1): (
            [3, 7, 1, 9, 3, 6, 1, 0, 0, 0, 3, 0],
            {6: 9, 10: 6},
        ),
        RecallTask("compositional", length=24, pairs=4, vocab_size=12): (
            [1, 5, 8, 2, 4, 9, 2, 5, 11, 1, 4, 10, 2, 5, 0, 1, 5, 0, 2, 4, 0, 1, 4, 0],
            {13: 11, 16: 8, 19: 9, 22: 10},
        ),
    }
    for task, (tokens, answers) in rows.items():
        solved = solve(task, np.array([tokens]))[0].tolist()
        assert {place: target for place, target in enumerate(solved) if target != IGNORED} == answers


@pytest.mark.parametrize("alpha", [0.1, 1.0, 2.0])
def test_distances_follow_the_power_law(alpha):
    task = RecallTask(length=52, pairs=1, vocab_size=100, alpha=alpha)
    places, _ = generate(task, 40_000, 11).queries()
    counts = np.bincount((places[:, 0] - task.context) // 2, minlength=task.slots)
    found, bound = chi_square(counts, power_law(task.slots, alpha))
    assert found < bound


def test_distances_begin_at_the_least_one_and_follow_the_power_law_from_there():
    task = RecallTask(length=90, pairs=1, vocab_size=100, min_distance=41)
    places, _ = generate(task, 40_000, 11).queries()
    counts = np.bincount((places[:, 0] - 41) // 2, minlength=task.slots)  # the key is token 0
    assert len(counts) == task.slots == (90 - 41) // 2
    found, bound = chi_square(counts, power_law(task.slots, task.alpha))
    assert found < bound


def test_every_query_may_be_thousands_of_tokens_behind_its_key():
    task = RecallTask(length=4096, pairs=64, min_distance=2048)
    rows = generate(task, 20, 0)
    keys, places = rows.tokens[:, 0 : task.context : 2], rows.queries()[0]
    queries = np.take_along_axis(rows.tokens, places, 1)
    distances = places[:, None] - 2 * np.arange(64)[:, None]
    found = distances[queries[:, None] == keys[..., None]]
    assert len(found) == 20 * 64 and 2048 <= found.min() < 2148 and found.max() > 3000


def test_a_least_distance_that_every_row_has_anyway_changes_nothing():
    for task in TASKS[:7]:
        near, plain = replace(task, min_distance=task.width), generate(task, 50, 7)
        assert (generate(near, 50, 7).tokens == plain.tokens).all()
    assert str(RecallTask(length=512, min_distance=99)) == "mqar 512:4 min_distance 99"
    assert "min_distance" not in str(RecallTask())


def test_slots_are_drawn_one_after_another_without_replacement():
    task = RecallTask(length=14, pairs=2, vocab_size=100)
    places, _ = generate(task, 40_000, 12).queries()
    p = power_law(task.slots, task.alpha)
    sets = list(combinations(range(task.slots), 2))
    expected = [p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in sets]
    found = [tuple(row) for row in ((places - task.context) // 2).tolist()]
    assert sum(expected) == pytest.approx(1)
    statistic, bound = chi_square([found.count(each) for each in sets], expected)
    assert statistic < bound


@pytest.mark.parametrize("text", ["the module", "docs/guides/mqar.md"])
def test_docs_say_where_rows_differ_from_the_published_code(text):
    """Users who compare results must find the differences in both. The other tests here check the rows."""
    words = mqar.__doc__ if text == "the module" else (Path(__file__).parents[2] / text).read_text()
    start = {
        "the module": "Rows differ from those of the published code",
        "docs/guides/mqar.md": "### Where it differs from",
    }
    part = " ".join(words.partition(start[text])[2].partition("\n## ")[0].split())
    for said in ("assigned to the", "at random", "0.01", "whole vocabulary", "all different", "num_passes", "global"):
        assert said in part, said


def test_slots_given_out_in_the_order_drawn_favour_early_keys():
    """The published code does so. This is why keys are assigned at random here."""
    task, rng = RecallTask(length=64, pairs=4), np.random.default_rng(0)
    p = power_law(task.slots, task.alpha)
    drawn = np.array([rng.choice(task.slots, task.pairs, replace=False, p=p) for _ in range(3000)])
    means, error = drawn.mean(0), drawn.std(0).max() * (2 / len(drawn)) ** 0.5  # of a difference of two
    assert means[-1] - means[0] > 4 * error and (np.diff(means) > 0).all(), means


def test_keys_may_take_the_slots_in_the_order_drawn():
    task = RecallTask(length=64, pairs=4, deal="drawn")
    rows = generate(task, 20_000, seed=0)
    keys, places = rows.tokens[:, 0:8:2], rows.queries()[0]
    queries = np.take_along_axis(rows.tokens, places, 1)
    slot = (np.take_along_axis(places, (queries[:, None] == keys[..., None]).argmax(2), 1) - task.context) // 2
    p = power_law(task.slots, task.alpha)
    found, bound = chi_square(np.bincount(slot[:, 0], minlength=task.slots), p)  # the first key has the first draw
    assert found < bound
    assert slot[:, 0].mean() < slot[:, 3].mean() - 1


def test_early_keys_are_no_nearer_than_late_ones():
    task = RecallTask(length=20, pairs=2, vocab_size=100)
    drawn = generate(task, 40_000, 13)
    _, labels = drawn.queries()
    first_is_nearer = (labels[:, 0] == drawn.tokens[:, 1]).sum()
    statistic, bound = chi_square([first_is_nearer, 40_000 - first_is_nearer], [0.5, 0.5])
    assert statistic < bound


@pytest.mark.parametrize(("size", "count"), [(9, 2), (5, 3)], ids=["redrawn", "permuted"])
def test_choices_without_replacement_are_equally_likely(size, count):
    drawn = mqar.draw_distinct(np.random.default_rng(5), 60_000, 3, 3 + size, count) - 3
    assert all(len(set(row)) == count for row in drawn[:1000].tolist())
    counts = np.bincount(np.ravel_multi_index(tuple(drawn.T), (size,) * count), minlength=size**count)
    counts = counts[counts > 0]
    assert len(counts) == math.perm(size, count)
    statistic, bound = chi_square(counts, np.full(len(counts), 1 / len(counts)))
    assert statistic < bound


def test_random_filler_is_uniform_over_the_tokens_a_row_does_not_use():
    task = RecallTask(length=40, pairs=3, vocab_size=20, filler="random")
    drawn = generate(task, 6000, 6)
    assert (drawn.tokens > 0).all()
    free = np.ones(task.length, bool)
    free[: task.context] = False
    counts, expected = np.zeros(20), np.zeros(20)
    for row, targets in zip(drawn.tokens, drawn.targets, strict=True):
        used = set(row[: task.context].tolist())
        filler = row[free & (targets == IGNORED)]
        assert not used & set(filler.tolist())
        allowed = [token for token in range(1, 20) if token not in used]
        expected[allowed] += len(filler) / len(allowed)
        counts += np.bincount(filler, minlength=20)
    statistic, bound = chi_square(counts[1:], expected[1:] / expected.sum())
    assert statistic < bound


def test_zero_filler_is_zero():
    drawn = generate(TASKS[0], 50, 0)
    rest = drawn.tokens[:, TASKS[0].context :]
    assert ((rest == 0) == (drawn.targets[:, TASKS[0].context :] == IGNORED)).all()


@pytest.mark.parametrize("filler", mqar.FILLERS)
def test_a_function_of_the_seed_alone(filler, monkeypatch):
    task = RecallTask(length=32, pairs=4, vocab_size=100, filler=filler)
    before = np.random.get_state()[1].copy()
    one, same, other = generate(task, 60, 1), generate(task, 60, 1), generate(task, 60, 2)
    assert (np.random.get_state()[1] == before).all()
    assert (one.tokens == same.tokens).all() and (one.targets == same.targets).all()
    assert not (one.tokens == other.tokens).all()
    monkeypatch.setattr(mqar, "BLOCK_ELEMENTS", 700)  # several blocks, the last one smaller
    blocks = generate(task, 60, 1)
    assert (blocks.targets == solve(task, blocks.tokens)).all()
    assert len({row.tobytes() for row in blocks.tokens}) == 60


@pytest.mark.parametrize("filler", mqar.FILLERS)
def test_no_second_copy_in_memory(filler):
    task = RecallTask(length=512, pairs=64, filler=filler)
    tracemalloc.start()
    try:
        drawn = generate(task, 20_000, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * (drawn.tokens.nbytes + drawn.targets.nbytes)


def test_a_mixture_shares_its_rows_out():
    tasks = [RecallTask(length=16, pairs=2, vocab_size=40), RecallTask(length=32, pairs=4, vocab_size=40)] * 2
    parts = mixture(tasks, 10, 7)
    assert [part.tokens.shape for part in parts] == [(3, 16), (3, 32), (2, 16), (2, 32)]
    assert not (parts[0].tokens[:2] == parts[2].tokens).all()
    assert (mixture(tasks, 10, (7,))[1].tokens == parts[1].tokens).all()
    for task, part in zip(tasks, parts, strict=True):
        assert (part.targets == solve(task, part.tokens)).all()
    with pytest.raises(ValueError, match="4 tasks, 3 examples"):
        mixture(tasks, 3, 0)


REFUSED = [
    ({"length": 63}, "length must be even; got 63"),
    ({"length": 14, "pairs": 4}, "4 pairs need a length of at least 16; got 14"),
    ({"kind": "forgetting", "length": 18, "pairs": 4, "updates": 2}, "4 pairs and 2 updates need a length of at least"),
    ({"kind": "compositional", "length": 22, "pairs": 4}, "4 pairs need a length of at least 24; got 22"),
    ({"kind": "compositional", "pairs": 5}, "pairs of a compositional task must be a square, 1, 4, 9, ...; got 5"),
    ({"vocab_size": 9}, "vocab_size is too small: 4 keys are needed, 9 tokens hold 3"),
    ({"kind": "forgetting", "updates": 4, "vocab_size": 14}, "too small: 8 values are needed, 14 tokens hold 7"),
    ({"kind": "compositional", "vocab_size": 6}, "too small: 2 first keys are needed, 6 tokens hold 1"),
    ({"length": 16, "vocab_size": 9, "pairs": 3, "filler": "random"}, None),
    ({"length": 4, "vocab_size": 4, "pairs": 1, "filler": "random"}, None),
    ({"kind": "forgetting", "pairs": 3, "updates": 1, "vocab_size": 8}, None),
    (
        {"kind": "forgetting", "pairs": 3, "updates": 1, "vocab_size": 8, "filler": "random"},
        "vocab_size is too small for random filler: keys and values take 7 of 7 tokens",
    ),
    ({"updates": 1}, "updates are of the forgetting task alone; got 1 for mqar"),
    ({"kind": "forgetting"}, "a forgetting task has 1 to 4 updates, as many as pairs; got 0"),
    ({"kind": "mqra"}, "kind is one of mqar, forgetting, compositional; got 'mqra'"),
    ({"filler": "none"}, "filler is one of zero, random; got 'none'"),
    ({"deal": "sorted"}, "deal is one of random, drawn; got 'sorted'"),
    ({"alpha": math.nan}, "alpha must be a finite number; got nan"),
    ({"pairs": 0}, "pairs must be at least 1; got 0"),
    ({"length": 64.0}, "length must be an integer; got 64.0"),
    ({"min_distance": -1}, "min_distance must be at least 0; got -1"),
    ({"min_distance": 20.0}, "min_distance must be an integer; got 20.0"),
    ({"min_distance": 51}, "4 pairs with a min_distance of 51 need a length of at least 66; got 64"),
    ({"min_distance": 50}, None),
    ({"length": 66, "min_distance": 51}, None),
    (
        {"kind": "forgetting", "updates": 2, "length": 72, "min_distance": 55},
        "4 pairs and 2 updates with a min_distance of 55 need a length of at least 74; got 72",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_drawn_is_refused_and_what_can_is_not(fields, message):
    if message is None:
        task = RecallTask(**fields)
        drawn = generate(task, 20, 0)
        assert (drawn.targets == solve(task, drawn.tokens)).all()
        return
    with pytest.raises((ValueError, TypeError)) as refused:
        RecallTask(**fields)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="examples must be at least 1; got 0"):
        generate(RecallTask(), 0, 0)
