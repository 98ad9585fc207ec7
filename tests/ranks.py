"""Functions run on several ranks: processes on this machine, joined by gloo, and on GPUs of their own by NCCL as well.

They are forked from a server that has the packages imported, as torch's own import takes seconds. A test process
has one such server: what is preloaded when it starts stays.
"""

import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

# On a machine with a GPU nothing is preloaded: some of these packages initialize CUDA, which forked processes then
# cannot use.
PRELOAD = [] if torch.cuda.is_available() else [
    "sympow.conversion", "sympow.recipes", "sympow.sweeps.worker", "safetensors.torch", "torch.utils.tensorboard",
    "torch._dynamo.backends.debugging", "torch._inductor.pattern_matcher", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "torch.distributed.tensor.experimental",
]  # fmt: skip


def run_ranks(function: Callable, size: int, *arguments: Any, device: str = "cpu") -> list[Any]:
    """function(*arguments), which a module defines, on every rank of a default group; what each returned, in order.

    With device "cuda" every rank has a GPU, and where there are too few the test is skipped.
    """
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, (function, size, folder, arguments, device), size, start_method="forkserver"
        )
        files = [Path(folder) / f"{rank}.pt" for rank in range(size)]
        return [torch.load(file, map_location=device, weights_only=False) for file in files]


def _rank(rank: int, function: Callable, size: int, folder: str, arguments: tuple, device: str) -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        from tests import interpreter

        interpreter.speed_up()
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # as `launched` does
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(1))  # one with nothing to say must not leave while others still connect
    try:
        torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
