"""A run that takes a second and learns, and rows of results that were made up."""

import pytest

from sympow.data.mqar import RecallTask
from sympow.models import MixerConfig
from sympow.recall import Architecture, RecallConfig


@pytest.fixture
def small():
    """One pair in 8 tokens, attention behind a short convolution: solved in two epochs."""
    attention = MixerConfig("short_convolution", {"mixer": "softmax", "options": {"rotation": "none"}})
    return RecallConfig(
        Architecture("attention", (attention,), mlp_ratio=0),
        width=32,
        learning_rate=1e-2,
        train=(RecallTask(length=8, pairs=1, vocab_size=16),),
        examples=2000,
        validation_examples=200,
        test_examples=200,
        epochs=2,
        batch_size=32,
        stop_at=None,
    )


@pytest.fixture
def made_up():
    """A sweep as it might have come out: three models, three widths, four numbers of pairs, two heads, rates, seeds."""
    rows = []
    for label, growth, size in (("attention", 9.0, None), ("power p=2", 1.5, 2), ("gated convolution", 0.6, 1)):
        for width in (64, 128, 256):
            for pairs in (4, 8, 16, 32):
                for heads in (1, 2):
                    for rate in (1e-4, 1e-3, 1e-2):
                        for seed in (0, 1, 2):
                            reach = growth * width / heads / pairs
                            good = min(1.0, reach / 4) * {1e-4: 0.6, 1e-3: 1.0, 1e-2: 0.7}[rate]
                            accuracy = max(0.0, good - 0.02 * seed)
                            state = 2 * width * 16 * pairs if size is None else size * width * width // heads
                            rows.append(_row(label, width, pairs, heads, rate, seed, accuracy, 4 * state))
    return rows


def _row(label, width, pairs, heads, rate, seed, accuracy, state_bytes):
    task = f"mqar {16 * pairs}:{pairs}"
    return {
        "run": f"{label}-{width}-{pairs}-{heads}-{rate}-{seed}", "label": label, "mixers": label, "width": width,
        "heads": heads, "layers": 2, "mlp_ratio": 0, "positions": False, "train": task, "test": task,
        "length": 16 * pairs, "pairs": pairs, "vocab_size": 8192, "learning_rate": rate, "seed": seed, "data_seed": 0,
        "examples": 1000, "epochs": 1, "batch_size": 64, "weight_decay": 0.1, "warmup": 0.1,
        "stop_at": None, "validations": 1, "precision": "bf16", "state_elements": state_bytes // 4,
        "state_bytes": state_bytes, "validation_loss": 1 - accuracy, "validation_accuracy": accuracy,
        "test_loss": 1 - accuracy, "test_accuracy": accuracy,
    }  # fmt: skip
