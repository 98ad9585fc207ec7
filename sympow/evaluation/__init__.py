"""Measures how a trained model uses its context, and the size of its state."""

from sympow.evaluation.ar_hits import Cell, HitLosses, Share, gap_shares, hit_losses
from sympow.evaluation.ar_hits_plot import plot_ar_hits
from sympow.evaluation.bigrams import BigramCounts, count_bigrams
from sympow.evaluation.context_loss import Bin, ContextLosses, Curve, choose_rows, context_losses, write_csv
from sympow.evaluation.plot import plot_context_losses
from sympow.evaluation.sizes import Table, size_tables

__all__ = [
    "BigramCounts",
    "Bin",
    "Cell",
    "ContextLosses",
    "Curve",
    "HitLosses",
    "Share",
    "Table",
    "ar_hits",
    "choose_rows",
    "context_losses",
    "count_bigrams",
    "gap_shares",
    "hit_losses",
    "plot_ar_hits",
    "plot_context_losses",
    "size_tables",
    "write_csv",
]
