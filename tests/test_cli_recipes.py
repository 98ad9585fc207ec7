"""The project's own recipes: each is a run that can be built."""

import dataclasses

import pytest

from sympow.models import LanguageModel
from sympow.recipes import load_recipe, recipe_names
from sympow.training import override

RECIPES = [
    "demo:power",
    "demo:softmax",
    *(f"longcrawl64:{name}" for name in ("power", "power_ungated", "softmax", "window", "linear")),
]


def test_every_file_is_listed():
    assert recipe_names() == sorted({name.split(":")[0] for name in RECIPES})


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


def test_a_file_alone_is_its_first_recipe():
    assert load_recipe("demo") == load_recipe("demo:power")


@pytest.mark.parametrize("place", ["demo", "longcrawl64"])
def test_comparisons_differ_in_the_mixer_alone(place):
    power, softmax = load_recipe(f"{place}:power"), load_recipe(f"{place}:softmax")
    assert power.model.mixers != softmax.model.mixers
    model = dataclasses.replace(power.model, mixers=softmax.model.mixers)
    assert dataclasses.replace(power, name=softmax.name, model=model) == softmax
