"""Reads documents and makes batches of tokens. Of sympow, it imports only `progress`, `fields`, `files` and `locks`."""

from sympow.data.batches import Batch, Batches
from sympow.data.builders.doc_corpus import build_doc_corpus
from sympow.data.builders.kernel_corpus import build_kernel_corpus
from sympow.data.builders.length_plot import plot_document_lengths
from sympow.data.builders.own_corpus import build_corpus
from sympow.data.config import DataConfig
from sympow.data.corpus import Concatenated, Corpus, Mixture, Subset, TokenCorpus
from sympow.data.splits import Splits, open_corpus
from sympow.data.tokens import (
    BPETokenizer,
    ByteTokenizer,
    StreamDecoder,
    Tokenizer,
    encode_stream,
    encode_text,
    load_tokenizer,
)
from sympow.data.zarr_corpus import ZarrCorpus
from sympow.files import default_cache_dir

__all__ = [
    "BPETokenizer",
    "Batch",
    "Batches",
    "ByteTokenizer",
    "Concatenated",
    "Corpus",
    "DataConfig",
    "Mixture",
    "Splits",
    "StreamDecoder",
    "Subset",
    "TokenCorpus",
    "Tokenizer",
    "ZarrCorpus",
    "build_corpus",
    "build_doc_corpus",
    "build_kernel_corpus",
    "default_cache_dir",
    "encode_stream",
    "encode_text",
    "load_tokenizer",
    "open_corpus",
    "plot_document_lengths",
]
