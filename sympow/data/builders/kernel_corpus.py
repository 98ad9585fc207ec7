"""Long documents without a network: the Linux kernel's source, from a Debian package, in the layout of LongCrawl64.

A document is a directory of the kernel. Its text consists of the files directly in it, sorted by name; a line with its
path precedes each file. If a directory, together with directories that have joined it, has less text than four bytes
for each token of a row, it joins its parent directory. Its files then follow the parent's own files, in the order of
paths. Therefore a document also contains small directories below it. Hidden and binary files are left out, and so are
the generated register tables of two drivers (folders `asic_reg`): 400 MB, nearly a third of the source.

The documents are tokenized by a byte-level BPE trained on a sample of the training files, and cut to rows of 65,536
tokens. What is left at a document's end, and a document shorter than a row, is in no array.

Documents whose paths agree in the first three folders form a group, because nearby directories share much text. A group
is held out as a whole, or used for training as a whole. Groups are taken in the order of a hash of these folders. A
group is held out if at most 5% of the text is then held out.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from sympow.data.builders.corpus_folder import ROW_TOKENS, VOCAB_SIZE, write_corpus
from sympow.data.builders.debian_package import fetch_package
from sympow.data.builders.source_tree import read_files
from sympow.data.builders.sources import SourceDocument, choose_held_out, join_small
from sympow.data.text import headed_text, looks_binary
from sympow.files import digest
from sympow.progress import Progress

PACKAGE = "linux-source-6.1"

_SMALLEST = 4  # bytes a token of a row: the kernel has 2.5 bytes a token, so that a document fills a row or more
_SUBTREE = 3  # folders of a path that are held out together
_TABLES = "asic_reg"
_VERSION = 1  # the version of the rules in this file; raise it if the rules make another corpus from the same source


def build_kernel_corpus(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    row_tokens: int = ROW_TOKENS,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes the corpus of the kernel's source into the folder `out`, or continues it, as `write_corpus` does.

    Args:
        out: the folder: a new one, or one that an earlier call with the same arguments started.
        source: as for `read_files`; by default Debian's package linux-source-6.1, by `apt-get download`.
        vocab_size: tokens of the BPE, 256 to 65,536; a small source may give fewer.
        row_tokens: the number of tokens in a row.
        progress: whether to show the progress on stderr, see `Progress`.

    Returns the content of `corpus.json`. Raises the errors of `write_corpus`; ValueError also for an unusable source;
    FileNotFoundError for a missing source; RuntimeError if the package cannot be fetched.
    """

    def open_source(partial: Path) -> _Tree:
        if source is not None:
            return _Tree(source, row_tokens, progress)
        with Progress(f"fetching {PACKAGE}", quiet=not progress):
            return _Tree(fetch_package(PACKAGE, partial / "package"), row_tokens, progress)

    settings = {"version": _VERSION, "vocab_size": vocab_size, "row_tokens": row_tokens}
    return write_corpus(out, settings, open_source, row_tokens=row_tokens, vocab_size=vocab_size, texts=source)


def plan_documents(sizes: dict[str, int], smallest: int) -> list[SourceDocument]:
    """Plans which files make which documents, and which documents are held out.

    Documents are in the order in which they become complete when files are read in the order of their paths, as
    archives have them. Raises ValueError where nothing can be held out.

    Args:
        sizes: bytes of each file's text by path.
        smallest: bytes; a directory with less joins the one above.
    """
    files = join_small(sizes, smallest)
    kept = {directory: sum(sizes[name] for name in names) for directory, names in files.items()}
    held_out = choose_held_out(kept, lambda each: "/".join(each.split("/")[:_SUBTREE]), "the source of a kernel")
    ordered = sorted(kept, key=lambda directory: max(files[directory]))
    return [
        SourceDocument(each, tuple(sorted(files[each], key=os.path.split)), kept[each], each in held_out)
        for each in ordered
    ]


class _Tree:
    """Gives the files of a source that count. Each call that reads them goes through the source once more."""

    def __init__(self, source: str | os.PathLike[str], row_tokens: int, progress: bool):
        self._source, self._row_tokens, self._progress = source, row_tokens, progress
        self.sizes: dict[str, int] = {}  # bytes of each file's text by path, once surveyed
        self._count: int | None = None  # of all files, once surveyed

    def reading(self, task: str) -> Progress:
        """Returns the progress of a reading of all files."""
        return Progress(task, "file", total=self._count, quiet=not self._progress)

    def survey(self) -> str:
        """Measures all files. Returns a hash of them that does not depend on the kind of source."""
        hashes = {}
        with self.reading("looking through") as progress:
            for name, text in self.files(progress):
                if name in self.sizes:
                    raise ValueError(f"source {self._source} holds {name} twice")
                data = text.encode("utf-8")
                self.sizes[name], hashes[name] = len(data), digest([data])
        self._count = progress.done
        if not hashes:
            raise ValueError(f"source {self._source} is empty: no text in it")
        return digest(hashes[name] for name in sorted(hashes))

    def plan(self) -> list[SourceDocument]:
        return plan_documents(self.sizes, _SMALLEST * self._row_tokens)

    def sample(self, files: Collection[str]) -> Iterator[str]:
        with self.reading("training the tokenizer") as progress:
            yield from (text for name, text in self.files(progress) if name in files)

    def files(self, progress: Progress) -> Iterator[tuple[str, str]]:
        """Yields the path and the headed text of each file; `progress` counts all files that are read."""
        for name, data in read_files(self._source):
            progress.advance()
            parts = name.split("/")
            hidden = any(part.startswith(".") for part in parts)
            if data and not hidden and _TABLES not in parts and not looks_binary(data):
                yield name, headed_text(name, data.decode("utf-8", errors="replace"))

    def texts(self, documents: Sequence[SourceDocument], start: int) -> Iterator[tuple[SourceDocument, str]]:
        """Yields the documents from number `start` on, in order, with their texts."""
        place = {name: n for n, document in enumerate(documents[start:], start) for name in document.files}
        parts: dict[int, dict[str, str]] = defaultdict(dict)
        turn = start
        with self.reading("tokenizing") as progress:
            for name, text in self.files(progress):
                if name in place:
                    parts[place[name]][name] = text
                while turn < len(documents) and len(parts[turn]) == len(documents[turn].files):
                    texts = parts.pop(turn)
                    yield documents[turn], "".join(texts[file] for file in documents[turn].files)
                    turn += 1
        if turn < len(documents):
            raise ValueError(
                f"source {self._source} was changed while it was read: files of {documents[turn].directory} are gone"
            )
