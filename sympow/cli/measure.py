"""Measures trained models: `sympow evaluate`, `ar-hits`, `recall-probe`, `passkey`, `needles` and `sizes`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sympow.cli.options import (
    DEVICE,
    DTYPES,
    RUN,
    SCORED,
    WEIGHTS,
    AddCommand,
    Distinct,
    add_fields,
    add_number,
    add_path,
    add_trust_code,
    natural,
    positive,
    tell,
)

if TYPE_CHECKING:
    import torch

    from sympow.evaluation import Curve
    from sympow.evaluation.needles import NeedleRow
    from sympow.evaluation.passkey import Continue, PasskeyRow, Tokenizer
    from sympow.training import Run

Row = TypeVar("Row")

_EVALUATE = """Measures the mean loss at each position of the context, over sequences from the held-out documents.
Positions are put into bins whose widths double. The result shows how much a model gains from context, also from longer
contexts than it was trained on."""

_AR_HITS = """Measures mean loss and perplexity on held-out text. Tokens are split by whether the bigram that ends in
the token occurred earlier in the same sequence, and by how often the bigram occurs in the training data. An AR hit is
a repeated bigram that is rare in training: only recall from the context predicts it. For several runs the command also
prints how much each part contributes to the gap to the first run, with bootstrap intervals."""

_HITS = "AR hits"  # the title of the page

_RECALL_PROBE = """Asks a model for the values of keys. A sequence consists of random tokens of the model's own
vocabulary: first pairs of a key and a value, then every key and its value once more between filler tokens. Prints loss
and accuracy on the second occurrences of values and on filler."""

_PASSKEY = """Measures how often a model names a number of five digits that a long text contains. The text's length
varies, and so does the number's depth in it: at the beginning, a quarter, half, three quarters and the end. Runs of
sympow and models of Hugging Face transformers are measured in the same way."""

_NEEDLES = """Measures how often a model answers from statements in a long text of prose, in the tasks of RULER. single:
one statement gives a key a number or a word. multikey: several do, and one is asked for. tracing: a chain of statements
gives one value to several names, and all names are asked for. Length and depth of the statement vary. The result tells
the distance in tokens between the statement and the answer."""

_SIZES = """Prints state dimensions, state sizes and weight-state FLOP ratios of power, linear, softmax and window
attention for a model shape. The shape is a preset in a body; options change single sizes of it."""


def add(command: AddCommand) -> None:
    """Adds the commands to the parser."""
    evaluate = command("evaluate", "Measure the held-out loss at every position of the context.", _EVALUATE)
    add_path(evaluate, "runs", "RUN", RUN, nargs="+")
    add_number(evaluate, "--context",
               "Predict N tokens in each sequence (default: 4 times the longest context trained on).")  # fmt: skip
    add_number(evaluate, "--rows", "Average over N sequences.", 16)
    add_fields(evaluate, "--data", "Change a field of the run's data config, such as kind=text; may be repeated.")
    evaluate.add_argument("--dtype", choices=DTYPES, default="auto", help=WEIGHTS)
    evaluate.add_argument("--device", default="auto", help=DEVICE)
    add_path(evaluate, "--csv", "FILE", "Write the losses into this file.")
    add_path(evaluate, "--plot", "FILE", "Draw the curves of all runs into this image.")
    add_trust_code(evaluate)
    evaluate.set_defaults(execute=run_evaluate, rest="runs")

    hits = command("ar-hits", "Measure the loss of tokens that can be recalled from the context.", _AR_HITS)
    add_path(hits, "runs", "RUN", SCORED, nargs="+")
    add_fields(hits, "--data", "Change a field of the first run's data config, such as kind=text; may be repeated.")
    add_number(hits, "--context",
               "Predict N tokens in each sequence (default: the shortest context that a model was trained "
               "on).")  # fmt: skip
    add_number(hits, "--rows", "Average over N sequences.", 64)
    add_number(hits, "--frequent", "Exclude bigrams from AR hits above N occurrences in training.", 1250, type=natural)
    add_number(hits, "--count-tokens", "Count bigrams in about N tokens of the training data (default: all tokens).")
    add_path(hits, "--csv", "FILE", "Write losses and gaps into this file.")
    add_path(hits, "--plot", "FILE", "Draw losses by count and distance into this image.")
    add_path(hits, "--html", "FILE", "Write sequences of coloured text as a page.")
    add_number(hits, "--examples", "Show N sequences on the page of --html (default: 4).")
    add_number(hits, "--show", "Print the last N tokens of a sequence in colour.")
    hits.add_argument("--device", default="auto", help=DEVICE)
    hits.add_argument("--quiet", action="store_true", help="Print the results only, without progress.")
    add_trust_code(hits)
    hits.set_defaults(execute=run_ar_hits, rest="runs")

    probe = command("recall-probe", "Ask a trained model for the values of keys in its context.", _RECALL_PROBE)
    add_path(probe, "runs", "RUN", SCORED, nargs="+")
    probe.add_argument("--pairs", metavar="P", type=positive, nargs="+", action=Distinct,
                       help="Use P pairs in each sequence "
                            "(default: those of 16 32 64 128 256 that fit the vocabulary).")  # fmt: skip
    add_number(probe, "--length", "Use sequences of N tokens (default: 8 for each pair).")
    probe.add_argument("--filler", choices=("random", "zero"), default="random",
                       help="Fill sequences with random tokens, or with one token (default: random).")  # fmt: skip
    add_number(probe, "--queries", "Ask for N values for every P.", 2048)
    add_number(probe, "--seed", "Draw the sequences from this seed.", 0, type=natural)
    add_path(probe, "--csv", "FILE", "Write the results into this file.")
    probe.add_argument("--device", default="auto", help=DEVICE)
    add_trust_code(probe)
    probe.set_defaults(execute=run_recall_probe, rest="runs")

    passkey = command("passkey", "Measure the recall of a number in a long text.", _PASSKEY)
    _add_options_of_texts(passkey, "the numbers")
    add_path(passkey, "--plot", "FILE", "Draw accuracy by context and depth into this image.")
    passkey.set_defaults(execute=run_passkey, rest="runs")

    needles = command("needles", "Measure the recall of statements in a long text.", _NEEDLES)
    _add_options_of_texts(needles, "keys, values and places")
    tasks = ("single", "multikey", "tracing")
    needles.add_argument("--task", choices=tasks, nargs="+", action=Distinct, default=tasks,
                         help="Measure these tasks (default: all).")  # fmt: skip
    needles.add_argument("--values", choices=("digits", "words"), nargs="+", action=Distinct,
                         default=["digits", "words"],
                         help="Let values be numbers or words (default: both).")  # fmt: skip
    add_path(needles, "--text", "FILE", "Hide statements in this prose (default: four sentences, repeated).")
    add_number(needles, "--keys", "Make N statements in multikey (default: 4).")
    add_number(needles, "--hops", "Give the value to N more names in tracing (default: 4).")
    needles.set_defaults(execute=run_needles, rest="runs")

    sizes = command("sizes", "Print state sizes and FLOP ratios of a model shape.", _SIZES)
    sizes.add_argument("preset", metavar="PRESET", nargs="?", default="small",
                       help="Use the shape of this preset (default: small).")  # fmt: skip
    sizes.add_argument("--body", choices=("gpt2", "llama", "rwkv7"), default="gpt2",
                       help="Use this body (default: gpt2).")  # fmt: skip
    for name, what, usual in (("d-model", "the width", "the preset's"),
                              ("layers", "the number of layers", "the preset's"),
                              ("heads", "the number of query heads", "the preset's"),
                              ("kv-heads", "the number of key/value heads", "that of query heads"),
                              ("key-dim", "the key dimension K", "the width over the query heads"),
                              ("value-dim", "the value dimension V", "K")):  # fmt: skip
        sizes.add_argument(f"--{name}", metavar="N", type=positive, help=f"Set {what} (default: {usual}).")
    sizes.add_argument("--p", metavar="P", type=positive, nargs="+", action=Distinct,
                       help="Show these powers (default: 2 3 4 5 6 8).")  # fmt: skip
    sizes.add_argument("--context", metavar="N", type=positive, nargs="+", action=Distinct,
                       help="Show these contexts, in tokens (default: 1024 8192 65536 1000000).")  # fmt: skip
    add_number(sizes, "--window", "Let window attention see N tokens (default: 8192).")
    add_number(sizes, "--element-bytes", "Count N bytes for an element of a state; sympow's have 4 (default: 2).")
    sizes.add_argument("--json", action="store_true", help="Print exact numbers as JSON.")
    sizes.set_defaults(execute=run_sizes)


def _add_options_of_texts(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Adds the options that `passkey` and `needles` share; `drawn` says what the seed decides."""
    add_path(parser, "runs", "RUN", SCORED, nargs="+")
    parser.add_argument("--context", metavar="N", type=positive, nargs="+", action=Distinct,
                        default=[1024, 2048, 4096],
                        help="Make texts of N tokens (default: 1024 2048 4096).")  # fmt: skip
    add_number(parser, "--texts", "Use N texts at each length and depth.", 20)
    parser.add_argument("--seed", metavar="N", type=natural, default=0,
                        help=f"Draw {drawn} from this seed (default: 0).")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=WEIGHTS)
    parser.add_argument("--device", default="auto", help=DEVICE)
    add_path(parser, "--csv", "FILE", "Write the results into this file.")
    parser.add_argument("--quiet", action="store_true", help="Print the result only, without progress.")
    add_trust_code(parser)


