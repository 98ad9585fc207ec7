"""What the image shows, read from the figure just before it is written."""

import re
import sys

import matplotlib.figure
import numpy as np
import pytest

from sympow.evaluation import ContextLosses, Curve, plot_context_losses
from sympow.evaluation.context_loss import bin_edges
from sympow.evaluation.plot import panels, shared_legend


def curve(run, context, train_context=None, rows=2):
    means = 1 + 4 / np.sqrt(np.arange(1, len(bin_edges(context))))
    row_losses = means + np.arange(rows)[:, None]
    return Curve(
        run, ContextLosses(np.repeat(row_losses.mean(0), np.diff(bin_edges(context))), row_losses), train_context
    )


@pytest.fixture
def axes(monkeypatch):
    """The axes of every figure that is saved."""
    seen = []
    save = matplotlib.figure.Figure.savefig

    def noting(self, *arguments, **options):
        seen.append(self.axes[0])
        return save(self, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", noting)
    return seen


def test_several_runs_in_one_image(tmp_path, axes):
    curves = [curve("one", 1024, 256), curve("two", 1024, 256), curve("three", 300)]
    plot_context_losses(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"
    lines = axes[0].get_lines()
    assert len(lines) == 4  # three curves and one trained context
    assert len({line.get_color() for line in lines}) == 4
    assert list(lines[3].get_xdata()) == [256, 256]
    x, y = lines[0].get_data()
    bins = [each for each in curves[0].losses.bins if each.start >= 16]
    np.testing.assert_allclose(y, [each.loss for each in bins])
    assert all(each.start < middle < each.end for each, middle in zip(bins, x, strict=True))
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend[0] == f"one: best-context loss {curves[0].losses.best.loss:.3f} at 1k tokens"
    assert axes[0].get_xscale() == "log"
    assert [text.get_text() for text in axes[0].texts] == ["trained on 256"]


def test_a_short_curve_is_drawn_whole(tmp_path, axes):
    plot_context_losses([curve("short", 12, 2048, rows=1)], tmp_path / "short.svg")
    assert len(axes[0].get_lines()[0].get_xdata()) == 5
    assert len(axes[0].get_lines()) == 1  # the trained context lies outside


@pytest.mark.parametrize(("count", "length", "columns"), [(3, 9, 3), (9, 40, 2), (2, 90, 1)])
def test_a_shared_legend_is_below_the_panels_and_within_the_figure(count, length, columns):
    figure, axes = panels(3, (4, 3))
    for n in range(count):
        axes[n % 3].plot([1, 2], label=str(n) * length)
    shared_legend(figure, axes)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    lefts = [round(text.get_window_extent().x0) for text in legend.get_texts()]
    assert len(lefts) == count and len(set(lefts)) == columns
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 < min(each.get_tightbbox().y0 for each in axes)
    assert axes[0].get_window_extent().height > 1.8 * figure.dpi  # the legend takes nothing from the panels


def test_no_curve_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one curve"):
        plot_context_losses([], tmp_path / "none.png")


def test_matplotlib_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("drawing curves needs matplotlib: pip install 'sympow[eval]'")):
        plot_context_losses([curve("one", 16)], tmp_path / "curves.png")
