"""Model shapes by name, in any body."""

from __future__ import annotations

from collections.abc import Sequence

from sympow.layers.attention import BLOCK
from sympow.models.config import Body, MixerConfig, ModelConfig

# name: (d_model, n_layers, n_heads). The last four are GPT-2's; see `preset` for their parameters.
PRESETS: dict[str, tuple[int, int, int]] = {
    "nano": (64, 2, 2),
    "tiny": (128, 4, 4),
    "mini": (384, 6, 6),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
}

_POWER = MixerConfig("power")
_HEADS = MixerConfig("hybrid_heads", {"window": 1024})
HYBRID = (
    _HEADS, _HEADS, _HEADS, MixerConfig("softmax", dict(BLOCK) | {"gate": True, "rotation": "none"}), _HEADS, _HEADS
)  # fmt: skip
"""The mixers of a hybrid, for six layers or a multiple of six.

In five of six layers half of the heads attend to windows of 1,024 tokens, and half of them have the delta rule. The
fourth layer is gated softmax attention without a rotation.
"""


def preset(
    name: str, vocab_size: int = 50_257, mixers: Sequence[MixerConfig] | MixerConfig = _POWER, body: Body = "gpt2"
) -> ModelConfig:
    """Returns the config of a shape of `PRESETS` with a vocabulary, mixers and a body.

    The numbers of weights in different bodies differ by one or two percent.

    With 50,257 tokens and softmax attention the gpt2 body counts 123,654,912 parameters in "small", 353,776,640
    in "medium", 772,721,920 in "large" and 1,555,976,000 in "xl". The published numbers are 124M, 335M, 774M and 1.5B.
    The first number is the count above. The last two include 1,024 learned positions, which are replaced by rotation
    here. No way of counting the medium shape gives 335M: it has 354M, or 302M without the embedding. The gate adds
    0.09% to "small", gate and data-dependent rotation together 0.18%.
    """
    if name not in PRESETS:
        raise ValueError(f"a preset is one of {', '.join(PRESETS)}; got {name!r}")
    d_model, n_layers, n_heads = PRESETS[name]
    pattern = (mixers,) if isinstance(mixers, MixerConfig) else tuple(mixers)
    return ModelConfig(vocab_size, d_model, n_layers, n_heads, pattern, body=body)