def run_evaluate(options: argparse.Namespace) -> None:
    """Runs `sympow evaluate`."""
    from sympow.cli.result_files import check_image, check_table
    from sympow.cli.run_checks import dtype_of
    from sympow.evaluation import plot_context_losses, write_csv
    from sympow.evaluation.context_loss import COLUMNS
    from sympow.training.devices import resolve_device

    check_table(options.csv, COLUMNS)
    check_image(options.plot)
    runs = load_runs(options.runs, resolve_device(options.device), dtype_of(options.dtype))
    context = options.context or 4 * max(run.config.training.context for run in runs.values())
    curves = evaluate_runs(runs, context, options.rows, options.data)
    print_curves(curves)
    if options.csv:
        write_csv(options.csv, curves)
    if options.plot:
        plot_context_losses(curves, options.plot)


def run_ar_hits(options: argparse.Namespace) -> None:
    """Runs `sympow ar-hits`."""
    from sympow.cli.recall_tables import COLUMNS, measure
    from sympow.cli.result_files import check_image, check_page, check_table
    from sympow.cli.scored_models import load_scored
    from sympow.evaluation import plot_ar_hits
    from sympow.evaluation.ar_hits_text import to_html, to_terminal
    from sympow.files import naming
    from sympow.training.devices import resolve_device

    if options.examples and not options.html:
        raise ValueError("--examples is of the page that --html names; got no --html")
    check_table(options.csv, COLUMNS)
    check_page(options.html, to_html([], _HITS).partition("<style>")[0])
    check_image(options.plot)
    models = load_scored(options.runs, resolve_device(options.device))
    measured = measure(
        models,
        options.data,
        context=options.context,
        rows=options.rows,
        frequent=options.frequent,
        count_tokens=options.count_tokens,
        with_text=bool(options.html or options.show),
        quiet=options.quiet,
    )
    print(measured.text())
    if options.csv:
        measured.write_csv(options.csv)
    if options.plot:
        plot_ar_hits(measured.losses, options.plot)
    if options.html:
        page = to_html(measured.examples(options.examples or 4), _HITS)
        with naming(options.html):
            Path(options.html).write_text(page, encoding="utf-8")
    if options.show:
        (row,) = measured.examples(1)
        print(*(f"\n{to_terminal(row, run, options.show)}" for run in measured.losses), sep="", end="")


