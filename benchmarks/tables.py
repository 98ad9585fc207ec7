"""Writes the tables of docs from committed results: `python -m benchmarks.tables`. `--check` only compares. `--stale`
lists the results whose code has changed since they were measured, and whose rows were not repeated since. Code with the
same results and kernels does not count as changed, see `benchmarks.same`.

A table is between the lines `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a file of benchmarks/results, or
one of `benchmarks.pages.context_tables`. Lines below it name the files whose code has changed since, and of those that
`benchmarks.repeat` confirms the rows that were repeated. These lines alone are between `<!-- stale: PATTERN -->` and
`<!-- end -->`, in pages whose tables other programs write.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.code_hash import SAME, Part, is_present, part_of
from benchmarks.common.measure import known, read
from benchmarks.pages import context_tables, papers_figures
from benchmarks.pages.prose import filled
from benchmarks.pages.result_tables import TABLES
from benchmarks.repeat import REPEATED, confirmed, rows_named
from sympow.recall.results import read_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("index.md", "kernels.md", "guides/context-files.md", "guides/generation.md", "guides/serving.md",
         "guides/transformers.md", "results/chunks.md", "results/context-scaling.md", "results/learning.md",
         "results/mqar.md", "results/speed.md", "results/training.md")  # fmt: skip
OTHERS = ("results/ar-hits.md", "results/conversion.md")  # tables of other programs
MISSING = "Not measured yet."
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in NAMES)]


def of_results(name: str, of_readme: bool = False) -> str:
    """Returns the table of a name; a sentence where there is none yet. Below it, `stale_lines` of its files."""
    if name in context_tables.TABLES:
        text, sources = context_tables.TABLES[name](RESULTS), context_tables.SOURCES[name]
    elif (path := RESULTS / name).is_file():
        text, sources = TABLES[name](read_results(path) if name.startswith("mqar") else read(path)), (name,)
    else:
        return MISSING
    return "\n\n".join(filter(None, [text, stale_lines(sources, of_readme)]))


def stale_lines(names: Sequence[str], of_readme: bool = False) -> str:
    """Returns lines that name the files of earlier code among some, stale ones and confirmed ones; "" if none is.

    They also name the rows that confirm a file. The README, which is short, has a link to the page that names them.
    """
    late: list[str] = []
    agreeing: list[str] = []
    for name in sorted(names):
        if parts := earlier(RESULTS / name):
            repeated = confirmed(RESULTS / REPEATED, name, parts)
            if not repeated:
                late.append(f"`{name}`")
                continue
            count = f"{len(repeated)} row{'s' * (len(repeated) > 1)} repeated"
            agree = "agree" if len(repeated) > 1 else "agrees"
            if of_readme:
                agreeing.append(f"`{name}`; [{count}]({_page_of(name)}) {agree}")
            else:
                agreeing.append(f"`{name}`; {count} {agree} ({rows_named(RESULTS / name, repeated)})")
    lines = [f"Stale, measured with earlier code: {', '.join(late)}."] if late else []
    lines += [f"Measured with earlier code: {each}." for each in agreeing]
    return "\n\n".join(lines)


def _page_of(name: str) -> str:
    """Returns the path of the page in docs with the table of a file of results."""
    return (
        next(page for page in PAGES[1:] if f"<!-- table: {name} -->" in page.read_text()).relative_to(ROOT).as_posix()
    )


def with_tables(text: str, of_readme: bool = False) -> str:
    """Returns `text` with every table written anew, by name."""
    return filled(text, lambda name: of_results(name, of_readme))


def with_stale_lines(text: str) -> str:
    """Returns `text` with the lines that name files of earlier code written anew."""

    def written(pattern: str) -> str:
        return stale_lines([path.relative_to(RESULTS).as_posix() for path in RESULTS.glob(pattern)])

    return filled(text, written, kind="stale")


def stale(path: Path) -> list[str]:
    """Returns the commits of rows whose code has changed since the measurement, sorted; none of a confirmed file."""
    parts = earlier(path)
    if not parts or confirmed(RESULTS / REPEATED, path.relative_to(RESULTS).as_posix(), parts):
        return []
    return sorted(set().union(*parts.values()))


def earlier(path: Path) -> dict[Part, set[str]]:
    """Returns the commits of rows whose code has changed since the measurement, by the part of the code.

    What a row does not run may change. Rows of a commit that git does not know are stale, unless they contain the hash
    of the present code. Rows that name neither a commit nor a hash are left out.
    """
    name = path.relative_to(RESULTS).as_posix()
    runs = {
        (part_of(name, row), row.get("commit") or "unknown", row.get("code"))
        for row in known(path)
        if row.get("commit") or row.get("code")
    }
    found: dict[Part, set[str]] = {}
    for part, commit, code in sorted(runs, key=str):
        if not is_present(part, commit, code):
            found.setdefault(part, set()).add(commit)
    return found


def print_stale() -> int:
    """Prints the files of results with stale rows, and returns how many there are."""
    files = sorted(path for path in RESULTS.rglob("*.csv") if path.name not in (REPEATED, SAME.name))
    found = {path.relative_to(RESULTS).as_posix(): commits for path in files if (commits := stale(path))}
    for name, commits in found.items():
        print(f"{name}: the code that it measured has changed since {', '.join(commits)}")
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    parser.add_argument(
        "--stale", action="store_true", help="change nothing; exit 1 if the code of results has changed"
    )
    args = parser.parse_args()
    if args.stale:
        return int(print_stale() > 0)
    late = 0
    for page in [*PAGES, *(ROOT / "docs" / name for name in OTHERS)]:
        old = page.read_text()
        new = with_tables(old, page == PAGES[0]) if page in PAGES else with_stale_lines(old)
        late += new != old
        if not args.check:
            page.write_text(new)
    if not args.check:
        evidence = context_tables.Evidence(RESULTS)
        for name, figure in (context_tables.FIGURES | papers_figures.FIGURES).items():
            figure(evidence).savefig(ROOT / "docs" / "results" / name, metadata={"Software": None})
    return int(args.check and late > 0)


if __name__ == "__main__":
    sys.exit(main())
