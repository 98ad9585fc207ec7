"""Ops that a GPU computes with one kernel: the formula in plain torch, and beside it the kernels, `NAME_kernels.py`."""
