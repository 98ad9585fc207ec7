import re
from dataclasses import replace

import pytest

from benchmarks import ops, tables
from benchmarks.common.cases import CASES, Case
from benchmarks.common.measure import read

SMALL = Case(T=70, H=2, G=1, K=4, V=3)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(ops, "milliseconds", lambda calls, device, rounds=7: [1.0] * len(calls))
    monkeypatch.setattr(ops, "peak_extra_bytes", lambda call: 1)


def test_rows(call, monkeypatch, tmp_path):
    """The columns that results promise, from the command itself."""
    monkeypatch.setitem(CASES, "cpu", [SMALL])
    file = tmp_path / "ops.csv"
    call(ops, "--device", "cpu", "--threads", "1", "--csv", file)
    rows = read(file)
    assert [row["mode"] for row in rows] == ["forward", "forward+backward"]
    columns = "op impl peer device dtype B T H G K V p chunk gated mode ms peer_ms ratio err commit torch"
    assert set(columns.split()) <= rows[0].keys()
    assert 0 < rows[1]["err"] < 1e-5


def test_some_cases_leave_other_rows(call, monkeypatch, tmp_path, capsys):
    """And replace their own."""
    monkeypatch.setitem(CASES, "cpu", [SMALL, replace(SMALL, T=80)])
    monkeypatch.setattr(ops, "peak_memory", lambda *_: 1.0)  # measured in a process of its own, as in `test_rows`
    file = tmp_path / "ops.csv"
    command = ["--device", "cpu", "--threads", "1", "--csv", str(file)]
    for more in ([], ["--times", "80", "--powers", "2"]):
        call(ops, *command, *more)
        rows = read(file)
        assert [(row["T"], row["mode"]) for row in rows] == [
            (70, "forward"), (70, "forward+backward"), (80, "forward"), (80, "forward+backward")
        ]  # fmt: skip
        monkeypatch.setattr(ops, "milliseconds", lambda calls, device, rounds=7: [2.0] * len(calls))
    assert [row["ms"] for row in rows] == [1.0, 1.0, 2.0, 2.0]
    with pytest.raises(SystemExit):
        call(ops, *command, "--times", "80", "90")
    assert r"--times are of [70, 80]; got [80, 90]" in capsys.readouterr().err


def test_a_wrong_result_is_not_timed(monkeypatch):
    exact = ops.power_call

    def wrong(case, inputs, impl, mode, chunk=None):
        results = exact(case, inputs, impl, mode, chunk)
        return [x * 1.01 if inputs["q"].dtype.itemsize == 4 else x for x in results]

    monkeypatch.setattr(ops, "power_call", wrong)
    with pytest.raises(RuntimeError, match="not timed"):
        list(ops.measure([SMALL], "cpu", "eager", "forward+backward"))


def test_the_pages_show_the_committed_results():
    pages = [page.read_text() for page in tables.PAGES]
    assert [tables.with_tables(page, page == pages[0]) for page in pages] == pages
    shown = {name for page in pages for name in re.findall("<!-- table: (.*) -->", page)}
    assert shown == {*tables.TABLES, *tables.context_tables.TABLES}
    others = [(tables.ROOT / "docs" / name).read_text() for name in tables.OTHERS]
    assert [tables.with_stale_lines(page) for page in others] == others
    assert all("<!-- stale: " in page for page in others)


def test_the_figure_has_the_shapes_of_three_lengths(tmp_path):
    """Neither linear attention, nor a shape of two lengths, nor calls without a gate."""
    row = {"p": 2, "B": 1, "H": 2, "G": 2, "gated": True, "mode": "forward+backward", "device": "cuda", "ms": 1.0,
           "peer_ms": 2.0, "processor": "a GPU", "dtype": "bfloat16"}  # fmt: skip
    rows = [row | {"K": width, "T": time, "peer": peer} for width in (64, 128) for time in (8, 16, 32)
            for peer in ("cuDNN", "linear")]  # fmt: skip
    few = [row | {"K": 64, "H": 4, "T": time, "peer": "cuDNN"} for time in (8, 16)]
    with pytest.MonkeyPatch.context() as patch:
        drawn = []
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
        ops.plot([*rows, *few, rows[0] | {"gated": False, "K": 256}], tmp_path / "ops.png")
    titles = [axis.get_title() for axis in drawn[0].axes]
    assert titles == ["K = V = 64: B 1, H 2, G 2", "K = V = 128: B 1, H 2, G 2"]
    assert [line.get_label() for line in drawn[0].axes[0].lines] == ["sympow, p = 2", "cuDNN"]


def test_the_readme_quotes_the_committed_times():
    """Ratios of cuDNN's time to ours at B 8, H 12, forward and backward; and of a step of decoding."""
    rows = {(row["K"], row["T"]): row["ratio"] for row in read(tables.RESULTS / "ops_h200.csv")
            if row["mode"] == "forward+backward" and "cuDNN" in row["peer"] and row["gated"]
            and (row["p"], row["B"], row["H"], row["G"]) == (2, 8, 12, 12)}  # fmt: skip
    texts = [" ".join((tables.ROOT / name).read_text().split()) for name in ("README.md", "docs/results/speed.md")]
    assert 9 <= rows[64, 65536] < 11 and all("a tenth of" in text for text in texts)
    assert 2.8 <= rows[128, 65536] < 3.2 and "and a third with K = V = 128" in texts[0] and "a third of it" in texts[1]
    times = [f"{1 / rows[width, 4096]:.1f}" for width in (64, 128)]
    assert f"At 4,096 tokens they take {times[0]} and {times[1]} times its time" in texts[0]
    assert f"{times[1]} times its time at 4,096 tokens" in texts[1] and rows[64, 1024] > 1
    steps = {row["K"]: row["ratio"] for row in read(tables.RESULTS / "decoding_h200.csv")
             if (row["B"], row["state_dtype"]) == (1, "float32")}  # fmt: skip
    assert 8.5 <= steps[64] < 9.5 and 3.8 <= steps[128] < 4.2
    assert "takes constant time: a ninth and a quarter of cuDNN's over 65,536 tokens" in texts[0]
    (model,) = (row for row in read(tables.RESULTS / "decoding_models_h200.csv")
                if (row["mixer"], row["dtype"], row["rows"]) == ("power", "bfloat16", 1))  # fmt: skip
    weights, milliseconds = round(model["parameters"] / 1e6), model["ms_per_token"]
    assert f"{weights}M weights in bfloat16 take {milliseconds:.2f} ms a token" in texts[0]
