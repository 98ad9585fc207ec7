"""Runs the commands with their parsed options. Each function returns an exit code, or None for 0."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sympow import training
from sympow.cli import serving
from sympow.cli.conversion import convert_model
from sympow.cli.passkeys import measure_passkeys
from sympow.cli.places import check_image, check_writable, image_types
from sympow.cli.reading import check_out, read_text
from sympow.cli.recalling import measure, probe_runs
from sympow.cli.runs import check_data_tokenizer, check_held_out, check_tokenizers, dtype_of, labels_of
from sympow.cli.scored import load_scored
from sympow.cli.writing import argument_text, draft_model, text_of, write_text
from sympow.conversion import distill as distill_run
from sympow.conversion import distillation_run
from sympow.data import (
    Corpus,
    build_corpus,
    build_doc_corpus,
    build_kernel_corpus,
    load_tokenizer,
    open_corpus,
    plot_document_lengths,
)
from sympow.data.corpus_folder import ROW_TOKENS, SPLITS, VOCAB_SIZE
from sympow.data.tokenizer_files import end_tokens
from sympow.evaluation import Curve, context_losses, plot_ar_hits, plot_context_losses, size_tables, write_csv
from sympow.evaluation.ar_hits_text import to_html, to_terminal
from sympow.evaluation.passkey import plot_passkeys, write_passkeys
from sympow.models import BODIES, NgramDrafts, load_context, preset
from sympow.ops.cost import ModelShape, format_bytes
from sympow.progress import Progress
from sympow.recall import draw_figures, read_results, run_sweep, summary
from sympow.recall.results import check_rows
from sympow.recall.sweep import RESULTS
from sympow.recipes import load_recipe, load_sweep
from sympow.training import Run, RunConfig, fine_tuning_run, load, override
from sympow.training.ranks import is_main
from sympow.training.run_folder import folder_of, read_config
from sympow.training.runs import OPENING, tell_remarks
from sympow.training.step import resolve_device, usual_precision


def train(options: argparse.Namespace) -> int | None:
    """Runs `sympow train`."""
    config = fine_tuning_run(options.start) if options.recipe is None else load_recipe(options.recipe)
    if options.start is not None:
        config = replace(config, start=str(Path(options.start)))
    config = override(config, options.overrides)
    check_held_out(config.data, options.overrides, "data.")
    folder = Path(options.out or f"runs/{config.name}")
    if config.start is not None and folder_of(config.start).resolve() == folder.resolve():
        raise ValueError(f"the run cannot be written into {folder}, from which it begins: give another folder (--out)")
    return _train(config, folder, options.quiet, options.restart)


def evaluate(options: argparse.Namespace) -> None:
    """Runs `sympow evaluate`."""
    check_writable(options.csv)
    check_image(options.plot)
    runs = _load_runs(options.runs, resolve_device(options.device), dtype_of(options.dtype))
    context = options.context or 4 * max(run.config.training.context for run in runs.values())
    curves = _evaluate(runs, context, options.rows, options.data)
    _print_curves(curves)
    if options.csv:
        write_csv(options.csv, curves)
    if options.plot:
        plot_context_losses(curves, options.plot)


def ar_hits(options: argparse.Namespace) -> None:
    """Runs `sympow ar-hits`."""
    for file in (options.csv, options.html):
        check_writable(file)
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
        page = to_html(measured.examples(options.examples), "AR hits")
        Path(options.html).write_text(page, encoding="utf-8")
    if options.show:
        (row,) = measured.examples(1)
        print(*(f"\n{to_terminal(row, run, options.show)}" for run in measured.losses), sep="", end="")


def recall_probe(options: argparse.Namespace) -> None:
    """Runs `sympow recall-probe`."""
    models = load_scored(options.runs, resolve_device(options.device))
    print(probe_runs(models, options.pairs, options.queries, options.seed, options.length, options.filler))


def passkey(options: argparse.Namespace) -> None:
    """Runs `sympow passkey`."""
    check_writable(options.csv)
    check_image(options.plot)
    rows = measure_passkeys(
        load_scored(options.runs, resolve_device(options.device)),
        options.context,
        texts=options.texts,
        seed=options.seed,
        quiet=options.quiet,
    )
    for row in rows:
        print(f"{row.model}: {row.context:,} tokens, depth {row.depth:.0%}: {row.accuracy:.0%} of {row.texts} numbers")
    if options.csv:
        write_passkeys(options.csv, rows)
    if options.plot:
        plot_passkeys(rows, options.plot)


def generate(options: argparse.Namespace) -> None:
    """Runs `sympow generate`."""
    prompt = argument_text(options.prompt or "", "--prompt")
    if options.prompt_file is not None:
        prompt = text_of(options.prompt_file)
    run = load(options.run, resolve_device(options.device), dtype_of(options.dtype))
    context = None if options.context is None else load_context(options.context, run.model)
    write_text(
        run,
        prompt,
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        context=context,
        drafts=NgramDrafts() if options.speculate else draft_model(options.draft, run),
        ends=() if run.tokenizer is None else end_tokens(folder_of(options.run), run.tokenizer),
    )


def read(options: argparse.Namespace) -> int | None:
    """Runs `sympow read`."""
    out = Path(options.out)
    check_out(out, options.text, options.context)
    check_writable(options.out, replaced=True)
    run = load(options.run, resolve_device(options.device), None)
    done = read_text(
        run,
        options.text,
        out,
        before=options.context,
        dtype=options.dtype,
        chunk=options.chunk,
        quiet=options.quiet,
    )
    if done.stopped_by:
        print(f"stopped by {done.stopped_by} after {done.tokens:,} tokens; the same command continues")
        return 128 + signal.Signals[done.stopped_by]
    size = out.stat().st_size
    what = f"{done.tokens:,} tokens, {size:,} bytes ({format_bytes(size)}), {options.dtype}"
    print(f"{out}: {what}{', read before' if done.already else ''}")
    return None


def serve(options: argparse.Namespace) -> None:
    """Runs `sympow serve`."""
    serving.run(options)


def export(options: argparse.Namespace) -> None:
    """Runs `sympow export`."""
    if options.out.lower().endswith(".gguf"):
        raise ValueError(f"{options.out}: programs that read GGUF files have no power attention, so none is written: "
                         "give a folder")  # fmt: skip
    from sympow.integrations.transformers import to_transformers  # which imports transformers

    print(to_transformers(options.run, options.out, max_shard_size=options.max_shard_size))


def convert(options: argparse.Namespace) -> None:
    """Runs `sympow convert`."""
    folder, model = convert_model(
        options.model, options.out, pattern=options.pattern, p=options.p, window=options.window
    )
    kinds = [model.config.mixer(layer).name for layer in range(model.config.n_layers)]
    layers = ", ".join(f"{kinds.count(name)} of {name}" for name in dict.fromkeys(kinds))
    print(f"{folder}: {model.num_parameters():,} parameters, layers {layers}")


def distill(options: argparse.Namespace) -> int | None:
    """Runs `sympow distill`."""
    start, teacher = str(Path(options.run)), str(Path(options.teacher))
    config = override(distillation_run(read_config(start), start, teacher), options.overrides)
    out = Path(options.out)
    begun = (out / "config.json").is_file() and not options.restart
    device = resolve_device(config.training.device)
    # A run that continues keeps its precision, also on another processor.
    precision = read_config(out).training.precision if begun else usual_precision(device)
    config = override(distillation_run(read_config(start), start, teacher, precision), options.overrides)
    check_held_out(config.data, options.overrides, "data.")
    return _train(config, out, options.quiet, options.restart)


def sizes(options: argparse.Namespace) -> None:
    """Runs `sympow sizes`."""
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


def mqar(options: argparse.Namespace) -> None:
    """Runs `sympow mqar`."""
    sweep = load_sweep(options.recipe).override(options.overrides)
    resolve_device(options.device)
    folder = Path(options.out or f"runs/{sweep.name}")
    try:
        rows = run_sweep(
            sweep,
            folder,
            executor=options.executor,
            jobs=options.jobs,
            device=options.device,
            compiled=not options.no_compile,
            cuda_graphs=not options.no_cuda_graphs,
            slurm=dict(_slurm_parameter(text) for text in options.slurm),
            quiet=options.quiet,
            tracker=options.tracker,
        )
    except KeyboardInterrupt:
        print("stopped; finished runs are kept, and the same command does the others", file=sys.stderr)
        raise
    check_rows(rows, folder / RESULTS)
    print(summary(rows))
    print(f"{len(sweep.runs)} {'run' if len(sweep.runs) == 1 else 'runs'}: {folder / RESULTS}")


def mqar_figures(options: argparse.Namespace) -> None:
    """Runs `sympow mqar-figures`."""
    rows = [row for file in options.results for row in read_results(file)]
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for file in draw_figures(rows, folder):
        print(file)


def corpus(options: argparse.Namespace) -> None:
    """Runs `sympow corpus`."""
    check_image(options.plot)
    made = build_corpus(
        options.out,
        options.texts,
        group=options.group,
        suffixes=tuple(filter(None, (options.suffixes or "").split(","))),
        text_field=options.text_field,
        vocab_size=options.vocab_size or VOCAB_SIZE,
        tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer else None,
        row_tokens=options.row_tokens or ROW_TOKENS,
        progress=not options.quiet,
        remark=lambda line: print(line, file=sys.stderr),
    )
    _tell_corpus(made, options)
    for split in SPLITS:
        counts = made[split]
        lost = counts["tokens"] - counts["tokens_in_rows"]
        if lost:
            print(
                f"left out of {split}.zarr: {lost:,} tokens ({lost / counts['tokens']:.0%}) after the last row of a "
                f"document, and in {counts['documents_without_a_row']:,} documents shorter than a row"
            )


def kernel_corpus(options: argparse.Namespace) -> None:
    """Runs `sympow kernel-corpus`."""
    check_image(options.plot)
    made = build_kernel_corpus(
        options.out,
        options.source,
        vocab_size=options.vocab_size or VOCAB_SIZE,
        row_tokens=options.row_tokens or ROW_TOKENS,
        progress=not options.quiet,
    )
    _tell_corpus(made, options)


def doc_corpus(options: argparse.Namespace) -> None:
    """Runs `sympow doc-corpus`."""
    check_image(options.plot)
    made = build_doc_corpus(
        options.out,
        options.source,
        vocab_size=options.vocab_size or VOCAB_SIZE,
        tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer else None,
        row_tokens=options.row_tokens or ROW_TOKENS,
        progress=not options.quiet,
    )
    _tell_corpus(made, options)


def _tell_corpus(made: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the sizes of a corpus, and draws the lengths of its documents if an image was requested."""
    for split in SPLITS:
        counts = made[split]
        print(
            f"{Path(options.out) / split}.zarr: {counts['rows']:,} rows of {made['row_tokens']:,} tokens, "
            f"from {counts['documents']:,} documents of {counts['tokens']:,} tokens"
        )
    if options.plot:
        plot_document_lengths(options.out, options.plot)


