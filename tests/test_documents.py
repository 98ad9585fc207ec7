"""What README and docs say can be done: links lead somewhere, and the README's Python runs."""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sympow import training
from sympow.cli import main
from sympow.data import ByteTokenizer
from sympow.recipes import load_recipe
from sympow.training.runs import Run
from tests.tiny_runs import finished_runs

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PROSE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / ".github").rglob("*.md"))]
# What does not count in the length of a line: comments, targets of links, addresses.
NO_PROSE = re.compile(r"<!--.*?-->|(?<=\])\([^)]*\)|https?://\S+")


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)


def load_script(name: str) -> ModuleType:
    """Imports a file of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    missing = [link for link in targets if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_are_there(page):
    """Paths in code type, from the root, or from a folder that pages speak of without naming it each time."""
    folders = [ROOT, *(ROOT / each for each in ("sympow", "sympow/ops", "sympow/ops/triton", "docs"))]
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md))`", page.read_text("utf-8"))
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    named = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index) if "://" not in link}
    assert [page.name for page in PAGES[2:] if page not in named and page.name != "index.md"] == []


@pytest.mark.parametrize("block", python_of("README.md"), ids=lambda block: block.split("\n")[0])
def test_python_of_the_readme_runs(block, tmp_path, monkeypatch):
    if "transformers" in block:
        pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert os.listdir(tmp_path) in ([], ["hf"])


def names_of_pages() -> dict[str, object]:
    """What pages speak of without making it: a model, a smaller one, tokens and a state."""
    from sympow.models import LanguageModel, preset

    model, small = (LanguageModel(preset("nano", vocab_size=256), seed=seed).eval() for seed in (0, 1))
    tokens = torch.arange(24)[None] % 7
    given = {"model": model, "small": small, "tokens": tokens, "prompt": tokens[:, :3], "state": model.init_state(1)}
    given["ModuleConfig"] = SimpleNamespace  # Zoology's, a class of two fields
    return {"__name__": "page", **given}


RUNNING = [
    ("docs/index.md", ...), ("docs/tutorial.md", ...), ("docs/guides/choosing.md", ...), ("docs/guides/kernel.md", ...),
    ("docs/guides/mixer.md", ...), ("docs/guides/migration.md", ...), ("docs/guides/command-line.md", ...),
    ("docs/guides/context-files.md", 0), ("docs/guides/generation.md", ...), ("docs/guides/mqar.md", ...),
    ("docs/theory.md", ...),
]  # fmt: skip
WITH_TRANSFORMERS = [
    ("docs/guides/transformers.md", 0),
    ("docs/guides/transformers.md", 2),
    ("docs/guides/context-files.md", 1),
]
OF_RUNS = ["docs/guides/ar-hits.md", "docs/api/training.md"]
OF_A_SERVER = ["docs/guides/serving.md"]  # tests/serving runs it


@pytest.mark.parametrize(("page", "only"), RUNNING, ids=[page for page, _ in RUNNING])
def test_python_of_a_page_runs_from_top_to_bottom(page, only, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names, blocks = names_of_pages(), python_of(page)
    (tmp_path / "manual.txt").write_text("def main(")
    models = {"runs/small": names["small"]}
    monkeypatch.setattr(training, "load", lambda path: Run(models.get(path, names["model"]), ByteTokenizer(), None))
    for block in blocks if only is ... else [blocks[only]]:
        if file := re.search(r"# in (\S+\.py)$", block, re.M):
            (tmp_path / file[1]).parent.mkdir(parents=True)
            (tmp_path / file[1]).write_text(block)
        exec(compile(block, page, "exec"), names)
    for made in ("run", "sweep"):
        assert made not in names or names[made]()


@pytest.mark.parametrize("page", ["docs/guides/mixer.md", "docs/guides/migration.md"])
def test_every_block_of_a_guide_imports_what_it_uses(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in python_of(page):
        if file := re.search(r"# in (\S+\.py)$", block, re.M):
            (tmp_path / file[1]).parent.mkdir(parents=True)
            (tmp_path / file[1]).write_text(block)
        exec(compile(block, page, "exec"), {"__name__": "page"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a recipe tiny.py and two trained runs, in runs/demo."""
    folder = tmp_path_factory.mktemp("pages")
    with finished_runs(folder, [f"def f{i}(): return {i}\n" * 200 for i in range(40)]):
        for name in ("power", "softmax"):
            (folder / "runs" / "demo").mkdir(parents=True, exist_ok=True)
            (folder / name).rename(folder / "runs" / "demo" / f"demo-{name}")
        yield folder


@pytest.mark.parametrize("page", OF_RUNS)
def test_python_of_a_page_about_runs_runs(page, runs, monkeypatch):
    """`demo:power` is a tiny recipe here, of 4 steps instead of 400."""
    monkeypatch.chdir(runs)
    monkeypatch.setattr("sympow.recipes.load_recipe", lambda name, load=load_recipe: load(f"{runs}/tiny.py:power"))
    for block in python_of(page):
        exec(compile(block.replace("steps=400", "steps=4"), page, "exec"), {"__name__": "page"})


