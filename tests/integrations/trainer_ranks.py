"""Trains a small model by the Trainer and by Accelerate, wholly and resumed half way, on every rank of torchrun.

Each rank writes FOLDER/RANK.json: the losses of each run, and a hash of the weights that it ended with.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from sympow.integrations.transformers import SympowConfig, SympowForCausalLM
from tests.integrations.small import small_config

STEPS, HALF = 12, 6
ROWS = [{"input_ids": row, "labels": row} for row in (torch.arange(16) + torch.arange(24)[:, None]) % 7]


def new_model() -> SympowForCausalLM:
    set_seed(0)
    return SympowForCausalLM(SympowConfig(model=small_config("hybrid")))


def hashed(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def by_trainer(folder: Path, resumed: bool) -> dict:
    """One run of the Trainer; a resumed one begins at the checkpoint that a whole one wrote half way."""
    model = new_model()
    arguments = TrainingArguments(
        str(folder / ("resumed" if resumed else "whole")), max_steps=STEPS, per_device_train_batch_size=2,
        learning_rate=1e-2, logging_steps=1, save_steps=HALF, report_to=[], use_cpu=True, ddp_backend="gloo",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{HALF}") if resumed else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"ranks": arguments.world_size, "losses": losses, "weights": hashed(model)}


def by_accelerate(folder: Path, resumed: bool) -> dict:
    """One run of a loop with Accelerate, in two halves; a resumed one reads the state saved between them."""
    accelerator = Accelerator(cpu=True)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    wrapped, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(ROWS, batch_size=2))
    losses = []
    for half in range(resumed, STEPS // HALF):
        if half:
            (accelerator.load_state if resumed else accelerator.save_state)(str(folder / "accelerate"))
        for batch in rows:
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.wait_for_everyone()  # the first rank may still be writing
    return {"ranks": accelerator.num_processes, "losses": losses, "weights": hashed(model)}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    runs = {f"{train.__name__} {resumed}": train(folder, resumed) for train in (by_trainer, by_accelerate)
            for resumed in (False, True)}  # fmt: skip
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
