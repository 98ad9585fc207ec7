"""Ops that a GPU computes with one kernel, a file each: formula in plain torch, kernels, launches, gradients."""
