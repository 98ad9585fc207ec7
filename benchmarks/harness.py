"""Scores of lm-evaluation-harness (`pip install lm-eval`): `python -m benchmarks.harness FOLDER --csv FILE`.

A folder is one of Hugging Face, such as `sympow export RUN --out FOLDER` writes. The tasks are those in
benchmarks/harness_tasks; they need no network. `--include` adds a folder of others.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import csv_file, keep, measured

TASKS = Path(__file__).parent / "harness_tasks"


def score(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for every task and metric of one model."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    import sympow.integrations.transformers  # noqa: F401  (registers the models with the Auto classes)

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.eos_token is None:  # the harness puts it in front of texts, and pads with it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(options.end)
    tasks = TaskManager(include_path=[str(each) for each in (TASKS, *options.include)], include_defaults=False)
    model = HFLM(
        str(folder), tokenizer=tokenizer, dtype=options.dtype, device=options.device, batch_size=options.batch,
        max_length=options.max_length,
    )  # fmt: skip
    found = lm_eval.simple_evaluate(
        model=model, tasks=options.tasks, task_manager=tasks, limit=options.limit, bootstrap_iters=0
    )
    if found is None:
        raise RuntimeError("lm-evaluation-harness gave no results: only the first rank has them")
    rows = []
    for task, values in found["results"].items():
        own = {"kind": "harness", "run": folder.name, "task": task, "harness": lm_eval.__version__}
        own["samples"] = found["n-samples"][task]["effective"]
        for name, value in values.items():
            metric, _, kept = name.partition(",")
            if kept and not metric.endswith("_stderr"):
                rows.append(own | {"metric": metric, "value": float(value)})
    return rows


def main() -> None:
    """Prints the rows, and writes them to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="of Hugging Face, with tokenizers")
    parser.add_argument("--tasks", nargs="+", default=["pages", "passkeys"], help="(default: pages passkeys)")
    parser.add_argument("--include", type=Path, action="append", default=[], help="a folder with further tasks")
    parser.add_argument("--limit", type=int, help="samples of each task (default: all)")
    parser.add_argument("--batch", type=int, default=8, help="rows at once (default: 8)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a row (default: 2048)")
    parser.add_argument("--end", type=int, default=0, help="the token between texts, if none is named (default: 0)")
    parser.add_argument("--dtype", default="float32", help="of the weights (default: float32)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--csv", type=csv_file, required=True, help="where the rows go")
    options = parser.parse_args()
    about = measured(torch.device(options.device).type)
    keep(options.csv, (row | about for folder in options.folders for row in score(folder, options)))


if __name__ == "__main__":
    main()
