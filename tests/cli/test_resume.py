"""Runs that are killed and continued, as processes: the end is that of a run left alone, bit for bit.

The processes are forked from a server that has the package imported, as torch's own import takes seconds.
"""

import dataclasses
import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from sympow.cli import main
from sympow.training import latest, load_checkpoint, read_metrics
from sympow.training.checkpoint import latest_step
from tests.ranks import PRELOAD

STEPS, EVERY = 90, 3
RECIPE = f"""
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

def tiny():
    return RunConfig(
        "tiny",
        ModelConfig(vocab_size=256, d_model=32, n_layers=2, n_heads=2,
                    mixers=(MixerConfig("power"), MixerConfig("softmax"))),
        DataConfig(kind="text", path="corpus", tokenizer="bytes"),
        TrainingConfig(context=64, batch_size=4, micro_batch_size=2, steps={STEPS}, warmup_steps=5, log_every=1,
                       checkpoint_every={EVERY}, evaluate_every=10, evaluation_batches=1),
    )
"""


class Trainer:
    """`python -m sympow train tiny.py --out RUN --quiet` in forked processes."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def start(self, run: Path):
        self.patch.setattr(sys, "argv", ["sympow", "train", "tiny.py", "--out", str(run), "--quiet"])  # inherited
        process = self.context.Process(target=runpy.run_module, args=("sympow", None, "__main__"))
        process.start()
        return process

    def finish(self, run: Path) -> None:
        process = self.start(run)
        process.join()
        assert process.exitcode == 0


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer in a folder with a corpus."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "corpus").mkdir()
    draw = random.Random(0)
    for i in range(5):
        words = (draw.choice(["power", "state", "of", "the", "key", "value"]) for _ in range(400))
        (folder / "corpus" / f"{i}.txt").write_text(" ".join(words))
    (folder / "tiny.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Trainer(patch)


@pytest.fixture(scope="module")
def whole(trainer, tmp_path_factory):
    """What an uninterrupted run ends with."""
    run = tmp_path_factory.mktemp("whole") / "run"
    trainer.finish(run)
    return end(run)


def wait_for_step(run: Path, step: int, process) -> None:
    """Until the metrics of a step are written, or the process has ended."""
    while process.is_alive():
        rows = read_metrics(run)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.005)


def bits(value):
    """Nested tensors as something that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def end(run: Path):
    """All that a run ends with, but the times."""
    checkpoint = load_checkpoint(latest(run))
    fields = {field.name: bits(getattr(checkpoint, field.name)) for field in dataclasses.fields(checkpoint)}
    timed = ("seconds", "tokens_per_second")
    rows = [{name: value for name, value in row.items() if name not in timed} for row in read_metrics(run)]
    return {name: value for name, value in fields.items() if name != "seconds"}, rows


def test_killed_ten_times_at_random_steps(trainer, whole, tmp_path):
    run, draw, lost = tmp_path / "killed", random.Random(1), 0
    for _ in range(10):
        process = trainer.start(run)
        wait_for_step(run, latest_step(run) + draw.randint(1, 6), process)
        time.sleep(draw.random() * 0.01)  # anywhere in a step
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        lost += read_metrics(run)[-1]["step"] - latest_step(run)
        if latest_step(run):
            load_checkpoint(latest(run))  # whole, whenever the kill came
    assert latest_step(run) < STEPS and lost > 0  # else nothing was tested
    trainer.finish(run)
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
    assert end(run) == whole


def test_a_signal_saves_and_the_same_command_continues(trainer, whole, tmp_path):
    run = tmp_path / "run"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = latest_step(run)
        process = trainer.start(run)
        wait_for_step(run, before + 10, process)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == code
        assert before + 10 <= latest_step(run) < STEPS
        assert read_metrics(run)[-1]["step"] == latest_step(run)
    trainer.finish(run)
    assert end(run) == whole


def test_a_second_process_in_the_folder_ends_at_once_and_changes_nothing(trainer, whole, tmp_path, capfd):
    run = tmp_path / "run"
    first = trainer.start(run)
    wait_for_step(run, 1, first)
    stop(first.pid)
    found = []
    try:
        held = contents(run)
        for options in ([], ["--restart"], ["training.seed=1"]):
            code = main(["train", "tiny.py", "--out", str(run), "--quiet", *options])
            found.append((options, code, capfd.readouterr().err, contents(run) != held))
    finally:
        first.kill()  # which leaves nothing behind that locks the folder
        first.join()
    line = f"sympow: error: {run} is in use, another process trains there: wait for it, or give another folder\n"
    assert found == [(options, 2, line, False) for options in ([], ["--restart"], ["training.seed=1"])]
    trainer.finish(run)
    assert end(run) == whole


def stop(pid: int) -> None:
    """Stops a process, and waits until all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        file.read_text().rpartition(")")[2].split()[0] != "T" for file in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.005)


def contents(folder: Path) -> dict[Path, tuple[float, bytes | None]]:
    """When everything in a folder was changed, and the bytes of files."""
    return {path: (path.stat().st_mtime, path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")}
