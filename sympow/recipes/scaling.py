"""Loss against context: one function for each variant, with the same shape, number of tokens and order of the data.

The recipes need the paths of the documents: data.path=FOLDER/train.zarr data.held_out_path=FOLDER/heldout.zarr, two
arrays in the layout of LongCrawl64 with 16,384 different tokens. A step has 65,536 tokens at every context, so
training.context=N needs training.batch_size=65536/N. All variants have the optimizer and the rate that were best for
gated softmax attention, power attention and the delta rule (docs/results/learning.md). `python -m benchmarks.learning
run --studies` runs the studies, with AdamW.

Variants have the body llama, except those of RWKV-7's body. "The block" means a short convolution before the mixer, a
norm of every head's output, a gate on it, and a rotation of a quarter of the channels. Variants have the block unless
they are called plain or published. "Published" variants do not have the project's defaults either: they have
eps = 1e-6, scores that start at 0, and biases of 0 if there is a gate [CST].
"""

from dataclasses import replace
from typing import Any

from sympow.data import DataConfig
from sympow.layers import attention
from sympow.models import HYBRID, MixerConfig, ModelConfig, preset
from sympow.training import RunConfig, TrainingConfig

TOKENS_PER_STEP = 65_536
STEPS = 460  # 30 million tokens
VOCAB_SIZE = 16_384
LONGEST = 65_536  # tokens of a document
DATA = DataConfig(kind="zarr", path="corpus/train.zarr", held_out_path="corpus/heldout.zarr",
                  tokenizer="none", vocab_size=VOCAB_SIZE, pack=False)  # fmt: skip

BLOCK: dict[str, Any] = dict(attention.BLOCK)
PLAIN: dict[str, Any] = {"short_convolution": 0, "head_norm": False, "output_gate": False, "rotary_fraction": 1.0}
PUBLISHED: dict[str, Any] = PLAIN | {"eps": 1e-6, "initial_score": 0.0}
_GATED_HEADS = MixerConfig("hybrid_heads", {"window": 1024, "window_options": {"gate": True}})
UNGATED: dict[str, Any] = {"gate": False, "rotation": "fixed"}
GATED: dict[str, Any] = {"gate_bias": (0.0, 0.0), "rotation": "fixed"}
CONFORMAL: dict[str, Any] = {
    "gate_bias": (0.0, 0.0), "rotation": "data", "position_rate": 1.0, "frequencies": "conformal",
    "max_length": LONGEST,
}  # fmt: skip


# Power attention, and what it is compared with, in the block.


def power() -> RunConfig:
    """Power attention as it is by default: p = 2, gated, in the block."""
    return _power("power")


def power_delta() -> RunConfig:
    """The delta rule on the state of power attention, p = 2, gated, in the block."""
    return _config("power_delta", MixerConfig("power_delta"))


def power_data() -> RunConfig:
    """Power attention, p = 2 rotated by data-dependent positions (conformal)."""
    return _power("power_data", rotation="data")


def power_ungated() -> RunConfig:
    """Power attention, p = 2 without a gate."""
    return _power("power_ungated", gate=False)


def linear_gated() -> RunConfig:
    """Power attention, p = 1 with a gate: gated linear attention."""
    return _power("linear_gated", p=1)


def power_p4_k24() -> RunConfig:
    """Power attention, p = 4 of keys of 24: a state of 17,550 rows, 8.4 times that of p = 2."""
    return _power("power_p4_k24", p=4, head_dim=24, value_dim=64)


def power_p4_k32() -> RunConfig:
    """Power attention, p = 4 of keys of 32, two key/value heads: a state of 8.4 times the elements of p = 2."""
    return _power("power_p4_k32", p=4, head_dim=32, value_dim=64, n_kv_heads=2)


def power4() -> RunConfig:
    """Power attention, p = 4 of keys of 64: a state of 766,480 rows, so that it is computed in its quadratic form."""
    return _power("power4", p=4)


def softmax() -> RunConfig:
    """Softmax attention with rotary positions."""
    return _config("softmax", MixerConfig("softmax", BLOCK))


def softmax_gate() -> RunConfig:
    """Softmax attention with the gate of power attention."""
    return _config("softmax_gate", MixerConfig("softmax", BLOCK | {"gate": True}))


def window() -> RunConfig:
    """A window of 1,024 tokens. Its state has 131,072 elements per head, and that of p = 2 has 135,200."""
    return _window("window", 1024)


def linear() -> RunConfig:
    """Linear attention without a gate."""
    return _config("linear", MixerConfig("linear", BLOCK))


def window32() -> RunConfig:
    """A window of 32 tokens. Its state has 4,096 elements per head, and that of linear attention has 4,160."""
    return _window("window32", 32)


def rwkv7() -> RunConfig:
    """The time mixing of RWKV-7, which has a block of its own."""
    return _config("rwkv7", *_rwkv7())


def gated_delta_net() -> RunConfig:
    """Gated DeltaNet of flash-linear-attention, which has a block of its own."""
    return _config("gated_delta_net", MixerConfig("gated_delta_net"))


