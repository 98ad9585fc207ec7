from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sympow.data import Batches, Mixture, TokenCorpus
from sympow.data.batches import IGNORED, pack_lengths, shuffled


def numbered(lengths: list[int]) -> TokenCorpus:
    """A corpus in which every token is different, so that each can be traced."""
    starts = np.cumsum([0, *lengths])
    return TokenCorpus.from_documents(
        [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)], max(int(starts[-1]), 1)
    )


def segments(batch):
    """The sequences of a batch: (tokens, targets) of each row, or of each stretch between cu_seqlens."""
    if batch.cu_seqlens is None:
        return [(x.tolist(), y.tolist()) for x, y in zip(batch.tokens, batch.targets, strict=True)]
    borders = batch.cu_seqlens.tolist()
    return [(batch.tokens[0, a:b].tolist(), batch.targets[0, a:b].tolist()) for a, b in pairwise(borders)]


lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=12)
shapes = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))  # context, batch size, seed


@settings(deadline=None)
@given(lengths=lengths_of_documents.filter(lambda x: max(x) > 1), shape=shapes)
def test_every_target_is_predicted_once_an_epoch(lengths, shape):
    context, batch_size, seed = shape
    batches = Batches(numbered(lengths), context, batch_size, seed)
    first_tokens = set(np.cumsum([0, *lengths]).tolist())
    wanted = [token for token in range(sum(lengths)) if token not in first_tokens]
    assert batches.targets == len(wanted)
    targets = Counter()
    for i in range(batches.rows):  # batch_size epochs
        batch = batches[i]
        targets.update(y for y in batch.targets.flatten().tolist() if y != IGNORED)
    assert targets == dict.fromkeys(wanted, batch_size)


@settings(deadline=None)
@given(lengths=lengths_of_documents.filter(lambda x: max(x) > 1), shape=shapes)
def test_a_sequence_is_a_piece_of_one_document_cut_at_the_context(lengths, shape):
    context, batch_size, seed = shape
    corpus = numbered(lengths)
    batches = Batches(corpus, context, batch_size, seed)
    starts = np.cumsum([0, *lengths])
    for i in range(min(batches.rows, 20)):
        batch = batches[i]
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        packed = batch.cu_seqlens is not None
        assert batch.tokens.shape == batch.targets.shape
        assert batch.tokens.shape == ((1, batch_size * context) if packed else (batch_size, context))
        if packed:
            assert batch.cu_seqlens.dtype == torch.int32
            assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == batch_size * context
            assert (batch.cu_seqlens.diff() > 0).all()
        for tokens, targets in segments(batch):
            if targets[0] == IGNORED:  # padding, a sequence of its own
                assert packed and set(targets) == {IGNORED} and set(tokens) == {0}
                continue
            document = int(np.searchsorted(starts, tokens[0], side="right")) - 1
            start = tokens[0] - starts[document]
            assert start % context == 0
            piece = corpus[document][start : start + context + 1].tolist()
            if len(piece) == context and not packed:
                piece.append(IGNORED)  # the document ends with its row
            assert (tokens, targets) == (piece[:-1], piece[1:])
            assert packed == (len(tokens) < context)


@settings(deadline=None)
@given(lengths=lengths_of_documents.filter(lambda x: max(x) > 1), shape=shapes, data=st.data())
def test_a_batch_depends_on_nothing_but_its_index(lengths, shape, data):
    def values(batch):
        return [t if t is None else t.tolist() for t in batch]

    indices = data.draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
    batches = Batches(numbered(lengths), *shape)
    once = {i: values(batches[i]) for i in indices}
    again = {i: values(Batches(numbered(lengths), *shape)[i]) for i in reversed(indices)}
    assert once == again


