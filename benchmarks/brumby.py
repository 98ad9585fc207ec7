"""Times a model of Brumby-14B's shape, decoding and reading: `python -m benchmarks.brumby --device cuda --csv FILE`.

The weights are random, in bfloat16, and made on the device. A check comes first: logits of single steps against those
of one forward. Decoding is timed for 1 and for 32 sequences, with the steps and the greedy draw of `generate`, over as
many tokens as the tail has room for, so that folding counts as often as it occurs. The floor is the time in which the
device copies as many bytes as a step must read and write: the weights except the embedding, the states, and the share
of a token in folding them. Reading is timed for a short and a long text, with the peak of memory for each.

`--scale toy` tries the program out, also on a CPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.measure import (
    gpu_peak_extra_bytes,
    keep,
    measured,
    milliseconds,
    options,
    peak_extra_bytes,
    synchronize,
)
from benchmarks.decoding_gpu import copy_call
from benchmarks.state_dtype import room
from sympow.models import LanguageModel, ModelState
from sympow.models.generation import sample
from sympow.models.lm import Undrawn
from sympow.models.slots import Slots

SHAPE: dict[str, Any] = {
    "model_type": "brumby", "vocab_size": 151936, "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "vocab_size": 300, "hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 140,
}  # fmt: skip
PROMPT = 40  # tokens behind which decoding is checked and timed; its time does not depend on their number
CHECKED = 3  # tokens of the check: a CUDA graph is made at the second step, and the third step only runs it
GATE_BIAS = 6.0  # a memory of 400 tokens, because kernels skip what a gate has decayed to nothing
TURNS = 3  # rounds of as many tokens as the tail has room for, of which the median counts


@dataclass(frozen=True)
class Scale:
    """Describes what is measured.

    Attributes:
        shape: the content of a config.json.
        batches: the numbers of sequences that are decoded.
        lengths: the tokens that are read.
        chunk: the tokens that are read at a time.
        copied: the bytes of the copy whose time gives the floor.
    """

    shape: dict[str, Any]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    chunk: int
    copied: int


SCALES = {
    "full": Scale(SHAPE, (1, 32), (10_000, 100_000), 1024, 1 << 30),
    "toy": Scale(SHAPE | SMALL, (1, 4), (200, 1000), 64, 1 << 20),
}


def random_model(shape: dict[str, Any], device: str, dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    """Returns a model of a config.json with random weights, which are made on the device in their dtype."""
    from sympow.integrations.transformers.pretrained.power_models import power_config  # needs transformers

    with torch.device(device):
        model = Undrawn(power_config(shape, stored_head=True, name="the model"), dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1 / math.sqrt(weight.shape[1]), generator=generator)
            else:
                weight.fill_(GATE_BIAS if name.endswith("gate.bias") else 1)
    return model.eval()


def read(model: LanguageModel, tokens: Tensor, chunk: int) -> ModelState:
    """Returns the state after tokens [B, T], read in chunks."""
    state = model.init_state(tokens.shape[0])
    for piece in tokens.split(chunk, dim=1):
        _, state = model.step(piece, state)
    return state


def slots_after(model: LanguageModel, tokens: Tensor, most: int | None = None) -> Slots:
    """Returns slots for all rows of tokens [B, T], read one by one, so that one state more than B is in memory.

    They have room for `most` tokens in caches that grow.
    """
    slots = Slots(model, tokens.shape[0], most)
    for row in tokens.split(1):
        slots.put(read(model, row, tokens.shape[1]), tokens.shape[1])
    return slots


def checked_slots(model: LanguageModel, batch: int, prompt: int = PROMPT, more: int = 0) -> tuple[Slots, float]:
    """Returns slots for a batch, and the relative error in norm of their first steps, against one forward.

    Each sequence has a prompt of so many tokens, and caches that grow have room for `more` tokens.

    Raises RuntimeError where the error is too large for the steps to be timed.
    """
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    shape, generator = (batch, prompt + CHECKED), torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    slots = slots_after(model, tokens[:, :prompt], prompt + CHECKED + more)
    found = torch.stack([slots.step(token).clone() for token in tokens[:, prompt:].unbind(1)], 1).float()
    expected = torch.cat([model(row)[:, prompt:] for row in tokens.split(1)]).float()
    wrong = ((found - expected).norm() / expected.norm()).item()
    # Roundings of the layers are independent of each other, and there are some ten in each.
    bound = (10 * model.config.n_layers) ** 0.5 * torch.finfo(dtype).eps
    if not wrong <= bound:
        raise RuntimeError(f"steps of {batch} sequences err by {wrong:.1e} where {bound:.1e} is allowed; not timed")
    return slots, wrong


def decoding(
    model: LanguageModel,
    batch: int,
    copy_ms_per_byte: float,
    device: str,
    prompt: int = PROMPT,
    written: float | None = None,
) -> dict[str, Any]:
    """Returns the fields of a row of decoding; copying a byte reads it and writes it.

    `written` is the share of the states that a step writes; None: that of states with a tail.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    capacity = room(model.init_state(1))
    slots, wrong = checked_slots(model, batch, prompt, TURNS * capacity)
    state = slots.equal().nbytes
    token = torch.zeros(batch, dtype=torch.int64, device=device)
    times = []
    for _ in range(TURNS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(capacity):
            token = sample(slots.step(token), temperature=0)
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3 / capacity)
    ms = statistics.median(times)
    weights = sum(each.nbytes for each in model.parameters())
    weights -= 0 if model.head is None else model.embedding.weight.nbytes  # a step reads a few rows of it
    least = weights + state * (1 + (1 / capacity if written is None else written))
    floor = least * copy_ms_per_byte / 2
    return (
        {"what": "decoding", "rows": batch, "tokens": TURNS * capacity, "ms_per_token": round(ms, 4)}
        | {"tokens_per_s": round(batch / ms * 1e3, 1), "weight_bytes": weights, "state_bytes": state}
        | {"least_bytes": round(least), "gb_per_s": round(least / ms / 1e6), "floor_ms": round(floor, 4)}
        | {"copy_gb_per_s": round(2 / copy_ms_per_byte / 1e6), "share_of_floor": round(floor / ms, 3)}
        | {"peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None, "err": float(f"{wrong:.2e}")}
    )


def reading(model: LanguageModel, length: int, chunk: int, device: str) -> dict[str, Any]:
    """Returns the fields of a row of reading a text. The peak contains weights, the state and all else."""
    drawn = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(2))
    tokens, seconds = drawn.to(device), 0.0

    def call() -> list[Tensor]:
        nonlocal seconds
        start = time.perf_counter()
        state = read(model, tokens, chunk)
        synchronize(device)
        seconds = time.perf_counter() - start
        return list(state.tensors())

    extra = gpu_peak_extra_bytes(call) if device == "cuda" else peak_extra_bytes(call)
    state, weights = model.init_state(1).nbytes, sum(each.nbytes for each in model.parameters())
    return (
        {"what": "reading", "rows": 1, "tokens": length, "ms_per_token": round(seconds / length * 1e3, 4)}
        | {"tokens_per_s": round(length / seconds, 1), "weight_bytes": weights, "state_bytes": state}
        | {"peak_bytes": weights + state + extra}
    )


