"""Models behind OpenAI's interface: an engine with continuous batching, and in `http` the server around it.

The engine needs torch alone; the server needs the extra `serve`.
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
