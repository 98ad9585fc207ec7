"""Held-out text with its AR hits and losses in colour, for a browser and for a terminal."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sympow.evaluation.ar_hits import PARTS, bigram_distances
from sympow.evaluation.bigrams import BigramCounts
from sympow.evaluation.context_loss import Documents, score_rows

WORST = 8.0  # nats; a token with this loss or more has the full colour
_COLOURS = {"hits": (213, 94, 0), "frequent": (0, 114, 178), "new": (110, 110, 110)}  # of Okabe and Ito's palette
_MEANINGS = {
    "hits": "AR hit: the bigram stood in this row before and is rare in training",
    "frequent": "repeated, but frequent in training",
    "new": "new in this row",
}


@dataclass(frozen=True)
class Example:
    """Holds the strings of the T targets of a row of text.

    For each target it also holds the slice, the distance and count of its bigram, and the loss of every run in nats.
    """

    pieces: Sequence[str]
    slices: Sequence[str]
    distances: np.ndarray
    counts: np.ndarray
    losses: Mapping[str, np.ndarray]


def example(
    models: Mapping[str, Any],
    corpus: Documents,
    counts: BigramCounts,
    row: np.ndarray,
    context: int,
    frequent: int,
    text: Callable[[int], str],
) -> Example:
    """Scores one row of held-out text by several models.

    Args:
        models: by the name of their run.
        corpus: as for `hit_losses`.
        counts: as for `hit_losses`.
        context: as for `hit_losses`.
        frequent: as for `hit_losses`.
        row: one of `choose_rows`, int64 [2].
        text: what a token stands for.
    """
    losses = {}
    for name, model in models.items():
        (scored,) = score_rows(model, corpus, row[None], context)
        losses[name], tokens = scored.losses[0], scored.tokens
    distances = bigram_distances(tokens)[0]
    seen = counts.lookup(tokens[0, :-1], tokens[0, 1:])
    names = np.where(distances == 0, "new", np.where(seen > frequent, "frequent", "hits"))
    return Example([text(int(token)) for token in tokens[0, 1:]], names.tolist(), distances, seen, losses)


def to_html(examples: Sequence[Example], title: str) -> str:
    """Returns a complete HTML page with a block for each row and a column for each run.

    A token with a higher loss has a stronger colour. Pointing at a token shows the numbers.
    """
    key = " ".join(f'<span style="{_css(each, WORST / 2)}">{_MEANINGS[each]}</span>' for each in PARTS)
    blocks = []
    for number, row in enumerate(examples, 1):
        columns = []
        for run, losses in row.losses.items():
            means = ", ".join(
                f"{part} {losses[here].mean():.2f}" for part in PARTS if (here := np.array(row.slices) == part).any()
            )
            spans = "".join(_span(row, i, run) for i in range(len(row.pieces)))
            columns.append(f"<div><h3>{html.escape(run)}</h3><p>nats: {means}</p><pre>{spans}</pre></div>")
        blocks.append(f'<h2>Row {number}</h2><div class="columns">{"".join(columns)}</div>')
    style = (
        "body{font-family:sans-serif;margin:1.5em}pre{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5}"
        ".columns{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(20em,1fr);gap:1.5em;overflow-x:auto}"
        "p span{padding:0 .4em;margin-right:.6em}"
    )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    note = f"The stronger the colour, the higher the loss, up to {WORST:g} nats."
    body = f"<h1>{html.escape(title)}</h1><p>{key}</p><p>{note}</p>{''.join(blocks)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def to_terminal(row: Example, run: str, last: int) -> str:
    """Returns the last tokens of a row by one run, coloured for a terminal of 24-bit colours, with a key."""
    key = "  ".join(f"{_ansi(part, WORST / 2)} {_MEANINGS[part]} \x1b[0m" for part in PARTS)
    losses, begin = row.losses[run], max(0, len(row.pieces) - last)
    words = []
    for i in range(begin, len(row.pieces)):
        colour = _ansi(row.slices[i], losses[i])
        # A background colour that is still set at the end of a line would fill the rest of the line.
        words.append("\n".join(f"{colour}{part}\x1b[0m" if part else "" for part in row.pieces[i].split("\n")))
    return f"{run}\n{key}\n\n{''.join(words)}\n"


def _span(row: Example, i: int, run: str) -> str:
    said = [f"{other}: {losses[i]:.2f} nats" for other, losses in row.losses.items()]
    said.append(f"bigram {row.counts[i]:,} times in training")
    said.append(f"{row.distances[i]:,} tokens ago" if row.distances[i] else "new in this row")
    title, style = html.escape("\n".join(said)), _css(row.slices[i], row.losses[run][i])
    return f'<span style="{style}" title="{title}">{html.escape(row.pieces[i])}</span>'


def _css(part: str, loss: float) -> str:
    return f"background:rgba({','.join(map(str, _COLOURS[part]))},{_strength(loss):.2f})"


def _ansi(part: str, loss: float) -> str:
    """Returns the style of a token: black on the slice's colour mixed into white."""
    strength = _strength(loss)
    mixed = (round(255 + strength * (channel - 255)) for channel in _COLOURS[part])
    return f"\x1b[30;48;2;{';'.join(map(str, mixed))}m"


def _strength(loss: float) -> float:
    return 1.0 if math.isnan(loss) else min(1.0, max(0.0, loss / WORST)) * 0.85