def hybrid_softmax() -> RunConfig:
    """Five layers of power attention, and softmax attention in the fourth of the six."""
    power, softmax = MixerConfig("power"), MixerConfig("softmax", BLOCK)
    return _config("hybrid_softmax", power, power, power, softmax, power, power)


def hybrid_softmax_gate() -> RunConfig:
    """Five layers of power attention, and softmax attention with the same gate in the fourth of the six."""
    power, softmax = MixerConfig("power"), MixerConfig("softmax", BLOCK | {"gate": True})
    return _config("hybrid_softmax_gate", power, power, power, softmax, power, power)


def hybrid_window() -> RunConfig:
    """Power attention and windows of 512 tokens in turns: a state of constant size."""
    return _config("hybrid_window", MixerConfig("window", BLOCK | {"window": 512}), MixerConfig("power"))


def hybrid_softmax_window() -> RunConfig:
    """Softmax attention in the fourth of six layers, windows of 512 tokens in three, power attention in two."""
    power, softmax = MixerConfig("power"), MixerConfig("softmax", BLOCK)
    window = MixerConfig("window", BLOCK | {"window": 512})
    return _config("hybrid_softmax_window", window, power, window, softmax, window, power)


# Without the block, and as published.


def softmax_plain() -> RunConfig:
    """Softmax attention without the block."""
    return _config("softmax_plain", MixerConfig("softmax"))


def power_plain() -> RunConfig:
    """The default of power attention without the block."""
    return _power("power_plain", **PLAIN)


def published_p2() -> RunConfig:
    """Power attention, p = 2 without a gate: symmetric power transformers [SPT]."""
    return _power("published_p2", **PUBLISHED, **UNGATED)


def published_p4() -> RunConfig:
    """Power attention, p = 4 without a gate [SPT]."""
    return _power("published_p4", p=4, **PUBLISHED, **UNGATED)


def published_p6() -> RunConfig:
    """Power attention, p = 6 without a gate [SPT]."""
    return _power("published_p6", p=6, **PUBLISHED, **UNGATED)


def published_p2_gated() -> RunConfig:
    """Power attention, p = 2 with the gate of [CST] and fixed rotation."""
    return _power("published_p2_gated", **PUBLISHED, **GATED)


def published_p4_gated() -> RunConfig:
    """Power attention, p = 4 with the gate of [CST] and fixed rotation."""
    return _power("published_p4_gated", p=4, **PUBLISHED, **GATED)


def conformal_p2() -> RunConfig:
    """Power attention, p = 2 with gate and rotation as in [CST]: conformal symmetric power transformers."""
    return _power("conformal_p2", **PUBLISHED, **CONFORMAL)


def conformal_p4() -> RunConfig:
    """Power attention, p = 4 with gate and rotation as in [CST]."""
    return _power("conformal_p4", p=4, **PUBLISHED, **CONFORMAL)


