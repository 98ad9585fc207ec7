"""What a trained model can do with its context, and what its state costs."""

from sympow.evaluation.context_loss import Bin, ContextLosses, Curve, choose_rows, context_losses, write_csv
from sympow.evaluation.plot import plot_context_losses
from sympow.evaluation.sizes import Table, size_tables

__all__ = [
    "Bin",
    "ContextLosses",
    "Curve",
    "Table",
    "choose_rows",
    "context_losses",
    "plot_context_losses",
    "size_tables",
    "write_csv",
]