def demo(options: argparse.Namespace) -> int | None:
    """Runs `sympow demo`: trains the recipes in `recipes/demo.py`, compares them, generates a text with the first."""
    image_types()  # raises without matplotlib, before the training
    folder = Path(options.out)
    folders = []
    for name in ("power", "softmax"):
        config = load_recipe(f"demo:{name}")
        folders.append(folder / config.name)
        code = _train(config, folders[-1], options.quiet)
        if code:
            return code
    runs = _load_runs([str(each) for each in folders], resolve_device("auto"), None)
    context = 4 * max(run.config.training.context for run in runs.values())
    curves = _evaluate(runs, context, rows=16, quiet=options.quiet)
    _print_curves(curves)
    write_csv(folder / "context_loss.csv", curves)
    plot_context_losses(curves, folder / "context_loss.png")
    print(f"drawn: {folder / 'context_loss.png'}\n")
    write_text(next(iter(runs.values())), "def main(", 128, temperature=0.8, top_p=0.95)
    return None


def _slurm_parameter(text: str) -> tuple[str, int | str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"a parameter of Slurm is written key=value, got {text!r}")
    return key, int(value) if value.isdecimal() else value


def _train(config: RunConfig, folder: Path, quiet: bool, restart: bool = False) -> int | None:
    do = training.run if config.distillation is None else distill_run
    result = do(config, folder, quiet=quiet, restart=restart)
    if result.stopped_by:
        line = (
            f"stopped by {result.stopped_by} at step {result.step} of {result.steps}, checkpoint saved; "
            "the same command continues"
        )
    elif result.loss is None:
        line = f"{folder} has finished already, at step {result.step} of {result.steps}"
    else:
        line = f"finished at step {result.step} of {result.steps}, loss {result.loss:.4f}: {folder}"
    if is_main():
        print(line)
    return 128 + signal.Signals[result.stopped_by] if result.stopped_by else None


