"""A hash of the code that a benchmark measures: of a part of `sympow` and every module of it that this part imports."""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "sympow.ops.triton"
PARTS = {"cuda": KERNELS, "cpu": "sympow.ops.eager"}  # what a benchmark on a device measures
ALSO = {KERNELS: ("sympow.ops.fused",)}  # packages that belong to a part
# Modules that the modules of a part import for other devices, or for graphs of plain torch. Its calls do not run them.
NOT_RUN = {KERNELS: ("sympow.ops.eager", "sympow.ops.recomputed", "sympow.ops.reference")}

# What only some rows run: modules of the delta rule, modules and functions of single steps, and modules of steps of
# models.
OF_DELTA_RULE = (f"{KERNELS}.delta", f"{KERNELS}.delta_kernels", f"{KERNELS}.delta_step", "sympow.ops.delta_rule",
                 "sympow.ops.delta_solve", "sympow.ops.delta_types", "sympow.ops.delta_reference",
                 "sympow.ops.eager_operators")  # fmt: skip
OTHER_DELTA_RULE = "gated[ _-]delta[_-]?net"  # names of the mixer with the kernels of flash-linear-attention
OF_STEPS = (f"{KERNELS}.decode", f"{KERNELS}.delta_step", f"{KERNELS}.adapt.step_with_tail", "sympow.ops.decoding",
            "sympow.ops.decoding_state")  # fmt: skip
OF_MODEL_STEPS = tuple(f"sympow.ops.fused.{name}" for name in ("step_products", "few_rows", "more_rows"))
ENTRANCES = ("sympow.ops.power", "sympow.ops.rotary")  # that every row of kernels runs, whatever the kernels import
# Files of results whose programs do no single step: they train, or call the op or a model on whole rows.
NO_STEPS = ("learning.csv", "context_scaling/*", "ar_hits/*", "conversion/smollm2-*", "mqar_*", "training_*", "ops_*",
            "delta_gpu.csv", "chunks_*", "powers_*", "host_*", "positions_*", "long_row_*", "long_text_*")  # fmt: skip

# Files of results that measure the host: calls with the same kernels and results may take another time there.
OF_HOST = ("host_*", "ops_cpu.csv", "decoding_cpu.csv", "serving_cpu.csv", "serving_load_cpu.csv",
           "speculation_cpu.csv", "context_restore_cpu.csv")  # fmt: skip
# Files of results that time steps of whole models by few kernels: equal calls of the op say nothing of them. The rows
# of serving_h200.csv are of at least 16 sequences in float32, which such kernels do not step.
OF_GENERATING = ("decoding_models_*", "hf_generate_*", "brumby_*")
SAME = ROOT / "benchmarks" / "results" / "same.csv"  # of `benchmarks.same`: versions with the same kernels and results

# Finds comments faster than `tokenize` does. Strings are found too, because a "#" in them begins no comment.
STRING_OR_COMMENT = re.compile(r"""('{3}|"{3}|'|")(?:\\.|[^\\])*?\1|#[^\n]*""", re.DOTALL)


class Part(NamedTuple):
    """Describes the code that a row measured: a part of `sympow`, the modules and functions of it that the row does not
    run, and whether the row measures the host, or a model that generates."""

    name: str
    not_run: tuple[str, ...] = ()
    of_host: bool = False
    of_generating: bool = False


def part_of(name: str, row: Mapping[str, Any]) -> Part:
    """Returns the part that a row measured.

    Args:
        name: of the file of results, with its folders.
        row: names the processor in a column; without one, the file's name tells the device. A row runs the kernels of
            the delta rule if its texts, or the file's name, name it and not that of another package.
    """
    processor, path = row.get("processor"), Path(name)
    on_cpu = not processor.startswith("NVIDIA") if processor else path.stem.endswith("_cpu")
    of_host, of_generating = (any(fnmatch(name, at) for at in patterns) for patterns in (OF_HOST, OF_GENERATING))
    if on_cpu:
        return Part(PARTS["cpu"], of_host=of_host)
    not_run: set[str] = set()
    texts = " ".join(map(str, (name, *row.values()))).lower()
    if "delta" not in re.sub(OTHER_DELTA_RULE, "", texts):
        not_run.update(OF_DELTA_RULE)
    if any(fnmatch(name, pattern) for pattern in NO_STEPS):
        not_run.update(OF_STEPS)
    if not of_generating:
        not_run.update(OF_MODEL_STEPS)
    return Part(PARTS["cuda"], tuple(sorted(not_run)), of_host, of_generating)


def is_present(part: Part, commit: str, code: str | None) -> bool:
    """Returns whether a row measured the code of its part as it is now.

    What the row does not run may have changed, and so may the underscore before a name. A version with the same results
    and kernels is as good, says `benchmarks.same`, unless the row measures the host.

    Args:
        part: what the row measured.
        commit: that the row names.
        code: the hash that the row contains; None: the code at the commit was measured.
    """
    return any(_is_code_at(at, part, commit, code) for at in _same_versions(part))


def _is_code_at(at: str | None, part: Part, commit: str, code: str | None) -> bool:
    """Returns whether a row measured the code at the commit `at`; None: as the files are now."""
    if code is not None and code == code_hash(part.name, at):
        return True
    if code is not None and code != code_hash(part.name, commit):
        return False
    then = run_hash(part, commit)
    return then is not None and then == run_hash(part, at)


