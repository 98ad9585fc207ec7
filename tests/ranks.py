"""Functions run on several ranks: processes on this machine, joined by gloo.

They are forked from a server that has the packages imported, as torch's own import takes seconds.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

PRELOAD = ["sympow.cli.commands", "torch.utils.tensorboard", "torch._dynamo", "torch.distributed.fsdp",
           "torch.distributed.checkpoint"]  # fmt: skip


def run_ranks(function: Callable, size: int, *arguments: Any) -> list[Any]:
    """function(*arguments), which a module defines, on every rank of a default group; what each returned, in order."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, (function, size, folder, arguments), size, start_method="forkserver"
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, function: Callable, size: int, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
