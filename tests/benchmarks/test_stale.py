"""Which committed results are of other code than there is."""

import pytest

from benchmarks import tables
from benchmarks.common import code_hash as hashes
from benchmarks.common.code_hash import KERNELS, PARTS


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Code that was one thing at commit "a", and since commit "b" is what it is now."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    asked = []

    def code_hash(part, commit=None):
        asked.append(part)
        return {"a": "11e111111111", "b": "222222222222", None: "222222222222"}.get(commit)

    monkeypatch.setattr(hashes, "code_hash", code_hash)
    monkeypatch.setattr(hashes, "run_hash", lambda part, commit=None: code_hash(part.name, commit))
    monkeypatch.setattr(hashes, "same_lines", lambda part: [])  # which are kept, and depend on the hashes
    (tmp_path / "ops_h200.csv").write_text("commit,code\nb,\na,222222222222\n")
    (tmp_path / "rows.csv").write_text("commit,code\nb,222222222222\n")
    (tmp_path / "decoding_cpu.csv").write_text("commit\nb\n")
    return tmp_path, asked


def run(call, capsys):
    return call(tables, "--stale"), capsys.readouterr().out


def test_nothing_is_stale(results, call, capsys):
    assert run(call, capsys) == (0, "")
    assert set(results[1]) == {KERNELS, PARTS["cpu"]}


@pytest.mark.parametrize(
    "row", [{"commit": "a"}, {"commit": "b", "code": "11e111111111"}, {"commit": "a+"}, {"commit": "unknown"}]
)
def test_stale_results_are_named(results, call, capsys, row):
    (results[0] / "ops_h200.csv").write_text(f"commit,code\nb,\n{row['commit']},{row.get('code', '')}\n")
    (results[0] / "rows.csv").write_text("commit,code\na,11e111111111\n")
    status, text = run(call, capsys)
    assert status == 1 and [line.split(":")[0] for line in text.splitlines()] == ["ops_h200.csv", "rows.csv"]
    assert text.splitlines()[0].endswith(f"changed since {row['commit']}")


@pytest.mark.parametrize("name", ["runs/rows.csv", "kernel/run/rows.csv", "a.csv"])
def test_every_file_of_results_is_looked_at(results, call, capsys, name):
    """Also one without a table, in folders, and whose commit looks like a number."""
    file = results[0] / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("commit,processor\n1485582,NVIDIA H200\n")
    assert run(call, capsys) == (1, f"{name}: the code that it measured has changed since 1485582\n")


def test_a_row_is_of_the_device_that_it_names(results, call, capsys):
    """Whatever the file is called. Rows that name neither a commit nor their code are left out."""
    for file in results[0].iterdir():
        file.unlink()
    (results[0] / "rows.csv").write_text('commit,processor\nb,"AMD EPYC, 2 threads"\n,NVIDIA H200\n')
    (results[0] / "bounds.csv").write_text("memory,bound\nRetNet,1.0\n")
    assert run(call, capsys) == (0, "") and set(results[1]) == {PARTS["cpu"]}
    (results[0] / "rows_cpu.csv").write_text("commit,processor\nb,NVIDIA H200\n")
    assert run(call, capsys) == (0, "") and set(results[1]) == {PARTS["cpu"], KERNELS}
    (results[0] / "bounds.csv").write_text("memory,code\nRetNet,11e111111111\n")
    assert run(call, capsys) == (1, "bounds.csv: the code that it measured has changed since unknown\n")
