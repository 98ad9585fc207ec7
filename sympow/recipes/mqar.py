"""Multi-query associative recall: `sympow mqar mqar:FUNCTION`.

Every model here can look at the previous token. Attention and similar mixers follow a short convolution. The other
mixers contain a convolution or a token shift; power attention contains a short convolution by default. Without it, two
layers must learn the shift, which takes many more steps. `published` has no convolution, as in the source.
"""

from dataclasses import replace
from typing import Any

from sympow.data.mqar import RecallTask
from sympow.models import MixerConfig
from sympow.ops.feature_map import spow_dim
from sympow.recall import Architecture, OwnTask, RecallConfig, Sweep, grid

PUBLISHED_RATES = tuple(10 ** (-4 + 2 * i / 3) for i in range(4))  # logspace(-4, -2, 4)
_SHORT_CONVOLUTION: tuple[str, dict[str, Any]] = ("base_conv", {"filter": "explicit", "max_length": 3})
PUBLISHED_TASKS = tuple(RecallTask(length=n, pairs=d) for n, d in ((64, 4), (128, 8), (256, 16), (512, 64)))


def attention() -> RecallConfig:
    """One run: softmax attention after a short convolution, on the published task of 64 tokens; minutes on a CPU."""
    return _anchor(_behind("attention", "softmax", rotation="none"))


def power() -> RecallConfig:
    """One run: power attention with its default options, p = 2, on the same task."""
    return _anchor(_alone("power p=2", ("power", {}), head_dim=32))


def anchors() -> Sweep:
    """Attention and power attention, three seeds each; they must reach an accuracy of 99% on a CPU in minutes."""
    runs = [run for base in (attention(), power()) for run in grid(base, seeds=(0, 1, 2))]
    return Sweep("mqar-anchors", tuple(runs))


def input_dependent() -> RecallConfig:
    """One run: BaseConv of 3 taps, then the programmatic filter, which shows each key its value; minutes on a CPU."""
    return _hybrid_run(_hybrids(64)["programmatic filter"], 64)


def filters() -> Sweep:
    """The filters that depend on the input, and random selection for comparison; an hour on a CPU."""
    named = [("programmatic filter", 64), ("programmatic filter", 128), ("programmatic filter", 256),
             ("autocorrelation filter", 64), ("random selection", 64)]  # fmt: skip
    return Sweep("mqar-filters", tuple(_hybrid_run(_hybrids(length)[name], length) for name, length in named))


def hybrids() -> Sweep:
    """Hybrids of BaseConv (Zoology, Figure 2, bottom, and section 5) at N = 64, 128, 256, D = N / 16, three seeds."""
    runs = [_hybrid_run(model, length) for length in (64, 128, 256) for model in _hybrids(length).values()]
    return Sweep("mqar-hybrids", tuple(run for base in runs for run in grid(base, seeds=(0, 1, 2))))


def published() -> Sweep:
    """The published protocol and shapes (Zoology, Figure 2) with attention and learned positions; hours on a GPU."""
    plain = Architecture("attention", (MixerConfig("softmax", {"rotation": "none"}),), positions=True)
    runs = grid(RecallConfig(plain), tasks=PUBLISHED_TASKS, widths=(64, 128, 256, 512), learning_rates=PUBLISHED_RATES)
    return Sweep("mqar-published", runs)


def published_convolutions() -> Sweep:
    """The published protocol and shapes (Zoology, Figure 2) with convolutions, H3 and RWKV-4; days of a GPU."""
    runs = _deep_grid(RecallConfig(_deep(2, 64)[0]), tasks=PUBLISHED_TASKS, widths=(64, 128, 256, 512),
                      learning_rates=PUBLISHED_RATES)  # fmt: skip
    return Sweep("mqar-published-convolutions", runs)


def deep() -> Sweep:
    """Convolutions, H3 and RWKV-4 beside attention in 2 and 4 layers with MLP, N = 64 to 512; an hour of an H200.

    The depths and shapes of Figure 2 with two widths, the three highest published rates, three seeds, and 6,250 steps
    of 16,384 tokens at every N.
    """
    axes: dict[str, Any] = {"widths": (64, 128), "learning_rates": PUBLISHED_RATES[1:], "seeds": (0, 1, 2)}
    runs: list[RecallConfig] = []
    for task in PUBLISHED_TASKS:
        base = RecallConfig(_deep(2, 64)[0], batch_size=16_384 // task.length, epochs=1024 // task.length,
                            precision="bf16")  # fmt: skip
        runs += _deep_grid(base, tasks=(task,), **axes)
    return Sweep("mqar-deep", tuple(runs))


