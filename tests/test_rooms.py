"""What keeps the rooms in order: files of one idea, no circle, one loop that trains, tests that use public names."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "sympow"
FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
LONGEST = 900  # lines: a file tells one idea from top to bottom
SMALL = 40  # lines
# What tests may take of named tuples, Python, PyTorch and Triton, which have no public name for it.
PRIVATE = {"_replace", "_asdict", "_getframe", "_exit", "_cdata", "_dynamo", "_subclasses", "_python_dispatch",
           "_pytree", "_runtime", "_get_np_dtype", "_interpreter", "_patch_lang", "_is_amx_tile_supported",
           "_is_avx512_bf16_supported"}  # fmt: skip
REPLACING = ("setattr", "delattr", "getattr", "patch", "object")


def module_of(name: str) -> str:
    return ".".join(["sympow", *Path(name).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(name): name for name in FILES}


@cache
def imported(name: str) -> set[str]:
    """The modules of the package that a file imports anywhere, also in a function or from an `__init__`."""
    tree, found = ast.parse(FILES[name]), set()
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in MODULES else node.module for each in inner}
    return (found & set(MODULES)) - {module_of(name)}


def test_no_file_is_long():
    lengths = {name: text.count("\n") for name, text in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


def test_no_small_file_has_one_importer():
    """It would be a part of the file that imports it."""
    graph = {name: imported(name) for name in FILES}
    small = [name for name, text in FILES.items() if text.count("\n") < SMALL and not Path(name).stem.startswith("__")]
    importers = {name: [other for other in FILES if module_of(name) in graph[other]] for name in small}
    assert small and {name: found for name, found in importers.items() if len(found) < 2} == {}


def test_no_import_circle():
    """graphlib names the circle it finds."""
    graph = {module_of(name): imported(name) for name in FILES}
    assert sum(map(len, graph.values())) > 300
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(("room", "above"), [("runtime", ("fused", "triton")), ("fused", ("triton",))])
def test_rooms_of_the_ops_import_downwards(room, above):
    """The kernels of power attention are above the fused ops, and both are above what kernels run on."""
    files = [name for name in FILES if name.startswith(f"ops/{room}/")]
    targets = tuple(f"sympow.ops.{each}" for each in above)
    found = {name: {each for each in imported(name) if each.startswith(targets)} for name in files}
    assert files and {name: upward for name, upward in found.items() if upward} == {}


def test_one_loop_trains():
    """Gradients are taken and weights are moved in one file, and one loop takes the steps."""
    trains = {name for name, text in FILES.items() if ").backward()" in text and not name.startswith("ops/")}
    moves = {name for name, text in FILES.items() if "optimizer.step()" in text}
    loops = {name for name, text in FILES.items() if "run_steps(" in text}
    assert trains == {"training/step.py", "layers/auxiliary.py"}  # the latter in a docstring
    assert moves == {"training/step.py"}
    assert loops == {"training/loop.py", "training/trainer.py", "recall/run.py"}


def private_names(tree: ast.AST) -> set[str]:
    """Names with an underscore in front: attributes of others, imports, and texts that name what is to be replaced."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {name for alias in node.names for name in f"{node.module}.{alias.name}".split(".")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in REPLACING:
            texts = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found |= {name for text in texts if isinstance(text, str) for name in text.split(".")}
    return {name for name in found if re.fullmatch(r"_[a-z]\w*", name, re.I)}


def test_tests_use_public_names():
    used = {path.relative_to(TESTS).as_posix(): private_names(ast.parse(path.read_text("utf-8"))) - PRIVATE
            for path in sorted(TESTS.rglob("*.py"))}  # fmt: skip
    assert {name: sorted(found) for name, found in used.items() if found} == {}


def test_private_names_are_found():
    text = "from a import _b\nx._c()\nself._d\npatch.setattr(x, '_e', 1)\nmock.patch('a.b._f')\nx.__doc__\nprint('_g')"
    assert private_names(ast.parse(text)) == {"_b", "_c", "_e", "_f"}
