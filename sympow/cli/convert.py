"""Converts pretrained models, distills them, and exports runs: `sympow convert`, `distill` and `export`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sympow.cli.options import RUN, AddCommand, Refuse, add_fields, add_number, add_path, add_trust_code

if TYPE_CHECKING:
    from sympow.models import LanguageModel, ModelConfig

PATTERN, POWER, WINDOW = "window,delta", 2, 1024  # of new layers, if the command names no others

_CONVERT = """Reads a pretrained model, such as Llama or Qwen, and replaces the softmax attention of its layers by power
attention, with or without the delta rule, or by window attention; docs/guides/conversion.md lists the models. A pattern
of power, delta, window, softmax and gated gives the kind of each layer; softmax keeps the layer as it is, and gated
gives it a gate and takes its rotation. All other weights are kept. The result is a run's folder with the model's
tokenizer, for `sympow distill`, generate, read, evaluate and export."""

_DISTILL = """Trains a converted model in three stages. The first stage trains every layer's attention on that of the
teacher, the second the predictions on those of the teacher, the third the model on text. key=value sets a field of the
run's config, such as a field of its data. Ctrl-C saves a checkpoint; the same command continues the run. The metrics
contain the held-out loss, the teacher's held-out loss and the gap between them. To use several GPUs, run torchrun -m
sympow.cli distill ..."""

_EXPORT = """Writes the model of a run, with its tokenizer, as a folder that from_pretrained of Hugging Face
transformers reads after `import sympow.integrations.transformers`."""


def add(command: AddCommand) -> None:
    """Adds the commands to the parser."""
    convert = command("convert", "Convert a pretrained model into one with power attention.", _CONVERT)
    add_path(convert, "model", "MODEL", "Read this model: a folder or an id of Hugging Face, or a GGUF file.")
    add_path(convert, "--out", "DIR", "Write the result into this folder, which is new or empty.", required=True)
    convert.add_argument("--pattern", metavar="LAYERS",
                         help="Repeat these kinds of layers, such as power*5,softmax (default: those of a model with "
                              f"power attention, otherwise {PATTERN} with --unshare).")  # fmt: skip
    add_number(convert, "--p", f"Give new power and delta layers this power (default: {POWER}).", metavar="P")
    add_number(convert, "--window", f"Give new layers of window attention N tokens (default: {WINDOW:,}).")
    convert.add_argument("--unshare", action="store_true",
                         help="Give each query head of new power and delta layers its own key/value head.")  # fmt: skip
    convert.add_argument("--keep", metavar="N",
                         help="Keep softmax attention in N layers, those whose replacement alone changes predictions "
                              "most; gated*N gives them a gate and no rotation.")  # fmt: skip
    add_path(convert, "--by", "TEXTS", "Compare predictions on the texts in this file or folder, for --keep.")
    convert.set_defaults(execute=run_convert, check=_check_choice)

    distill = command("distill", "Train a converted model on its teacher, or continue.", _DISTILL)
    add_path(distill, "run", "DIR", "Train the model in this folder of `sympow convert`.")
    add_fields(distill, "overrides", "Set a field of the run's config, such as data.path=manuals/train.zarr.")
    add_path(distill, "--teacher", "MODEL",
             "Learn from this model: a run's folder, or what `sympow convert` reads.", required=True)  # fmt: skip
    add_path(distill, "--out", "DIR", "Write the run into this folder.", required=True)
    distill.add_argument("--restart", action="store_true",
                         help="First remove the files of an earlier run in the folder.")  # fmt: skip
    distill.add_argument("--quiet", action="store_true", help="Print the last line only, without progress.")
    add_trust_code(distill)
    distill.set_defaults(execute=run_distill, rest="overrides")

    export = command("export", "Write a run as a folder for Hugging Face transformers.", _EXPORT)
    add_path(export, "run", "RUN", RUN)
    add_path(export, "--out", "DIR", "Write the result into this folder, which is new or empty.", required=True)
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB",
                        help="Write weights in files of at most this size (default: 5GB).")  # fmt: skip
    add_trust_code(export)
    export.set_defaults(execute=run_export)


def _check_choice(options: argparse.Namespace, refuse: Refuse) -> None:
    if (options.keep is None) != (options.by is None):
        refuse("--keep and --by go together: by which texts, and how many layers")
    if options.p is None and options.window is None:
        return
    from sympow.conversion import parse_pattern

    try:
        kinds = set(parse_pattern(PATTERN if options.pattern is None else options.pattern))
    except ValueError as error:
        refuse(str(error))
    for option, value, users in (("--p", options.p, ("power", "delta")), ("--window", options.window, ("window",))):
        if value is not None and kinds.isdisjoint(users):
            refuse(f"{option} is for {' and '.join(users)} layers, and the pattern has none: {options.pattern}")


def run_convert(options: argparse.Namespace) -> None:
    """Runs `sympow convert`."""
    folder, model = convert_model(
        options.model,
        options.out,
        pattern=options.pattern,
        p=POWER if options.p is None else options.p,
        window=options.window,
        unshare=options.unshare,
        keep=options.keep,
        by=options.by,
    )
    from sympow.conversion.swap import kind_of

    kinds = [kind_of(model.config.mixer(layer)) for layer in range(model.config.n_layers)]
    layers = ", ".join(f"{kinds.count(name)} of {name}" for name in dict.fromkeys(kinds))
    print(f"{folder}: {model.num_parameters():,} parameters, layers {layers}")


def run_distill(options: argparse.Namespace) -> int | None:
    """Runs `sympow distill`."""
    from sympow.cli.run_checks import check_bpe, check_given, check_held_out
    from sympow.cli.train import run_training
    from sympow.conversion import distillation_run
    from sympow.conversion.distillation import NARROW, hides_nothing
    from sympow.training import override
    from sympow.training.devices import resolve_device, usual_precision
    from sympow.training.ranks import is_main
    from sympow.training.run_folder import folder_of, read_config
    from sympow.training.runs import saved_tokenizer

    given = {"distillation.start": "DIR", "distillation.teacher": "--teacher", "distillation": "the command"}
    check_given(options.overrides, given)
    start, teacher = str(Path(options.run)), str(Path(options.teacher))
    config = override(distillation_run(read_config(start), start, teacher), options.overrides)
    out = Path(options.out)
    begun = (out / "config.json").is_file() and not options.restart
    device = resolve_device(config.training.device)
    # A run that continues keeps its precision, also on another processor.
    precision = read_config(out).training.precision if begun else usual_precision(device)
    config = override(distillation_run(read_config(start), start, teacher, precision), options.overrides)
    check_held_out(config.data, options.overrides, "data.")
    check_bpe(saved_tokenizer(folder_of(start)), start, options.overrides, "data.")
    if hides_nothing(config) and is_main():
        line = f"distillation.window_dropout has no effect: no layer has a window of more than {NARROW} tokens"
        print(line, file=sys.stderr)
    return run_training(config, out, options.quiet, options.restart)


def run_export(options: argparse.Namespace) -> None:
    """Runs `sympow export`."""
    if options.out.lower().endswith(".gguf"):
        raise ValueError(f"{options.out}: programs that read GGUF files have no power attention, so none is written: "
                         "give a folder")  # fmt: skip
    size = options.max_shard_size
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", size, re.IGNORECASE):
        raise ValueError(f"--max-shard-size takes a number with KB, MB, GB or TB, such as 5GB; got {size!r}")
    from sympow.integrations.transformers import to_transformers  # which imports transformers

    print(to_transformers(options.run, options.out, max_shard_size=size))


def convert_model(
    source: str,
    out: str | os.PathLike[str],
    *,
    pattern: str | None,
    p: int,
    window: int | None,
    unshare: bool = False,
    keep: str | None = None,
    by: str | None = None,
) -> tuple[Path, LanguageModel]:
    """Reads a pretrained model, swaps its mixers and writes the result as a run folder of 0 steps.

    Args:
        source: as for `load_pretrained`.
        out: a new or an empty folder.
        pattern: as for `parse_pattern` and `swap_mixers`; None: the layers of a source with power attention are kept,
            and any other source gets PATTERN and `unshare`.
        p: as for `parse_pattern` and `swap_mixers`.
        window: as for `parse_pattern` and `swap_mixers`; None: WINDOW.
        unshare: as for `swap_mixers`.
        keep: as for `parse_kept`; None: the pattern gives all layers.
        by: the texts by which the layers to keep are chosen, as for `rows_of`.

    A line on stdout tells which layers were chosen. A line on stderr says if the model's tokenizer does not keep texts
    as they are.

    Returns the folder and the model. Raises the errors of these functions, ValueError for a pattern of several kinds
    with more layers than the model, and FileNotFoundError for a model without a tokenizer.
    """
    from sympow.conversion import parse_pattern, swap_mixers
    from sympow.conversion.choice import check_count, choose_layers, layer_divergences, parse_kept, rows_of
    from sympow.conversion.swap import keeps_layers, replaced_layers
    from sympow.data import BPETokenizer, DataConfig
    from sympow.data.text import find_texts
    from sympow.integrations.transformers.pretrained import load_pretrained  # which imports transformers
    from sympow.progress import Progress
    from sympow.training import RunConfig, TrainingConfig
    from sympow.training.devices import resolve_device
    from sympow.training.run_folder import new_folder, write_run_folder

    kinds = parse_pattern(PATTERN if pattern is None else pattern)
    kept, folder = () if keep is None else parse_kept(keep), new_folder(out)
    if by is not None:
        find_texts(by)  # before the model is read

    def check(tokenizer: str | None, power: ModelConfig | None) -> None:
        nonlocal kinds
        if tokenizer is None:
            raise FileNotFoundError(f"{source} has no tokenizer.json: a converted model reads and writes text by it")
        if power is not None and pattern is None:
            kinds = ("power",)
        if power is not None and keeps_layers(power, kinds, p, unshare) and (kept or window is not None):
            raise ValueError("the layers of the model have power attention, which is kept; --keep and --window need "
                             "layers of softmax attention")  # fmt: skip

    pretrained = load_pretrained(source, check)
    window = WINDOW if window is None else window
    unshare = unshare or (pattern is None and "delta" in kinds)
    model, text = pretrained.model, str(pretrained.tokenizer)  # which the check has seen
    if len(set(kinds)) > 1 and len(kinds) > model.config.n_layers:
        raise ValueError(f"the pattern has {len(kinds):,} layers, and {source} has {model.config.n_layers}")
    if kept and by is not None:
        replaced = replaced_layers(model.config, kinds, p=p, window=window, unshare=unshare)
        check_count(len(replaced), len(kept))
        rows, device = rows_of(by, BPETokenizer(text)), resolve_device("auto")
        model.to(device)
        layers = model.config.n_layers
        found = {}
        with Progress("choosing layers", "layer", total=len(replaced)) as progress:
            rows = rows.to(device)
            for layer, divergence in layer_divergences(model, kinds, rows, p=p, window=window, unshare=unshare):
                found[layer] = divergence
                progress.advance()
        model.to("cpu")
        chosen = choose_layers(found, len(kept))
        kinds = tuple(kept[0] if layer in chosen else kinds[layer % len(kinds)] for layer in range(layers))
        unshare = unshare and not {"power", "delta"}.isdisjoint(kinds)  # all of these layers may have been chosen
        told = ", ".join(f"{layer} ({found[layer]:.4f})" for layer in chosen)
        print(f"layers of {kept[0]}, with the divergence that the replacement of each alone gives: {told}")
    if not keeps_layers(model.config, kinds, p, unshare):  # a copy of a large model would not fit in memory
        model = swap_mixers(model, kinds, p=p, window=window, unshare=unshare)
    training = TrainingConfig(context=pretrained.context, steps=1, warmup_steps=0)
    config = RunConfig(folder.resolve().name, model.config, DataConfig(), training)
    written = write_run_folder(folder, config, model, tokenizer=text, beside=pretrained.beside)
    tokenizer = BPETokenizer(text)
    if tokenizer.normalizes:
        print(f"the tokenizer of {source} puts texts into the Unicode form NFC", file=sys.stderr)
    if tokenizer.strips:
        print(f"the tokenizer of {source} removes white space beside some of its added tokens", file=sys.stderr)
    return written, model
