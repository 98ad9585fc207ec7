"""The project's own recipes: each is a run that can be built."""

import dataclasses
import importlib
import inspect
import sys

import pytest
import torch

from sympow.cli import main
from sympow.models import LanguageModel, RecallModel
from sympow.recall.run import describe_tasks
from sympow.recipes import load_recipe, load_sweep, recipe_names, scaling
from sympow.training import override

# Not gated_delta_net, which needs a package and a GPU.
SCALING = sorted(name for name, value in vars(scaling).items() if inspect.isfunction(value) and name[0] != "_"
                 and value.__module__ == scaling.__name__ and name != "gated_delta_net")  # fmt: skip
HYBRIDS = ("attention", "softmax_gate", "power", "power_delta", "power_delta_offset", "hyena", "base_conv",
           "base_conv_full", "base_conv_random", "base_conv_programmatic", "base_conv_learned", "base_conv_published",
           "long_convolution", "h3", "rwkv4", "retnet", "liquid_s4", "hyena_window64", "hyena_window256", "hyena_w2",
           "hyena_w14", "hyena_heads")  # fmt: skip
CONTROLS = ("control_attention", "control_base_conv", "control_full", "control_random", "control_programmatic",
            "control_learned", "control_learned_row")  # fmt: skip
PUBLISHED = ("power_ungated", "power_ungated_p4", "power_ungated_p6", "power_gated", "power_gated_p4", "conformal",
             "conformal_p4", "softmax_plain")  # fmt: skip
RECIPES = [
    "demo:power",
    "demo:softmax",
    *(f"longcrawl64:{name}" for name in ("power", "softmax", "window", "linear", *PUBLISHED)),
    *(f"scaling:{name}" for name in SCALING),
    *(f"hybrids:{name}" for name in HYBRIDS + CONTROLS),
]
SWEEPS = {"attention": 1, "power": 1, "anchors": 6, "published": 64, "convolutions": 144, "widths": 360, "pairs": 108,
          "heads": 30, "lengths": 60, "equal_state": 144, "relatives": 144, "input_dependent": 1, "filters": 5,
          "hybrids": 54, "windows": 18, "far": 60, "deep": 864, "published_convolutions": 768,
          "single_filters": 18, "hybrids_mixed": 48, "offset": 9, "bits": 42, "stacked": 24}  # fmt: skip
MQAR = [f"mqar:{name}" for name in (*SWEEPS, "equal_state_fla")]  # the last one needs flash-linear-attention


def test_every_file_is_listed():
    assert recipe_names() == sorted({name.split(":")[0] for name in RECIPES} | {"mqar"})


