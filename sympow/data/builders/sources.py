"""What a corpus is made of: a source, its documents, and which of them are held out."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sympow.files import digest

HELD_OUT = 0.05
SPLITS = ("train", "heldout")  # of the arrays' names: train.zarr and heldout.zarr, as LongCrawl64 has them


@dataclass(frozen=True)
class SourceDocument:
    """Describes a document: its directory, the files in the order of its text, its bytes, and its split."""

    directory: str
    files: tuple[str, ...]
    size: int
    held_out: bool

    @property
    def name(self) -> str:
        """Returns the first file, and how many there are besides."""
        others = len(self.files) - 1
        return self.files[0] + (f" and {others} other files" if others else "")

    @property
    def split(self) -> str:
        """Returns the name of the split of the document, one of `SPLITS`."""
        return SPLITS[self.held_out]


class Source(Protocol):
    """Gives the texts of a corpus. Each call that reads texts reads the whole source again."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Returns bytes of each file's text by path, once surveyed."""
        ...

    def survey(self) -> str:
        """Measures all files.

        Returns a hash of them.
        """
        ...

    def plan(self) -> list[SourceDocument]:
        """Returns the documents, in the order in which `texts` gives them."""
        ...

    def sample(self, files: Collection[str]) -> Iterator[str]:
        """Returns the texts of these files, to train a tokenizer."""
        ...

    def texts(
        self, documents: Sequence[SourceDocument], start: int
    ) -> Iterator[tuple[SourceDocument, str | np.ndarray]]:
        """Returns the documents from number `start` on, in turn, with their texts, or with their tokens."""
        ...


def join_small(sizes: Mapping[str, int], smallest: int, top: int = 0) -> dict[str, list[str]]:
    """Returns the files of each directory. The files of a directory below `smallest` bytes join its parent directory.

    Directories whose path has only `top` folders are not joined. Empty directories are left out.
    """
    files: dict[str, list[str]] = defaultdict(list)
    directories = {""}
    for name in sizes:
        files[directory := os.path.dirname(name)].append(name)
        while directory not in directories:
            directories.add(directory)
            directory = os.path.dirname(directory)
    kept: dict[str, list[str]] = {}
    for directory in sorted(directories, key=lambda name: (-name.count("/"), not name, name)):  # from the leaves up
        size = sum(sizes[name] for name in files[directory])
        if len(list(filter(None, directory.split("/")))) > top and size < smallest:
            files[os.path.dirname(directory)] += files.pop(directory)
        elif size:
            kept[directory] = files[directory]
    return kept


def choose_held_out(sizes: Mapping[str, int], group: Callable[[str], str], expected: str) -> set[str]:
    """Chooses the directories to hold out from all directories with their sizes in bytes.

    Whole groups are taken in the order of a hash of their names. A group is skipped if more than 5% of all bytes would
    be held out with it.

    Raises ValueError, which says what source is `expected`, if nothing can be held out.
    """
    totals = Counter[str]()
    for directory, size in sizes.items():
        totals[group(directory)] += size
    left, chosen = HELD_OUT * sum(sizes.values()), set()
    for name in sorted(totals, key=lambda name: digest([name])):
        if totals[name] <= left:
            chosen.add(name)
            left -= totals[name]
    if not chosen:
        raise ValueError(
            f"the source has {len(sizes)} long directories, too few to hold {HELD_OUT:.0%} of the text out: "
            f"expected {expected}, or a smaller row_tokens"
        )
    return {directory for directory in sizes if group(directory) in chosen}