def test_python_about_padding_runs(runs, monkeypatch):
    """With the tokenizer of bytes, which names no token. The short text is continued as it is alone."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(runs)
    assert main(["export", "runs/demo/demo-power", "--out", "hf/power"]) == 0
    with pytest.raises(ValueError, match="does not have a padding token"):
        transformers.AutoTokenizer.from_pretrained("hf/power")(["a", "bc"], padding=True)
    names = {"__name__": "page"}
    (block,) = (block for block in python_of("docs/guides/transformers.md") if "pad_token = " in block)
    exec(compile(block, "docs/guides/transformers.md", "exec"), names)
    alone = names["tokenizer"](["def"], return_tensors="pt")
    expected = names["model"].generate(**alone, max_new_tokens=20, do_sample=False)
    assert names["written"][1, -20:].tolist() == expected[0, -20:].tolist() and len(names["texts"]) == 2


def test_python_about_adapters_runs(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="needs peft")
    from transformers import AutoModelForCausalLM

    from sympow.integrations.transformers import SympowConfig
    from sympow.models import preset

    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_config(SympowConfig(model=preset("nano", vocab_size=64))).eval()
    model.save_pretrained("hf/power")
    names = {"__name__": "page"}
    (block,) = (block for block in python_of("docs/guides/transformers.md") if "LoraConfig(" in block)
    exec(compile(block, "docs/guides/transformers.md", "exec"), names)
    tuned, tokens = AutoModelForCausalLM.from_pretrained("hf/tuned"), names["tokens"]
    assert not torch.allclose(tuned(tokens).logits, model(tokens).logits, atol=1e-3)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize(("page", "number"), WITH_TRANSFORMERS)
def test_python_of_a_page_about_transformers_runs(page, number, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers import AutoModelForCausalLM

    from sympow.integrations.transformers import SympowConfig
    from sympow.models import preset

    monkeypatch.chdir(tmp_path)
    names = names_of_pages()
    config = SympowConfig(model=preset("nano", vocab_size=64))
    names |= {"model": AutoModelForCausalLM.from_config(config).eval(), "prompt": names["tokens"]}
    exec(compile(python_of(page)[number], page, "exec"), names)


def test_the_python_of_every_page_has_a_test_that_runs_it():
    tested = {page for page, _ in RUNNING + WITH_TRANSFORMERS} | {"README.md", *OF_RUNS, *OF_A_SERVER}
    assert {str(page.relative_to(ROOT)) for page in PAGES if python_of(str(page.relative_to(ROOT)))} == tested


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page_names_what_there_is(page):
    """Also in blocks that cannot run here."""
    for node in (node for block in python_of(page) for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sympow"):
            if "transformers" in node.module:
                pytest.importorskip("transformers", reason="needs transformers")
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    book = json.loads(path.read_text("utf-8"))
    text = "".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown")
    assert all((path.parent / link).exists() for link in LINK.findall(text) if "://" not in link)
    stored = [bool(cell["outputs"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    load_script("run_notebooks").run(book, path.name)
    assert [bool(cell["outputs"]) for cell in book["cells"] if cell["cell_type"] == "code"] == stored


def test_the_drawings_of_the_kernels_are_those_of_the_script(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    script = load_script("draw_kernels")
    script.main(tmp_path)
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == sorted(file.name for file in script.FOLDER.iterdir())
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    assert all(f"(kernels/{name})" in page for name in drawn)
    titles = "".join(axis.get_title() for axis in script.bases().axes)
    assert all(f"{rows} rows" in titles for rows in ("4,096", "2,080", "3,072", "2,560"))


def public_names() -> Iterator[str]:
    """Classes and functions that the packages of sympow list as their own; constants have names in capitals.

    The list is read, not imported, as some packages need others that are not here.
    """
    for file in sorted((ROOT / "sympow").rglob("__init__.py")):
        listed = re.search(r"^__all__ = (\[.*?\])$", file.read_text("utf-8"), re.M | re.S)
        yield from (name for name in ast.literal_eval(listed[1]) if not name.isupper()) if listed else ()


def test_every_public_name_has_its_place_in_the_api():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = {entry.rpartition(".")[2] for entry in re.findall(r"^::: (sympow\S+)$", pages, re.M)}
    assert set(public_names()) - entries == {"__version__", "ar_hits"}  # the latter is a module


def test_words_are_spelled_right():
    pytest.importorskip("codespell_lib", reason="needs codespell")
    texts = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "sympow", "benchmarks", "scripts"]
    command = [sys.executable, "-m", "codespell_lib", *texts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "api" / "ops" / "index.html").is_file()


def test_asterisks_of_a_docstring_stay_on_the_site():
    pytest.importorskip("griffe", reason="needs griffe")
    plain = load_script("docs_docstrings").plain
    assert plain("x**p and `x**p`\n    **heads: of H**2 values") == "x\\*\\*p and `x**p`\n    **heads: of H**2 values"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines that are neither code nor rows of tables, pictures or comments."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        if not (code or fence or line.lstrip().startswith(("|", "![", "::: "))):
            yield number, NO_PROSE.sub("", line)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_have_at_most_100_characters(page):
    assert [number for number, line in prose(page.read_text("utf-8")) if len(line) > 100] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_in_a_paragraph_begins_with_a_comment(page):
    """Markdown would end the paragraph there."""
    assert re.findall(r"^<!--.*?-->(?=[^\n<]).*", page.read_text("utf-8"), re.M) == []


def test_prose_is_told_from_code_and_tables():
    text = "one\n```\ncode\n```\n| row |\n- [text](target.md) <!-- mark --> two\n"
    assert list(prose(text)) == [(1, "one"), (6, "- [text]  two")]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=lambda page: page.stem)
def test_a_decision_fits_on_a_page(page):
    assert len(page.read_text("utf-8").splitlines()) <= 90


def test_the_tour_of_the_code_is_short_and_names_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    tour = page.partition("## A tour of the code\n")[2].partition("\n## ")[0]
    assert 20 < len(tour.splitlines()) <= 40
    names = re.findall(r"`([a-z_/0-9]+\.py)`", tour.partition("One call")[2])
    assert len(names) > 20
    assert [name for name in names if not (ROOT / "sympow" / name).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
