"""What README and docs say can be done: links lead somewhere, and the README's Python runs."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    missing = [link for link in targets if not (page.parent / link).exists()]
    assert not missing


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


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