def run_recall_probe(options: argparse.Namespace) -> None:
    """Runs `sympow recall-probe`."""
    from sympow.cli.recall_tables import ProbeRow, probe_runs, probe_table
    from sympow.cli.result_files import check_table
    from sympow.cli.scored_models import load_scored
    from sympow.files import write_table
    from sympow.training.devices import resolve_device

    check_table(options.csv, ProbeRow._fields)
    models = load_scored(options.runs, resolve_device(options.device))
    rows = probe_runs(models, options.pairs, options.queries, options.seed, options.length, options.filler)
    print(probe_table(rows))
    if options.csv:
        write_table(options.csv, ProbeRow._fields, rows)


def run_passkey(options: argparse.Namespace) -> int | None:
    """Runs `sympow passkey`."""
    from sympow.cli.result_files import check_image, check_table
    from sympow.evaluation.passkey import PasskeyRow, passkey_recall, plot_passkeys, write_passkeys

    check_table(options.csv, PasskeyRow._fields)
    check_image(options.plot)

    def said(row: PasskeyRow) -> str:
        where = f"{row.context:,} tokens, depth {row.depth:.0%}"
        return f"{row.model}: {where}: {row.accuracy:.0%} of {row.texts} numbers"

    measured = partial(passkey_recall, texts=options.texts, seed=options.seed, quiet=options.quiet)
    rows, code = _told(options, "passkeys", measured, said, write_passkeys)
    if options.plot:
        plot_passkeys(rows, options.plot)
    return code