@torch.no_grad()
def measure(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    """Yields the rows: of reading first, because decoding many sequences fills the memory."""
    (copy_ms,) = milliseconds([copy_call(device, scale.copied)], device, rounds=5)
    model = random_model(scale.shape, device)
    about = {"device": device, "dtype": "bfloat16", "d_model": model.config.d_model, "layers": model.config.n_layers}
    about |= {"parameters": model.num_parameters()}
    checked_slots(model, 1)
    for length in scale.lengths:  # a whole piece and the last one, so that all kernels are compiled before the timing
        first = torch.zeros(1, scale.chunk + length % scale.chunk, dtype=torch.int64, device=device)
        read(model, first, scale.chunk)
    for length in scale.lengths:
        yield about | reading(model, length, scale.chunk, device) | measured(device)
    for batch in scale.batches:
        yield about | decoding(model, batch, copy_ms / scale.copied, device) | measured(device)


def line(row: dict[str, Any]) -> str:
    """Returns a row as text to print."""
    peak = "" if row["peak_bytes"] is None else f"; peak of memory {row['peak_bytes'] / 1e9:,.2f} GB"
    if row["what"] == "reading":
        return f"reading {row['tokens']:,} tokens: {row['tokens_per_s']:,.0f} tokens/s{peak}"
    floor = f"floor {row['floor_ms']:.2f} ms at {row['copy_gb_per_s']:,} GB/s of a copy"
    timing = f"{row['ms_per_token']:.2f} ms a token, {row['tokens_per_s']:,.0f} tokens/s, {row['gb_per_s']:,} GB/s"
    return f"decoding {row['rows']} rows: {timing}; {floor}: {row['share_of_floor']:.0%}{peak}; err {row['err']:.1e}"


def main() -> None:
    parser = options("benchmarks.brumby", __doc__ or "")
    parser.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep(args.csv, measure(SCALES[args.scale], args.device), line)


if __name__ == "__main__":
    main()