def rows_of_an_epoch(batches, epoch):
    count = batches.rows
    return [batches[epoch * count + i].tokens[0, 0].item() for i in range(count)]


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = []
    for seed in (0, 1):
        batches = Batches(numbered([41] * 10), context=4, batch_size=1, seed=seed)
        assert batches.rows == 100
        orders += [rows_of_an_epoch(batches, epoch) for epoch in (0, 1)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    in_place = sum(a == b for a, b in zip(orders[0], sorted(orders[0]), strict=True))
    assert in_place < 10


def test_packed_batches_are_spread_evenly():
    batches = Batches(numbered([5 * 3 + 4] * 8), context=5, batch_size=2)  # 24 full rows, 8 packed ones
    assert batches.rows == 32
    sorts = [batches[i].cu_seqlens is not None for i in range(32)]
    assert sorts == [False, False, False, True] * 8


def test_a_batch_may_reach_over_the_end_of_an_epoch():
    batches = Batches(numbered([13]), context=4, batch_size=2)  # 3 full rows an epoch
    rows = [row for i in range(3) for row in batches[i].tokens[:, 0].tolist()]
    assert sorted(rows[:3]) == sorted(rows[3:]) == [0, 4, 8]


def test_without_packing_tails_are_left_out():
    batches = Batches(numbered([14, 3, 9]), context=4, batch_size=2, pack=False)
    assert (batches.rows, batches.targets) == (5, 20)
    assert all(batches[i].cu_seqlens is None for i in range(10))
    rows = [row for i in range(5) for row in batches[i].tokens[:, 0].tolist()]
    assert Counter(rows) == dict.fromkeys([0, 4, 8, 17, 21], 2)


@pytest.mark.parametrize(("context", "rows"), [(16, 1), (8, 2), (4, 4), (2, 8)])
def test_documents_of_whole_rows_are_rows_to_the_last_token(context, rows):
    """As in LongCrawl64, whose documents are as long as the longest context: every context sees all tokens."""
    batches = Batches(numbered([16] * 3), context, batch_size=rows, pack=False)
    assert (batches.rows, batches.targets) == (3 * rows, 3 * 15)
    seen = [batches[i] for i in range(3)]
    assert sorted(token for batch in seen for token in batch.tokens.flatten().tolist()) == list(range(48))
    assert sum((batch.targets == IGNORED).sum() for batch in seen) == 3


def test_batch_moves_to_a_device():
    batches = Batches(numbered([6]), context=4, batch_size=1)
    for batch in (batches[0], batches[1]):
        moved = batch.to("meta")
        assert moved.tokens.device.type == moved.targets.device.type == "meta"
        assert (moved.cu_seqlens is None) == (batch.cu_seqlens is None)


def test_state_of_the_same_data_passes():
    batches = Batches(numbered([30, 20]), context=4, batch_size=2, seed=3)
    batches.check_state(Batches(numbered([30, 20]), context=4, batch_size=2, seed=3).state())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Batches(numbered([30, 21]), 4, 2), "corpus was [0-9a-f]{32} and is [0-9a-f]{32}$"),
        (Batches(numbered([30, 20]), 5, 3), "context was 5 and is 4; batch_size was 3 and is 2$"),
        (Batches(numbered([30, 20]), 4, 2, seed=1), "seed was 1 and is 0$"),
        (Batches(numbered([30, 20]), 4, 2, pack=False), "pack was False and is True$"),
    ],
)
def test_state_of_other_data_is_refused_in_one_line(other, message):
    with pytest.raises(ValueError, match="^the data are not those of the checkpoint: " + message):
        Batches(numbered([30, 20]), 4, 2).check_state(other.state())


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([30], {"context": 0}, "context must be at least 1, got 0"),
        ([30], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([30], {"seed": -1}, "seed must be at least 0, got -1"),
        ([1, 1], {}, "nothing to predict: no document holds 2 tokens"),
        (
            [9, 8],
            {"context": 10, "pack": False},
            "no document fills a row of context = 10 tokens, the longest has 9: use a shorter context, or packing "
            r"\(data.pack=true\)$",
        ),
    ],
)
def test_what_gives_no_batches_is_refused(lengths, arguments, message):
    with pytest.raises(ValueError, match=message):
        Batches(numbered(lengths), **{"context": 4, "batch_size": 1, **arguments})


def test_batches_are_numbered_from_0():
    with pytest.raises(IndexError, match="batches are numbered from 0, got -1"):
        Batches(numbered([30]), 4, 1)[-1]


def first_fit_decreasing(lengths, capacity):
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= capacity), None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    return sorted(rows)


@given(data=st.data(), capacity=st.integers(1, 30))
def test_packing_is_first_fit_decreasing(data, capacity):
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), dtype=np.int64)
    order, starts = pack_lengths(lengths, capacity)
    assert sorted(order) == list(range(len(lengths)))
    rows = [lengths[order[a:b]].tolist() for a, b in pairwise(starts)]
    assert sorted(sorted(row, reverse=True) for row in rows) == first_fit_decreasing(lengths.tolist(), capacity)


