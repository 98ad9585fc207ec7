"""What a run is: validation, JSON and differences."""

import dataclasses
import json
from dataclasses import replace

import pytest

from sympow.models import MixerConfig
from sympow.training import DistillationConfig, ExecutionConfig, RunConfig, TrainingConfig
from sympow.training.config import decisive, first_difference


def test_json_gives_back_an_equal_config(make_config):
    config = make_config(betas=(0.8, 0.99), micro_batch_size=1)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_runs_of_version_0_1_0_have_no_execution(make_config):
    config = make_config()
    assert RunConfig.from_dict(decisive(config.to_dict())) == config


def test_the_start_is_a_path_and_part_of_the_config(make_config):
    config = replace(make_config(), start="runs/first")
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert first_difference(make_config().to_dict(), config.to_dict()) == ("start", None, "runs/first")
    with pytest.raises(TypeError, match=r"RunConfig.start must be a path or None, got 1"):
        replace(config, start=1)
    with pytest.raises(ValueError, match=r"distillation.start gives the initial weights; start must be None, got "):
        replace(config, distillation=DistillationConfig("a", "b"))


def test_passes_split_a_batch():
    config = TrainingConfig(batch_size=12, micro_batch_size=3)
    assert (config.rows_per_pass, config.passes_per_step) == (3, 4)
    assert (TrainingConfig(batch_size=12).rows_per_pass, TrainingConfig(batch_size=12).passes_per_step) == (12, 1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"steps": 0}, ValueError, "training.steps must be at least 1; got 0"),
        ({"steps": 1.5}, TypeError, "training.steps must be an integer; got 1.5"),
        ({"batch_size": True}, TypeError, "training.batch_size must be an integer; got True"),
        ({"seed": -1}, ValueError, "training.seed must be at least 0; got -1"),
        ({"seed": 2**63}, ValueError, r"training.seed must be below 2\*\*63, got 9223372036854775808"),
        (
            {"micro_batch_size": 3},
            ValueError,
            "batch_size must be a multiple of training.micro_batch_size, got 8 and 3",
        ),
        ({"micro_batch_size": 0}, ValueError, "training.micro_batch_size must be at least 1; got 0"),
        ({"warmup_steps": 2000}, ValueError, "warmup_steps must be at most training.steps, got 2000 and 1000"),
        ({"learning_rate": 0}, ValueError, "training.learning_rate must be above 0, got 0"),
        ({"learning_rate": float("nan")}, ValueError, "training.learning_rate must be finite; got nan"),
        ({"learning_rate": 10**400}, ValueError, "training.learning_rate must be finite; got 1000"),
        ({"learning_rate": "1e-3"}, TypeError, "training.learning_rate must be a number; got '1e-3'"),
        ({"clip": 0.0}, ValueError, "training.clip must be above 0, got 0.0"),
        ({"weight_decay": -0.1}, ValueError, "training.weight_decay must be at least 0, got -0.1"),
        ({"min_lr_ratio": 1.1}, ValueError, "training.min_lr_ratio must be from 0 to 1, got 1.1"),
        ({"betas": (0.9, 1.0)}, ValueError, r"training.betas must be at least 0 and below 1, got \(0.9, 1.0\)"),
        ({"betas": [0.9]}, TypeError, "training.betas must be a tuple of two numbers"),
        ({"schedule": "cosin"}, ValueError, "unknown training.schedule 'cosin'; did you mean 'cosine'"),
        (
            {"short_context": 100, "short_share": 0.5},
            ValueError,
            "multiple of training.short_context, got 1024 and 100",
        ),
        ({"short_share": 0.5}, ValueError, "training.short_share needs training.short_context, got 0.5: set both"),
        ({"short_context": 64}, ValueError, "training.short_share must be above 0 and at most 1, got 0.0: set both"),
        ({"short_context": 64, "short_share": 1.5}, ValueError, "training.short_share must be above 0 and at most 1"),
        ({"short_context": 64.0, "short_share": 1}, TypeError, "training.short_context must be an integer; got 64.0"),
        ({"decay_steps": 5}, ValueError, "is for training.schedule = 'wsd' only, got 5 and 'cosine'"),
        ({"schedule": "wsd", "decay_steps": 0}, ValueError, "training.decay_steps must be at least 1; got 0"),
        ({"schedule": "wsd", "decay_steps": 901}, ValueError, "together, got 100 and 901 of 1000"),
        ({"precision": "bfloat16"}, ValueError, "unknown training.precision 'bfloat16'; did you mean 'bf16'"),
        ({"precision": "float16"}, ValueError, "unknown training.precision 'float16'; did you mean 'float32'"),
        ({"device": 0}, TypeError, "training.device must be a string, got 0"),
    ],
)
def test_bad_values_are_refused(fields, error, message):
    with pytest.raises(error, match=message) as caught:
        TrainingConfig(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"context_parallel": 0}, ValueError, "execution.context_parallel must be at least 1; got 0"),
        ({"profile_steps": -1}, ValueError, "execution.profile_steps must be at least 0; got -1"),
        ({"compile": 1}, TypeError, "execution.compile must be true or false, got 1"),
        ({"checkpoint_activations": "x"}, TypeError, "execution.checkpoint_activations must be true or false, got 'x'"),
        ({"tracker": "wandbb"}, ValueError, "unknown execution.tracker 'wandbb'; did you mean 'wandb'"),
    ],
)
def test_bad_ways_of_execution_are_refused(fields, error, message):
    with pytest.raises(error, match=message) as caught:
        ExecutionConfig(**fields)
    assert "\n" not in str(caught.value)


