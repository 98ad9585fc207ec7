"""Bad runs are refused in one line before anything runs; good ones have stable names."""

import math
from dataclasses import replace

import pytest

from sympow.data.mqar import RecallTask
from sympow.models import MixerConfig
from sympow.recall import Architecture, RecallConfig, Sweep, grid
from sympow.training import override

SOFTMAX = Architecture("attention", (MixerConfig("softmax"),))


def refusal(build) -> str:
    with pytest.raises((ValueError, TypeError)) as refused:
        build()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_config_of_any_depth_is_made_at_once():
    """A model of this depth is refused where it is made; a check of every layer would not end."""
    assert RecallConfig(replace(SOFTMAX, layers=10**12)).model.n_layers == 10**12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture.heads": "3"}, "d_model must be a multiple of n_heads"),
        ({"architecture.head_dim": "48"}, "attention: width 64 is no multiple of head_dim 48"),
        ({"architecture.layers": "0"}, "n_layers must be an integer of at least 1"),
        ({"width": "1000000000"}, "width = 1,000,000,000 needs "),
        ({"architecture.mixers.0.name": "softmx"}, "a mixer is one of"),
        ({"architecture.mixers.0.options.hedas": "2"}, "the softmax mixer has no option 'hedas'"),
        ({"architecture.mixers.0.options.rotation": "data"}, "rotation is one of fixed, none"),
        ({"architecture.label": "a|b"}, "a label is made of letters"),
        ({"widht": "64"}, "unknown field 'widht'; did you mean 'width'?"),
        ({"train.0.length": "63"}, "length must be even; got 63"),
        ({"train.0.pairs": "17"}, "17 pairs need a length of at least 68; got 64"),
        ({"train.0.vocab_size": "8"}, "vocab_size is too small: 4 keys are needed"),
        ({"train.0.kind": "mqra"}, "kind is one of"),
        (
            {"architecture.head_dim": "16", "architecture.heads": "2"},
            "got heads = 2 and head_dim = 16: set head_dim to",
        ),
        ({"examples": "191", "validations": "3"}, "validations must be at most the 2 steps of an epoch; got 3"),
        ({"examples": "63"}, "every task needs a batch of 64 rows to train on; got 63"),
        ({"batch_size": "0"}, "batch_size must be at least 1"),
        ({"learning_rate": "0"}, "learning_rate must be above 0"),
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'; known: adamw, muon"),
        ({"muon_rate": "2"}, "muon_rate is for optimizer = 'muon' only, got 2.0 and 'adamw': set both"),
        ({"optimizer": "muon", "muon_rate": "-1"}, "muon_rate must be above 0, got -1"),
        ({"weight_decay": "-1"}, "weight_decay must be at least 0"),
        ({"warmup": "1.5"}, "warmup is a share of the steps, 0 to 1; got 1.5"),
        ({"stop_at": "2"}, "stop_at is an accuracy above 0 and at most 1, or none; got 2"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"weight_decay": "nan"}, "weight_decay must be finite; got nan"),
        ({"learning_rate": "inf"}, "learning_rate must be finite; got inf"),
        ({"seed": "-1"}, "seed must be at least 0"),
        ({"seed": str(2**63)}, "seed must be below 2**63; got 9223372036854775808"),
    ],
    ids=str,
)
def test_refused(fields, message):
    assert message in refusal(
        lambda: override(RecallConfig(SOFTMAX), [f"{key}={value}" for key, value in fields.items()])
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_decay": "0.1"}, "weight_decay must be a number; got '0.1'"),
        ({"weight_decay": math.inf}, "weight_decay must be finite; got inf"),
        ({"learning_rate": True}, "learning_rate must be a number; got True"),
        ({"learning_rate": 10**400}, "learning_rate must be finite; got 1000"),
        ({"warmup": None}, "warmup must be a number; got None"),
        ({"stop_at": "0.9"}, "stop_at must be a number; got '0.9'"),
        ({"train": ("mqar",)}, "train must be a RecallTask or an OwnTask, or several of them; got ('mqar',)"),
        ({"test": "mqar"}, "test must be a RecallTask or an OwnTask, or several of them; got 'mqar'"),
        ({"architecture": None}, "architecture must be an Architecture; got None"),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused(fields, message):
    assert refusal(lambda: RecallConfig(**{"architecture": SOFTMAX} | fields)).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": None}, "a label is made of letters, digits, spaces and . , = + ( ) -; got None"),
        ({"positions": "no"}, "positions must be true or false; got 'no'"),
        ({"mixers": ("softmax",)}, "mixers is a tuple of at least one MixerConfig; got ('softmax',)"),
        ({"mixers": MixerConfig("softmax")}, "mixers is a tuple of at least one MixerConfig; got MixerConfig"),
    ],
    ids=str,
)
def test_an_architecture_of_another_type_is_refused(fields, message):
    assert refusal(lambda: replace(SOFTMAX, **fields)).startswith(message)


