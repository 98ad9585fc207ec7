"""Metrics in Prometheus' format, of one server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from sympow.serving.engine import Engine
from sympow.serving.engine_time import EngineTime
from sympow.serving.requests import Output

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts the answers of an engine, and reports its load.

    Args:
        engine: the engine whose load and work are reported.
    """

    def __init__(self, engine: Engine):
        self._registry = registry = CollectorRegistry()
        self._ended = Counter("sympow_requests", "Prompts ended, by reason.", ["finish"], registry=registry)
        self._answers = Counter("sympow_http_responses", "HTTP responses, by status.", ["status"], registry=registry)
        self._prompt = Counter("sympow_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter("sympow_cached_tokens", "Tokens of prompts found in the cache.", registry=registry)
        self._new = Counter("sympow_generated_tokens", "Tokens drawn.", registry=registry)
        times = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._queued = times("sympow_queue_seconds", "Time before a slot was free.")
        self._first = times("sympow_first_token_seconds", "Time to the first token.")
        self._whole = times("sympow_request_seconds", "Time to the last token.")
        ProcessCollector(registry=registry)
        registry.register(_WorkCollector(engine.work))
        loads = {
            "waiting": ("Requests that wait for a slot.", lambda: engine.load.waiting),
            "reading": ("Requests whose prompt is read.", lambda: engine.load.reading),
            "decoding": ("Requests that draw tokens.", lambda: engine.load.decoding),
            "slots_bytes": ("Bytes of the states of all slots.", lambda: engine.nbytes),
            "prefix_cache_bytes": ("Bytes of states of prefixes.", lambda: engine.prefixes.nbytes),
            "prefix_cache_entries": ("States of prefixes.", lambda: len(engine.prefixes)),
            "gpu_bytes": ("Bytes of tensors on the GPU, at most since the start.", torch.cuda.max_memory_allocated),
        }
        for name, (what, value) in loads.items():
            Gauge(f"sympow_{name}", what, registry=registry).set_function(value)

    def ended(self, output: Output) -> None:
        """Counts an answer by its last piece."""
        usage = output.usage
        if usage is None:
            raise ValueError("only the last piece of an answer is counted")
        self._ended.labels(output.finish).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._new.inc(usage.new_tokens)
        self._queued.observe(usage.queued_seconds)
        self._whole.observe(usage.seconds)
        if usage.first_token_seconds is not None:
            self._first.observe(usage.first_token_seconds)

    def answered(self, status: int) -> None:
        """Counts a response."""
        self._answers.labels(str(status)).inc()

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return generate_latest(self._registry)


class _WorkCollector(Collector):
    """Reports what the engine's thread has done."""

    def __init__(self, work: EngineTime):
        self._work = work

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the counters."""
        work = self._work
        seconds = CounterMetricFamily("sympow_engine_seconds", "Time of the engine, by what it does.", labels=["part"])
        for part, spent in work.seconds.items():
            seconds.add_metric([part], spent)
        yield seconds
        yield CounterMetricFamily("sympow_steps", "Steps that read a token in every row.", value=work.steps)
        yield CounterMetricFamily("sympow_stepped_rows", "Rows of all steps.", value=work.rows)
        yield CounterMetricFamily("sympow_prompt_calls", "Calls that read pieces of prompts.", value=work.pieces)
