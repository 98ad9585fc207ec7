"""A small model that is served; tests of the server are left out where its packages are not installed."""

import importlib.util
import queue

import pytest
import torch

from sympow.data import ByteTokenizer
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.serving import Engine, PrefixCache, Request, Sampling
from tests.draws import make_every_token_matter

if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "pydantic", "prometheus_client")):
    collect_ignore_glob = ["test_http*.py"]


@pytest.fixture(scope="session")
def model():
    """Power attention and a window in turns."""
    mixers = (MixerConfig("power"), MixerConfig("window", {"window": 9}))
    return make_every_token_matter(LanguageModel(ModelConfig(256, 32, 2, 2, mixers), seed=0)).eval()


@pytest.fixture
def engine(model):
    """Of four slots, with a cache of prompts; closed at the end."""
    made = Engine(model, ByteTokenizer(), slots=4, queue=64, chunk=16, prefixes=PrefixCache(model, 1 << 26))
    made.start()
    yield made
    made.close()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed))


class Client:
    """A request and what comes back; greedy, and with log probabilities for the tokens drawn."""

    def __init__(self, prompt: torch.Tensor, new: int = 12, temperature: float = 0.0, **options):
        self.pieces: queue.Queue = queue.Queue()
        options = {"logprobs": 0, "stream": True} | options
        sampling = options.pop("sampling", Sampling(temperature))
        self.request = Request(prompt, new, self.pieces.put, sampling, **options)

    def result(self):
        """The tokens drawn, the text, and the last piece."""
        drawn, text = [], ""
        while True:
            piece = self.pieces.get(timeout=60)
            drawn += [each.token for each in piece.logprobs]
            text += piece.text
            if piece.finish is not None:
                return drawn, text, piece


def ask(engine: Engine, *clients: Client):
    """Sends all at once, and waits for all."""
    engine.submit([client.request for client in clients])
    return [client.result() for client in clients]