def test_a_single_task_needs_no_tuple():
    config = RecallConfig(SOFTMAX, train=RecallTask(pairs=2), test=RecallTask(pairs=8))
    assert config == RecallConfig(SOFTMAX, train=(RecallTask(pairs=2),), test=(RecallTask(pairs=8),))


def test_refused_together():
    base = RecallConfig(SOFTMAX)
    other = RecallTask(vocab_size=100)
    assert "all tasks of a run have one vocab_size" in refusal(lambda: replace(base, test=(other,)))
    assert "train needs at least one task" in refusal(lambda: replace(base, train=()))
    learned = replace(SOFTMAX, positions=True)
    long = RecallTask(length=128)
    assert "learned positions end at the trained length, 64; the test has 128" in refusal(
        lambda: replace(base, architecture=learned, test=(long,))
    )
    assert "width must be an integer; got 64.0" in refusal(lambda: replace(base, width=64.0))
    three = (RecallTask(),) * 3
    assert "at least 1 for each of the 3 tasks" in refusal(lambda: replace(base, train=three, validation_examples=2))
    assert "the sweep empty has no runs" in refusal(lambda: Sweep("empty", ()))


@pytest.mark.parametrize(("length", "batch"), [(64, 64), (254, 64), (256, 16), (510, 16), (512, 8)])
def test_published_batch_sizes(length, batch):
    assert RecallConfig(SOFTMAX, train=(RecallTask(length=length),)).batch == batch
    if length % 64 == 0:  # the width counts as the length does
        assert RecallConfig(SOFTMAX, width=length).batch == batch


def test_names_differ_with_every_field_and_are_stable():
    base = RecallConfig(SOFTMAX)
    changes = ["width=128", "seed=1", "learning_rate=2e-3", "train.0.alpha=0.2", "train.0.min_distance=9", "epochs=2",
               "architecture.layers=3", "architecture.mixers.0.options.qk_norm=true", "stop_at=none",
               "precision=bf16", "optimizer=muon"]  # fmt: skip
    names = [base.id, *(override(base, [change]).id for change in changes)]
    names.append(override(base, ["optimizer=muon", "muon_rate=2"]).id)
    assert len(set(names)) == len(names)
    assert RecallConfig(replace(SOFTMAX)).id == base.id
    assert base.id == "attention-n64-d4-w64-lr0.001-s0-3543b6317b"  # so that finished sweeps go on
    assert replace(base, test=base.train).id != replace(base, test=(RecallTask(min_distance=9),)).id


def test_a_grid_is_every_combination_and_a_sweep_holds_a_run_once():
    base = RecallConfig(SOFTMAX)
    tasks = [RecallTask(length=64), RecallTask(length=128)]
    runs = grid(base, tasks=tasks, widths=(64, 128), learning_rates=(1e-3, 1e-2), seeds=(0, 1, 2))
    assert len(runs) == len({run.id for run in runs}) == 24
    assert {(run.train[0].length, run.width, run.seed) for run in runs} == {
        (n, d, s) for n in (64, 128) for d in (64, 128) for s in (0, 1, 2)
    }
    twice = Sweep("twice", (base, *runs, base))
    assert twice.runs == (base, *(run for run in runs if run != base))
    assert len(twice.override(["seed=0"]).runs) == 8 and twice.override(["seed=0"]).name == "twice"


def test_a_mixer_that_needs_a_length_gets_the_longest_row():
    convolution = {"mixer": "long_convolution"}
    mixers = (MixerConfig("long_convolution"), MixerConfig("short_convolution", convolution), MixerConfig("softmax"))
    architecture = Architecture("long", (*mixers, MixerConfig("long_convolution", {"max_length": 5})), layers=4)
    config = RecallConfig(architecture, train=(RecallTask(length=64),), test=(RecallTask(length=128),))
    assert [mixer.options for mixer in config.model.mixers] == [
        {"max_length": 128},
        {"mixer": "long_convolution", "options": {"max_length": 128}},
        {},
        {"max_length": 5},
    ]


def test_heads_follow_from_their_width():
    architecture = replace(SOFTMAX, head_dim=32)
    assert [RecallConfig(architecture, width=d).model.n_heads for d in (32, 64, 128)] == [1, 2, 4]


def test_long_labels_give_names_of_files_that_differ():
    task = RecallTask(length=16, pairs=2, vocab_size=32)
    models = [Architecture("\u00e4" * 300 + end, (MixerConfig("softmax"),)) for end in "ab"]
    names = [RecallConfig(model, width=16, train=(task,)).id for model in models]
    assert names[0] != names[1] and all(len(name.encode()) <= 200 for name in names)


@pytest.mark.parametrize("name", ["a/b", "", ".a", "x" * 240])
def test_a_sweep_has_a_name_that_can_name_a_folder(name):
    task = RecallTask(length=16, pairs=2, vocab_size=32)
    runs = (RecallConfig(SOFTMAX, width=16, train=(task,)),)
    with pytest.raises(ValueError, match=r"^the name of a sweep must (be usable as a file name|have at most)"):
        Sweep(name, runs)
