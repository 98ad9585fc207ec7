"""key.path=value: typed by the fields, refused by name."""

from dataclasses import dataclass
from typing import Literal

import pytest

from sympow.training import override


def test_values_are_read_as_their_fields_types(make_config):
    config = override(
        make_config(),
        [
            "training.learning_rate=1e-3",
            "training.steps=7",
            "training.betas=(0.8, 0.9)",
            "training.micro_batch_size=1",
            "training.precision=bf16",
            "data.pack=false",
            "model.mixers.0.options.p=4",
            "model.mixers.0.options.gate=false",
            "model.mixers.0.options.rotation=none",
            "name=other",
        ],
    )
    training = config.training
    assert (training.learning_rate, training.steps, training.betas) == (1e-3, 7, (0.8, 0.9))
    assert (training.micro_batch_size, training.precision, config.data.pack) == (1, "bf16", False)
    assert config.model.mixers[0].options == {"p": 4, "gate": False, "rotation": "none"}
    assert config.name == "other"


def test_none_tuples_and_dictionaries(make_config):
    config = override(make_config(micro_batch_size=1), ["training.micro_batch_size=none"])
    assert config.training.micro_batch_size is None
    config = override(
        config, ["data.kind=text", "data.path=/x", "data.suffixes=.py,.md", "model.mixers.0.name=softmax"]
    )
    assert (config.data.path, config.data.suffixes) == ("/x", (".py", ".md"))
    assert config.model.mixers[0].name == "softmax"
    zarr = [
        "data.kind=zarr",
        "data.path=x",
        "data.tokenizer=bytes",
        "data.storage_options.token=anon",
        "data.suffixes=",
    ]
    assert override(config, zarr).data.storage_options == {"token": "anon"}
    several = override(config, ["data.path=none", "data.paths=x,y", "data.weights=3,1"])
    one = override(several, ["data.path=z", "data.paths=none", "data.weights=none"])  # as the error says
    assert (one.data.path, one.data.paths, one.data.weights) == ("z", (), ())
    with pytest.raises(ValueError, match=r"data takes path or paths, .*: set one to none"):
        override(several, ["data.path=z"])


def test_fields_that_belong_together_change_together(make_config):
    config = override(make_config(), ["training.batch_size=6", "training.micro_batch_size=3"])
    assert config.training.passes_per_step == 2
    assert make_config().training.batch_size == 2  # the given config stays as it is


def test_no_override_gives_an_equal_config(make_config):
    assert override(make_config(), []) == make_config()


@dataclass(frozen=True)
class Options:
    mode: Literal["fast", "slow"] = "fast"
    size: int | float = 1


def test_literals_and_unions():
    assert override(Options(), ["mode=slow", "size=2.5"]) == Options("slow", 2.5)
    assert isinstance(override(Options(), ["size=2"]).size, int)
    with pytest.raises(ValueError, match="mode is one of fast, slow, got 'slwo'"):
        override(Options(), ["mode=slwo"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.lerning_rate=1", "unknown field 'training.lerning_rate'; did you mean 'training.learning_rate'"),
        ("training.lr=1", "unknown field 'training.lr'; did you mean 'training.learning_rate'"),
        ("training.compile=true", "unknown field 'training.compile'; known: training.batch_size"),
        ("data.dir=texts", "unknown field 'data.dir'; did you mean 'data.path'"),
        ("trainin.steps=1", "unknown field 'trainin'; did you mean 'training'"),
        ("training.steps=many", "training.steps takes an integer, got 'many'"),
        ("training.steps=1.5", "training.steps takes an integer, got '1.5'"),
        ("training.learning_rate=fast", "training.learning_rate takes a number, got 'fast'"),
        ("training.micro_batch_size=x", "training.micro_batch_size takes an integer, got 'x'"),
        ("training.betas=0.9", "training.betas takes 2 values with commas between, got '0.9'"),
        ("training.betas=a,b", "training.betas takes a number, got 'a'"),
        ("training.steps.x=1", "training.steps is a single value; it has no field 'x'"),
        ("data.pack=yes", "data.pack takes true or false, got 'yes'"),
        ("data.storage_options=x", "data.storage_options cannot be set by an override; set one of its parts"),
        ("training=1", "training is a group of fields; set one of training.context, "),
        ("model.mixers=softmax", "model.mixers is a list of groups of fields; set one of model.mixers.0.name, "),
        ("model.mixers.1.name=softmax", "model.mixers has the elements 0 to 0, not '1'"),
        ("model.mixers.0.name=sotfmax", "a mixer is one of .* got 'sotfmax'"),
        ("model.mixers.0.options.q=1", "no option 'q'"),
        ("model.mixers.0.options.p=" + "[" * 100_000, "the option 'p' of the .* mixer must be an integer"),
        ("training.steps", "an override is written key=value, got 'training.steps'"),
        ("=3", "an override is written key=value, got '=3'"),
    ],
)
def test_bad_overrides_are_refused_in_one_line(make_config, assignment, message):
    with pytest.raises(ValueError, match=message) as caught:
        override(make_config(), [assignment])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "assignments",
    [
        ["training.steps=1", "training.steps=2"],
        ["model.mixers.0.options=x", "model.mixers.0.options.p=2"],
        ["model.mixers.0.options.p=2", "model.mixers.0.options=x"],
    ],
)
def test_a_field_cannot_be_set_twice(make_config, assignments):
    with pytest.raises(ValueError, match="is set twice"):
        override(make_config(), assignments)
