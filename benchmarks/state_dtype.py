"""Measures what a state in bfloat16 or int8 costs: `python -m benchmarks.state_dtype RUN --csv FILE`.

A model reads held-out documents one after the other, as in decoding: from step to step with one state, and as many
tokens at a time as the tail has room for. There is a row for a float32 state, and one for each narrower
dtype (`narrowed`). The loss is that of the next token, over all tokens and over the last tenth of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.common.measure import measured, options, write
from sympow.data import open_corpus
from sympow.evaluation.context_loss import Documents
from sympow.layers.state import narrowed
from sympow.models import LanguageModel, ModelState
from sympow.ops import DecodingState
from sympow.progress import Progress
from sympow.training import load


def joined(documents: Documents, count: int) -> Tensor:
    """Returns the first `count` tokens of the documents, int64 [1, count].

    Raises ValueError where there are fewer.
    """
    have = int(documents.lengths.sum())
    if have < count:
        raise ValueError(f"{count:,} tokens are needed; the held-out documents have {have:,}")
    parts, found = [], 0
    for i in range(len(documents.lengths)):
        parts.append(documents[i].astype(np.int64))
        found += len(parts[-1])
        if found >= count:
            break
    return torch.from_numpy(np.concatenate(parts)[None, :count])


DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
NO_TAIL = 64  # tokens, where no state has a tail


def room(state: ModelState) -> int:
    """Returns a number of tokens that every tail of a state has room for."""
    return min((x.capacity for layer in state.layers for x in _decoding_states(layer)), default=NO_TAIL)


def _decoding_states(state: object) -> list[DecodingState]:
    if isinstance(state, DecodingState):
        return [state]
    return [x for item in vars(state).values() for x in _decoding_states(item)] if hasattr(state, "__dict__") else []


@torch.no_grad()
def losses(model: LanguageModel, tokens: Tensor, state: ModelState, step: int) -> Tensor:
    """Returns -log p of every token after the first, in nats, float64 [T - 1]; `step` tokens are read at a time."""
    found = []
    with Progress("reading", "token", total=tokens.shape[1] - 1) as progress:
        for piece, wanted in zip(tokens[:, :-1].split(step, 1), tokens[:, 1:].split(step, 1), strict=True):
            logits, after = model.try_step(piece, state)
            state = after(piece.shape[1])
            found.append(cross_entropy(logits[0].double(), wanted[0], reduction="none").cpu())
            progress.advance(piece.shape[1])
    return torch.cat(found)


def measure(model: LanguageModel, tokens: Tensor) -> list[dict]:
    """Returns the rows of a model that reads tokens [1, T]."""
    narrow = {name: narrowed(model.init_state(1), dtype) for name, dtype in DTYPES.items()}
    rows: list[dict] = []
    step, last = room(narrow["int8"]), (tokens.shape[1] - 1) // 10
    for name, state in {"float32": model.init_state(1), **narrow}.items():
        size = state.nbytes
        each = losses(model, tokens, state, step)
        row = {"state_dtype": name, "tokens": tokens.shape[1], "tokens_a_fold": step, "state_bytes": size}
        row |= {"loss": each.mean().item(), "loss_of_last_tenth": each[-last:].mean().item()}
        first = rows[0] if rows else row
        row["more"] = row["loss"] / first["loss"] - 1
        row["more_in_last_tenth"] = row["loss_of_last_tenth"] / first["loss_of_last_tenth"] - 1
        rows.append(row)
    return rows


def main() -> None:
    parser = options("benchmarks.state_dtype", __doc__ or "")
    parser.add_argument("run", help="a run's folder or a checkpoint")
    parser.add_argument("--tokens", type=int, default=100_000, help="(default: 100,000)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = load(arguments.run, arguments.device)
    documents = open_corpus(run.config.data, tokenizer=run.tokenizer).held_out
    tokens = joined(documents, arguments.tokens).to(arguments.device)
    about = {"model": run.config.name, **measured(arguments.device)}
    rows = [row | about for row in measure(run.model, tokens)]
    for row in rows:
        print(
            f"{row['state_dtype']}, {row['state_bytes']:,} bytes: loss {row['loss']:.5f} ({row['more']:+.3%}), "
            f"of the last tenth {row['loss_of_last_tenth']:.5f} ({row['more_in_last_tenth']:+.3%})"
        )
    write(arguments.csv, rows)


if __name__ == "__main__":
    main()
