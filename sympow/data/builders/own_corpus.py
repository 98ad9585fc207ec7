"""A corpus from one's own texts, in the layout of LongCrawl64.

A document is one of `find_texts`. About 5% of the documents, of all lengths, are held out. Documents are tokenized and
cut to rows. What is left at a document's end, and a document shorter than a row, is in no array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sympow.data.builders.corpus_folder import ROW_TOKENS, VOCAB_SIZE, write_corpus
from sympow.data.builders.sources import HELD_OUT, SourceDocument
from sympow.data.corpus import choose_held_out
from sympow.data.text import Document, cut_document, find_texts, measure_documents
from sympow.data.tokens import Tokenizer
from sympow.files import digest
from sympow.progress import Progress

_SEED = 0  # of the choice of the documents to hold out
_VERSION = "texts-1"  # of the rules in this file; change it if they make another corpus from the same texts


def build_corpus(
    out: str | os.PathLike[str],
    texts: str | os.PathLike[str],
    *,
    group: str = "file",
    suffixes: Sequence[str] = (),
    text_field: str = "text",
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Tokenizer | None = None,
    row_tokens: int = ROW_TOKENS,
    progress: bool = False,
    remark: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Writes the texts of a file or a folder as a corpus into the folder `out`, or continues, as `write_corpus` does.

    Args:
        out: the folder: a new one, or one that an earlier call with the same arguments started.
        texts: the file or the folder with the texts, see `find_texts`.
        group: as for `find_texts`.
        suffixes: as for `find_texts`.
        text_field: as for `find_texts`.
        vocab_size: tokens of the BPE, 256 to 65,536; few texts may give fewer.
        tokenizer: used instead of a BPE trained on the corpus.
        row_tokens: the number of tokens in a row.
        progress: whether to show the progress on stderr, see `Progress`.
        remark: called with each line on what is left out of the folder.

    Returns the content of `corpus.json`. Raises the errors of `write_corpus` and of `find_texts`.
    """
    words = {"vocab_size": vocab_size} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
    reading = {"group": group, "suffixes": list(suffixes), "text_field": text_field}
    settings = {"version": _VERSION, "row_tokens": row_tokens, "words": words, "reading": reading}

    def open_source(_: Path) -> Texts:
        return Texts(texts, group, suffixes, text_field, progress, remark or (lambda line: None))

    return write_corpus(
        out, settings, open_source, row_tokens=row_tokens, vocab_size=vocab_size, tokenizer=tokenizer, texts=texts
    )


class Texts:
    """Gives the documents of a file or a folder. Each call that reads texts reads all files again.

    Args:
        path: as for `find_texts`.
        group: as for `find_texts`.
        suffixes: as for `find_texts`.
        text_field: as for `find_texts`.
        progress: whether to show the progress on stderr.
        remark: called with each line on what is left out of the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str,
        suffixes: Sequence[str],
        text_field: str,
        progress: bool,
        remark: Callable[[str], object],
    ):
        self._found = find_texts(path, group, suffixes, text_field)
        self._progress, self._remark = progress, remark
        self._documents: list[Document] = []
        self.sizes: dict[str, int] = {}  # bytes of each document by name, once surveyed

    def survey(self) -> str:
        """Measures all documents. Returns a hash of them."""
        with self._reading("looking through", len(self._found.documents)) as progress:
            kept, sizes, hashes = measure_documents(_counted(self._found.documents, progress))
        if not kept:
            raise ValueError(f"text corpus {self._found.path} is empty: its files hold no text")
        for line in self._found.remarks(len(self._found.documents) - len(kept)):
            self._remark(line)
        if len(kept) == 1:
            kept, sizes, hashes = measure_documents(cut_document(kept[0], HELD_OUT))
        self._documents = kept
        for document, size in zip(kept, sizes.tolist(), strict=True):
            if document.name in self.sizes:
                raise ValueError(f"text corpus {self._found.path} holds {document.name} twice: remove one of the files")
            self.sizes[document.name] = size
        return digest(part for pair in zip(self.sizes, hashes, strict=True) for part in pair)

    def plan(self) -> list[SourceDocument]:
        """Returns the documents, of which some are held out."""
        sizes = np.array(list(self.sizes.values()))
        held_out = set(choose_held_out(sizes, HELD_OUT, _SEED).tolist())
        return [SourceDocument(name, (name,), size, i in held_out) for i, (name, size) in enumerate(self.sizes.items())]

    def sample(self, files: Collection[str]) -> Iterator[str]:
        """Returns the texts of these documents."""
        with self._reading("training the tokenizer", len(self._documents)) as progress:
            yield from (each.read() for each in _counted(self._documents, progress) if each.name in files)

    def texts(self, documents: Sequence[SourceDocument], start: int) -> Iterator[tuple[SourceDocument, str]]:
        """Yields the documents from number `start` on, in order, with their texts."""
        with self._reading("tokenizing", len(self._documents), start) as progress:
            for place in range(start, len(documents)):
                yield documents[place], self._documents[place].read()
                progress.advance()

    def _reading(self, task: str, total: int, done: int = 0) -> Progress:
        return Progress(task, "document", total=total, done=done, quiet=not self._progress)


def _counted(documents: Sequence[Document], progress: Progress) -> Iterator[Document]:
    for document in documents:
        yield document
        progress.advance()
