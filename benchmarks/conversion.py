"""Compares a converted model with its teacher: `python -m benchmarks.conversion measure RUN --teacher DIR --csv FILE`.

`logits` compares a pretrained model in transformers with its native form. `measure` takes a converted model before or
after distillation and its teacher, on the same held-out rows: the gap at 2,048 tokens and after each stage, and the
loss by position. `report` writes docs/results/conversion.md from all files in benchmarks/results/conversion,
those of `python -m benchmarks.conversion_decoding` among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import csv_file, keep, measured
from benchmarks.pages.conversion_report import PAGE, RESULTS, read_rows, write_report
from sympow.conversion.distillation import load_teacher
from sympow.conversion.swap import kind_of
from sympow.data import open_corpus
from sympow.evaluation import context_losses
from sympow.ops import rotary_frequencies
from sympow.training import load, override, read_metrics
from sympow.training.devices import autocast, resolve_device

PARTS = ("stages", "loss", "positions")


@contextmanager
def exact_angles(model: torch.nn.Module) -> Iterator[None]:
    """Lets a Llama-shaped model of transformers, without a scaling of its frequencies, form its angles in float64."""
    config, rotary = model.config, model.model.rotary_emb
    key_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = rotary_frequencies(key_dim, base=config.rope_parameters["rope_theta"])

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = position_ids[..., None].double() * frequencies
        both = torch.cat([half, half], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    before, rotary.forward = rotary.forward, angles
    try:
        yield
    finally:
        rotary.forward = before


def compare_logits(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns rows with the largest differences between the logits in transformers and here, in float32 on the CPU.

    The native model in float64 gives the exact result, from which the errors of both are computed. transformers
    computes the angles of rotary positions in float32. So there is a second difference with angles in float64 there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sympow.integrations.transformers.pretrained import load_pretrained

    path = Path(options.model)
    where: dict[str, Any] = {"pretrained_model_name_or_path": options.model, "trust_remote_code": False}
    if path.suffix == ".gguf":
        where |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    theirs = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(**where)(options.text.read_text(), return_tensors="pt").input_ids
    ours = load_pretrained(options.model).model
    for length in options.lengths:
        row = tokens[:, :length]
        with torch.no_grad():
            expected, found = theirs(row).logits, ours(row)
            with exact_angles(theirs):
                same_angles = theirs(row).logits
            exact = ours.double()(row)
            ours.float()
        yield (
            {"kind": "logits", "model": path.stem, "text": options.text.name, "tokens": row.shape[1]}
            | {"difference": (found - expected).abs().max().item(), "largest": expected.abs().max().item()}
            | {"same_angles": (found - same_angles).abs().max().item()}
            | {"ours_to_exact": (found - exact).abs().max().item()}
            | {"theirs_to_exact": (expected - exact).abs().max().item()}
        )


def measure(path: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields rows of one converted model and its teacher, each when it is measured."""
    device = resolve_device(options.device)
    run, teacher = load(path, device), load_teacher(options.teacher).to(device).eval()
    names = [kind_of(run.model.config.mixer(layer)) for layer in range(run.model.config.n_layers)]
    about = {"run": Path(path).name, "layers": ",".join(names)}
    models = {"converted": run.model, "teacher": teacher}
    if {"loss", "positions"} & set(options.parts):
        held_out = open_corpus(override(run.config.data, options.data), tokenizer=run.tokenizer).held_out
    if "stages" in options.parts:
        kept = ("step", "stage", "tokens", "seconds", "held_out_loss", "teacher_loss", "gap")
        for row in read_metrics(path):
            if "gap" in row:
                yield about | {"kind": "stage"} | {name: row[name] for name in kept}
    precision = "bf16" if device.type == "cuda" else "float32"
    if "loss" in options.parts:
        with autocast(precision, device):
            losses = {each: context_losses(model, held_out, options.context, options.rows).loss
                      for each, model in models.items()}  # fmt: skip
        yield about | {"kind": "loss", "context": options.context, "rows": options.rows} | losses
    for each, model in models.items():
        own = about | {"model": each}
        if "positions" in options.parts:
            with autocast(precision, device):
                curve = context_losses(model, held_out, options.positions, options.position_rows)
            bins = [{"start": piece.start, "end": piece.end, "loss": piece.loss} for piece in curve.bins]
            yield own | {"kind": "positions", "rows": options.position_rows, "bins": bins}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    logits = commands.add_parser("logits", help="logits of a pretrained model here and in transformers")
    logits.add_argument("model", help="a folder of Hugging Face, or a GGUF file")
    logits.add_argument("--text", type=Path, default=Path("docs/math.md"), help="(default: docs/math.md)")
    logits.add_argument("--lengths", type=int, nargs="+", default=[64, 512])
    one = commands.add_parser("measure", help="a converted model against its teacher")
    one.add_argument("run", help="a run's folder or a checkpoint")
    one.add_argument("--teacher", required=True, help="a run's folder, or what sympow convert reads")
    one.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    one.add_argument("--data", metavar="key=value", action="append", default=[], help="another corpus than the run's")
    one.add_argument("--context", type=int, default=2048, help="of the gap (default: 2048)")
    one.add_argument("--rows", type=int, default=64, help="(default: 64)")
    one.add_argument("--positions", type=int, default=32768, help="tokens (default: 32768)")
    one.add_argument("--position-rows", type=int, default=8, help="(default: 8)")
    one.add_argument("--device", default="auto", help="(default: auto)")
    for command in (logits, one):
        command.add_argument("--csv", type=csv_file, required=True, help=f"the rows, as a file of {RESULTS}")
    commands.add_parser("report", help="write docs/results/conversion.md and its figures")
    options = parser.parse_args()
    if options.command == "report":
        from benchmarks.pages.conversion_figures import draw_figures

        print(write_report(), *draw_figures(read_rows(), PAGE.with_suffix("")), sep="\n")
        return
    device = "cpu" if options.command == "logits" else resolve_device(options.device).type
    found = compare_logits(options) if options.command == "logits" else measure(options.run, options)
    about = measured(device)
    keep(options.csv, (row | about for row in found))


if __name__ == "__main__":
    main()