def run_needles(options: argparse.Namespace) -> int | None:
    """Runs `sympow needles`."""
    from sympow.cli.result_files import check_table
    from sympow.evaluation.needles import NeedleRow, needle_recall, write_needles
    from sympow.evaluation.passkey import FILLER
    from sympow.files import read_utf8

    check_table(options.csv, NeedleRow._fields)
    made = {name: getattr(options, name) for name in ("values", "texts", "seed", "quiet")}
    for name, task in (("keys", "multikey"), ("hops", "tracing")):
        given = getattr(options, name)
        if given is not None and task not in options.task:
            raise ValueError(f"--{name} is of the task {task}; got --task {' '.join(options.task)}")
        made |= {} if given is None else {name: given}
    made |= {"tasks": options.task, "text": FILLER if options.text is None else read_utf8(options.text)}

    def said(row: NeedleRow) -> str:
        where = f"{row.context:,} tokens, depth {row.depth:.0%}, {row.distance:,.0f} tokens before the answer"
        return f"{row.model}: {row.task} of {row.values}, {where}: {row.accuracy:.0%} of {row.texts} texts"

    return _told(options, "statements", partial(needle_recall, **made), said, write_needles)[1]


def _told(
    options: argparse.Namespace,
    texts: str,
    measure: Callable[[str, Continue, Tokenizer, Sequence[int]], Iterator[Row]],
    said: Callable[[Row], str],
    write: Callable[[str, Iterable[Row]], None],
) -> tuple[list[Row], int | None]:
    """Measures every model; prints a line for each row, and writes the row into the file, when it is measured.

    After Ctrl-C or SIGTERM the row that is being measured is the last one. Returns the rows, and the exit code.
    """
    from sympow.files import naming
    from sympow.training.interrupt import StopRequest

    # A list, so that errors of every model come before the first one is measured.
    rows = chain.from_iterable([measure(*model, options.context) for model in _generating(options, texts)])
    file = options.csv
    kept: list[Row] = []
    with StopRequest(doing="stopping after this row") as stop:

        def told() -> Iterator[Row]:
            for row in rows:
                kept.append(row)
                with naming("standard output"):
                    print(said(row), flush=True)
                yield row
                if stop.signal:
                    return

        if file:
            write(file, told())
        else:
            for _ in told():
                pass
    if stop.signal is None:
        return kept, None
    tell(f"stopped by {stop.signal.name} after {len(kept)} rows{f', which are in {file}' if file else ''}")
    return kept, 128 + stop.signal


def _generating(options: argparse.Namespace, texts: str) -> Iterator[tuple[str, Continue, Tokenizer]]:
    """Yields the label, the function that continues prompts, and the tokenizer of each model of `options.runs`."""
    from sympow.cli.run_checks import dtype_of
    from sympow.cli.scored_models import load_scored
    from sympow.evaluation.passkey import native, transformers
    from sympow.models import LanguageModel
    from sympow.training.devices import resolve_device

    models = load_scored(options.runs, resolve_device(options.device), dtype_of(options.dtype))
    for label, scored in models.items():
        if scored.tokenizer is None:
            raise ValueError(f"{label} has no tokenizer: {texts} are texts")
        model = scored.model
        yield label, native(model) if isinstance(model, LanguageModel) else transformers(model.model), scored.tokenizer