def test_rows_must_be_such_that_ranks_can_split_them(make_config):
    config = make_config(context=18)
    split = ExecutionConfig(context_parallel=4)
    with pytest.raises(ValueError, match=r"not rows of packed documents: set data\.pack = false"):
        dataclasses.replace(config, execution=split)
    whole_rows = dataclasses.replace(config.data, pack=False)
    with pytest.raises(ValueError, match=r"training\.context must be a multiple .*, got 18 and 4"):
        dataclasses.replace(config, data=whole_rows, execution=split)


def test_unknown_and_missing_fields_are_named(make_config):
    with pytest.raises(ValueError, match="unknown training field 'lerning_rate'; did you mean 'learning_rate'"):
        TrainingConfig.from_dict({"lerning_rate": 1.0})
    with pytest.raises(TypeError, match="the training config must be a dict of fields, got 3"):
        TrainingConfig.from_dict(3)
    values = make_config().to_dict()
    with pytest.raises(ValueError, match="unknown run field 'modl'; did you mean 'model'"):
        RunConfig.from_dict({**values, "modl": {}})
    with pytest.raises(ValueError, match="unknown execution field 'fsdp'"):
        RunConfig.from_dict({**values, "execution": {"fsdp": True}})
    with pytest.raises(ValueError, match="the run config needs the field 'data'"):
        RunConfig.from_dict({name: value for name, value in values.items() if name != "data"})


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", " x"])
def test_name_must_be_a_folder_name(make_config, name):
    with pytest.raises(ValueError, match="usable as a folder name"):
        dataclasses.replace(make_config(), name=name)


def test_parts_must_be_configs(make_config):
    with pytest.raises(TypeError, match=r"RunConfig.model must be a ModelConfig, got a dict"):
        dataclasses.replace(make_config(), model={})


def test_first_difference_is_named_by_its_path(make_config):
    config = make_config()
    assert first_difference(config.to_dict(), config.to_dict()) is None
    model = dataclasses.replace(config.model, mixers=(MixerConfig("power", {"p": 4}),))
    other = dataclasses.replace(config, model=model)
    assert first_difference(config.to_dict(), other.to_dict()) == ("model.mixers.0.options.p", None, 4)
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == ("a", [1], [1, 2])
    assert first_difference({"a": 1}, {}) == ("a", 1, None)
