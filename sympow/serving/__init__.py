"""Serves models with OpenAI's interface: an engine with continuous batching, and in `http` the server for it.

The engine needs only torch; the server needs the extra `serve`.
"""

from sympow.serving.engine import Engine, EngineClosedError, Load, QueueFullError
from sympow.serving.prefixes import PrefixCache
from sympow.serving.requests import Output, Request, Sampling, TokenLogprob, Usage

__all__ = [
    "Engine",
    "EngineClosedError",
    "Load",
    "Output",
    "PrefixCache",
    "QueueFullError",
    "Request",
    "Sampling",
    "TokenLogprob",
    "Usage",
]
