"""What the figures show, read from their axes."""

import re
import sys

import numpy as np
import pytest

from sympow.recall import draw_figures, figures

NAMES = ["accuracy_width", "accuracy_pairs", "accuracy_heads", "frontier", "learning_rates", "capacity"]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws rows; the axes of each figure by its name."""

    def draw(rows):
        seen = {}
        import matplotlib.figure

        monkeypatch.setattr(
            matplotlib.figure.Figure, "savefig", lambda self, path: seen.__setitem__(path.stem, self.axes)
        )
        assert [path.stem for path in draw_figures(rows, tmp_path)] == list(seen)
        return seen

    return draw


def lines(axis):
    """Label -> (x, y) of the curves of an axis."""
    labelled = zip(*axis.get_legend_handles_labels(), strict=True)
    return {label: tuple(map(list, curve.get_data())) for curve, label in labelled}


def test_learning_curves_are_a_curve_a_seed(made_up, drawn):
    curve = {"validation_accuracies": "[0.1, 0.5, 0.9]", "validations": 2}
    rows = [row | curve for row in made_up if row["heads"] == 1]
    assert "learning_curves" not in drawn(made_up)
    panels = drawn(rows + [row | {"test": "mqar 8:1"} for row in rows])["learning_curves"]
    assert [axis.get_title() for axis in panels[:2]] == ["mqar 128:8, d 64", "mqar 128:8, d 128"] and len(panels) == 12
    x, y = lines(panels[0])["attention"]
    assert (x, y) == ([0.5, 1.0, 1.5], [0.1, 0.5, 0.9])
    assert len(panels[0].lines) == 3 * 3 + 1  # models, seeds, and guessing


def test_accuracy_against_the_length_has_a_panel_for_each_depth(made_up, drawn):
    """A label does not name the depth again, and guessing is that of each length."""
    few = [row for row in made_up if (row["heads"], row["width"], row["pairs"]) == (1, 64, 8)]
    rows = [row | {"length": n, "pairs": n // 16, "test": f"mqar {n}:{n // 16}", "layers": layers,
                   "label": f"{row['label']}, {layers} layers"}
            for row in few for n in (64, 128) for layers in (2, 4)]  # fmt: skip
    panels = drawn(rows)["accuracy_length"]
    assert [axis.get_title() for axis in panels[:2]] == ["2 layers, d 64", "4 layers, d 64"]
    assert "attention" in lines(panels[0]) and lines(panels[1])[figures.GUESSING] == ([64, 128], [1 / 4, 1 / 8])


def test_titles_of_long_names_stay_within_their_panels(made_up, drawn):
    task = 'sympow.recall.tasks:majority 16:2 {"every": true}'
    panels = drawn([row | {"test": name} for name in (task, "mqar 8:1") for row in made_up])["frontier"]
    panels[0].figure.canvas.draw()
    assert panels[0].get_title().split() == task.split()
    assert panels[0].title.get_window_extent().width < 1.05 * panels[0].get_window_extent().width


def test_images_are_written(made_up, tmp_path):
    few = [row | {"length": 512} for row in made_up if row["width"] < 256 and row["pairs"] < 16 and row["seed"] < 2]
    files = draw_figures(few, tmp_path)
    assert [file.name for file in files] == [f"{name}.png" for name in NAMES]
    assert all(file.read_bytes()[1:4] == b"PNG" for file in files)


def test_only_figures_that_have_data(made_up, drawn):
    one = [
        row for row in made_up if (row["width"], row["pairs"], row["heads"], row["learning_rate"]) == (64, 4, 1, 1e-3)
    ]
    assert list(drawn(one)) == ["frontier"]
    stateless = [row | {"state_bytes": None} for row in one]
    assert list(drawn(stateless)) == []
    with pytest.raises(ValueError, match="at least one row"):
        drawn([])


def test_accuracy_against_width_is_that_of_the_chosen_rate(made_up, drawn):
    rows = [row for row in made_up if row["heads"] == 1]
    panels = drawn(rows)["accuracy_width"]
    assert [axis.get_title() for axis in panels] == ["N 64, D 4", "N 128, D 8", "N 256, D 16", "N 512, D 32"]
    x, y = lines(panels[3])["power p=2"]
    assert x == [64, 128, 256]
    expected = [np.mean([row["test_accuracy"] for row in rows if row["label"] == "power p=2" and row["width"] == d
                         and row["pairs"] == 32 and row["learning_rate"] == 1e-3]) for d in x]  # fmt: skip
    np.testing.assert_allclose(y, expected)
    bars = panels[3].containers[1].lines[2][0].get_segments()
    assert bars[0][0][1] == pytest.approx(expected[0] - 0.02) and bars[0][1][1] == pytest.approx(expected[0] + 0.02)


def test_no_line_leads_to_a_failed_seed(made_up, drawn):
    rows = [row for row in made_up if (row["label"], row["heads"], row["pairs"]) == ("attention", 1, 4)]
    failed = [row | {"test_accuracy": 0.25} if (row["width"], row["seed"]) == (64, 2) else row for row in rows]
    for some, joined in ((rows, [True, True, True]), (failed, [False, True, True])):
        (axis,) = drawn(some)["accuracy_width"]
        (line,) = [line for line in axis.lines if line.get_linestyle() == "-"]
        marks = axis.containers[0].lines[0].get_ydata(orig=False)
        assert np.isfinite(line.get_ydata()).tolist() == joined and np.isfinite(marks).all() and len(marks) == 3


def test_the_number_of_seeds_is_that_of_every_point(made_up, drawn):
    rows = [row for row in made_up if row["heads"] == 1]
    fewer = [row for row in rows if row["seed"] == 0 or row["width"] == 64]
    for some, told in ((rows, "3 seeds"), (fewer, "1 to 3 seeds"), (rows[::3], "one seed")):
        about = f"N: tokens of a row, D: pairs, d: width; {rows[0]['examples']:,} rows of training, {told}"
        assert drawn(some)["frontier"][0].figure.get_suptitle() == about


def test_pairs_and_heads(made_up, drawn):
    found = drawn([row | {"length": 512} for row in made_up if row["width"] == 64])
    (panel,) = found["accuracy_pairs"]
    assert panel.get_title() == "N 512, d 64" and len(lines(panel)) == 7
    assert lines(panel)["attention, heads 2"][0] == [4, 8, 16, 32]
    assert len(found["accuracy_heads"]) == 4 and lines(found["accuracy_heads"][0])["attention"][0] == [1, 2]


def test_heads_are_drawn_where_a_model_varies_them(made_up, drawn):
    """Models of different heads, each with one number of them, make no figure of heads."""
    rows = [row for row in made_up if row["width"] == 64 and row["heads"] == (2 if row["label"] == "attention" else 1)]
    assert "accuracy_heads" not in drawn(rows)


def test_guessing_is_drawn_in_every_figure_of_an_accuracy(made_up, drawn):
    found = drawn(made_up)
    expected = [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    for name in ("accuracy_width", "frontier"):
        assert [set(lines(panel)[figures.GUESSING][1]) for panel in found[name]] == [{share} for share in expected]
    for panel in found["accuracy_heads"] + found["learning_rates"]:
        pairs = int(panel.get_title().split("D ")[1].split(",")[0])
        assert set(lines(panel)[figures.GUESSING][1]) == {1 / pairs}
    assert figures.GUESSING not in lines(found["capacity"][0])
    (panel,) = drawn([row | {"length": 512} for row in made_up if row["width"] == 64])["accuracy_pairs"]
    assert lines(panel)[figures.GUESSING] == ([4, 8, 16, 32], expected)
    unknown = drawn([row | {"pairs": None} for row in made_up if row["pairs"] == 4])
    assert figures.GUESSING not in lines(unknown["frontier"][0])


def test_learning_rates_show_every_seed(made_up, drawn):
    (axis,) = drawn([row for row in made_up if row["width"] == 64 and row["pairs"] == 4 and row["heads"] == 1])[
        "learning_rates"
    ]
    dots = [line for line in axis.get_lines() if line.get_linestyle() == "None"]
    assert len(dots) == 9 and all(len(dot.get_xdata()) == 3 for dot in dots)
    assert lines(axis)["attention"][0] == [1e-4, 1e-3, 1e-2] and axis.get_xscale() == "log"


def test_capacity_is_the_most_pairs_held(made_up, drawn):
    rows = [row for row in made_up if row["heads"] == 1 and row["label"] != "attention"]
    (axis,) = drawn(rows)["capacity"]
    x, y = lines(axis)["power p=2"]
    assert x == [row["state_bytes"] / 1024 for row in rows if row["label"] == "power p=2" and row["pairs"] == 4
                 and row["learning_rate"] == 1e-3 and row["seed"] == 0]  # fmt: skip
    assert y == [16, 32, 32]  # growth 1.5 x width / pairs / 4 reaches 0.9
    assert lines(axis)["gated convolution"][1] == [8, 16, 32]
    weak = [row | {"test_accuracy": 0.1} for row in rows]
    assert set(lines(drawn(weak)["capacity"][0])["power p=2"][1]) == {0}


def test_many_models_are_told_apart(made_up, drawn):
    (axis,) = drawn([made_up[0] | {"label": f"model {n}"} for n in range(20)])["frontier"]
    handles, labels = axis.get_legend_handles_labels()
    curves = [curve for curve, label in zip(handles, labels, strict=True) if label.startswith("model ")]
    looks = {(curve.get_color(), curve.get_marker(), curve.get_linestyle()) for curve in curves}
    assert len(curves) == len(looks) == 20


def test_heads_that_follow_from_the_width_make_one_curve(made_up, drawn):
    rows = [row | {"heads": row["width"] // 32} for row in made_up if row["heads"] == 1 and row["pairs"] == 16]
    (panel,) = drawn(rows)["accuracy_width"]
    assert lines(panel)["power p=2"][0] == [64, 128, 256]


def test_matplotlib_missing_is_one_line(made_up, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("drawing figures needs matplotlib: pip install 'sympow[eval]'")):
        draw_figures(made_up, tmp_path)
