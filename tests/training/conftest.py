"""A model, a corpus and a config small enough to train in a second."""

import numpy as np
import pytest

from sympow.data import Batches, DataConfig, TokenCorpus
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

VOCAB = 17


@pytest.fixture
def make_config():
    """make_config(**fields of TrainingConfig) -> RunConfig of a one-layer model, `model` further fields of it."""

    def make(mixer: str = "power", options: dict | None = None, model: dict | None = None, **training) -> RunConfig:
        settings = {"context": 16, "batch_size": 2, "steps": 12, "warmup_steps": 2, "learning_rate": 1e-2,
                    "log_every": 1, "checkpoint_every": 4, "evaluate_every": 6, "evaluation_batches": 2}  # fmt: skip
        shape = {"d_model": 16, "n_layers": 1, "n_heads": 2, "mixers": (MixerConfig(mixer, options or {}),)}
        config = ModelConfig(VOCAB, **shape | (model or {}))
        data = DataConfig(tokenizer="bytes")
        return RunConfig("tiny", config, data, TrainingConfig(**{**settings, **training}))

    return make


@pytest.fixture
def make_batches():
    """make_batches(config, seed of the corpus) -> Batches of noisy arithmetic sequences, which can be learned."""

    def make(config: RunConfig, corpus_seed: int = 0, documents: int = 6) -> Batches:
        rng = np.random.default_rng(corpus_seed)
        texts = [
            (np.arange(rng.integers(40, 90)) * rng.integers(1, 4) + rng.integers(0, 2)) % VOCAB
            for _ in range(documents)
        ]
        settings = config.training
        corpus = TokenCorpus.from_documents(texts, VOCAB)
        return Batches(corpus, settings.context, settings.rows_per_pass, settings.seed, config.data.pack)

    return make
