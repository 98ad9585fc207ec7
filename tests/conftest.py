"""For every test: one thread a process, so that parallel workers do not fight, and reproducible examples."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by subprocesses

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("sympow", derandomize=True, deadline=None, database=None)
settings.load_profile("sympow")
