"""Draws the figures of docs/kernels.md: `python scripts/draw_kernels.py` writes them to docs/kernels/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from sympow.ops.feature_map import spow_indices
from sympow.ops.triton.rows import rows_of

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "kernels"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "0.85"  # of Okabe and Ito's palette
KEY_DIM = 64
CHUNKS = 4


def bases() -> Figure:
    """Draws which products x_i x_j the state has a row for, p = 2 and K = 64: all, the triangle, halves, quarters."""
    triangle = spow_indices(KEY_DIM, 2)
    every = torch.cartesian_prod(torch.arange(KEY_DIM), torch.arange(KEY_DIM))
    panels = [("all products", every), ("smallest basis (M7)", triangle),
              ("kernels: halves", _tuples(2)), ("Hopper: quarters", _tuples(4))]  # fmt: skip
    figure = Figure(figsize=(6.4, 6.8), dpi=130, layout="constrained")
    for axis, (name, tuples) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        held = np.zeros((KEY_DIM, KEY_DIM))
        held[tuples[:, 0], tuples[:, 1]] = 1
        axis.imshow(held, cmap=ListedColormap([GREY, BLUE]), vmin=0, vmax=1)
        axis.set_title(f"{name}\n{len(tuples):,} rows", fontsize=11)
        axis.set_xticks([0, 16, 32, 48, 63])
        axis.set_yticks([0, 16, 32, 48, 63])
        axis.set_xlabel("last index j")
        axis.set_ylabel("prefix i")
    return figure


def passes() -> Figure:
    """Draws the passes of the chunked form: what each one reads, and in which direction it goes through the chunks."""
    figure = Figure(figsize=(7.2, 6.4), dpi=130, layout="constrained")
    forward, backward = figure.subplots(2, 1)
    _draw(
        forward,
        False,
        "Forward. The state pass adds k and v of a chunk to the state S.",
        "k, v",
        "S",
        "The output pass multiplies q with S and adds the scores within the chunk.",
        "q, k, v",
    )
    _draw(
        backward,
        True,
        "Backward. The state pass in reverse adds q and dy of a chunk to dS.",
        "q, dy",
        "dS",
        "The query pass forms dq from S. The key pass forms dk and dv from dS.",
        "q, k, v, dy",
    )
    return figure


def _draw(axis: Any, reverse: bool, first: str, reads: str, state: str, second: str, reads_too: str) -> None:
    """Draws a state pass above its states, and below these the passes that use them."""
    step = -1 if reverse else 1
    for chunk in range(CHUNKS):
        x = 2.5 * chunk
        _box(axis, x, 2.6, f"{reads}\nof chunk {chunk}", BLUE)
        _box(axis, x, 1.45, f"{state}{chunk + reverse}", ORANGE)
        _box(axis, x, 0, f"{reads_too}\nof chunk {chunk}", GREEN)
        _arrow(axis, (x, 1.15), (x, 0.45))
        if 0 <= chunk + step < CHUNKS:
            _arrow(axis, (x + 0.4 * step, 2.2), (x + 2 * step, 1.65))
            _arrow(axis, (x + 0.5 * step, 1.45), (x + 2 * step, 1.45))
    axis.text(-0.7, 3.25, first, color=BLUE, fontsize=10, va="bottom")
    axis.text(-0.7, -0.6, second, color=GREEN, fontsize=10, va="top")
    axis.set_xlim(-0.9, 2.5 * (CHUNKS - 1) + 0.9)
    axis.set_ylim(-1.1, 3.7)
    axis.axis("off")


def _box(axis: Any, x: float, y: float, text: str, colour: str) -> None:
    frame = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour, "linewidth": 1.8}
    axis.text(x, y, text, ha="center", va="center", fontsize=9.5, bbox=frame)


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "->"})


def _tuples(parts: int) -> torch.Tensor:
    """Returns the indices [rows, 2] of the kernels' rows in halves (2) or quarters (4)."""
    last = torch.arange(KEY_DIM)
    return torch.cat([torch.cartesian_prod(prefixes[:, 0], last[start:end])
                      for prefixes, start, end in rows_of(KEY_DIM, 2, parts).bands])  # fmt: skip


def main(folder: Path) -> None:
    """Writes all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (("bases", bases()), ("passes", passes())):
        figure.savefig(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
