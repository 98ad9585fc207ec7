"""Which rows measured anew confirm a file of earlier code."""

import pytest

from benchmarks import repeat, tables
from benchmarks.common import code_hash as hashes
from benchmarks.common.measure import read, write

NOW, THEN = "222222222222", "11e111111111"
H200, H100 = "NVIDIA H200", "NVIDIA H100"
SPEED = {"B": 1, "T": 1024, "peer": "cuDNN", "ms": 1.0, "ratio": 2.0, "processor": H200, "commit": "a", "code": THEN}
LOSS = {"variant": "power", "context": 4096, "seed": 0, "held_out_loss": 2.0, "processor": H200, "commit": "a"}


def patch_hashes(monkeypatch, code_hash):
    for module in (hashes, repeat):
        monkeypatch.setattr(module, "code_hash", code_hash)
    monkeypatch.setattr(hashes, "run_hash", lambda part, commit=None: code_hash(part.name, commit))
    monkeypatch.setattr(hashes, "same_lines", lambda part: [])  # which are kept, and depend on the hashes


@pytest.fixture
def repeated(call, monkeypatch, tmp_path):
    """Returns a function that writes a file of earlier code, repeats rows, and returns the exit status and what is
    stale then."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(repeat, "RESULTS", tmp_path)
    patch_hashes(monkeypatch, lambda part, commit=None: {"a": THEN, None: NOW}.get(commit))

    def run(name, old, *new):
        write(tmp_path / name, old)
        write(tmp_path.parent / f"{tmp_path.name}-new.csv", new)
        return call(repeat, name, tmp_path.parent / f"{tmp_path.name}-new.csv"), tables.stale(tmp_path / name)

    return run


def new(row, **changed):
    return row | {"commit": "unknown", "code": NOW} | changed


def test_a_file_is_confirmed(repeated, tmp_path, call, capsys):
    other = SPEED | {"T": 4096}
    assert repeated("ops_h200.csv", [SPEED, other], new(SPEED, ms=1.05), new(other, ratio=1.9)) == (0, [])
    lines = read(tmp_path / repeat.REPEATED)
    assert [(line["key"]["T"], line["column"], line["before"], line["now"], line["allowed"]) for line in lines] == [
        (1024, "ms", 1.0, 1.05, "time"), (1024, "ratio", 2.0, 2.0, "ratio"),
        (4096, "ms", 1.0, 1.0, "time"), (4096, "ratio", 2.0, 1.9, "ratio")]  # fmt: skip
    assert {(line["processor"], line["commit"], line["code"]) for line in lines} == {(H200, "unknown", NOW)}
    assert tables.stale_lines(["ops_h200.csv"]) == (
        "Measured with earlier code: `ops_h200.csv`; 2 rows repeated agree (T 1,024, 4,096)."
    )
    capsys.readouterr()
    assert (call(tables, "--stale"), capsys.readouterr().out) == (0, "")  # nor is the record stale


def test_a_note_says_which_rows_were_repeated(repeated, tmp_path, monkeypatch):
    """By the columns in which rows of the file differ. The README leads to the page that says it."""
    other = LOSS | {"variant": "window", "seed": 1}
    old = [LOSS, LOSS | {"seed": 1}, other, other | {"seed": 0, "learning_rate": 0.00125}]
    assert repeated("learning.csv", old, new(LOSS), new(other)) == (0, [])
    assert tables.stale_lines(["learning.csv"]) == (
        "Measured with earlier code: `learning.csv`; 2 rows repeated agree (variant power, window; seed 0, 1)."
    )
    (tmp_path / repeat.REPEATED).unlink()
    assert repeated("learning.csv", old, new(old[3])) == (0, [])
    assert tables.stale_lines(["learning.csv"]) == (
        "Measured with earlier code: `learning.csv`; 1 row repeated agrees "
        "(variant window; learning rate 0.00125; seed 0)."
    )
    assert tables.stale_lines(["learning.csv"], of_readme=True) == (
        "Measured with earlier code: `learning.csv`; [1 row repeated](docs/results/learning.md) agrees."
    )


@pytest.mark.parametrize("changed", [{"ms": 1.051}, {"ratio": 1.89}, {"ratio": None}, {"ms": float("nan")}])
def test_one_value_outside_of_what_is_allowed(repeated, changed):
    """Also after another row of the same code agrees."""
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, **changed)) == (1, ["a"])
    assert repeated("ops_h200.csv", [SPEED], new(SPEED)) == (0, ["a"])
    assert tables.stale_lines(["ops_h200.csv"]) == "Stale, measured with earlier code: `ops_h200.csv`."


def test_rows_of_other_code_confirm_nothing(repeated):
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, code="333333333333")) == (0, ["a"])
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, code=None)) == (2, ["a"])
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, ms=2.0, code="444444444444")) == (1, ["a"])
    assert repeated("ops_h200.csv", [SPEED], new(SPEED)) == (0, [])


def test_another_card_repeats_ratios_and_losses_only(repeated, tmp_path):
    """And no other value of rows that have a time and no ratio."""
    assert repeated("powers_h200.csv", [SPEED], new(SPEED, processor=H100)) == (2, ["a"])
    rate = {"model": "small", "batch": 1, "tokens_per_second": 9.0, "equal": True, "processor": H200, "commit": "a"}
    assert repeated("hf_generate_h200.csv", [rate], new(rate, processor=H100)) == (2, ["a"])
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, ms=9.0, processor=H100)) == (0, [])
    assert [line["column"] for line in read(tmp_path / repeat.REPEATED)] == ["ratio"]
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, ms=9.0, ratio=1.8, processor=H100)) == (1, ["a"])
    old = [LOSS, LOSS | {"seed": 1, "held_out_loss": 2.02}]
    assert repeated("learning.csv", old, new(LOSS, processor=H100)) == (0, [])


@pytest.mark.parametrize(("loss", "agrees"), [(2.028, True), (1.972, True), (2.029, False), (1.971, False)])
def test_losses_may_differ_by_two_standard_deviations_over_seeds(repeated, loss, agrees):
    """Here 0.0283, of a case with two seeds. A run with one seed says nothing of it, and is allowed the same."""
    one = LOSS | {"variant": "window"}
    old = [LOSS, LOSS | {"seed": 1, "held_out_loss": 2.02}, one]
    assert repeated("learning.csv", old, new(LOSS, held_out_loss=loss)) == ((0, []) if agrees else (1, ["a"]))
    repeat.RESULTS.joinpath(repeat.REPEATED).unlink()
    assert repeated("learning.csv", old, new(one, held_out_loss=loss)) == ((0, []) if agrees else (1, ["a"]))


def test_a_case_that_spreads_more_may_differ_more(repeated):
    """Than the median of 0.1, 0.2 and 0.4, two standard deviations."""
    cases = [(LOSS | {"variant": name}, spread / 2**0.5) for name, spread in zip("abc", (0.1, 0.2, 0.4), strict=True)]
    old = [row for case, step in cases for row in (case, case | {"seed": 1, "held_out_loss": 2 + step})]
    assert repeated("learning.csv", old, *(new(case, held_out_loss=2.199) for case, _ in cases)) == (0, [])
    assert repeated("learning.csv", old, new(cases[2][0], held_out_loss=2.399)) == (0, [])
    assert repeated("learning.csv", old, new(cases[1][0], held_out_loss=2.201)) == (1, ["a"])


def test_a_column_that_the_file_lacks_does_not_count(repeated):
    """As the optimizer in files from before there were several."""
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, mode="forward")) == (0, [])


@pytest.mark.parametrize("changed", [{"T": 512}, {"peer": "flash"}, {"B": None}])
def test_a_case_that_the_file_does_not_have(repeated, capsys, changed):
    assert repeated("ops_h200.csv", [SPEED], new(SPEED, **changed)) == (2, ["a"])
    assert capsys.readouterr().err.startswith("error: expected one row of ops_h200.csv with {")


def test_each_part_of_the_code_needs_a_repetition(repeated, monkeypatch):
    """In a file with rows of a GPU and of a CPU."""
    own = {"sympow.ops.eager": "555555555555"}
    patch_hashes(monkeypatch, lambda part, commit=None: THEN if commit else own.get(part, NOW))
    old = [LOSS, LOSS | {"seed": 1, "processor": "CPU"}]
    assert repeated("learning.csv", old, new(LOSS)) == (0, ["a"])
    assert repeated("learning.csv", old, new(LOSS, seed=1, processor="CPU", code="555555555555")) == (0, [])


def test_power_attention_does_not_confirm_the_delta_rule(repeated):
    """Whose rows run more. They confirm power attention."""
    delta = LOSS | {"variant": "power_delta", "seed": 1}
    assert repeated("learning.csv", [LOSS, LOSS | {"seed": 2}, delta], new(LOSS)) == (0, ["a"])
    assert repeated("learning.csv", [LOSS, LOSS | {"seed": 2}, delta], new(delta)) == (0, [])


def test_a_row_that_took_the_place_of_one_that_does_not_agree(repeated):
    other = SPEED | {"T": 4096}
    slower = new(SPEED, ms=2.0)
    assert repeated("ops_h200.csv", [SPEED, other], slower) == (1, ["a"])
    assert repeated("ops_h200.csv", [SPEED, other], new(other)) == (0, ["a"])
    assert repeated("ops_h200.csv", [slower, other], new(other)) == (0, [])


def test_rules_name_each_committed_row_once():
    """And every file whose rows name a commit has a rule."""
    for path in repeat.RESULTS.rglob("*.csv"):
        rows = read(path)
        if path.name not in (repeat.REPEATED, hashes.SAME.name) and "commit" in rows[0]:
            rule = repeat.rule_of(path.relative_to(repeat.RESULTS).as_posix())
            assert len({str(repeat.key_of(rule, row, row)) for row in rows}) == len(rows), path
            assert any(column in rows[0] for column in rule.values), path
