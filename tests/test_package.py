"""Rules over the whole package: who imports whom, what an import costs, versions, no bare asserts."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sympow

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("convert", "corpora", "generate", "measure", "mqar", "options", "serve", "train")
CLI = {"sympow", "sympow.cli", *(f"sympow.cli.{name}" for name in GROUPS)}  # what the help imports
RECIPES = {"sympow.recipes"}  # and the help of commands that take a recipe
PACKAGE = ROOT / "sympow"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part of the package may import of the others. Imports run downwards; data stands at the side.
MAY_IMPORT = {
    "packages": set(),
    "progress": {"packages"},
    "files": set(),
    "locks": set(),
    "fields": set(),
    "ops": set(),
    "layers": {"fields", "packages", "ops"},
    "models": {"packages", "fields", "files", "ops", "layers"},
    "data": {"files", "locks", "packages", "progress", "fields"},
    "evaluation": {"files", "packages", "progress", "ops", "layers", "models"},
    "training": {"files", "locks", "progress", "fields", "ops", "layers", "models", "data"},
    "sweeps": {"files", "locks", "fields", "data", "training"},
    "integrations": {"fields", "files", "locks", "packages", "progress", "ops", "layers", "models", "data", "training"},
    "serving": {"data", "models"},
    "conversion": {"ops", "layers", "models", "data", "training", "integrations"},
    "recall": {
        "files",
        "locks",
        "progress",
        "fields",
        "ops",
        "layers",
        "models",
        "data",
        "evaluation",
        "training",
        "sweeps",
    },
    "recipes": {"fields", "ops", "layers", "models", "data", "evaluation", "training", "recall"},
    "cli": {
        "files",
        "packages",
        "progress",
        "ops",
        "layers",
        "models",
        "data",
        "evaluation",
        "training",
        "recall",
        "recipes",
        "integrations",
        "serving",
        "conversion",
    },
    "__main__": {"cli"},
    "__init__": {"ops", "layers", "models"},
}
# Optional or heavy: imported where they are used, never when a part of the package is imported.
LAZY = ["datasets", "fla", "fsspec", "huggingface_hub", "matplotlib", "numcodecs", "peft", "prometheus_client",
        "pyarrow", "pydantic", "safetensors", "starlette", "submitit", "tensorboard", "tokenizers", "tqdm",
        "transformers", "triton", "uvicorn", "vllm", "zarr"]  # fmt: skip


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever in the file it does so."""
    package = ["sympow", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden_imports(path: Path) -> list[str]:
    here = part(path)
    found = []
    for module in imported_modules(path):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if top != "sympow" or target == here or target not in MAY_IMPORT:  # `from sympow import __version__`
            continue
        if target not in MAY_IMPORT[here]:
            found.append(module)
    return found


def test_imports_run_downwards():
    forbidden = {path.relative_to(PACKAGE).as_posix(): forbidden_imports(path) for path in FILES}
    assert {path: modules for path, modules in forbidden.items() if modules} == {}


def test_every_part_has_a_rule():
    assert {part(path) for path in FILES} <= set(MAY_IMPORT)


def test_no_bare_assert_in_the_package():
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == [], "raise an error that says what was expected and what came"


def test_one_function_writes_the_files_of_corpora_runs_and_sweeps():
    """`sympow.files.atomic_write`: a kill or a loss of power leaves no part of a file under its name."""
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}"
        for path in FILES
        if part(path) in ("data", "training", "sweeps", "recall")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and writes_a_new_file(node)
    ]
    assert found == []


def writes_a_new_file(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("write_text", "write_bytes"):
        return True
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    words = [*call.args, *(each.value for each in call.keywords)]
    return name == "open" and any(isinstance(x, ast.Constant) and x.value in ("w", "wt", "wb") for x in words)


def test_every_part_imports_without_optional_packages_and_leaves_no_trace():
    """No optional package needed, no seeding, no threads set, no default changed. Against torch's own import, which
    may itself import some of them."""
    script = f"""
import importlib, sys
import torch
sys.modules.update(dict.fromkeys({LAZY!r}))  # None: an import of it fails
def settings():
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()
generator, before = torch.get_rng_state(), settings()
for part in {sorted({part(path) for path in FILES} - {"__init__", "__main__"})!r}:
    importlib.import_module(f"sympow.{{part}}")
if settings() != before or not torch.equal(generator, torch.get_rng_state()):
    sys.exit("importing changed a setting of torch")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_layer_runs_without_triton():
    """The files of the fused ops hold their kernels too."""
    script = """
import sys
import torch
sys.modules["triton"] = None  # an import of it fails
from sympow.layers import PowerAttention
layer, x = PowerAttention(16, 2, rotation="data"), torch.randn(1, 9, 16)
layer(x).sum().backward()
layer.eval().requires_grad_(False).step(x, layer.init_state(1))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("command", "more"), [([], set()), (["train"], RECIPES), (["mqar"], RECIPES)])
def test_help_comes_at_once(command, more):
    """Neither torch nor numpy, which take seconds, and no part of sympow but the command line. Recipes are read."""
    words = [sys.executable, "-X", "importtime", "-m", "sympow", *command, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    imported = {line.split("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.stdout.startswith("usage: sympow") and ("\nrecipes:\n" in done.stdout) == bool(more)
    assert {name for name in imported if name.split(".")[0] in ("sympow", "torch", "numpy")} == CLI | more


def test_public_names():
    """In a fresh process: each is listed and found, and torch is imported only when one is asked for."""
    names = [*sympow.__all__, "ops"]
    script = f"""
import sys, sympow
unlisted, lazy = set({names!r}) - set(dir(sympow)), "torch" not in sys.modules
for name in {names!r}:
    found = {{}}
    exec(f"from sympow import {{name}}", found)
    assert found[name] is getattr(sympow, name)
print(unlisted, lazy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set() True\n", done.stderr


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'sympow' has no attribute 'power_atention'"):
        _ = sympow.power_atention
    with pytest.raises(ImportError, match="cannot import name 'power_atention'"):
        from sympow import power_atention  # noqa: F401


def test_version_is_that_of_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == version == sympow.__version__
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation and citation[1] == version


def test_the_oldest_transformers_is_the_same_everywhere():
    """In the extra, in `make test-transformers`, and where CONTRIBUTING tells of that."""
    required = re.search(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text("utf-8"))[1]
    tested = re.findall(r"'[=>]=([\d.]+?)(?:\.\*)?'", (ROOT / "Makefile").read_text("utf-8"))
    told = re.search(r"transformers (\d+\.\d+) and", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))[1]
    assert {required, told, *tested} == {required} and len(tested) == 2


def test_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
