"""Makes corpora of long documents: `sympow corpus`, `kernel-corpus`, `doc-corpus` and `needle-corpus`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sympow.cli.options import AddCommand, add_number, add_path, natural

_CORPUS = """Makes a corpus of texts of your own in the layout of LongCrawl64. A document is a file, a folder, or a row
of a JSON lines, Parquet or Arrow file. Files may be compressed (.gz, .zst). Documents are cut into rows, and 5% of them
are held out. The same command continues interrupted work, and does not change a finished corpus."""

_KERNEL_CORPUS = """Makes a corpus of the Linux kernel's source in the layout of LongCrawl64. A document is a directory,
cut into rows; whole subtrees are held out. The source is Debian's package linux-source-6.1, which
apt-get fetches, or the path of --source. The same command continues interrupted work, and does not change a finished
corpus."""

_JOINED = ". Small directories are joined until a document fills a row (default: 65,536)."
_TOKENIZER = "Use this tokenizer.json, or that in this folder."

_DOC_CORPUS = """Makes a corpus of English manuals in the layout of LongCrawl64. A document is a directory of a manual,
cut into rows; whole packages are held out. The source is documentation packages of Debian, which
apt-get fetches, or the folder of --source. The same command continues interrupted work, and does not change a finished
corpus."""

_NEEDLE_CORPUS = """Makes a corpus that trains recall, in the layout of LongCrawl64. A row is prose with statements,
such as the number of a key, and later in the row a question with its answer, at all distances. The tasks are those of
`sympow needles` and `sympow passkey`, with other keys, words and numbers. The same command continues interrupted work,
and does not change a finished corpus."""


def add(command: AddCommand) -> None:
    """Adds the commands to the parser."""
    own = command("corpus", "Make a corpus of long documents from texts of your own.", _CORPUS)
    add_path(own, "texts", "TEXTS", "Read the texts in this file or folder.")
    add_path(own, "--out", "DIR", "Write the corpus into this folder.", required=True)
    own.add_argument("--group", choices=("file", "folder"), default="file",
                     help="Make a document of every file, or of the files directly in a folder "
                          "(default: file).")  # fmt: skip
    own.add_argument("--suffixes", metavar="LIST",
                     help="Read files with these endings only, such as .py,.md "
                          "(default: every text file).")  # fmt: skip
    own.add_argument("--text-field", metavar="NAME", default="text",
                     help="Read this field of JSON lines, Parquet and Arrow files (default: text).")  # fmt: skip
    _add_rows_and_words(own, "; shorter documents are left out (default: 65,536).", _TOKENIZER)
    own.set_defaults(execute=run_corpus)

    corpus = command("kernel-corpus", "Make a corpus of long documents from the Linux source.", _KERNEL_CORPUS)
    add_path(corpus, "--out", "DIR", "Write the corpus into this folder.", required=True)
    add_path(corpus, "--source", "PATH",
             "Read the kernel's source from this Debian package, tar archive or folder (default: the package is "
             "fetched).")  # fmt: skip
    _add_rows_and_words(corpus, _JOINED)
    corpus.set_defaults(execute=run_kernel_corpus)

    docs = command("doc-corpus", "Make a corpus of long prose from manuals.", _DOC_CORPUS)
    add_path(docs, "--out", "DIR", "Write the corpus into this folder.", required=True)
    add_path(docs, "--source", "DIR", "Read the Debian packages (*.deb) in this folder (default: they are fetched).")
    _add_rows_and_words(docs, _JOINED, f"{_TOKENIZER[:-1]}, such as a teacher's.")
    docs.set_defaults(execute=run_doc_corpus)

    needles = command("needle-corpus", "Make a corpus that trains recall.", _NEEDLE_CORPUS)
    add_path(needles, "texts", "TEXTS", "Take the prose from this file or folder.")
    add_path(needles, "--tokenizer", "FOLDER",
             f"{_TOKENIZER[:-1]}, such as a teacher's.", required=True)  # fmt: skip
    add_path(needles, "--out", "DIR", "Write the corpus into this folder.", required=True)
    add_number(needles, "--rows", "Make N rows for training, and a twentieth as many that are held out.", 1000)
    add_number(needles, "--row-tokens", "Make rows of N tokens, as many as the training's context.", 16384)
    add_number(needles, "--every", "Put one statement and its question into every N tokens of a row, about.", 250)
    add_number(needles, "--seed", "Draw statements and places from this seed.", 0, type=natural)
    needles.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")
    needles.set_defaults(execute=run_needle_corpus)


def _add_rows_and_words(parser: argparse.ArgumentParser, short: str, tokenizer: str | None = None) -> None:
    """Adds the options that three commands share; `short` ends the sentence on the rows."""
    words = parser.add_mutually_exclusive_group()
    add_number(words, "--vocab-size", "Train a BPE of N tokens (default: 16,384).")
    if tokenizer is not None:
        add_path(words, "--tokenizer", "FOLDER", tokenizer)
    add_number(parser, "--row-tokens", f"Cut documents into rows of N tokens{short}")
    add_path(parser, "--plot", "FILE", "Draw the lengths of documents into this image.")
    parser.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")


def run_corpus(options: argparse.Namespace) -> None:
    """Runs `sympow corpus`."""
    from sympow.data import build_corpus
    from sympow.data.builders.sources import SPLITS
    from sympow.ops.cost import counted

    fields = {"group": options.group, "text_field": options.text_field, "remark": _remark}
    suffixes = tuple(filter(None, (options.suffixes or "").split(",")))
    made = _built(options, build_corpus, options.texts, suffixes=suffixes, **fields)
    for split in SPLITS:
        counts = made[split]
        lost = counts["tokens"] - counts["tokens_in_rows"]
        if lost:
            print(
                f"left out of {split}.zarr: {counted(lost, 'token')} ({lost / counts['tokens']:.0%}) after the last "
                f"row of a document, and in {counted(counts['documents_without_a_row'], 'document')} shorter than a row"
            )


def run_kernel_corpus(options: argparse.Namespace) -> None:
    """Runs `sympow kernel-corpus`."""
    from sympow.data import build_kernel_corpus

    _built(options, build_kernel_corpus, options.source)


def run_doc_corpus(options: argparse.Namespace) -> None:
    """Runs `sympow doc-corpus`."""
    from sympow.data import build_doc_corpus

    _built(options, build_doc_corpus, options.source)


def run_needle_corpus(options: argparse.Namespace) -> None:
    """Runs `sympow needle-corpus`."""
    from sympow.data import load_tokenizer
    from sympow.ops.cost import counted
    from sympow.recall.needle_corpus import build_needle_corpus

    made = build_needle_corpus(
        options.out,
        options.texts,
        load_tokenizer(options.tokenizer),
        rows=options.rows,
        row_tokens=options.row_tokens,
        every=options.every,
        seed=options.seed,
        progress=not options.quiet,
        remark=_remark,
    )
    for split in ("train", "heldout"):
        rows = counted(made[split]["rows"], "row")
        print(f"{Path(options.out) / split}.zarr: {rows} of {made['row_tokens']:,} tokens")


def _remark(line: str) -> None:
    print(line, file=sys.stderr)


def _built(
    options: argparse.Namespace, build: Callable[..., dict[str, Any]], source: str | None, **fields: Any
) -> dict[str, Any]:
    """Builds a corpus of a source, prints its sizes, and draws the lengths of its documents if an image was asked for.

    Returns the counts of the corpus.
    """
    from sympow.cli.result_files import check_image
    from sympow.data import load_tokenizer, plot_document_lengths
    from sympow.data.builders.corpus_folder import ROW_TOKENS, VOCAB_SIZE
    from sympow.data.builders.sources import SPLITS
    from sympow.ops.cost import counted

    check_image(options.plot)
    sizes = {"vocab_size": options.vocab_size or VOCAB_SIZE, "row_tokens": options.row_tokens or ROW_TOKENS}
    if getattr(options, "tokenizer", None):
        fields["tokenizer"] = load_tokenizer(options.tokenizer)
    made = build(options.out, source, progress=not options.quiet, **sizes, **fields)
    for split in SPLITS:
        counts = made[split]
        print(
            f"{Path(options.out) / split}.zarr: {counted(counts['rows'], 'row')} of {made['row_tokens']:,} tokens, "
            f"from {counted(counts['documents'], 'document')} of {counted(counts['tokens'], 'token')}"
        )
    if options.plot:
        plot_document_lengths(options.out, options.plot)
    return made
