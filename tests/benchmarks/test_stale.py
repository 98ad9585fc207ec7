"""Which committed results are of other code than there is."""

import json

import pytest

from benchmarks import tables
from benchmarks.code_hash import KERNELS, PARTS


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Code that was one thing at commit "a", and since commit "b" is what it is now."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TABLES", {"ops_h200.json": None, "rows.csv": None, "decoding_cpu.json": None})
    asked = []

    def code_hash(part, commit=None):
        asked.append(part)
        return {"a": "11e111111111", "b": "222222222222", None: "222222222222"}.get(commit)

    monkeypatch.setattr(tables, "code_hash", code_hash)
    (tmp_path / "ops_h200.json").write_text(json.dumps([{"commit": "b"}, {"commit": "a", "code": "222222222222"}]))
    (tmp_path / "rows.csv").write_text("commit,code\nb,222222222222\n")
    (tmp_path / "decoding_cpu.json").write_text(json.dumps({"commit": "b"}))
    return tmp_path, asked


def run(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tables", "--stale"])
    return tables.main(), capsys.readouterr().out


def test_nothing_is_stale(results, monkeypatch, capsys):
    assert run(monkeypatch, capsys) == (0, "")
    assert set(results[1]) == {KERNELS, PARTS["cpu"]}


@pytest.mark.parametrize(
    "row", [{"commit": "a"}, {"commit": "b", "code": "11e111111111"}, {"commit": "a+"}, {"commit": "unknown"}]
)
def test_stale_results_are_named(results, monkeypatch, capsys, row):
    (results[0] / "ops_h200.json").write_text(json.dumps([{"commit": "b"}, row]))
    (results[0] / "rows.csv").write_text("commit,code\na,11e111111111\n")
    status, text = run(monkeypatch, capsys)
    assert status == 1 and [line.split(":")[0] for line in text.splitlines()] == ["ops_h200.json", "rows.csv"]
    assert text.splitlines()[0].endswith(f"changed since {row['commit']}")
