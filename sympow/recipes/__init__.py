"""Recipes: Python functions that return a `RunConfig`. This package contains the recipes of the project, by subject.

Recipes in `mqar.py` return a `RecallConfig`, or a `Sweep` of them.

A recipe is named by its file and function, "demo:softmax". The name of a file alone is enough if the file has one
recipe. Recipes of users are named by a path, "mine.py:small", or by a module, "mypackage.recipes:small". Modules in the
folder of a recipe's file, such as a mixer or a task, can be imported by name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympow.recall.config import Sweep
    from sympow.training.config import RunConfig


class RecipeError(ValueError):
    """Reports an error in the code of a recipe, with the file and the line, in one line."""


def recipe_names() -> list[str]:
    """Returns the names of the recipe files of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def describe_recipes(*returned: str) -> dict[str, str]:
    """Returns the first docstring line of every recipe that returns one of these types, by name, such as "demo:power".

    The files are parsed and not run, because running them would import torch.
    """
    lines = {}
    for module in recipe_names():
        source = pkgutil.get_data(__name__, f"{module}.py") or b""
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.returns is None:
                continue
            if ast.unparse(node.returns) in returned:
                lines[f"{module}:{node.name}"] = (ast.get_docstring(node) or "").partition("\n")[0]
    return lines


def load_recipe(name: str) -> RunConfig:
    """Returns the config of a recipe.

    Raises ValueError for an unknown recipe or function, and for a file of several recipes if none is named,
    FileNotFoundError for a missing file, ImportError for a module that cannot be imported, TypeError for a function
    that is no recipe, and RecipeError for whatever the code of a recipe raises.
    """
    from sympow.training.config import RunConfig

    label, config = _called(name)
    if not isinstance(config, RunConfig):
        raise TypeError(f"{label} is no recipe of sympow train: it returned {type(config).__name__}, not RunConfig")
    return config


def load_sweep(name: str) -> Sweep:
    """Returns the sweep of a recipe, or a sweep of the one run that it returns. Raises the errors of `load_recipe`."""
    from sympow.recall.config import RecallConfig, Sweep

    label, config = _called(name)
    if isinstance(config, RecallConfig):
        return Sweep("mqar", (config,))
    if not isinstance(config, Sweep):
        got = type(config).__name__
        raise TypeError(f"{label} is no recipe of sympow mqar: it returned {got}, not RecallConfig or Sweep")
    return config


def _called(name: str) -> tuple[str, Any]:
    """Calls a recipe. Returns its name for messages, and its result."""
    from sympow.fields import unknown

    place, colon, function_name = name.rpartition(":")
    if not colon or not function_name.isidentifier():
        place, function_name = name, ""
    functions = _recipes_of(_module(place))
    if not functions:
        raise ValueError(f"{place} holds no recipe: no public function is defined in it")
    if function_name and function_name not in functions:
        raise ValueError(unknown(f"recipe in {place}", function_name, functions))
    if not function_name and len(functions) > 1:
        names = ", ".join(f"{place}:{each}" for each in functions)
        raise ValueError(f"{place} holds several recipes: name one of {names}")
    recipe = functions[function_name or next(iter(functions))]
    label = f"{recipe.__name__} in {place}"
    needed = [p.name for p in inspect.signature(recipe).parameters.values()
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if needed:
        raise TypeError(f"{label} is no recipe: it needs the argument {needed[0]!r}")
    with _errors_of_recipes(place):
        return label, recipe()


def _module(place: str) -> ModuleType:
    from sympow.fields import unknown

    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise FileNotFoundError(f"no recipe file at {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        _make_importable(path.resolve().parent)
        with _errors_of_recipes(place):
            spec.loader.exec_module(module)
        return module
    if "." in place and all(part.isidentifier() for part in place.split(".")):
        with _errors_of_recipes(place):
            return importlib.import_module(place)
    if place not in recipe_names():
        raise ValueError(unknown("recipe", place, recipe_names()))
    return importlib.import_module(f"{__name__}.{place}")


def _make_importable(folder: Path) -> None:
    """Makes the modules in the folder of a recipe importable.

    The folder comes last, so that no file beside a recipe takes the place of an installed module.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def _errors_of_recipes(place: str) -> Iterator[None]:
    """Converts errors in the code of a recipe at `place` into a RecipeError with file and line.

    Other errors are not changed.
    """
    try:
        yield
    except SyntaxError as error:
        where = place if error.filename is None else f"{error.filename}, line {error.lineno}"  # none for binary files
        raise RecipeError(f"{where}: {type(error).__name__}: {error.msg}") from error
    except Exception as error:
        # The first frame outside this file and the import system is the recipe's.
        frames = traceback.extract_tb(error.__traceback__)
        passing = (__file__, importlib.__file__)
        own = [frame for frame in frames if frame.filename not in passing and not frame.filename.startswith("<frozen")]
        if not own:
            raise
        place = f"{own[0].filename}, line {own[0].lineno}"
        raise RecipeError(f"{place}: {type(error).__name__}: {error}") from error


def _recipes_of(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Returns the public functions that a module defines, in the order of its source."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