def hybrids_mixed() -> Sweep:
    """Every hybrid of BaseConv on a mixture of N = 64, 128, 256, and the source's single filters; minutes of an H200.

    Zoology, Figure 2, bottom. Rows of one length alone are learned late, so all lengths are trained on together, and
    tested one by one. Two learning rates, three seeds.
    """
    train = tuple(RecallTask(length=n, pairs=n // 16) for n in (64, 128, 256))
    models = [*_hybrids(256).values(), *_single_filters(256)]
    base = RecallConfig(models[0], train=train, batch_size=128, epochs=8, stop_at=0.996, precision="bf16")
    return Sweep("mqar-hybrids-mixed", grid(base, architectures=models, learning_rates=(1e-3, 3e-3), seeds=(0, 1, 2)))


def single_filters() -> Sweep:
    """Filters that depend on the input, with one filter for all tokens of a row, as in the source; three seeds.

    Zoology, Figure 2, bottom. `hybrids` has them with a lag applied only where tokens match.
    """
    runs = [_hybrid_run(model, length) for length in (64, 128, 256) for model in _single_filters(length)]
    return Sweep("mqar-single-filters", tuple(run for base in runs for run in grid(base, seeds=(0, 1, 2))))


def widths() -> Sweep:
    """Accuracy against width for every mixer, N = 64, 128, 256 with D = N / 16: 20 minutes of an H200.

    The published learning rates, with larger batches and fewer epochs than published, one seed.
    """
    tasks = [RecallTask(length=n, pairs=n // 16) for n in (64, 128, 256)]
    runs = _gpu_grid(_mixers(), epochs=4, tasks=tasks, widths=(64, 128, 256))
    runs += _gpu_grid(_mixers()[:3], epochs=4, tasks=tasks, widths=(32,))
    return Sweep("mqar-widths", runs)


def convolutions() -> Sweep:
    """Convolutions beside attention where attention solves all (Zoology, Figure 2, top): minutes of an H200.

    N = 64 and 128 with D = N / 16, widths 64 and 128, the two highest published learning rates, three seeds.
    """
    models = _with_convolutions()
    tasks = [RecallTask(length=n, pairs=n // 16) for n in (64, 128)]
    base = RecallConfig(models[0], batch_size=256, epochs=4, validations=2, precision="bf16")
    runs = grid(base, architectures=models, tasks=tasks, widths=(64, 128), learning_rates=PUBLISHED_RATES[2:],
                seeds=(0, 1, 2))  # fmt: skip
    return Sweep("mqar-convolutions", runs)


def equal_state() -> Sweep:
    """Models with about 64, 128 and 256 KiB of state, and the number of pairs that they recall; an hour of an H200.

    Trained on a mixture of 16 and 64 pairs, tested on six numbers of pairs. Width 128, two layers, two learning rates,
    three seeds.
    """
    return Sweep("mqar-equal-state", _equal_state_runs([model for kib in (64, 128, 256) for model in _of_state(kib)]))


def equal_state_fla() -> Sweep:
    """The runs of `equal_state`, and Gated DeltaNet with states of the same sizes; needs the extra `fla` and a GPU."""
    models = [_alone("Gated DeltaNet", ("gated_delta_net", {"head_dim": 64, "expand_v": expand_v}), heads=2)
              for expand_v in (0.75, 1.75, 3.625)]  # 59, 127 and 254 KiB  # fmt: skip
    return Sweep("mqar-equal-state", (*equal_state().runs, *_equal_state_runs(models)))


def pairs() -> Sweep:
    """Accuracy against the number of pairs in 256 tokens (Zoology, Figure 6), and what each state holds.

    RetNet, windows and blocked windows beside attention, power attention, linear attention by a Taylor map and Hyena.
    Trained on a mixture of 8 to 64 pairs, tested on each number; the source trains on each by itself. Two widths, two
    learning rates, three seeds.
    """
    named = {model.label: model for model in _mixers()}
    taylor = _behind("linear, Taylor map", "linear", head_dim=32, feature_map="taylor", rotation="none")
    models = [named["attention"], named["power p=2"], taylor, named["RetNet"], *_windows(), named["Hyena"]]
    train = tuple(RecallTask(length=256, pairs=d) for d in (8, 16, 32, 64))
    base = RecallConfig(models[0], train=train, batch_size=128, epochs=8, validations=2, stop_at=0.996,
                        precision="bf16")  # fmt: skip
    runs = grid(base, architectures=models, widths=(64, 128), learning_rates=(1e-3, 3e-3), seeds=(0, 1, 2))
    return Sweep("mqar-pairs", runs)


def windows() -> Sweep:
    """Windows and blocked windows of 8 and 32 tokens (Zoology, Figure 6), attention, Mamba: hours of a CPU core.

    N = 64 with D = 4, three seeds.
    """
    models = [_behind("attention", "softmax", rotation="none"), *_windows(), _alone("Mamba", ("mamba", {}))]
    runs = [run for model in models for run in grid(_hybrid_run(model, 64), seeds=(0, 1, 2))]
    return Sweep("mqar-windows", tuple(runs))


def heads() -> Sweep:
    """Hyena's convolution in 2 to 16 heads, and with a filter a channel (Zoology, Figure 7): minutes of an H200.

    N = 64 with D = 4, two learning rates, three seeds.
    """
    models = [_alone("Hyena, a filter a channel", ("hyena", {}))]
    models += [_alone("Hyena in heads", ("hyena", {"multi_head": True}), heads=h) for h in (16, 8, 4, 2)]
    base = RecallConfig(models[0], batch_size=256, epochs=12, precision="bf16")
    return Sweep("mqar-heads", grid(base, architectures=models, learning_rates=(3e-3, 1e-2), seeds=(0, 1, 2)))


def lengths() -> Sweep:
    """Trained on a mixture of lengths, tested on each of them and on twice the longest: minutes of an H200.

    Attention, power attention and three convolutions with D = N / 16, two widths, two learning rates, three seeds. The
    same steps, rates and data for every model.
    """
    train = tuple(RecallTask(length=n, pairs=n // 16) for n in (64, 128, 256))
    base = RecallConfig(_mixers()[0], train=train, test=(*train, RecallTask(length=512, pairs=32)), batch_size=128,
                        epochs=4, validations=2, stop_at=0.996, precision="bf16")  # fmt: skip
    runs = grid(base, architectures=_with_convolutions()[:5], widths=(64, 128), learning_rates=(1e-3, 3e-3),
                seeds=(0, 1, 2))  # fmt: skip
    return Sweep("mqar-lengths", runs)


def far() -> Sweep:
    """64 pairs, queried beyond the reach of a window with as many bytes of state: half an hour of four GPUs.

    The test has rows of 1,024, 4,096 and 8,192 tokens. In the two longer ones a query is at least 2,304 tokens behind
    its key. Two layers with the window and a convolution of 4 taps reach 2,116 tokens back, so a window can only guess.
    Rows of 1,024 tokens show that the window has learned the task.

    All models train on a mixture of row lengths from 256 to 8,192 in equal parts, because long rows alone are learned
    late. All have the block of power attention and no rotation. Four learning rates, three seeds.
    """
    short = RecallTask(length=256, pairs=16), RecallTask(length=256, pairs=64)
    distances = {512: 256, 1024: 512, 2048: 1024, 4096: 2304, 8192: 2304}
    long = tuple(RecallTask(length=n, pairs=64, min_distance=least) for n, least in distances.items())
    models = _far_models(head_dim=64)
    base = RecallConfig(models[0], width=128, train=(*short, *long), test=(long[1], *long[3:]), examples=7 * 9600,
                        validation_examples=7 * 64, test_examples=512, batch_size=16, epochs=1, validations=12,
                        stop_at=0.998, precision="bf16")  # fmt: skip
    return Sweep("mqar-far", grid(base, architectures=models, learning_rates=(5e-4, 1e-3, 2e-3, 4e-3), seeds=(0, 1, 2)))


def offset() -> Sweep:
    """The delta rule with and without an offset of its scores, 16 pairs in 128 tokens: minutes of a CPU core a run.

    Two layers of four heads of 16 channels, three seeds. What differs is the number of steps until 99%.
    """
    models = [_alone("delta rule", ("power_delta", {"rotation": "none"}), head_dim=16)]
    models += [_alone(f"delta rule, offset {c:g}", ("power_delta", {"rotation": "none", "offset": c}), head_dim=16)
               for c in (0.09, 1.0)]  # fmt: skip
    task = (RecallTask(length=128, pairs=16),)
    base = RecallConfig(models[0], train=task, examples=60_000, epochs=1, batch_size=64, stop_at=0.99, validations=12)
    return Sweep("mqar-offset", grid(base, architectures=models, learning_rates=(3e-3,), seeds=(0, 1, 2)))


def relatives() -> Sweep:
    """Keys given another value, and keys of two tokens."""
    tasks = [RecallTask("forgetting", length=128, pairs=8, updates=4), RecallTask("compositional", length=128, pairs=9)]
    return Sweep("mqar-relatives", _gpu_grid(_mixers(), tasks=tasks, widths=(64, 128)))


def bits() -> Sweep:
    """Parity and majority of 16 bits, asked at every token, by mixers of a constant state and attention.

    Two layers with MLP, as in Zoology's code, each mixer with or after a short convolution. The delta rule has no
    gate. With `beta_max` 2 a token can change the sign of a part of the state.
    """
    tasks = [OwnTask(f"sympow.recall.tasks:{name}", 16, 3, pairs=2, options={"every": True})
             for name in ("parity", "majority")]  # fmt: skip
    plain: dict[str, Any] = {"rotation": "none"}
    rule = plain | {"p": 1, "gate": False}
    models = [
        _behind("attention", "softmax", heads=4, **plain),
        _behind("linear", "linear", heads=4, **plain),
        _alone("power p=2", ("power", plain), heads=4),
        _alone("delta rule p=1", ("power_delta", rule), heads=4),
        _alone("delta rule p=1, beta to 2", ("power_delta", rule | {"beta_max": 2.0}), heads=4),
        _alone("delta rule p=2, beta to 2", ("power_delta", rule | {"p": 2, "beta_max": 2.0}), heads=4),
        _alone("Mamba", ("mamba", {})),
    ]
    base = RecallConfig(models[0], train=(tasks[0],), examples=30_000, epochs=1, validations=12)
    models = [replace(model, mlp_ratio=4) for model in models]
    return Sweep("mqar-bits", grid(base, tasks=tasks, architectures=models, learning_rates=(3e-3,), seeds=(0, 1, 2)))


def stacked() -> Sweep:
    """Recall by one layer without a convolution, where one token is a key and its value: minutes of a CPU core.

    4 pairs of 8 keys and 8 values, no positions, no MLP, two learning rates, three seeds.
    """
    bare: dict[str, Any] = {"rotation": "none", "short_convolution": 0}
    mixers = {"attention": ("softmax", {"rotation": "none"}), "linear": ("linear", {"rotation": "none"}),
              "power p=2": ("power", bare), "delta rule p=2": ("power_delta", bare)}  # fmt: skip
    models = [replace(_alone(label, mixer, heads=4), layers=1) for label, mixer in mixers.items()]
    task = OwnTask("sympow.recall.tasks:stacked_mqar", length=8, vocab_size=8 * 10, pairs=4)
    base = RecallConfig(models[0], train=(task,), examples=40_000, epochs=1, validations=12)
    return Sweep("mqar-stacked", grid(base, architectures=models, learning_rates=(3e-3, 1e-2), seeds=(0, 1, 2)))


def _mixers() -> list[Architecture]:
    """Returns the compared mixers. Power attention has heads of 32, whose states are small enough to be kept."""
    return [
        _behind("attention", "softmax", rotation="none"),
        _alone("power p=2", ("power", {}), head_dim=32),
        _alone("power p=2, no gate", ("power", {"gate": False}), head_dim=32),
        _behind("window 32", "window", window=32, rotation="none"),
        _behind("RetNet", "retnet", head_dim=32),
        _alone("BaseConv", _SHORT_CONVOLUTION, ("base_conv", {})),
        _alone("Hyena", ("hyena", {})),
        _alone("H3", ("h3", {"head_dim": 2})),
        _alone("RWKV-4", ("rwkv4", {"depth": 0.0}), ("rwkv4", {"depth": 1.0, "shift_depth": 0.5})),
    ]


def _windows() -> list[Architecture]:
    """Returns windows and blocked windows of 8 and 32 tokens."""
    kinds = {"window": "window", "blocked window": "blocked_window"}
    return [_behind(f"{label} of {w}", name, window=w, rotation="none") for label, name in kinds.items()
            for w in (8, 32)]  # fmt: skip


def _with_convolutions() -> list[Architecture]:
    """Returns the two kinds of attention and four mixers that use convolutions or a token shift."""
    named = {model.label: model for model in _mixers()}
    return [named[label] for label in ("attention", "power p=2", "BaseConv", "Hyena", "H3", "RWKV-4")]


def _deep(layers: int, length: int) -> list[Architecture]:
    """Returns the models of Figure 2 (top) in `layers` layers with MLP. H3's state has as many elements as a row.

    Besides the attention of the source, which has learned positions, there is one that follows a short convolution.
    """
    rwkv: list[tuple[str, dict[str, Any]]] = [("rwkv4", {"depth": i / (layers - 1), "shift_depth": i / layers})
                                              for i in range(layers)]  # fmt: skip
    models: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "attention": [("softmax", {"rotation": "none"})],
        "attention after convolution": [("short_convolution", {"mixer": "softmax", "options": {"rotation": "none"}})],
        "BaseConv": [_SHORT_CONVOLUTION, ("base_conv", {})],
        "Hyena": [("hyena", {})],
        "H3": [("h3", {"head_dim": 2, "state_dim": length})],
        "RWKV-4": rwkv,
    }
    return [Architecture(f"{label}, {layers} layers", tuple(MixerConfig(*mixer) for mixer in mixers), layers=layers,
                         positions=label == "attention") for label, mixers in models.items()]  # fmt: skip


def _deep_grid(base: RecallConfig, *, tasks: tuple[RecallTask, ...], **axes: Any) -> tuple[RecallConfig, ...]:
    """Returns the runs of all models of `_deep`, in 2 and 4 layers, on tasks."""
    return tuple(run for task in tasks for layers in (2, 4)
                 for run in grid(base, tasks=[task], architectures=_deep(layers, task.length), **axes))  # fmt: skip


def _far_models(head_dim: int) -> list[Architecture]:
    """Returns power attention, the delta rule on its state and on that of p = 1, softmax attention and a window.

    All have the block of power attention and no rotation. The window has as many elements of state as power attention
    with p = 2, rounded down: D (V + 1) elements a head are D (V + 1) / (K + V) tokens, 1,056 tokens for heads of 64.
    """
    block = {"short_convolution": 4, "head_norm": True, "output_gate": True, "rotation": "none"}
    window = spow_dim(head_dim, 2) * (head_dim + 1) // (2 * head_dim)
    named: dict[str, tuple[str, dict[str, Any]]] = {
        "power p=2": ("power", {"p": 2}),
        "delta rule p=2": ("power_delta", {"p": 2}),
        "delta rule p=1": ("power_delta", {"p": 1}),
        "softmax, gate": ("softmax", {"gate": True}),
        f"window of {window}": ("window", {"window": window}),
    }
    return [_alone(label, (mixer, block | options), head_dim=head_dim) for label, (mixer, options) in named.items()]


def _equal_state_runs(models: list[Architecture]) -> tuple[RecallConfig, ...]:
    tests = tuple(RecallTask(length=256, pairs=d) for d in (8, 16, 24, 32, 48, 64))
    base = RecallConfig(models[0], width=128, train=(tests[1], tests[-1]), test=tests, batch_size=128, epochs=3,
                        stop_at=0.999, precision="bf16")  # fmt: skip
    return grid(base, learning_rates=(2e-3, 6e-3), architectures=models, seeds=(0, 1, 2))


def _of_state(kib: int) -> list[Architecture]:
    """Returns models of two layers with `kib` KiB of state in float32, besides that of the mixers' own convolutions.

    The value width or the window is chosen to reach this size.
    """
    width = 128
    room = kib * 128 - 3 * width  # elements of a layer, without those of its short convolution
    models = [
        _behind("window", "window", window=room // (2 * width), rotation="none"),
        _behind("RetNet", "retnet", heads=4, value_dim=room // (4 * 32) - 1),
        _behind("linear", "linear", heads=4, value_dim=room // (4 * 32) - 2, rotation="none"),
        _alone("H3", ("h3", {"head_dim": 2, "state_dim": kib * 128 // (6 * width) * 2})),
    ]
    for p, key_dim, heads in ((1, 32, 4), (2, 16, 4), (3, 8, 4), (4, 8, 2)):
        value_dim = room // (heads * spow_dim(key_dim, p)) - 1
        options = {"p": p, "head_dim": key_dim, "value_dim": value_dim}
        models.append(_alone(f"power p={p}", ("power", options), heads=heads))
    return models


def _alone(
    label: str, *mixers: tuple[str, dict[str, Any]], heads: int = 1, head_dim: int | None = None
) -> Architecture:
    """Returns a model with one mixer per layer, without a convolution before it and without MLP, as published."""
    configs = tuple(MixerConfig(name, options) for name, options in mixers)
    return Architecture(label, configs, heads, head_dim, mlp_ratio=0)


def _behind(label: str, mixer: str, *, heads: int = 1, head_dim: int | None = None, **options: Any) -> Architecture:
    """Returns a model with a mixer after a short convolution, without MLP."""
    convolution = MixerConfig("short_convolution", {"mixer": mixer, "options": options})
    return Architecture(label, (convolution,), heads, head_dim, mlp_ratio=0)


def _hybrids(length: int) -> dict[str, Architecture]:
    """Returns hybrids of BaseConv with 3 taps and another mixer, for rows of `length` tokens, without MLP.

    Random selection takes a quarter of the tokens. Learned selection takes about as many, by k = N / 16. Filters keep
    N / 8 lags.
    """
    behind: dict[str, tuple[str, dict[str, Any]]] = {
        "full attention": ("softmax", {"rotation": "none"}),
        "programmatic selection": ("selection", {"selection": "programmatic", "rotation": "none"}),
        "programmatic filter": ("programmatic_conv", {"matching": True, "filler": 0}),
        "autocorrelation filter": ("autocorrelation_conv", {"matching": True, "filler": 0, "top_k": length // 8}),
    }
    scores: dict[str, dict[str, Any]] = {"random": {"probability": 0.25}, "learned": {"top_k": length // 16}}
    for choice, options in scores.items():
        behind[f"{choice} selection"] = ("selection", {"selection": choice, "rotation": "none"} | options)
    return {label: _alone(label, _SHORT_CONVOLUTION, mixer) for label, mixer in behind.items()}


def _single_filters(length: int) -> list[Architecture]:
    """Returns hybrids with filters that depend on the input, one filter for all tokens of a row of `length`."""
    filters: dict[str, tuple[str, dict[str, Any]]] = {
        "programmatic filter, one for all": ("programmatic_conv", {"filler": 0}),
        "autocorrelation filter, one for all": ("autocorrelation_conv", {"top_k": length // 8}),
    }
    return [_alone(label, _SHORT_CONVOLUTION, mixer) for label, mixer in filters.items()]


def _hybrid_run(architecture: Architecture, length: int) -> RecallConfig:
    task = RecallTask(length=length, pairs=length // 16)
    return RecallConfig(architecture, learning_rate=3e-3, train=(task,), examples=40_000, batch_size=64, epochs=1,
                        validations=12)  # fmt: skip


def _anchor(architecture: Architecture) -> RecallConfig:
    return RecallConfig(architecture, learning_rate=3e-3, epochs=1, validations=12, stop_at=0.994)


def _gpu_grid(architectures: list[Architecture], *, epochs: int = 8, **axes: Any) -> tuple[RecallConfig, ...]:
    base = RecallConfig(architectures[0], batch_size=256, epochs=epochs, validations=2, precision="bf16")
    return grid(base, architectures=architectures, learning_rates=PUBLISHED_RATES, **axes)
