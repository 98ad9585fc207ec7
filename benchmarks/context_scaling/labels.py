"""Names of variants and settings in tables."""

from __future__ import annotations

from benchmarks.context_scaling.grid import ABLATIONS, Run

LABELS = {name: words for name, (words, _) in ABLATIONS.items()} | {
    "softmax": "softmax",
    "softmax_gate": "softmax, gate",
    "power": "p = 2",
    "power_delta": "delta rule, p = 2",
    "power_data": "p = 2, data-dependent rotation",
    "power_ungated": "p = 2, no gate",
    "linear_gated": "p = 1",
    "power_p4_k24": "p = 4, K = 24",
    "power_p4_k32": "p = 4, K = 32, grouped",
    "power4": "p = 4",
    "window": "window of 1,024",
    "window32": "window of 32",
    "linear": "linear",
    "rwkv7": "RWKV-7",
    "gated_delta_net": "Gated DeltaNet",
    "hybrid_softmax": "five power, one softmax",
    "hybrid_softmax_gate": "five power, one softmax, gate",
    "hybrid_softmax_window": "power, windows, one softmax",
    "hybrid_window": "power and window of 512",
    "softmax_plain": "softmax, no block",
    "power_plain": "no block",
    "published_p2": "published, p = 2",
    "published_p4": "published, p = 4",
    "published_p6": "published, p = 6",
    "published_p2_gated": "published, p = 2, gate",
    "published_p4_gated": "published, p = 4, gate",
    "conformal_p2": "published, p = 2, gate and rotation",
    "conformal_p4": "published, p = 4, gate and rotation",
    "power_warmup": "warm-up of 1%",
    "body_power": "power in the RWKV-7 body",
    "body_softmax": "softmax in the RWKV-7 body",
    "body_linear": "p = 1 in the RWKV-7 body",
    "body_rwkv7": "RWKV-7",
    "ratio_1_12": "1:12, softmax, 2 layers",
    "ratio_2_1": "2:1, power, 7 layers",
    "ratio_4_1": "4:1, window of 2,048, 9 layers",
    "ratio_99_1": "99:1, window of 80, 11 layers",
}


def label(variant: str) -> str:
    """Returns the name of a variant, with its changed options: "p = 2 + rotary_dim=16"."""
    recipe, *changes = variant.split("+")
    return " + ".join([LABELS[recipe], *changes])


def setting(run: Run, names: list[str]) -> str:
    """Returns the named parts of a run's setting in words."""
    words = {
        "context": f"{run.context:,} tokens",
        "tokens": f"{run.tokens / 1e6:.0f}M tokens in all",
        "documents": f"{run.documents} document{'s' if run.documents > 1 else ''} a step",
        "row_tokens": f"cut into {run.row_tokens:,}" if run.row_tokens else "whole",
        "size": {"tiny": "0.8M", "small": "85M"}.get(run.size or "", "10.6M") + " weights",
    }
    return ", ".join(words[name] for name in names)
