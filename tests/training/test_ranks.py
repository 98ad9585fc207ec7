"""Training on several ranks: the losses of one rank, and checkpoints that any number of ranks continues."""

import dataclasses
import itertools
import multiprocessing
import os
import re
import runpy
import signal
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from sympow.recipes import load_recipe
from sympow.training import (
    ExecutionConfig,
    RunConfig,
    latest,
    load_checkpoint,
    load_model,
    override,
    read_metrics,
    train,
)
from sympow.training.checkpoint import latest_step, list_checkpoints
from sympow.training.ranks import GATHERED, Ranks, gathered_together, join, launched
from sympow.training.run_folder import open_run_folder
from sympow.training.step import held_out_loss
from tests.ops.contract import FLOAT64_TOLERANCE
from tests.ranks import PRELOAD, run_ranks
from tests.tiny_runs import forget_last_checkpoint

STEPS = 4
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@contextmanager
def float64():
    """Models made in it are of float64, so that ranks and one rank agree to its rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_all(jobs, gathered: int = GATHERED) -> None:
    """On this rank, or alone: (config, batches, folder) of every job."""
    for config, batches, run in jobs:
        dtype = float64() if config.training.precision == "float32" else nullcontext()
        with dtype, mock.patch("sympow.training.ranks.GATHERED", gathered):
            train(config, batches, run, held_out=batches, quiet=True)


@pytest.fixture
def make_run(make_config, make_batches, tmp_path):
    """make_run(name, precision, device, **fields of ExecutionConfig) -> a job of `train_all`: four passes a step."""

    def make(name: str, precision: str = "float32", device: str = "cpu", model: dict | None = None, **execution):
        config = make_config(model=model, batch_size=4, micro_batch_size=1, steps=STEPS, evaluate_every=2,
                             checkpoint_every=2, evaluation_batches=3, precision=precision, device=device)  # fmt: skip
        data = dataclasses.replace(config.data, pack=False)
        config = dataclasses.replace(config, data=data, execution=ExecutionConfig(**execution))
        return config, make_batches(config), tmp_path / name

    return make


def numbers(run) -> torch.Tensor:
    """Losses, gradient norms, tokens and held-out losses by step."""
    names = ("step", "loss", "grad_norm", "tokens", "held_out_loss")
    return torch.tensor([[row.get(name, 0.0) for name in names] for row in read_metrics(run)], dtype=torch.float64)


def losses(run) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def assert_same_numbers(run, expected) -> None:
    torch.testing.assert_close(numbers(run), numbers(expected), rtol=FLOAT64_TOLERANCE, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_any_ranks_train_as_one_does_and_continue_each_other(make_run, device):
    """Two data ranks; two context ranks; two of each; with and without activation checkpointing."""
    make_run = partial(make_run, device=device)
    one, rough = make_run("one"), make_run("rough", "bf16")
    train_all([one, rough])
    two, split = make_run("two"), make_run("split", context_parallel=2, checkpoint_activations=True)
    taken = (*one[:2], forget_last_checkpoint(one[2], "one, then two"))  # a file
    rough_split = make_run("rough, split", "bf16", context_parallel=2)
    run_ranks(train_all, 2, [two, split, taken, rough_split], device=device)
    for _, _, run in (two, split, taken):
        assert_same_numbers(run, one[2])
        assert latest(run).name == f"step-{STEPS:08d}.shards"
        weights, expected = (load_checkpoint(latest(x)).model for x in (run, one[2]))
        torch.testing.assert_close(weights, expected, rtol=0, atol=FLOAT64_TOLERANCE)

    assert losses(rough_split[2]) == pytest.approx(losses(rough[2]), rel=0.02)
    assert losses(rough_split[2]) != losses(one[2])
    assert {tensor.dtype for tensor in load_checkpoint(latest(rough_split[2])).model.values()} == {torch.float32}

    back = forget_last_checkpoint(two[2], "two, then one")  # a folder
    train_all([(*one[:2], back)])
    assert_same_numbers(back, one[2])
    assert [path.suffix for path in list_checkpoints(back)] == [".shards", ".pt"]

    with float64():
        loaded = load_model(two[2], dtype=None)
        assert loaded.step == STEPS and loaded.run_dir == two[2] and load_model(latest(two[2])).step == STEPS
        expected = read_metrics(one[2])[-1]["held_out_loss"]
        found = held_out_loss(loaded.model, two[1], two[0].training, torch.device("cpu"))
    assert found == pytest.approx(expected, rel=FLOAT64_TOLERANCE)

    if device == "cpu" or torch.cuda.device_count() >= 4:
        grid = (*split[:2], forget_last_checkpoint(two[2], "two, then four"))
        run_ranks(partial(train_all, gathered=1), 4, [grid], device=device)  # every block by itself
        assert_same_numbers(grid[2], one[2])


@pytest.mark.parametrize(
    "model", [{"body": "llama", "n_kv_heads": 1, "tie_embeddings": False}, {"body": "rwkv7"}], ids=lambda m: m["body"]
)
def test_bodies_on_two_ranks(make_run, model):
    """Sharded over two data ranks, and every row over two context ranks."""
    make_run = partial(make_run, model=model)
    one, two, split = make_run("one"), make_run("two"), make_run("split", context_parallel=2)
    train_all([one])
    run_ranks(train_all, 2, [two, split])
    for _, _, run in (two, split):
        assert_same_numbers(run, one[2])
        weights, expected = (load_checkpoint(latest(x)).model for x in (run, one[2]))
        torch.testing.assert_close(weights, expected, rtol=0, atol=FLOAT64_TOLERANCE)


# ---------------------------------------------------------------------------------- as torchrun starts it


RECIPE = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import ExecutionConfig, RunConfig, TrainingConfig

def tiny():
    return RunConfig(
        "tiny",
        ModelConfig(vocab_size=256, d_model=16, n_layers=1, n_heads=2),
        DataConfig(kind="text", path="corpus", tokenizer="bytes", pack=False),
        TrainingConfig(context=32, batch_size=2, micro_batch_size=1, steps=14, warmup_steps=5, log_every=1,
                       checkpoint_every=3, evaluate_every=10, evaluation_batches=1, device="cpu"),
        ExecutionConfig(context_parallel=2),
    )
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(run): `torchrun --nproc-per-node 2 -m sympow.cli train tiny.py --out RUN`, without torchrun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for i in range(3):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"power state of the key {i} value " * 40)
    (tmp_path / "tiny.py").write_text(RECIPE)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = []

    def run_command(run):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [context.Process(target=command, args=(rank, port, str(tmp_path), run)) for rank in range(2)]
        for process in processes:
            process.start()
        started.extend(processes)
        return processes

    yield run_command
    for process in started:  # of a test that failed
        process.kill()


def command(rank: int, port: int, folder: str, run: str) -> None:
    import sys

    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "XDG_CACHE_HOME": f"{folder}/cache",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    sys.argv = ["sympow", "train", "tiny.py", "--out", run]
    runpy.run_module("sympow.cli", None, "__main__")


def exit_codes(processes) -> list[int]:
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def wait(reached: Callable[[], bool], processes) -> None:
    """Until something is reached, or a process has ended."""
    while all(process.is_alive() for process in processes) and not reached():
        time.sleep(0.005)


def end(run) -> tuple:
    checkpoint = load_checkpoint(latest(run))
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in read_metrics(run)]
    return checkpoint.model, checkpoint.optimizer, checkpoint.tokens, checkpoint.data, rows


def test_killed_and_stopped_runs_end_as_whole_ones(start):
    assert exit_codes(start("whole")) == [0, 0]

    processes = start("parts")
    wait(lambda: any(row["step"] >= 5 for row in read_metrics("parts")), processes)
    for process in processes:
        process.kill()
    assert exit_codes(processes) == [-signal.SIGKILL] * 2
    load_checkpoint(latest("parts"))  # whole, whenever the kill came
    before, processes = latest_step("parts"), start("parts")
    wait(lambda: latest_step("parts") > before, processes)
    os.kill(processes[1].pid, signal.SIGTERM)  # one rank is asked, all stop
    assert exit_codes(processes) == [143, 143]
    assert before < latest_step("parts") < 14 and read_metrics("parts")[-1]["step"] == latest_step("parts")
    assert exit_codes(start("parts")) == [0, 0]
    parts, whole = end("parts"), end("whole")
    torch.testing.assert_close(parts[:2], whole[:2], rtol=0, atol=0)
    assert parts[2:] == whole[2:]


# ------------------------------------------------------------------------------------------------ refusals


def refusals(config: RunConfig) -> list[str]:
    messages = []
    for parts, passes in ((4, 2), (1, 3)):
        training = dataclasses.replace(config.training, batch_size=passes, micro_batch_size=1)
        execution = ExecutionConfig(context_parallel=parts)
        try:
            join(dataclasses.replace(config, training=training, execution=execution), torch.device("cpu"))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_do_not_fit_are_refused(make_run):
    config, *_ = make_run("run", context_parallel=2)
    alone = "execution.context_parallel = 2 needs a multiple of as many ranks, got 1: start with torchrun"
    with pytest.raises(ValueError, match=alone):
        join(config, torch.device("cpu"))
    for messages in run_ranks(refusals, 2, config):
        assert messages == [
            "execution.context_parallel = 4 needs a multiple of as many ranks, got 2: start with torchrun "
            "--nproc-per-node 4",
            "2 data ranks cannot share the 3 passes of a step: training.batch_size / training.micro_batch_size must be "
            "a multiple of them",
        ]


def test_the_ranks_of_the_pages_commands_can_share_the_recipes_rows():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "distributed.md").read_text("utf-8")
    commands = re.findall(r"torchrun (.*?-m sympow.cli train .*?)\n(?! )", page.replace("\\\n", " "))
    assert len(commands) == 5
    for command in commands:
        words = command.split()
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        ranks = nodes * int(words[words.index("--nproc-per-node") + 1])
        recipe = words.index("train") + 1
        config = override(load_recipe(words[recipe]), [word for word in words[recipe:] if "=" in word])
        assert ranks % config.execution.context_parallel == 0
        assert config.training.passes_per_step % (ranks // config.execution.context_parallel) == 0


def test_one_gpu_for_several_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = r"training\.device is one GPU, 'cuda:1'; on several ranks it is 'cuda' or 'auto'"
    with pytest.raises(ValueError, match=message), launched(torch.device("cuda:1")):
        pass


def folders_of_their_own(config: RunConfig, folder) -> str:
    ranks = join(config, torch.device("cpu"))
    opening = open_run_folder(folder / f"disk {ranks.rank}" / "run", config, ranks)
    with pytest.raises((FileNotFoundError, RuntimeError)) as caught, opening:
        pass
    return str(caught.value)


def in_use(config: RunConfig, folder) -> str:
    ranks = join(config, torch.device("cpu"))
    with pytest.raises(RuntimeError) as caught, open_run_folder(folder, config, ranks):
        pass
    return str(caught.value)


def test_ranks_end_together_where_another_process_trains(make_run, tmp_path):
    config, *_ = make_run("run")
    with open_run_folder(tmp_path / "run", config):
        first, second = run_ranks(in_use, 2, config, tmp_path / "run")
    assert "run is in use, another process trains there: " in first
    assert second == "another rank failed, with an error of its own"


def test_a_folder_that_not_all_ranks_see_is_refused(make_run, tmp_path):
    config, *_ = make_run("run")
    first, second = run_ranks(folders_of_their_own, 2, config, tmp_path)
    assert first == "another rank failed, with an error of its own"
    assert second.endswith("run is not on a disk that all ranks share: rank 1 does not see it")


def prepare_slowly(folder) -> bool:
    """Whether a rank sees the file of rank 0, which writes it after the default group would have given up."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=2)
    )
    with Ranks(rank, size).main_first():
        if rank == 0:
            time.sleep(3)
            (folder / "corpus").touch()
        return (folder / "corpus").exists()


