"""How calls are timed, and how rows are written."""

import time

import pytest
import torch

from benchmarks.common.measure import keep, known, measured, milliseconds, options, processor, read, refuses, write
from benchmarks.tables import RESULTS
from sympow.recall import write_results


def test_calls_take_turns_in_changing_order_and_keep_their_own_times():
    taken: list[int] = []

    def call(i: int) -> None:
        taken.append(i)
        time.sleep(0.002 * (1 + i))

    times = milliseconds([lambda i=i: call(i) for i in range(3)], "cpu", rounds=6, least=0)
    assert times == sorted(times) and times[0] >= 2 and times[2] >= 6
    rounds = [tuple(taken[i : i + 3]) for i in range(6, len(taken), 3)]  # after warming up and counting repeats
    assert len(rounds) == 6 and len(set(rounds)) > 1 and all(sorted(order) == [0, 1, 2] for order in rounds)


@pytest.mark.parametrize("words", [["--threads", "0"], ["--csv", "."]])
def test_wrong_options_of_a_benchmark_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        options("benchmarks.delta", "Times.").parse_args(["--csv", "rows.csv", *words])
    assert f"error: argument {words[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", "my notes\n", "exists and is no table that this command wrote: give another file, or remove it"),
        ("table.csv", "a,b\n1,2\n", "exists and is no table that this command wrote: give another file, or remove it"),
        ("no/rows.csv", None, "cannot be written: it is a folder, or its folder does not exist"),
        ("/dev/null", None, "is no regular file"),
    ],
)
def test_files_of_others_are_not_replaced(name, content, message, tmp_path, capsys):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        options("benchmarks.delta", "Times.").parse_args(["--csv", str(file)])
    assert f"error: argument --csv: {file} {message}\n" in capsys.readouterr().err


def test_tables_of_benchmarks_are_replaced(tmp_path):
    file = tmp_path / "rows.csv"
    for rows in ([], [{"ms": 1.0} | measured("cpu")]):
        write(file, rows)
        assert options("benchmarks.delta", "Times.").parse_args(["--csv", str(file)]).csv == file


@pytest.mark.parametrize(("count", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_the_threads_of_a_processor(count, words, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert processor("cpu").endswith(f", {words}")


def test_one_thread_in_files_of_earlier_versions(tmp_path):
    rows = [{"processor": f"CPU, {count} threads"} for count in (1, 11)]
    write(tmp_path / "rows.csv", rows)
    assert [row["processor"] for row in read(tmp_path / "rows.csv")] == ["CPU, 1 thread", "CPU, 11 threads"]


ROWS = [
    {"commit": "1485582", "torch": "2.10", "name": "power", "ms": 0.1 + 0.2, "T": 65536, "graph": True, "ratio": 1.0},
    {"commit": "12e4567", "name": "1e5", "ms": None, "T": 2**53 + 1, "graph": False, "passes": {"a": 1.5, "b": None}},
    {"commit": "05c02\u00e9", "name": "True", "ms": 1e-300, "bins": [{"end": 512, "loss": 2.5}], "text": 'a, "b"'},
    *({"commit": '"a"', "name": name} for name in ("", "007", "nan", "null", "[1]", '"', " a ", "1_000", "a\n\rb\0")),
]


def test_rows_come_back_from_a_file(tmp_path):
    """With the kind of every value; a name that a row lacks is None."""
    file = tmp_path / "rows.csv"
    write(file, ROWS)
    columns = dict.fromkeys(name for row in ROWS for name in row)
    found = read(file)
    assert repr(found) == repr([columns | row for row in ROWS])
    assert len(file.read_bytes().splitlines()) == 1 + len(ROWS)
    write(file, found)
    assert read(file) == found


def test_rows_of_no_names_and_infinite_numbers(tmp_path):
    write(tmp_path / "rows.csv", [])
    assert read(tmp_path / "rows.csv") == []
    write(tmp_path / "rows.csv", [{"loss": float("nan"), "ratio": float("inf")}])
    assert repr(read(tmp_path / "rows.csv")) == "[{'loss': nan, 'ratio': inf}]"


def test_rows_of_runs_of_recall_are_read(tmp_path):
    row = {"commit": "1485582", "loss": 0.25, "compiled": True, "size": None, "seed": 3, "ratio": float("inf")}
    write_results(tmp_path / "rows.csv", [row])
    assert read(tmp_path / "rows.csv") == [row]


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1\n")
    with pytest.raises(ValueError, match=r"rows\.csv is no table of results: row 1 has not as many cells"):
        read(tmp_path / "rows.csv")


def test_committed_results_are_rows_in_csv():
    """One file is the description of a corpus, which has no rows."""
    files = [path for path in RESULTS.rglob("*") if path.suffix in (".csv", ".json")]
    assert [path.name for path in files if path.suffix == ".json"] == ["doc_corpus.json"]
    assert all(read(path) for path in files if path.suffix == ".csv")


def test_rows_are_kept_when_they_come(tmp_path, capsys):
    file = tmp_path / "rows.csv"

    def rows():
        yield {"a": 1}
        assert known(file) == [{"a": 1}]
        yield {"a": 2}

    assert known(file) == []
    assert keep(file, rows(), lambda row: f"a is {row['a']}") == known(file) == [{"a": 1}, {"a": 2}]
    assert capsys.readouterr().out == "a is 1\na is 2\n"


def test_an_input_that_cannot_be_used_is_one_line(capsys):
    @refuses
    def main():
        raise FileNotFoundError("no corpus at x")

    assert main() == 2 and capsys.readouterr().err == "error: no corpus at x\n"
    assert refuses(lambda: None)() == 0 and refuses(lambda: 1)() == 1
