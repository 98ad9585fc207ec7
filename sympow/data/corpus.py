"""Documents as arrays of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from sympow.files import digest


class Corpus(Protocol):
    """Gives the tokens of documents by index.

    `corpus[i]` is document `i`, a 1-D integer array. It raises IndexError outside 0..len-1, so that iteration ends.
    `lengths`, int64 [len], contains the numbers of tokens. Every token is below `vocab_size`. `fingerprint` is a hash
    that changes with the content or the tokenizer.
    """

    @property
    def lengths(self) -> np.ndarray:
        """Returns the tokens of every document, int64 [len(self)]."""
        ...

    @property
    def vocab_size(self) -> int:
        """Returns the size of the vocabulary; every token is below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Returns a hash of the documents."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> np.ndarray: ...


class TokenCorpus:
    """Holds all documents, one after another, in one array in memory or in a memory-mapped file.

    Args:
        tokens: 1-D integers, all documents one after another.
        offsets: int64 [documents + 1]; document i is `tokens[offsets[i]:offsets[i + 1]]`.
        vocab_size: the size of the vocabulary. It is not checked; `from_documents` checks it.
        fingerprint: a hash of the documents. It is not checked; `from_documents` computes it.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, vocab_size: int, fingerprint: str):
        self._tokens = tokens
        self._offsets = offsets
        self.lengths = np.diff(offsets)
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint

    @classmethod
    def from_documents(cls, documents: Iterable[np.ndarray], vocab_size: int) -> TokenCorpus:
        """Makes a corpus in memory from 1-D integer arrays.

        Raises TypeError, or ValueError for a token outside the vocabulary and for a corpus without tokens.
        """
        arrays = [np.asarray(document) for document in documents]
        for index, array in enumerate(arrays):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise TypeError(f"document {index} must be 1-D integers, got {array.ndim}-D {array.dtype}")
            check_tokens(array, vocab_size, f"document {index}")
        if not sum(array.size for array in arrays):
            raise ValueError(f"a corpus needs tokens, got {len(arrays)} documents without any")
        dtype = np.min_scalar_type(vocab_size - 1)
        arrays = [array.astype(dtype) for array in arrays]
        offsets = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64)
        fingerprint = digest([str(vocab_size), *(array.tobytes() for array in arrays)])
        return cls(np.concatenate(arrays), offsets, vocab_size, fingerprint)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, len(self))
        return self._tokens[self._offsets[index] : self._offsets[index + 1]]


class Subset:
    """Selects documents of a corpus, as a corpus.

    Args:
        corpus: the corpus to select from.
        indices: int64 [N], the indices of the selected documents, in the order of the subset.

    Raises ValueError for indices that are not integers [N] from 0 to one less than the corpus has documents.
    """

    def __init__(self, corpus: Corpus, indices: np.ndarray):
        if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            raise ValueError(f"indices must be integers [N]; got {indices.dtype} {list(indices.shape)}")
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(corpus)):
            raise ValueError(f"a corpus of {len(corpus)} documents has none of index {_beyond(indices, len(corpus))}")
        self._corpus = corpus
        self._indices = indices
        self.lengths = corpus.lengths[indices]
        self.vocab_size = corpus.vocab_size
        self.fingerprint = digest([corpus.fingerprint, np.ascontiguousarray(indices, dtype=np.int64).tobytes()])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, len(self))
        return self._corpus[int(self._indices[index])]


class Concatenated:
    """Holds corpora of one vocabulary as one: the documents of one after those of another.

    Args:
        corpora: the corpora, at least one.

    Raises ValueError if there is none, or if their vocabularies have different sizes.
    """

    def __init__(self, corpora: Sequence[Corpus]):
        sizes = {corpus.vocab_size for corpus in corpora}
        if len(sizes) != 1:
            raise ValueError(f"expected corpora of one vocabulary, got sizes {sorted(sizes)}")
        self.corpora = tuple(corpora)
        self._ends = np.cumsum([len(corpus) for corpus in corpora])
        self.lengths = np.concatenate([corpus.lengths for corpus in corpora])
        self.vocab_size = sizes.pop()
        self.fingerprint = digest(corpus.fingerprint for corpus in corpora)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, len(self))
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.corpora[number][index - (int(self._ends[number - 1]) if number else 0)]


class Mixture(Concatenated):
    """Holds corpora as one, from which `Batches` takes tokens in given proportions.

    Args:
        corpora: the corpora, at least one.
        weights: the proportions of tokens, above 0; one for each corpus. Only their ratios matter.

    Raises ValueError as `Concatenated` does, and for weights that are not such numbers.
    """

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float]):
        super().__init__(corpora)
        if len(weights) != len(corpora) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"expected {len(corpora)} weights above 0, got {list(weights)}")
        self.weights = tuple(weights)
        self.fingerprint = digest([self.fingerprint, *map(str, map(float, weights))])


def _beyond(indices: np.ndarray, count: int) -> int:
    """Returns the first index that is not from 0 to count - 1."""
    return int(indices[(indices < 0) | (indices >= count)][0])


def choose_held_out(lengths: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Chooses the documents to hold out; returns their indices, sorted, int64.

    About `fraction` of the documents are chosen, at least one and never all. Documents are sorted by length and divided
    into as many groups as documents are held out. One document is drawn from each group. Therefore long documents are
    held out in proportion, and about `fraction` of the tokens. Raises ValueError for fewer than two documents.
    """
    documents = len(lengths)
    if documents < 2:
        raise ValueError(f"holding documents out needs at least 2 documents, got {documents}")
    rng = np.random.default_rng(seed)
    count = min(max(1, round(documents * fraction)), documents - 1)
    shuffled = rng.permutation(documents)  # so that documents of one length are drawn at random
    by_length = shuffled[np.argsort(-np.asarray(lengths)[shuffled], kind="stable")]
    edges = np.linspace(0, documents, count + 1).astype(np.int64)
    return np.sort(by_length[rng.integers(edges[:-1], edges[1:])])


def check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Raises ValueError unless every token is in 0..vocab_size-1."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        token = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise ValueError(f"{where} holds token {token}, outside the vocabulary of {vocab_size}")


def check_index(index: int, length: int) -> None:
    """Raises IndexError unless 0 <= index < length. A negative index would read another document's tokens."""
    if not 0 <= index < length:
        raise IndexError(f"document {index} of a corpus of {length}")