def _same_versions(part: Part) -> list[str | None]:
    """Returns None, for the present files, and the commits that `benchmarks.same` calls equal to them."""
    found: list[str | None] = [None]
    if part.of_host:
        return found
    for at in found:  # grows while it is read
        for line in same_lines(part.name):
            if part.of_generating and line.get("generations_different") not in (None, "", "0"):
                continue
            own, base = (line["commit"], line["code"]), (line["base"], line["base_code"])
            for (commit, code), (other, other_code) in ((own, base), (base, own)):
                if other in found or other_code != code_hash(part.name, other):
                    continue
                if _is_code_at(at, part, commit, code):
                    found.append(other)
    return found


@lru_cache
def same_lines(part: str) -> list[dict[str, str]]:
    """Returns the comparisons, on the device of a part of `PARTS`, in which no call differs."""
    if not SAME.is_file():
        return []
    with SAME.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if PARTS[line["device"]] == part and line["different"] == "0"]
    return [line for line in lines if line["base_code"] == code_hash(part, line["base"])]


@lru_cache
def code_hash(part: str = KERNELS, commit: str | None = None) -> str | None:
    """Returns 12 hex digits for the code of `part` and of all that it imports of `sympow` and may run.

    Args:
        part: a module or a package, such as "sympow.ops.eager".
        commit: the code as it was at this commit of git; None: as the files are now.

    Returns:
        The same for files that differ in comments and docstrings alone; None if git does not know the commit, or if
        there is no such part in it.
    """
    files = _files_now() if commit is None else _files_at(commit)
    return None if files is None else hash_of_files(part, files)


@lru_cache(maxsize=512)
def run_hash(part: Part, commit: str | None = None) -> str | None:
    """Returns a hash of the modules that a row runs, at a commit or now; None if git does not know the commit."""
    files = _files_now() if commit is None else _files_at(commit)
    return None if files is None else hash_of_run(part, files)


def hash_of_run(part: Part, files: Mapping[str, str]) -> str:
    """Returns what `run_hash` returns for a checkout of `files`. The underscores before names do not count."""
    also = () if part.name != KERNELS else ENTRANCES
    lines = (_code_run(path, files[path], part.not_run) for path in _modules(part.name, files, part.not_run, also))
    return hashlib.sha256(re.sub(r"\b_+(?=[a-z])", "", "\n".join(lines)).encode()).hexdigest()


@lru_cache(maxsize=4096)
def _code_run(path: str, source: str, not_run: tuple[str, ...]) -> str:
    """Returns the code of a module without those of its functions that `not_run` names."""
    module = path.removesuffix(".py").replace("/", ".")
    functions = {name.removeprefix(f"{module}.") for name in not_run if name.startswith(f"{module}.")}
    lines = source.splitlines()
    for node in ast.parse(source).body if functions else ():
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return _names_and_code("\n".join(lines))[1]


def hash_of_files(part: str, files: Mapping[str, str]) -> str | None:
    """Returns what `code_hash` returns for a checkout of `files`, sources by their paths."""
    modules = _modules(part, files)
    code = "\n".join(f"{path}\n{_names_and_code(files[path])[1]}" for path in modules)
    return hashlib.sha256(code.encode()).hexdigest()[:12] if modules else None


def _modules(part: str, files: Mapping[str, str], not_run: Sequence[str] = (), also: Sequence[str] = ()) -> list[str]:
    """Returns the paths of the modules of `part`, of those in `also`, and of all that they import and may run, in
    order."""
    own = [name.replace(".", "/") for name in (part, *ALSO.get(part, ()), *also)]
    left_out = {f"{name.replace('.', '/')}.py" for name in (*NOT_RUN.get(part, ()), *not_run)}
    found, waiting = set(), [path for path in files for at in own if path == at + ".py" or path.startswith(at + "/")]
    while waiting:
        path = waiting.pop()
        if path not in found | left_out:
            found.add(path)
            waiting += _imported(path, files)
    return sorted(found)


def _imported(path: str, files: Mapping[str, str]) -> Iterator[str]:
    """Returns the paths of the modules of `sympow` that a file imports at any place. The packages that contain a module
    are left out, because they only collect names."""
    for name in _names_and_code(files[path])[0]:
        at = name.replace(".", "/")
        yield from (there for there in (f"{at}.py", f"{at}/__init__.py") if there in files)


# Most files are the same at many commits.
@lru_cache(maxsize=4096)
def _names_and_code(source: str) -> tuple[tuple[str, ...], str]:
    """Returns what a hash needs of a source.

    Returns:
        The full names of the modules, and of what may be a module, that it imports; and its lines without comments and
        docstrings, and without lines that are empty then.
    """
    names: list[str] = []
    lines = STRING_OR_COMMENT.sub(lambda found: found[0] if found[1] else "", source).splitlines()
    for node in _statements(source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return tuple(names), "\n".join(line.rstrip() for line in lines if line.strip())


def _statements(source: str) -> Iterator[ast.AST]:
    """Returns the statements of a source. Expressions, most of its nodes, contain none and are not looked through."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, field, ())


def _files_now() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("sympow/**/*.py")}


@lru_cache(maxsize=64)
def _files_at(commit: str) -> dict[str, str] | None:
    archive = subprocess.run(["git", "archive", commit, "sympow"], capture_output=True, cwd=ROOT)
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar if member.name.endswith(".py"))
        return {name: file.read().decode() for name, file in files if file is not None}
