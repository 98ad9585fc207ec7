"""Rows survive a file, and validation alone chooses the learning rate."""

import math

import pytest

from sympow.recall import chosen, read_results, summary, write_results


def test_rows_survive_a_file(made_up, tmp_path):
    rows = [*made_up[:3], made_up[3] | {"state_bytes": None, "train_loss": math.nan, "positions": True}]
    write_results(tmp_path / "results.csv", rows)
    back = read_results(tmp_path / "results.csv")
    assert back[:3] == [row | {"train_loss": None} for row in made_up[:3]]
    assert back[3]["state_bytes"] is None and math.isnan(back[3]["train_loss"]) and back[3]["positions"] is True


def test_other_files_are_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="holds no results of recall: no column 'label'"):
        read_results(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("label\n")
    with pytest.raises(ValueError, match="no rows"):
        read_results(tmp_path / "empty.csv")


@pytest.mark.parametrize("content", [b"a,b\n1,2,3\n", b"a,b\n1\n", b"a,b\n\xff,2\n"])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'text'} is no table of results: "):
        read_results(tmp_path / "text")


def test_validation_chooses_and_the_test_does_not(made_up):
    base = made_up[0]

    def row(rate, seed, validation, test, loss=0.0):
        return base | {"learning_rate": rate, "seed": seed, "validation_accuracy": validation,
                       "validation_loss": loss, "test_accuracy": test}  # fmt: skip

    rows = [row(1e-3, 0, 0.9, 0.1), row(1e-3, 1, 0.5, 0.1), row(1e-2, 0, 0.71, 0.0), row(1e-2, 1, 0.71, 0.0),
            row(1e-1, 0, 0.0, 1.0), row(1e-1, 1, 0.0, 1.0)]  # fmt: skip
    assert chosen(rows) == rows[2:4]
    tied = [row(1e-3, 0, 0.5, 0.2, loss=2.0), row(1e-2, 0, 0.5, 0.2, loss=1.0), row(1e-1, 0, 0.5, 0.2, math.nan)]
    assert chosen(tied) == [tied[1]] == chosen(tied[::-1])
    assert chosen([row(1e-3, 0, 1.0, 0.5), *rows[2:]]) == rows[2:4]  # one seed does not count beside two


def test_settings_are_chosen_for_apart(made_up):
    best = chosen(made_up)
    assert len(best) == 3 * 3 * 4 * 2 * 3  # models, widths, pairs, heads, seeds
    assert {row["learning_rate"] for row in best} == {1e-3}
    muon = [row | {"optimizer": "muon", "muon_rate": rate} for row in made_up for rate in (1.0, 2.0)]
    assert len(chosen(made_up + muon)) == 3 * len(best)  # rows of earlier versions do not name the optimizer
    assert len(chosen([row | {"optimizer": "adamw", "muon_rate": 1.0} for row in made_up] + made_up)) == 2 * len(best)
    assert summary(muon).splitlines()[2].startswith("| attention, Muon | 1 | 64 | mqar 64:4 |")


def test_the_summary_has_a_line_a_setting(made_up):
    lines = summary(made_up).splitlines()
    assert len(lines) == 2 + 72
    assert lines[2].startswith("| attention | 1 | 64 | mqar 64:4 | 32,768 | 0.001 | 3 | 0.9800 | 0.9800 | 0.9600 |")
    other = summary([made_up[0] | {"test": "mqar 512:4", "state_bytes": None}]).splitlines()[2]
    assert other.startswith("| attention | 1 | 64 | mqar 512:4, trained on mqar 64:4 |  | 0.0001 | 1 |")