@given(length=st.integers(1, 300), key=st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 10**6)))
def test_shuffled_is_a_permutation(length, key):
    assert sorted(shuffled(np.arange(length), length, key)) == list(range(length))


def test_shuffled_is_far_from_any_order():
    """Neighbours land apart, and positions do not stay near where they were: as of a random permutation."""
    length = 100_000
    places = shuffled(np.arange(length), length, (0, 0, 0))
    assert abs(np.abs(np.diff(places)).mean() / length - 1 / 3) < 0.01
    assert abs(np.corrcoef(np.arange(length), places)[0, 1]) < 0.02
    assert shuffled(np.array([2**40]), 2**41, (0, 0, 0))[0] < 2**41


def of_token(token: int, lengths: list[int]) -> TokenCorpus:
    return TokenCorpus.from_documents([np.full(n, token) for n in lengths], 8)


@pytest.mark.parametrize("pack", [True, False])
def test_predictions_of_a_mixture_are_in_the_proportions_of_the_weights(pack):
    """In every stretch, of documents that fill rows, of short ones, and of those that leave padding."""
    draw = np.random.default_rng(0)
    corpora = [of_token(1, [400] * 40), of_token(2, draw.integers(20, 300, 50).tolist()), of_token(3, [70, 40] * 90)]
    batches = Batches(Mixture(corpora, (5, 3, 2)), 64, 4, seed=3, pack=pack)
    for stretch in (range(0, 250), range(10**9, 10**9 + 250)):
        counts = Counter(token for i in stretch for token in batches[i].targets.flatten().tolist())
        total = sum(counts[token] for token in (1, 2, 3))
        assert [counts[token] / total for token in (1, 2, 3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.005)
    sources = [set(batches[i].targets.flatten().tolist()) - {IGNORED, 0} for i in range(50)]
    assert sum(len(found) > 1 for found in sources) > 25  # batches mix the sources


def test_a_mixture_predicts_every_target_of_each_corpus_equally_often():
    documents = list(np.split(np.arange(141), (30, 39, 89, 101)))  # three of the first corpus, two of the second
    first, second = (TokenCorpus.from_documents(part, 141) for part in (documents[:3], documents[3:]))
    batches = Batches(Mixture([first, second], (3, 1)), 8, 2)
    counts = Counter(y for i in range(3000) for y in batches[i].targets.flatten().tolist() if y != IGNORED)
    for low, high, targets in ((0, 89, 86), (89, 141, 50)):
        of_source = [n for token, n in counts.items() if low <= token < high]
        assert len(of_source) == targets and max(of_source) - min(of_source) <= 1


def test_a_mixture_of_one_corpus_is_that_corpus():
    corpus = numbered([30, 9, 50])
    one, mixed = Batches(corpus, 8, 2, seed=1), Batches(Mixture([corpus], [3]), 8, 2, seed=1)
    assert (mixed.rows, mixed.targets) == (one.rows, one.targets)
    for i in range(40):
        for old, new in zip(one[i], mixed[i], strict=True):
            assert (old is None and new is None) or torch.equal(old, new)


def test_batches_of_a_mixture_know_its_weights():
    corpora = [of_token(1, [400]), of_token(2, [300])]
    old, new = (Batches(Mixture(corpora, weights), 64, 4) for weights in ((5, 3), (5, 2)))
    old.check_state(Batches(Mixture(corpora, (5.0, 3.0)), 64, 4).state())
    with pytest.raises(ValueError, match="the data are not those of the checkpoint: corpus was"):
        new.check_state(old.state())


@pytest.mark.parametrize(
    ("corpora", "weights", "message"),
    [
        ([of_token(1, [4])], [1, 2], r"expected 1 weights above 0, got \[1, 2\]"),
        ([of_token(1, [4])], [0], r"expected 1 weights above 0, got \[0\]"),
        ([of_token(1, [4]), numbered([4])], [1, 1], r"expected corpora of one vocabulary, got sizes \[4, 8\]"),
        ([], [], r"expected corpora of one vocabulary, got sizes \[\]"),
    ],
)
def test_mixtures_that_are_refused(corpora, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(corpora, weights)