@pytest.mark.parametrize("option", ["--help", "--list"])
@pytest.mark.parametrize("command", ["train", "mqar"])
def test_every_recipe_of_the_command_is_listed(command, option, capsys, monkeypatch):
    """By name, with the first line of what is written about it."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        main([command, option])
    before, _, recipes = capsys.readouterr().out.partition("recipes:\n")
    assert bool(before) == (option == "--help")
    listed = recipes.splitlines()
    names = [*RECIPES, "scaling:gated_delta_net"] if command == "train" else MQAR
    assert sorted(line.split()[0] for line in listed) == sorted(names)
    for line in listed:
        name, _, about = line.strip().partition("  ")
        file, _, function = name.partition(":")
        recipe = getattr(importlib.import_module(f"sympow.recipes.{file}"), function)
        assert about.strip() == inspect.getdoc(recipe).splitlines()[0] != ""


def test_the_list_of_recipes_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    with pytest.raises(SystemExit, match="0"):
        main(["mqar", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 72


@pytest.mark.parametrize("name", SWEEPS)
def test_recall_sweeps_are_runs_that_can_be_made(name):
    """Every config is checked where it is made, its mixers and heads too."""
    sweep = load_sweep(f"mqar:{name}")
    assert len(sweep.runs) == SWEEPS[name]
    assert len({run.id for run in sweep.runs}) == SWEEPS[name]


def test_the_grid_of_widths_is_the_published_one_in_part():
    runs = load_sweep("mqar:widths").runs
    assert {describe_tasks(run.train) for run in runs} == {"mqar 64:4", "mqar 128:8", "mqar 256:16"}
    narrow = {run.architecture.label for run in runs if run.width == 32}
    assert narrow == {"attention", "power p=2", "power p=2, no gate"}
    assert len({run.architecture.label for run in runs if run.width == 64}) == 9
    assert sorted({round(run.learning_rate, 6) for run in runs}) == [0.0001, 0.000464, 0.002154, 0.01]


def test_the_far_queries_are_beyond_the_reach_of_a_window_of_equal_state():
    models = {run.architecture.label: run for run in load_sweep("mqar:far").runs}
    assert len(models) == 5 and len({run.tests for run in models.values()}) == 1
    window, power = models["window of 1056"], models["power p=2"]
    options = window.model.mixer(0).options
    reach = window.model.n_layers * (options["window"] - 1 + options["short_convolution"] - 1)
    near, *far = window.tests
    assert near.length < options["window"] and [task.length for task in far] == [4096, 8192]
    assert min(task.min_distance for task in far) - 1 > reach  # a value is one token behind its key
    sizes = []
    for run in (window, power):
        with torch.device("meta"):
            sizes.append(RecallModel(run.model).state_size(8192))
    assert 0.999 < sizes[0] / sizes[1] <= 1


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_builds_its_model(name):
    config = load_recipe(name)
    small = override(config, ["model.d_model=48", "model.n_layers=1", "model.vocab_size=300"]).model
    LanguageModel(small, seed=0)  # the mixer takes its options
    assert config.data.vocab_size == config.model.vocab_size
    assert type(config).from_dict(config.to_dict()) == config


def test_names_of_runs_are_all_different():
    names = [load_recipe(name).name for name in RECIPES]
    assert len(set(names)) == len(names)


def test_a_file_alone_is_its_only_recipe(tmp_path):
    file = tmp_path / "one.py"
    file.write_text("from sympow.recipes.demo import power as _power\n\ndef run():\n    return _power()\n")
    assert load_recipe(str(file)) == load_recipe("demo:power")
    with pytest.raises(ValueError, match=r"^demo holds several recipes: name one of demo:power, demo:softmax$"):
        load_recipe("demo")


@pytest.mark.parametrize("place", ["demo", "longcrawl64", "scaling"])
def test_comparisons_differ_in_the_mixer_alone(place):
    power, softmax = load_recipe(f"{place}:power"), load_recipe(f"{place}:softmax")
    assert power.model.mixers != softmax.model.mixers
    model = dataclasses.replace(power.model, mixers=softmax.model.mixers)
    assert dataclasses.replace(power, name=softmax.name, model=model) == softmax


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_those_of_the_sources(name):
    """[SPT] divides by the sum and 1e-6, scores start at 0, nothing is around attention, and the rate is constant."""
    config = load_recipe(f"longcrawl64:{name}")
    training, options = config.training, config.model.mixers[0].options
    assert training.schedule == "constant" and training.warmup_steps == 0
    assert (training.learning_rate, training.context * training.batch_size) == (6e-4, 524_288)
    if name == "softmax_plain":
        assert options == {}
        return
    assert (options["eps"], options["initial_score"], options["short_convolution"]) == (1e-6, 0.0, 0)
    assert not options["head_norm"] and not options["output_gate"] and options["rotary_fraction"] == 1.0
    assert options.get("gate", True) == ("ungated" not in name)
    assert options["rotation"] == ("data" if "conformal" in name else "fixed")
    assert options.get("p", 2) == int(name[-1] if name[-2:-1] == "p" else 2)


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_have_the_same_block_around_all_attention(name):
    """The same short convolution and rotation, in six layers of the same shape, for the same steps."""
    attention, other = load_recipe("hybrids:control_attention"), load_recipe(f"hybrids:{name}")
    block = {"short_convolution": 4, "rotary_fraction": 0.25}
    attending = [mixer for mixer in other.model.mixers if mixer.name in ("softmax", "selection")]
    assert len(attending) == (name != "control_base_conv")
    assert all(mixer.options | block == mixer.options for mixer in attending)
    model = dataclasses.replace(attention.model, mixers=other.model.mixers)
    assert dataclasses.replace(attention, name=other.name, model=model) == other


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_differ_in_the_mixers_alone(name):
    power, other = load_recipe("hybrids:power"), load_recipe(f"hybrids:{name}")
    model = dataclasses.replace(power.model, mixers=other.model.mixers)
    assert dataclasses.replace(power, name=other.name, model=model) == other
    assert model.n_layers % len(other.model.mixers) == 0


def test_a_mixer_beside_the_recipe_is_found(tmp_path, monkeypatch):
    """From another folder, and what is beside does not hide a module of the standard library."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "colorsys.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "beside" / "mixer_beside_recipe.py").write_text(
        "from sympow.layers import LinearAttention\n\n\nclass Own(LinearAttention):\n    pass\n"
    )
    (tmp_path / "beside" / "recipe.py").write_text(
        "import colorsys\nfrom sympow.data import DataConfig\nfrom sympow.models import MixerConfig, preset\n"
        "from sympow.training import RunConfig, TrainingConfig\n\n"
        "def run():\n    mixer = MixerConfig('mixer_beside_recipe:Own')\n"
        "    training = TrainingConfig(context=64, steps=2, warmup_steps=1)\n"
        "    return RunConfig('own', preset('nano', vocab_size=64, mixers=mixer), DataConfig(), training)\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_recipe("beside/recipe.py:run")
    assert type(LanguageModel(config.model, seed=0).blocks[0].mixer).__name__ == "Own"
