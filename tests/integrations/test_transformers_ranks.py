"""`Trainer` and Accelerate on two processes: the loss falls, ranks stay equal, and resumed runs end as whole ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes tells of its runs."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    # Without the device's name Accelerate calls it "cpu:0", on which torch.load cannot place an optimizer's state.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu", "PYTHONPATH": paths}
    command += ["-m", "tests.integrations.trainer_ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("train", ["by_trainer", "by_accelerate"])
def test_two_processes_train_and_resume(ranks, train):
    first, second = ranks
    whole, resumed = first[f"{train} False"], first[f"{train} True"]
    assert whole["ranks"] == 2
    assert whole["losses"][-1] < 0.7 * whole["losses"][0]
    assert whole["weights"] == second[f"{train} False"]["weights"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["losses"][-6:] == whole["losses"][-6:]
