"""Times decoding of whole models on a GPU: `python -m benchmarks.decoding_models --device cuda --csv FILE`.

The models have the shape of a preset and random weights. Their steps are those of `generate`, with its greedy draw, and
are checked and timed as `brumby.py` does it. "power, parts" is the model with power attention whose steps call its
parts one after another, as models do whose parts were changed.

`--preset nano` tries the program out, also on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.brumby import decoding
from benchmarks.common.measure import keep, measured, milliseconds, options
from benchmarks.decoding_gpu import copy_call
from sympow.models import LanguageModel, MixerConfig, preset
from sympow.ops.fused import step_products

BATCHES = (1, 8, 64)
COPIED = {"cuda": 1 << 30, "cpu": 1 << 20}  # bytes
PARTS = "power, parts"
WRITTEN = {"power_delta": 1.0, "window": 0.0, "softmax": 0.0}  # shares of the states that a step writes
MIXERS = {
    PARTS: MixerConfig("power"),
    "power": MixerConfig("power"),
    "power_delta": MixerConfig("power_delta"),
    "window": MixerConfig("window", {"window": 1024}),
    "softmax": MixerConfig("softmax"),
}
PROMPT = 1024  # tokens


@torch.no_grad()
def measure(shape: str, vocabulary: int, prompt: int, batches: list[int], device: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each mixer, dtype and number of sequences."""
    (copy_ms,) = milliseconds([copy_call(device, COPIED[device])], device, rounds=5)
    for name, mixer in MIXERS.items():
        for dtype in (torch.bfloat16, torch.float32):
            model = LanguageModel(preset(shape, vocabulary, mixer), seed=0).to(device, dtype).eval()
            about = {"mixer": name, "options": mixer.options, "device": device}
            about |= {"dtype": str(dtype).removeprefix("torch."), "preset": shape, "vocabulary": vocabulary}
            about |= {"parameters": model.num_parameters(), "context": prompt}
            most = 0 if name == PARTS else step_products.MOST_ROWS
            for batch in batches:
                with (
                    mock.patch.object(step_products, "MOST_ROWS", most),
                    mock.patch.object(step_products, "FEW_WIDE_ROWS", min(most, step_products.FEW_WIDE_ROWS)),
                ):
                    row = decoding(model, batch, copy_ms / COPIED[device], device, prompt, WRITTEN.get(name))
                yield about | row | measured(device)


def line(row: dict[str, Any]) -> str:
    """Returns a row as text to print."""
    what = f"{row['mixer']:>12} {row['dtype']:>8}, {row['rows']:>2} rows"
    timing = f"{row['ms_per_token']:.3f} ms a token, {row['tokens_per_s']:,.0f} tokens/s, {row['gb_per_s']:,} GB/s"
    return f"{what}: {timing}, {row['share_of_floor']:.0%} of a copy; err {row['err']:.1e}"


def main() -> None:
    """Prints the rows, and writes them to a file."""
    parser = options("benchmarks.decoding_models", __doc__ or "")
    parser.add_argument("--preset", default="small", help="shape of the models (default: small)")
    parser.add_argument("--vocabulary", type=int, default=50257, help="(default: 50257)")
    parser.add_argument("--context", type=int, default=PROMPT, help=f"tokens of a prompt (default: {PROMPT})")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences (default: 1 8 64)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep(args.csv, measure(args.preset, args.vocabulary, args.context, args.batches, args.device), line)


if __name__ == "__main__":
    main()