def power_warmup() -> RunConfig:
    """`power` with a warm-up over 1% of the steps instead of 10%; the sources warm up over less than 1%."""
    config = _power("power_warmup")
    return replace(config, training=replace(config.training, warmup_steps=STEPS // 100))


# The body of RWKV-7 around other mixers [SCRA].


def body_power() -> RunConfig:
    """Power attention in the body of RWKV-7."""
    return _in_rwkv7_body("body_power", MixerConfig("power", PLAIN))


def body_softmax() -> RunConfig:
    """Softmax attention in the body of RWKV-7."""
    return _in_rwkv7_body("body_softmax", MixerConfig("softmax"))


def body_linear() -> RunConfig:
    """Gated linear attention in the body of RWKV-7."""
    return _in_rwkv7_body("body_linear", MixerConfig("power", PLAIN | {"p": 1, "head_norm": True}))


def body_window() -> RunConfig:
    """A window of 1,024 tokens in the body of RWKV-7."""
    return _in_rwkv7_body("body_window", MixerConfig("window", {"window": 1024}))


def body_window32() -> RunConfig:
    """A window of 32 tokens in the body of RWKV-7."""
    return _in_rwkv7_body("body_window32", MixerConfig("window", {"window": 32}))


def body_rwkv7() -> RunConfig:
    """The time mixing of RWKV-7 in its own body."""
    return _in_rwkv7_body("body_rwkv7", *_rwkv7())


def hybrid_power_gate() -> RunConfig:
    """Five layers of power attention, and softmax attention with a gate and without a rotation in the fourth."""
    return _hybrid("hybrid_power_gate", MixerConfig("power"))


def hybrid_delta_gate() -> RunConfig:
    """Five layers of the delta rule, and softmax attention with a gate and without a rotation in the fourth."""
    return _hybrid("hybrid_delta_gate", MixerConfig("power_delta"))


def hybrid_window_gate() -> RunConfig:
    """Five layers of windows of 1,024 tokens, and gated softmax attention without a rotation in the fourth."""
    return _hybrid("hybrid_window_gate", MixerConfig("window", BLOCK | {"window": 1024}))


def window_delta() -> RunConfig:
    """Windows of 128 tokens and the delta rule in turn."""
    return _config("window_delta", MixerConfig("window", BLOCK | {"window": 128}), MixerConfig("power_delta"))


def hybrid_window_delta() -> RunConfig:
    """Three layers of the delta rule, two of windows of 128 tokens, and gated softmax attention without a rotation."""
    delta, window = MixerConfig("power_delta"), MixerConfig("window", BLOCK | {"window": 128})
    softmax = MixerConfig("softmax", BLOCK | {"gate": True, "rotation": "none"})
    return _config("hybrid_window_delta", window, delta, window, softmax, delta, delta)


def heads_delta() -> RunConfig:
    """Half of the heads windows of 1,024 tokens and half of them the delta rule, in every layer."""
    return _config("heads_delta", MixerConfig("hybrid_heads", {"window": 1024}))


def hybrid_heads_delta() -> RunConfig:
    """Five layers like those of `heads_delta`, and gated softmax attention without a rotation in the fourth."""
    return _config("hybrid_heads_delta", *HYBRID)


def gated_heads_delta() -> RunConfig:
    """Layers like those of `heads_delta`, whose windows have a gate."""
    return _config("gated_heads_delta", _GATED_HEADS)


def hybrid_gated_heads_delta() -> RunConfig:
    """Five layers like those of `gated_heads_delta`, and gated softmax attention without a rotation in the fourth."""
    return _hybrid("hybrid_gated_heads_delta", _GATED_HEADS)


def based() -> RunConfig:
    """Windows of 64 tokens and linear attention by a Taylor map of 16 channels in turn: Based, in the block."""
    taylor = MixerConfig("linear", BLOCK | {"feature_map": "taylor", "head_dim": 16, "value_dim": 64})
    return _config("based", taylor, MixerConfig("window", BLOCK | {"window": 64}))


# Models of about 550 million FLOPs a token at 65,536 tokens, with different shares for weights and for the state
# [SCRA Figure 2]. The weight-state FLOP ratio is in the name.


def ratio_1_12() -> RunConfig:
    """2 layers of softmax attention, 512 wide."""
    return _shape("ratio_1_12", 512, 2, MixerConfig("softmax", BLOCK))


def ratio_2_1() -> RunConfig:
    """7 layers of power attention, 768 wide."""
    return _shape("ratio_2_1", 768, 7, MixerConfig("power"))


def ratio_4_1() -> RunConfig:
    """9 layers of windows of 2,048 tokens, 768 wide."""
    return _shape("ratio_4_1", 768, 9, MixerConfig("window", BLOCK | {"window": 2048}))


def ratio_99_1() -> RunConfig:
    """11 layers of windows of 80 tokens, 768 wide."""
    return _shape("ratio_99_1", 768, 11, MixerConfig("window", BLOCK | {"window": 80}))


def _power(name: str, **options: Any) -> RunConfig:
    return _config(name, MixerConfig("power", options))


def _window(name: str, width: int) -> RunConfig:
    return _config(name, MixerConfig("window", BLOCK | {"window": width}))


def _hybrid(name: str, mixer: MixerConfig) -> RunConfig:
    softmax = MixerConfig("softmax", BLOCK | {"gate": True, "rotation": "none"})
    return _config(name, mixer, mixer, mixer, softmax, mixer, mixer)


def _rwkv7() -> list[MixerConfig]:
    """Returns the mixers of the six layers. RWKV-7's initial values depend on the number of the layer."""
    return [MixerConfig("rwkv7", {"depth": layer / 5}) for layer in range(6)]


def _in_rwkv7_body(name: str, *mixers: MixerConfig) -> RunConfig:
    config = _config(name, *mixers)
    return replace(config, model=replace(config.model, body="rwkv7"))


def _shape(name: str, d_model: int, n_layers: int, mixer: MixerConfig) -> RunConfig:
    model = ModelConfig(VOCAB_SIZE, d_model, n_layers, d_model // 64, (mixer,), body="llama")
    return replace(_config(name), model=model)


def _config(name: str, *mixers: MixerConfig) -> RunConfig:
    """Returns the run at the longest context. A tenth of the steps is warmup; the held-out loss is measured 8 times."""
    return RunConfig(
        name=f"scaling-{name}",
        model=preset("mini", vocab_size=VOCAB_SIZE, mixers=mixers or MixerConfig("power"), body="llama"),
        data=DATA,
        training=TrainingConfig(
            context=TOKENS_PER_STEP,
            batch_size=1,
            steps=STEPS,
            optimizer="muon",
            learning_rate=8e-3,
            warmup_steps=STEPS // 10,
            precision="bf16",
            log_every=10,
            evaluate_every=-(-STEPS // 8),
            evaluation_batches=16,
            checkpoint_every=STEPS,
            keep_checkpoints=1,
        ),
    )