def _load_runs(paths: Sequence[str], device: torch.device, dtype: torch.dtype | None) -> dict[str, Run]:
    """Loads runs, by label."""
    runs = {label: load(path, device, dtype) for label, path in zip(labels_of(paths), paths, strict=True)}
    check_tokenizers({label: run.tokenizer for label, run in runs.items()})
    return runs


def _evaluate(
    runs: dict[str, Run], context: int, rows: int, data: Sequence[str] = (), quiet: bool = False
) -> list[Curve]:
    """Evaluates every run on the held-out documents of its data config, after the assignments `data` were applied."""
    opened: dict[str, Corpus] = {}
    curves = []
    for label, run in runs.items():
        config = override(run.config.data, data)
        check_held_out(config, data)
        check_data_tokenizer(config, run.tokenizer, label, data)
        if str(config) not in opened:
            with Progress(OPENING, quiet=quiet):
                splits = open_corpus(config, tokenizer=run.tokenizer)
            tell_remarks(splits)
            opened[str(config)] = splits.held_out
        progress = None if quiet else f"evaluating {label}"
        losses = context_losses(run.model, opened[str(config)], context, rows, progress=progress)
        curves.append(Curve(label, losses, run.config.training.context))
    return curves


def _print_curves(curves: Sequence[Curve]) -> None:
    """Prints a table with a line for each bin and a column for each run, and below it a line for each run."""
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
            f"{run}: mean {losses.loss:.4f} over {losses.rows} rows of {losses.context:,} tokens, "
            f"best-context loss {best.loss:.4f} at {at}, trained on {train_context:,}"
        )
