import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sympow.data import Subset, TokenCorpus
from sympow.data.corpus import choose_held_out

DOCUMENTS = [np.array([1, 2, 3]), np.array([], dtype=int), np.array([4]), np.array([5, 6])]


def test_documents_come_back():
    corpus = TokenCorpus.from_documents(DOCUMENTS, vocab_size=7)
    assert len(corpus) == 4 and corpus.lengths.tolist() == [3, 0, 1, 2] and corpus.lengths.dtype == np.int64
    assert [document.tolist() for document in corpus] == [document.tolist() for document in DOCUMENTS]


@pytest.mark.parametrize("index", [-1, 4])
def test_no_document_outside(index):
    corpus = TokenCorpus.from_documents(DOCUMENTS, vocab_size=7)
    for documents in (corpus, Subset(corpus, np.arange(4))):
        with pytest.raises(IndexError, match=f"document {index} of a corpus of 4"):
            documents[index]


def test_fingerprint_changes_with_content_borders_order_and_vocabulary():
    one, two = np.array([1, 2]), np.array([3])
    corpora = [
        TokenCorpus.from_documents(documents, vocab_size)
        for documents, vocab_size in [
            ([one, two], 7),
            ([two, one], 7),
            ([np.array([1]), np.array([2, 3])], 7),
            ([one, np.array([4])], 7),
            ([one, two], 8),
        ]
    ]
    corpora += [Subset(corpora[0], np.array([0])), Subset(corpora[0], np.array([1, 0]))]
    assert len({corpus.fingerprint for corpus in corpora}) == len(corpora)
    assert TokenCorpus.from_documents([one, two], 7).fingerprint == corpora[0].fingerprint


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([np.array([1, 7])], ValueError, "document 0 holds token 7, outside the vocabulary of 7"),
        ([np.array([1]), np.array([-1])], ValueError, "document 1 holds token -1, outside the vocabulary of 7"),
        ([np.array([0.5])], TypeError, "document 0 must be 1-D integers, got 1-D float64"),
        ([np.array([[1]])], TypeError, "document 0 must be 1-D integers, got 2-D int64"),
        ([], ValueError, "a corpus needs tokens, got 0 documents without any"),
        ([np.array([], dtype=int)], ValueError, "a corpus needs tokens, got 1 documents without any"),
    ],
)
def test_what_is_no_corpus_is_refused(documents, error, message):
    with pytest.raises(error, match=message):
        TokenCorpus.from_documents(documents, vocab_size=7)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([True, False, True, False], r"indices must be integers \[N\]; got bool \[4\]"),
        ([[0]], r"got int64 \[1, 1\]"),
        ([0.0], "got float64"),
        ([0, 4, 5], "a corpus of 4 documents has none of index 4"),
        ([-1], "none of index -1"),
    ],
)
def test_indices_that_name_no_documents_are_refused(indices, message):
    with pytest.raises(ValueError, match=message):
        Subset(TokenCorpus.from_documents(DOCUMENTS, vocab_size=7), np.array(indices))


def test_subset_reads_the_chosen_documents():
    subset = Subset(TokenCorpus.from_documents(DOCUMENTS, vocab_size=7), np.array([3, 0]))
    assert subset.lengths.tolist() == [2, 3] and subset.vocab_size == 7
    assert [document.tolist() for document in subset] == [[5, 6], [1, 2, 3]]


@given(
    lengths=st.lists(st.integers(0, 10**6), min_size=2, max_size=200),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_held_out_is_a_true_part_of_about_the_size(lengths, fraction, seed):
    chosen = choose_held_out(np.array(lengths), fraction, seed)
    assert (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < len(lengths)
    assert len(chosen) == min(max(1, round(fraction * len(lengths))), len(lengths) - 1)
    assert chosen.tolist() == choose_held_out(np.array(lengths), fraction, seed).tolist()


def test_held_out_has_its_share_of_the_long_documents_whatever_the_seed():
    lengths = np.array([10_000] * 20 + [10] * 180)
    choices = [choose_held_out(lengths, 0.1, seed) for seed in range(20)]
    assert all((lengths[chosen] == 10_000).sum() == 2 for chosen in choices)
    assert len({tuple(chosen) for chosen in choices}) == 20


def test_one_document_cannot_be_held_out():
    with pytest.raises(ValueError, match="at least 2 documents, got 1"):
        choose_held_out(np.array([5]), 0.1, 0)
