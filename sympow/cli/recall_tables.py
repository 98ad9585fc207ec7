"""`sympow ar-hits` and `sympow recall-probe`: measure the recall of trained models on real text and on random pairs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sympow.cli.run_checks import check_data_tokenizer, check_held_out
from sympow.cli.scored_models import Scored
from sympow.data import Corpus, DataConfig, Tokenizer, open_corpus
from sympow.evaluation import BigramCounts, HitLosses, Share, choose_rows, count_bigrams, gap_shares, hit_losses
from sympow.evaluation.ar_hits import FREQUENT, SLICES, published_share
from sympow.evaluation.ar_hits_text import Example, example
from sympow.files import naming
from sympow.progress import Progress
from sympow.recall.probe import PAIRS, Probed, fitting, probe
from sympow.training import override
from sympow.training.runs import OPENING, tell_changed, tell_remarks

_SAID = {
    "all": "all tokens",
    "hits": "AR hits",
    "other": "other tokens",
    "frequent": "  repeated, frequent",
    "new": "  new in the row",
}
_GAPS = tuple(f"gap_{name}" for name in Share._fields)
COLUMNS = ("run", "part", "start", "end", "tokens", "loss", "perplexity", *_GAPS)


@dataclass(frozen=True)
class MeasuredHits:
    """Holds the result of `measure`: losses of models on the same sequences. Gaps are relative to the first model.

    Attributes:
        losses: the losses by the labels of the models, as in `models`.
        rows: the chosen parts of `held_out`, as `choose_rows` returns them.
    """

    models: Mapping[str, Scored]
    losses: Mapping[str, HitLosses]
    held_out: Corpus
    rows: np.ndarray
    counts: BigramCounts
    tokenizer: Tokenizer | None

    def gaps(self) -> dict[str, dict[str, Share]]:
        """Returns, by label, the shares of the slices in the gap between each model and the first model."""
        base, *others = self.losses
        return {label: gap_shares(self.losses[label], self.losses[base]) for label in others}

    def examples(self, count: int) -> list[Example]:
        """Returns evenly spaced sequences with the losses of every model. Raises ValueError without a tokenizer."""
        tokenizer = _checked_tokenizer(self.tokenizer)
        models = {label: each.model for label, each in self.models.items()}
        spaced = range(0, len(self.rows), max(1, len(self.rows) // count))[:count]
        context, frequent = self._first.context, self._first.frequent
        texts = [piece.decode("utf-8", errors="replace") for piece in tokenizer.token_bytes]
        how = context, frequent, texts.__getitem__
        return [example(models, self.held_out, self.counts, self.rows[i], *how) for i in spaced]

    def text(self) -> str:
        """Returns the tables that the command prints."""
        width = max(20, *(len(label) + 2 for label in self.losses))
        first, whole = self._first, self._first.slice("all").tokens
        lines = [
            f"bigrams counted in {self.counts.tokens:,} tokens; AR hits: repeated in a row of {first.context:,} "
            f"tokens, at most {first.frequent:,} times in training",
            "",
            f"{'loss (perplexity)':>20}{'tokens':>12}{'share':>8}"
            + "".join(f"{label:>{width}}" for label in self.losses),
        ]
        for name in SLICES:
            tokens = first.slice(name).tokens
            cells = [_loss(losses.slice(name).loss) for losses in self.losses.values()]
            lines.append(
                f"{_SAID[name]:<20}{tokens:>12,}{tokens / whole:>8.1%}" + "".join(f"{cell:>{width}}" for cell in cells)
            )
        for label, shares in self.gaps().items():
            whole_gap = shares["all"]
            clear = whole_gap.nats_low > 0 or whole_gap.nats_high < 0
            lines += ["", f"{label} less {next(iter(self.losses))}, nats a token, with 95% intervals:"]
            lines += [f"{_SAID[name]:<20}{_gap(shares[name], clear and name != 'all')}" for name in SLICES]
            published = published_share(shares["hits"].nats, whole_gap.nats)
            if not clear:
                lines.append("no clear gap: shares in it would say nothing")
            elif not math.isnan(published):
                lines.append(f"share of AR hits by the rule of the source: {published:.0%}")
        return "\n".join(lines)

    def write_csv(self, path: str) -> None:
        """Writes slices, cells by count, distance and document of every run, and gaps, as one tidy table."""
        gaps = self.gaps()
        with naming(path), open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for label, losses in self.losses.items():
                parts = {name: [losses.slice(name)] for name in SLICES}
                parts |= {"count, repeated": losses.by_count(True), "count, new": losses.by_count(False)}
                parts |= {"distance, hits": losses.by_distance()}
                parts |= {f"document, {name}": losses.document_cells(name) for name in ("all", "hits")}
                for part, cells in parts.items():
                    for cell in cells:
                        if cell.tokens:
                            numbers = [f"{cell.loss:.6f}", f"{cell.perplexity:.6g}"]
                            bounds = ["", ""] if part in SLICES else [cell.start, cell.end]
                            share = [f"{value:.6f}" for value in gaps.get(label, {}).get(part, ())]
                            row = [label, part, *bounds, cell.tokens, *numbers]
                            writer.writerow([*row, *(share or [""] * len(_GAPS))])

    @property
    def _first(self) -> HitLosses:
        return next(iter(self.losses.values()))


def measure(
    models: Mapping[str, Scored],
    data: Sequence[str] = (),
    *,
    context: int | None = None,
    rows: int = 64,
    frequent: int = FREQUENT,
    count_tokens: int | None = None,
    with_text: bool = False,
    quiet: bool = False,
) -> MeasuredHits:
    """Counts the bigrams of the training documents and measures the losses of models on held-out rows.

    Args:
        models: the models by label; all have the same tokenizer.
        data: key=value assignments that change the first model's data config. If that config is not known, they give
            a complete one.
        context: the number of predictions in a sequence; None: the shortest context that a model was trained on.
        rows: as for `hit_losses`.
        frequent: as for `hit_losses`.
        count_tokens: as `tokens` of `count_bigrams`.
        with_text: whether `examples` will be called, which needs a tokenizer.
        quiet: show no progress.

    Raises the errors of `open_corpus`, `count_bigrams` and `hit_losses`, and ValueError if the vocabulary of the corpus
    is larger than that of a model.
    """
    context = context or min((each.context for each in models.values() if each.context), default=1024)
    first = next(iter(models.values()))
    with Progress(OPENING, quiet=quiet):
        splits = open_corpus(_data_config(first, data), tokenizer=first.tokenizer)
    tell_remarks(splits)
    if with_text:
        _checked_tokenizer(splits.tokenizer)  # before the evaluation, which may take hours
    vocab_size = splits.train.vocab_size
    for label, each in models.items():
        if vocab_size > each.vocab_size:
            raise ValueError(f"the corpus has {vocab_size:,} different tokens; {label} knows {each.vocab_size:,}")
        if not data and each.data == first.data:
            tell_changed(label, each.held_out, splits.held_out)
    held_out, chosen = splits.held_out, choose_rows(splits.held_out, context, rows)
    counting = None if quiet else "counting bigrams"
    counts = count_bigrams(splits.train, vocab_size, tokens=count_tokens, progress=counting)
    losses = {
        label: hit_losses(each.model, held_out, counts, context, rows, frequent=frequent,
                          progress=None if quiet else f"evaluating {label}")
        for label, each in models.items()
    }  # fmt: skip
    return MeasuredHits(models, losses, held_out, chosen, counts, splits.tokenizer)


class ProbeRow(NamedTuple):
    """Tells how well a model named the values of keys in passages of `length` tokens with `pairs` pairs.

    filler: the kind of filler; queries: the number of values asked for; asked_loss, asked_accuracy: of these values;
    filler_loss, filler_accuracy: of filler, NaN where there is none.
    """

    model: str
    pairs: int
    length: int
    filler: str
    queries: int
    asked_loss: float
    asked_accuracy: float
    filler_loss: float
    filler_accuracy: float


def probe_runs(
    models: Mapping[str, Scored],
    pairs: Sequence[int] | None,
    queries: int,
    seed: int,
    length: int | None = None,
    filler: str = "random",
) -> list[ProbeRow]:
    """Measures `sympow recall-probe`. `pairs` None means those of PAIRS that fit the vocabularies."""
    least = min(each.vocab_size for each in models.values())
    if pairs is None:
        pairs = [count for count in PAIRS if fitting(count, least, length=length, filler=filler)]
    if not pairs:
        room = "" if length is None else f" in {length} tokens"
        raise ValueError(f"a vocabulary of {least} tokens holds no passage of {PAIRS[0]} pairs{room}")
    rows = []
    for label, each in models.items():
        for count in pairs:
            found: Probed = probe(
                each.model, each.vocab_size, count, queries=queries, seed=seed, length=length, filler=filler
            )
            scores = (x for score in (found.asked, found.filler) for x in (score.loss, score.accuracy))
            rows.append(ProbeRow(label, count, found.length, filler, found.asked.tokens, *scores))
    return rows


def probe_table(rows: Sequence[ProbeRow]) -> str:
    """Returns the table of `sympow recall-probe`."""
    width = max(5, *(len(row.model) for row in rows))
    lines = [
        f"{'':{width}}  {'':>5} {'':>7}{'asked':>18}{'filler':>18}{'guessing':>10}",
        f"{'run':{width}}  {'pairs':>5} {'tokens':>7}{'loss':>9}{'right':>9}{'loss':>9}{'right':>9}{'right':>10}",
    ]
    for row in rows:
        scores = "".join(
            f"{'none':>9}{'none':>9}" if math.isnan(accuracy) else f"{loss:>9.3f}{accuracy:>9.1%}"
            for loss, accuracy in ((row.asked_loss, row.asked_accuracy), (row.filler_loss, row.filler_accuracy))
        )
        lines.append(f"{row.model:{width}}  {row.pairs:>5} {row.length:>7,}{scores}{1 / row.pairs:>10.1%}")
    return "\n".join(lines)


def _data_config(first: Scored, assignments: Sequence[str]) -> DataConfig:
    if first.data is None and not assignments:
        raise ValueError("what the first model was trained on is not known: --data kind=text --data path=... names it")
    config = override(first.data or DataConfig(), assignments)
    check_held_out(config, assignments)
    if first.tokenizer is None and config.tokenizer == "bpe":
        raise ValueError("the first model has no tokenizer.json: --data tokenizer=... names one")
    check_data_tokenizer(config, first.tokenizer, "the first model", assignments)
    return config


def _checked_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("examples need the text of tokens: the data have no tokenizer, --data tokenizer=... names one")
    return tokenizer


def _loss(loss: float) -> str:
    return "-" if math.isnan(loss) else f"{loss:.4f} ({math.exp(loss):,.2f})"


def _gap(share: Share, with_share: bool) -> str:
    said = f"{share.nats:>+9.4f} [{share.nats_low:+.4f}, {share.nats_high:+.4f}]"
    of_gap = f"{share.share:>7.0%} [{share.share_low:.0%}, {share.share_high:.0%}] of the gap"
    return said + of_gap if with_share else said
