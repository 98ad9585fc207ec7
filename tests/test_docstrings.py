"""Docstrings of public names begin with a verb. ruff (pydocstyle) holds the rest of their form."""

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sympow"
PARTS = ("ops", "layers", "models", "data", "training", "evaluation", "recall", "conversion", "serving", "sweeps")
# Recipes are listed by the command line with their docstrings; kernels are no public names.
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if not {"recipes", "triton"} & set(path.parts)]
# A verb of the third person ends in s. Such a word before one of these is a noun: "Sums of gates".
AFTER_NOUNS = {"of", "whose", "are", "were"}
NO_VERBS = {"This", "Its", "As", "Is", "Has", "Was", "Always", "Thus", "Plus", "Less"}


def public(body: list[ast.stmt], names: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions, methods and classes of a file, with dotted names."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield names + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{names}{node.name}.")


def begins_with_a_verb(docstring: str) -> bool:
    first, second = [*docstring.split(maxsplit=2), ""][:2]
    verb = first.rstrip(",:")
    return bool(re.fullmatch(r"[A-Z][a-z]+s", verb)) and verb not in NO_VERBS and second not in AFTER_NOUNS


@pytest.mark.parametrize(
    ("docstring", "verb"),
    [
        ("Returns x.", True),
        ("Sums up losses.", True),
        ("Reads, checks and keeps a file.", True),
        ("Sums of losses.", False),
        ("Return x.", False),
        ("The state.", False),
        ("This returns x.", False),
        ("see base", False),
    ],
)
def test_verbs_are_known_without_a_list(docstring, verb):
    assert begins_with_a_verb(docstring) is verb


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_of_functions_begin_with_a_verb(path):
    """Of classes only those that packages offer, see below."""
    found = []
    for name, node in public(ast.parse(path.read_text("utf-8")).body):
        docstring = ast.get_docstring(node)
        if docstring and not isinstance(node, ast.ClassDef) and not begins_with_a_verb(docstring):
            found.append(f"{name}: {docstring.splitlines()[0]}")
    assert found == []


@pytest.mark.parametrize("part", PARTS)
def test_what_a_package_offers_says_what_it_does(part):
    module = importlib.import_module(f"sympow.{part}")
    for name in module.__all__:
        offered = getattr(module, name)
        if callable(offered):
            assert begins_with_a_verb(offered.__doc__ or "-"), f"{name}: {offered.__doc__}"


@pytest.mark.parametrize("part", PARTS)
def test_constructors_list_their_arguments(part):
    """In the docstring of the class or of `__init__`: ruff checks those of functions alone."""
    module, missing = importlib.import_module(f"sympow.{part}"), []
    for name in module.__all__:
        offered = getattr(module, name)
        if not inspect.isclass(offered) or "__init__" not in vars(offered):
            continue
        if dataclasses.is_dataclass(offered) or typing.Protocol in offered.__bases__:
            continue
        text = f"{offered.__doc__}\n{offered.__init__.__doc__}"
        arguments = list(inspect.signature(offered).parameters)
        entry = r"^ +[*\w, ]*\b{}\b[*\w, ]*:"  # also of several arguments
        missing += [f"{name}: {each}" for each in arguments if not re.search(entry.format(each), text, re.M)]
    assert missing == []
