"""Steps of a model as CUDA graphs. A step is then one launch, where single launches take longer than the kernels."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FEW = 8  # rows: up to this number there is a graph for every power of 2, then for every multiple of it


@dataclass
class _Graph:
    replay: Callable[[], None]
    tokens: Tensor  # int64 [rows], which the graph reads
    logits: Tensor  # [rows, vocab_size], which it writes


class StepGraphs:
    """Holds a graph for every number of rows. The first step with a number of rows runs without a graph.

    Args:
        capacity: the largest number of rows.
        advance: a function of tokens, int64 [rows], and of the state of so many rows. It returns the logits and updates
            the state in place. It does not wait for the device, and its work depends on the number of rows only.
    """

    def __init__(self, capacity: int, advance: Callable[[Tensor, Any], Tensor]):
        self._capacity, self._advance = capacity, advance
        self._graphs: dict[tuple, _Graph] = {}
        self._stepped: set[tuple] = set()
        self._pool: Any = None

    def step(self, tokens: Tensor, rows: Callable[[int], Any]) -> Tensor:
        """Maps int64 [count] to logits [count, vocab_size], which the next step of as many rows overwrites.

        Args:
            tokens: int64 [count].
            rows: a function that returns the state of the first n rows for a number n. Rows after the given tokens are
                stepped too, with tokens that have no meaning.
        """
        count, device = tokens.shape[0], tokens.device
        total = min(rounded(count), self._capacity)
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = (total, cast)
        if key not in self._graphs:
            given = torch.zeros(total, dtype=torch.int64, device=device)
            given[:count] = tokens
            if key not in self._stepped:
                self._stepped.add(key)
                return self._advance(given, rows(total))[:count]
            self._graphs[key] = self._captured(given, rows(total))
        graph = self._graphs[key]
        graph.tokens[:count] = tokens
        graph.replay()
        return graph.logits[:count]

    def prepare(self, rows: Callable[[int], Any]) -> None:
        """Makes all graphs. The states of all rows change: they must not be in use.

        Args:
            rows: as for `step`.
        """
        for total in sorted({min(rounded(count), self._capacity) for count in range(1, self._capacity + 1)}):
            for _ in range(2):
                self.step(torch.zeros(total, dtype=torch.int64, device="cuda"), rows)

    def _captured(self, tokens: Tensor, state: Any) -> _Graph:
        """Returns the graph of a step, which is not run yet."""
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # a graph must not read casts of weights that no longer exist when it runs
        # Other threads, such as those of a server, may use the device during the capture.
        with capturing(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._advance(tokens, state)
        torch.clear_autocast_cache()
        self._pool = graph.pool()
        return _Graph(graph.replay, tokens, logits)


_CAPTURE = threading.Lock()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Captures what the block launches as a graph, with the options of `torch.cuda.graph`.

    A graph that Python's garbage collector frees would end the capture with an error. So the collector does not run
    meanwhile, and one thread captures at a time. It is not called before either, because that can take longer than an
    answer of the model.
    """
    with _CAPTURE:
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, **options):
                yield
        finally:
            if enabled:
                gc.enable()


def rounded(rows: int) -> int:
    """Rounds a number of rows up to one for which there is a graph."""
    return 1 << (rows - 1).bit_length() if rows <= _FEW else -(-rows // _FEW) * _FEW
