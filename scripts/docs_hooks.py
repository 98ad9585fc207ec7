"""Hooks of the documentation site (mkdocs.yml).

Pages in docs/ link to files outside of it, as a reader of the repository wants them. The site does not hold these
files: a link to one becomes its path in code type, and a picture outside is copied into the site. A
notebook becomes a page with its text, its code and what the code printed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent.parent / "docs"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
COMMENT = re.compile(r"<!--.*?-->", re.S)  # at the beginning of a line it would end the paragraph
PICTURES = "pictures"


def on_files(files: Files, config: Any) -> Files:
    """Adds the notebooks as pages, and the pictures that pages take from outside of docs/."""
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        uri = notebook.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, uri, content=notebook_page(notebook.read_text("utf-8"))))
    for page in sorted(DOCS.rglob("*.md")):
        for picture, _, target, _ in LINK.findall(page.read_text("utf-8")):
            source = (page.parent / target).resolve()
            if picture and "://" not in target and not source.is_relative_to(DOCS):
                uri = f"{PICTURES}/{source.name}"
                if uri not in files.src_uris:
                    files.append(File.generated(config, uri, abs_src_path=str(source)))
    return files


def notebook_page(text: str) -> str:
    """Returns a notebook, given as JSON, in Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Takes the comments out of a page and rewrites its links that lead out of docs/."""
    folder = (DOCS / page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        picture, text, target, _ = match.groups()
        if target.endswith(".ipynb"):
            return f"[{text}]({target.removesuffix('.ipynb')}.md)"
        outside = "://" not in target and not (folder / target).resolve().is_relative_to(DOCS)
        if not outside:
            return match.group(0)
        if picture:
            up = "../" * (len(Path(page.file.src_uri).parts) - 1)
            return f"![{text}]({up}{PICTURES}/{Path(target).name})"
        path = (folder / target).resolve().relative_to(DOCS.parent)
        return f"{text} (`{path}`)"

    return LINK.sub(rewritten, COMMENT.sub("", markdown))