def test_ranks_wait_for_the_first_longer_than_for_anything_else(tmp_path):
    assert run_ranks(prepare_slowly, 2, tmp_path) == [True, True]


def test_rows_that_cannot_be_split_are_refused(make_run, make_batches):
    config, *_ = make_run("run")
    ranks = Ranks(rank=1, size=2, context_size=2)
    rows = make_batches(config)[0]
    part = ranks.part(rows)
    assert torch.equal(part.tokens, rows.tokens[:, 8:]) and torch.equal(part.targets, rows.targets[:, 8:])
    with pytest.raises(ValueError, match="packed documents cannot be split over ranks"):
        ranks.part(rows._replace(cu_seqlens=torch.tensor([0, 16])))
    with pytest.raises(ValueError, match="a multiple of 2 tokens to be split over as many ranks, got 15"):
        ranks.part(rows._replace(tokens=rows.tokens[:, 1:]))


def test_blocks_are_gathered_in_groups(monkeypatch):
    monkeypatch.setattr("sympow.training.ranks.GATHERED", 20)
    blocks = [torch.nn.Linear(size, 1, bias=False) for size in (30, 8, 12, 1, 30, 5)]
    groups = gathered_together(blocks)
    assert [[block.in_features for block in group] for group in groups] == [[30], [8, 12], [1], [30], [5]]
    assert list(itertools.chain(*groups)) == blocks
