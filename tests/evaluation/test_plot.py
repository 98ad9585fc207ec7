"""What the image shows, read from the figure just before it is written."""

import re
import sys

import matplotlib.figure
import numpy as np
import pytest

from sympow.evaluation import ContextLosses, Curve, plot_context_losses
from sympow.evaluation.context_loss import bin_edges


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


def test_no_curve_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one curve"):
        plot_context_losses([], tmp_path / "none.png")


def test_matplotlib_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("drawing curves needs matplotlib: pip install 'sympow[eval]'")):
        plot_context_losses([curve("one", 16)], tmp_path / "curves.png")
