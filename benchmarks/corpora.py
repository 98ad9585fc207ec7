"""Counts a corpus of long documents: python -m benchmarks.corpora manuals kernel --json FILE

For each split: bytes of text, documents, tokens, rows, and the median and quartiles of the documents' tokens before
cutting. Documents without a row are counted, and are part of the quartiles.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from sympow.data.builders.corpus_folder import read_entries, read_summary
from sympow.data.builders.sources import SPLITS

COUNTS = ("documents", "documents_without_a_row", "bytes", "tokens", "rows")
QUARTILES = ("q25", "median", "q75")


def describe(corpus: Path) -> dict[str, Any]:
    """Returns the counts of a corpus's folder. Raises FileNotFoundError without a corpus, ValueError if it is
    damaged."""
    entries, summary = read_entries(corpus), read_summary(corpus)
    described: dict[str, Any] = {"corpus": corpus.name} | {name: summary[name] for name in ("source", "row_tokens")}
    for split in SPLITS:
        tokens = [entry.tokens for entry in entries if entry.split == split]
        counts = {name: summary[split][name] for name in COUNTS}
        quartiles = np.quantile(tokens, (0.25, 0.5, 0.75)).round().astype(int).tolist()
        described[split] = counts | {"tokens_of_a_document": dict(zip(QUARTILES, quartiles, strict=True))}
    return described


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", metavar="DIR", type=Path, nargs="+", help="folder of a corpus")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the counts to a file")
    options = parser.parse_args()
    described = [describe(corpus) for corpus in options.corpora]
    text = json.dumps(described, indent=2)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
