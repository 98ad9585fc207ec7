"""Rows of Markov chains, with another chain for each row. A model can learn a row from its beginning, at any length.

A row has an alphabet of its own. Every token of it has a few successors, which are drawn for the row and are equally
likely. All tokens of the alphabet occur again and again. Otherwise a row could end in one token that always follows
itself, and a single rounding error would change the loss of all its tokens. The loss of a model depends on its
knowledge of the row. Without knowledge, the loss is the logarithm of the size of the vocabulary. With knowledge of the
alphabet, it is the logarithm of the size of the alphabet. With knowledge of the transitions, it is the logarithm of the
number of successors. So the loss falls with the position, and stays low as long as the model remembers the transitions.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sympow.data import DataConfig
from sympow.models import MixerConfig, preset
from sympow.training import RunConfig, TrainingConfig
from sympow.training.ranks import Part

DATA = DataConfig(tokenizer="bytes", pack=False)  # of a run whose batches are given


@dataclass(frozen=True)
class Chains:
    """Gives endless batches by index, for `sympow.training.train`: `rows` rows of `context` tokens and their targets.
    The rows do not depend on the number of rows in a batch."""

    context: int
    rows: int
    vocabulary: int = 64
    alphabet: int = 16
    successors: int = 2
    seed: int = 0

    def __getitem__(self, index: int) -> Part:
        first = index * self.rows
        whole = torch.from_numpy(np.stack([self._row(number) for number in range(first, first + self.rows)]))
        return Part(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())

    def _row(self, number: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, number))
        letters = rng.permutation(self.vocabulary)[: self.alphabet]
        following = rng.integers(len(letters), size=(len(letters), self.successors))
        following[:, 0] = (np.arange(len(letters)) + 1) % len(letters)  # any token leads to every other
        table, place, places = following.tolist(), 0, []
        for pick in rng.integers(self.successors, size=self.context + 1).tolist():
            place = table[place][pick]
            places.append(place)
        return letters[places]

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def check_state(self, state: dict[str, Any]) -> None:
        if state != self.state():
            raise ValueError(f"the run was made on other chains: {state}, not {self.state()}")


def run_config(args: argparse.Namespace, name: str, vocabulary: int, **training: Any) -> RunConfig:
    """Returns the config of a run of power attention, by `options` and further fields of its training."""
    settings = TrainingConfig(context=args.context, batch_size=args.rows, steps=args.steps, device=args.device,
                              learning_rate=args.learning_rate, precision="bf16", **training)  # fmt: skip
    return RunConfig(name, preset(args.preset, vocabulary, MixerConfig("power")), DATA, settings)


def options(module: str, doc: str, *, rows: int, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """Returns the options of a program that trains on chains, with its own defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--preset", default="mini", help="shape of the model (default: mini)")
    parser.add_argument("--vocabulary", type=int, default=64, help="(default: 64)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the training rows (default: 8192)")
    parser.add_argument("--rows", type=int, default=rows, help=f"of a training step (default: {rows})")
    parser.add_argument("--steps", type=int, default=steps, help=f"of training (default: {steps})")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, help=f"(default: {learning_rate})")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the results")
    return parser
