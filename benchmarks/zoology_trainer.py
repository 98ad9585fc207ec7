"""Trains default power attention in Zoology's own Trainer: `python -m benchmarks.zoology_trainer --csv FILE`.

The published code must be importable: a checkout of github.com/HazyResearch/zoology at commit dbcb60d2bd10 on
PYTHONPATH, with torch, einops, pydantic, pandas, tqdm, rich, pyyaml and wandb. Its Trainer, its model and its data are
used as they are. The accuracy after the steps must be 99%.
"""

from __future__ import annotations

import argparse
import sys
import time
import types
from typing import Any

import torch

from benchmarks.common.measure import csv_file, measured
from sympow.recall import write_results

LEAST = 0.99


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoology_trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=csv_file, required=True, help="file the row is written to")
    parser.add_argument("--vocab-size", type=int, default=8192, help="(default: 8192)")
    parser.add_argument("--steps", type=int, default=400, help="of 64 rows (default: 400)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="(default: 0.003)")
    parser.add_argument("--test-examples", type=int, default=1000, help="(default: 1000)")
    options = parser.parse_args()
    began = time.perf_counter()
    found = train(options.vocab_size, options.steps, options.learning_rate, options.test_examples)
    row = {
        "mixer": "power",
        "vocab_size": options.vocab_size,
        "length": 64,
        "pairs": 4,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "test_loss": found["valid/loss"],
        "test_accuracy": found["valid/accuracy"],
        "seconds": round(time.perf_counter() - began, 1),
        **measured("cuda" if torch.cuda.is_available() else "cpu"),
    }
    write_results(options.csv, [row])
    print(row)
    return int(row["test_accuracy"] < LEAST)


def train(vocab_size: int, steps: int, learning_rate: float, test_examples: int) -> dict[str, Any]:
    """Trains two layers of width 64 for one epoch of `steps` batches of 64 rows; returns the Trainer's measurement."""
    _stand_in_for_torchvision()
    from zoology.config import DataConfig, LoggerConfig, ModelConfig, ModuleConfig, TrainConfig
    from zoology.data.multiquery_ar import MQARConfig
    from zoology.data.utils import prepare_data
    from zoology.logger import WandbLogger
    from zoology.model import LanguageModel
    from zoology.train import Trainer
    from zoology.utils import set_determinism

    task = {"vocab_size": vocab_size, "input_seq_len": 64, "num_kv_pairs": 4, "random_non_queries": False}
    config = TrainConfig(
        data=DataConfig(
            train_configs=[MQARConfig(num_examples=64 * steps, **task)],
            test_configs=[MQARConfig(num_examples=test_examples, **task)],
            batch_size=64,
        ),
        model=ModelConfig(
            vocab_size=vocab_size,
            d_model=64,
            n_layers=2,
            max_position_embeddings=0,
            sequence_mixer=ModuleConfig(
                name="sympow.integrations.zoology.SequenceMixer", kwargs={"mixer": "power", "n_heads": 2}
            ),
            state_mixer=ModuleConfig(name="torch.nn.Identity", kwargs={}),
        ),
        logger=LoggerConfig(),
    )
    set_determinism(config.seed)
    train_rows, test_rows = prepare_data(config.data)
    trainer = Trainer(
        model=LanguageModel(config=config.model),
        train_dataloader=train_rows,
        test_dataloader=test_rows,
        max_epochs=1,
        learning_rate=learning_rate,
        device="cuda" if torch.cuda.is_available() else "cpu",
        logger=WandbLogger(config),
    )
    trainer.fit()
    return trainer.test(0)


def _stand_in_for_torchvision() -> None:
    """Gives the one class that the published model imports from torchvision, which it uses with probability 0 alone."""
    try:
        import torchvision.ops
    except (ImportError, RuntimeError):  # missing, or made for another torch
        torchvision, ops = types.ModuleType("torchvision"), types.ModuleType("torchvision.ops")
        ops.StochasticDepth = _StochasticDepth  # type: ignore[attr-defined]
        torchvision.ops = ops  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": torchvision, "torchvision.ops": ops}


class _StochasticDepth(torch.nn.Module):
    def __init__(self, p: float, mode: str):
        super().__init__()
        if p:
            raise ValueError(f"only a probability of 0 is stood in for; got {p}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


if __name__ == "__main__":
    sys.exit(main())
