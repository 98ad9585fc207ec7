"""Measures how fast converted models decode: `python -m benchmarks.conversion_decoding --device cuda --csv FILE`.

The models have the shape of SmolLM2-135M and random weights, which do not change the speed, so nothing has to be
downloaded. The teacher is measured twice: with a cache that grows, and with a cache that has room for all tokens, as in
`generate`, which a CUDA graph can step. A converted model is compared with the faster of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.common.decoding_rate import decoding
from benchmarks.common.measure import keep, measured, options
from sympow.conversion.swap import parse_pattern, swap_mixers
from sympow.models import LanguageModel, MixerConfig, ModelConfig

GROWING, WHOLE = "teacher, growing cache", "teacher, whole cache"
PAIR, GATED = "window,delta", "window,gated"
FIVE_GATED = ",".join([GATED] * 2 + [PAIR] * 4 + [GATED, PAIR] + [GATED] * 2 + [PAIR] * 5)
CONVERTED = {  # pattern and p; all but those of power are students of docs/results/conversion.md
    "windows of 1,024": ("window", 2),
    "windows of 1,024 and power": ("window,power", 2),
    "windows of 1,024 and delta rule": (PAIR, 2),
    "windows of 1,024 and delta rule, p = 1": (PAIR, 1),
    "windows, delta rule and five gated": (FIVE_GATED, 2),
    "power": ("power", 2),
    "delta rule": ("delta", 2),
}
SHAPE = {"smollm2": (49_152, 576, 30, 9, 3, 1536), "tiny": (256, 32, 2, 2, 1, 64)}


def shaped(name: str) -> ModelConfig:
    """Returns the config of a teacher: softmax attention in the llama body."""
    vocab_size, d_model, n_layers, n_heads, n_kv_heads, mlp_hidden = SHAPE[name]
    softmax, groups = MixerConfig("softmax", {"bias": False}), {"n_kv_heads": n_kv_heads, "mlp_hidden": mlp_hidden}
    return ModelConfig(vocab_size, d_model, n_layers, n_heads, (softmax,), body="llama", **groups)


def measure(
    shape: str, device: torch.device, contexts: Sequence[int], batch: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for every context and model."""
    precision = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = LanguageModel(shaped(shape), seed=0).to(device, precision).eval()
    for context in contexts:
        for name, (pattern, p) in ({GROWING: ("softmax", 2), WHOLE: ("softmax", 2)} | CONVERTED).items():
            kinds = parse_pattern(pattern)[: len(teacher.blocks)]
            model = swap_mixers(teacher, kinds, p=p, window=1024, unshare="delta" in kinds)
            row = {"kind": "decoding", "shape": shape, "model": name, "context": context, "batch": batch}
            yield row | decoding(model, batch, context, tokens, grows=name == GROWING)
            del model


def main() -> None:
    """Prints the rows, and writes them to a file."""
    parser = options("benchmarks.conversion_decoding", __doc__ or "")
    parser.add_argument("--shape", choices=SHAPE, default="smollm2", help="of the models (default: smollm2)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32_768, 131_072], help="tokens before")
    parser.add_argument("--batch", type=int, default=32, help="rows decoded at once (default: 32)")
    parser.add_argument("--tokens", type=int, default=32, help="steps that are timed (default: 32)")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    about = measured(chosen.device)
    rows = measure(chosen.shape, torch.device(chosen.device), chosen.contexts, chosen.batch, chosen.tokens)
    keep(chosen.csv, (row | about for row in rows))


if __name__ == "__main__":
    main()
