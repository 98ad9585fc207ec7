"""Makes a small copy of a corpus, which is easy to move: `python -m benchmarks.subset`.

    python -m benchmarks.subset --corpus kernel --out FOLDER --rows 1600

Its documents to train on are evenly spaced among those of the corpus, with strong compression.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from pathlib import Path

import numpy as np

from benchmarks.common.measure import refuses
from benchmarks.context_scaling.data import HELD_OUT

# LZMA with its parameters for numbers of two bytes: of the codecs that come with zarr the one that makes documents of
# tokens smallest, a sixth below Zstandard's level 5. It packs a document in a tenth of a second.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]


def copied(source: Path, target: Path, count: int) -> int:
    """Copies `count` evenly spaced documents of an array; returns the number of bytes.

    Raises FileNotFoundError where there is no array, FileExistsError where `target` is there already.
    """
    try:
        import zarr
        from numcodecs import LZMA
    except ImportError as error:
        raise ImportError(f"writing zarr corpora needs zarr: pip install 'sympow[train]' ({error})") from None
    if not source.exists():
        raise FileNotFoundError(f"no corpus at {source}")
    if target.exists():
        raise FileExistsError(f"{target} is there already; give another folder")
    documents = zarr.open_array(source, mode="r")
    chosen = np.linspace(0, documents.shape[0] - 1, min(count, documents.shape[0])).astype(np.int64)
    copy = zarr.create_array(
        target,
        shape=(len(chosen), documents.shape[1]),
        dtype="<u2",
        chunks=(1, documents.shape[1]),
        compressors=LZMA(format=lzma.FORMAT_RAW, filters=FILTERS),
        zarr_format=2,
        config={"write_empty_chunks": True},  # so that a missing chunk always means a damaged corpus
    )
    for place, document in enumerate(chosen):
        copy[place] = documents[int(document)]
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


@refuses
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.subset", description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="that of `sympow kernel-corpus`")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--rows", type=int, required=True, help="documents to train on")
    args = parser.parse_args()
    size = sum(copied(args.corpus / name, args.out / name, count)
               for name, count in (("train.zarr", args.rows), ("heldout.zarr", HELD_OUT)))  # fmt: skip
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
