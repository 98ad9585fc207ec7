"""What keeps the rooms in order: short files, no import circle, one loop that trains."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "sympow"
FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
LONGEST = 400  # lines
# Kernels that are longer than a file should be.
LONG = {f"ops/triton/{name}.py" for name in
        ("launch", "gradients", "hopper/gradients", "hopper/output", "hopper/power_gradients")}  # fmt: skip


def module_of(name: str) -> str:
    return ".".join(["sympow", *Path(name).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(name): name for name in FILES}


def imported(name: str) -> set[str]:
    """The modules of the package that a file imports as it is imported itself; not those it imports in a function."""
    tree, found = ast.parse(FILES[name]), set()
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in top:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in MODULES else node.module for each in inner}
    return found & set(MODULES)


def test_no_file_is_long():
    lengths = {name: text.count("\n") for name, text in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST and name not in LONG} == {}
    assert set(FILES) >= LONG, "a file that is gone is no exception"


def test_no_import_circle():
    """Packages gather what their modules offer, so that only modules count; graphlib names the circle it finds."""
    graph = {name: imported(name) for name in FILES if not name.endswith("__init__.py")}
    assert sum(map(len, graph.values())) > 300
    modules = {module_of(name): {each for each in found if MODULES[each] in graph} for name, found in graph.items()}
    tuple(TopologicalSorter(modules).static_order())


def test_one_loop_trains():
    """Gradients are taken and weights are moved in one file, and one loop takes the steps."""
    trains = {name for name, text in FILES.items() if ").backward()" in text and not name.startswith("ops/")}
    moves = {name for name, text in FILES.items() if "optimizer.step()" in text}
    loops = {name for name, text in FILES.items() if "run_steps(" in text}
    assert trains == {"training/step.py", "layers/auxiliary.py"}  # the latter in a docstring
    assert moves == {"training/step.py"}
    assert loops == {"training/loop.py", "training/language.py", "recall/run.py"}