def run_sizes(options: argparse.Namespace) -> None:
    """Runs `sympow sizes`."""
    from sympow.evaluation import size_tables
    from sympow.models import BODIES, preset
    from sympow.ops.cost import ModelShape

    model = preset(options.preset, body=options.body)
    d_model = options.d_model or model.d_model
    n_layers = options.layers or model.n_layers
    n_heads = options.heads or model.n_heads
    others = BODIES[options.body].other_weights(replace(model, d_model=d_model))
    key_dim = options.key_dim or ModelShape.of(d_model, n_layers, n_heads).key_dim
    value_dim, kv_heads = options.value_dim or key_dim, options.kv_heads or n_heads
    choices = {"powers": options.p, "contexts": options.context, "window": options.window,
               "element_bytes": options.element_bytes}  # fmt: skip
    shape = ModelShape(d_model, n_layers, n_heads, key_dim, value_dim, kv_heads, other_weights=others)
    tables = size_tables(shape, **{name: choice for name, choice in choices.items() if choice is not None})
    if options.json:
        print(json.dumps([table.to_dict() for table in tables], indent=2))
    else:
        print("\n\n".join(table.text() for table in tables))


def load_runs(paths: Sequence[str], device: torch.device, dtype: torch.dtype | None) -> dict[str, Run]:
    """Loads runs, by label."""
    from sympow.cli.run_checks import check_tokenizers, labels_of
    from sympow.training import load

    runs = {label: load(path, device, dtype) for label, path in zip(labels_of(paths), paths, strict=True)}
    check_tokenizers({label: run.tokenizer for label, run in runs.items()})
    return runs


def evaluate_runs(
    runs: dict[str, Run], context: int, rows: int, data: Sequence[str] = (), quiet: bool = False
) -> list[Curve]:
    """Evaluates every run on the held-out documents of its data config, after the assignments `data` were applied."""
    from sympow.cli.run_checks import check_data_tokenizer, check_held_out
    from sympow.data import Corpus, open_corpus
    from sympow.evaluation import Curve, context_losses
    from sympow.progress import Progress
    from sympow.training import override
    from sympow.training.runs import OPENING, tell_changed, tell_remarks

    opened: dict[str, Corpus] = {}
    curves: list[Curve] = []
    for label, run in runs.items():
        config = override(run.config.data, data)
        check_held_out(config, data)
        check_data_tokenizer(config, run.tokenizer, label, data)
        if str(config) not in opened:
            with Progress(OPENING, quiet=quiet):
                splits = open_corpus(config, tokenizer=run.tokenizer)
            tell_remarks(splits)
            opened[str(config)] = splits.held_out
        first, held_out = next(iter(opened.values())), opened[str(config)]
        if not data:
            tell_changed(label, run.held_out, held_out)
        if held_out.fingerprint != first.fingerprint:
            print(f"{label} is evaluated on other held-out documents than {curves[0].run}, so that their losses cannot "
                  "be compared: --data gives all runs the same", file=sys.stderr)  # fmt: skip
        progress = None if quiet else f"evaluating {label}"
        losses = context_losses(run.model, held_out, context, rows, progress=progress)
        curves.append(Curve(label, losses, run.config.training.context))
    return curves


def print_curves(curves: Sequence[Curve]) -> None:
    """Prints a table with a line for each bin and a column for each run, and below it a line for each run."""
    from sympow.ops.cost import counted

    width = max(14, *(len(curve.run) + 2 for curve in curves))
    print(f"{'context':>17}", *(f"{curve.run:>{width}}" for curve in curves), sep="")
    for bins in zip(*(curve.losses.bins for curve in curves), strict=True):
        first, last = bins[0].start + 1, bins[0].end
        name = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        print(f"{name:>17}", *(f"{each.loss:>{width}.4f}" for each in bins), sep="")
    for run, losses, train_context in curves:
        best = losses.best
        at = f"{best.end:,}" if best.start + 1 == best.end else f"{best.start + 1:,} to {best.end:,}"
        print(
            f"{run}: mean {losses.loss:.4f} over {counted(losses.rows, 'row')} of {losses.context:,} tokens, "
            f"best-context loss {best.loss:.4f} at {at}, trained on {train_context:,}"
        )
