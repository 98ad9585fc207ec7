"""The ranks of a run: the distribution of rows of tokens over ranks, and the model on all ranks.

R ranks form a grid of data ranks and context ranks. Ranks with the same data rank share rows of tokens: each computes
a part of every row. Ranks with different data ranks have different rows. Weights, gradients and optimizer state are
sharded over all R ranks (FSDP2). Ranks that share rows have consecutive numbers, so that they are on one host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sympow.models import LanguageModel
from sympow.models.bodies.base import PreNormBlock
from sympow.training.config import RunConfig

GATHERED = 1 << 25  # weights in a group: every gather takes time of the host, even a small one
PREPARATION = timedelta(days=7)  # the longest time that rank 0 may take to prepare the data


class TokenRows(Protocol):
    """Describes a batch: int64 tokens and targets [B, T], -100 for no target, and cu_seqlens [N + 1] or None."""

    @property
    def tokens(self) -> Tensor:
        """Returns the tokens, int64 [B, T]."""
        ...

    @property
    def targets(self) -> Tensor:
        """Returns the targets, int64 [B, T], -100 where there is none."""
        ...

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Returns the bounds of packed documents [N + 1], or None."""
        ...


class Part(NamedTuple):
    """Holds a context rank's part of `TokenRows`, or `TokenRows` on another device."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class Ranks:
    """Describes this process: its rank of `size` ranks, and its place in the grid of data ranks and context ranks.

    The default process group supports tensors on the CPU and on `device`, the device type of the weights.
    """

    rank: int = 0
    size: int = 1
    context_size: int = 1
    context_group: dist.ProcessGroup | None = None
    device: str = "cpu"

    @property
    def main(self) -> bool:
        """Returns whether this process writes the run's files and to the terminal."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Returns the data rank of this process, counted from 0."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """Returns the number of data ranks."""
        return self.size // self.context_size

    @property
    def context_rank(self) -> int:
        """Returns the context rank of this process, counted from 0."""
        return self.rank % self.context_size

    def part(self, rows: TokenRows) -> TokenRows:
        """Returns this context rank's part of rows [B, T]: tokens, and the targets that follow them in the whole row.

        Raises ValueError for packed documents and for rows that cannot be cut into equal parts.
        """
        if self.context_size == 1:
            return rows
        if rows.cu_seqlens is not None:
            raise ValueError("rows of packed documents cannot be split over ranks: take batches without (pack=False)")
        if rows.tokens.shape[1] % self.context_size:
            raise ValueError(
                f"rows must be a multiple of {self.context_size} tokens to be split over as many ranks, "
                f"got {rows.tokens.shape[1]}"
            )
        tokens, targets = (x.tensor_split(self.context_size, dim=1) for x in (rows.tokens, rows.targets))
        return Part(tokens[self.context_rank].contiguous(), targets[self.context_rank].contiguous())

    def sum(self, value: float) -> float:
        """Returns the sum over all ranks."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """Returns the largest of all ranks."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Waits until every rank is here."""
        self.sum(0)

    def _reduce(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)  # on the CPU, where ranks may wait for a long time
        dist.all_reduce(tensor, operation)
        return tensor.item()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs a block, and raises an error on all ranks if the block fails on one.

        The ranks must not wait for each other in the block.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.sum(failure is not None):
            raise failure or RuntimeError("another rank failed, with an error of its own")

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs a block on rank 0 first, so that the other ranks find the files that rank 0 writes.

        The other ranks wait for up to `PREPARATION`, in a group of their own: the default group gives up after half an
        hour, and rank 0 may tokenize a corpus for hours.
        """
        patient = dist.new_group(backend="gloo", timeout=PREPARATION) if self.size > 1 else None

        def meet() -> None:
            if patient is not None:
                dist.all_reduce(torch.zeros(1), group=patient)

        if not self.main:
            meet()
        try:
            yield
        finally:
            if self.main:
                meet()


ALONE = Ranks()


def is_main() -> bool:
    """Returns whether this process is rank 0 of the processes that torchrun started, or the only process."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def launched(device: torch.device) -> Iterator[None]:
    """Makes a default process group if torchrun started the program on several ranks. On one rank it does nothing.

    On CUDA every rank takes the GPU of its local rank.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        if device != torch.device("cuda"):
            raise ValueError(f"training.device is one GPU, {str(device)!r}; on several ranks it is 'cuda' or 'auto'")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # No device_id: with it, groups of ranks are split from this group, which not every torch can do with gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    # Wait for all ranks: if one rank has refused its config and ended, others would report a lost connection as well.
    dist.all_reduce(torch.zeros(1))
    yield
    dist.destroy_process_group()  # not after an error, when other ranks may wait for this one


def join(config: RunConfig, device: torch.device) -> Ranks:
    """Returns this process among the ranks of the default group, if there is one.

    Raises ValueError if the ranks cannot form the grid of the config, or cannot share the passes of a step.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    parts, passes = config.execution.context_parallel, config.training.passes_per_step
    if size % parts:
        raise ValueError(
            f"execution.context_parallel = {parts} needs a multiple of as many ranks, got {size}: "
            f"start with torchrun --nproc-per-node {parts}"
        )
    if passes % (size // parts):
        raise ValueError(
            f"{size // parts} data ranks cannot share the {passes} passes of a step: "
            "training.batch_size / training.micro_batch_size must be a multiple of them"
        )
    if size == 1:
        return ALONE
    grid = init_device_mesh(device.type, (size // parts, parts), mesh_dim_names=("data", "context"))
    return Ranks(dist.get_rank(), size, parts, grid.get_group("context") if parts > 1 else None, device.type)


def gathered_together(blocks: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Returns the blocks in groups of neighbours of up to `GATHERED` weights, one block at least.

    FSDP gathers the weights of a group at once, and sums up their gradients at once.
    """
    groups: list[list[nn.Module]] = []
    room = 0
    for block in blocks:
        size = sum(parameter.numel() for parameter in block.parameters())
        if not groups or size > room:
            groups.append([])
            room = GATHERED
        groups[-1].append(block)
        room -= size
    return groups


def prepare(model: LanguageModel, config: RunConfig, ranks: Ranks) -> None:
    """Prepares `model` in place to run as config.execution says, on all ranks, before its optimizer is made.

    Weights are gathered and gradients are summed in float32 for every precision. With bf16, autocast casts the operands
    of matrix products only, as on one rank.
    """
    execution = config.execution
    if ranks.context_group is not None:
        model.split_context(ranks.context_group)
    if execution.checkpoint_activations:
        model.checkpoint_activations()
    if execution.compile:
        # Rows of two lengths get a graph each: torch 2.11 cannot compile windows on a GPU for rows of any length. The
        # borders of packed documents, whose number changes at every step, must be of any length.
        lengths = config.training.short_context is not None and not config.data.pack
        model.compile_parts(dynamic=False if lengths else None)
    if ranks.size == 1:
        return
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(ranks.device, (ranks.size,), mesh_dim_names=("shard",))
    for blocks in gathered_together(model.blocks):
        fully_shard(blocks, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("loss_sum", "token_losses", "divergence_sum", "mixing_error_sum"):
        register_fsdp_forward_method(model, method)
    for block in model.blocks:
        if isinstance(block, PreNormBlock):
            register_fsdp_forward_method(block, "mixed")
