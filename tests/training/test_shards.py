"""Tensors in a folder: what was written comes back, and nothing in a damaged or foreign folder is executed or taken."""

import errno
import os
import pickle

import pytest
import torch

from sympow.training import CheckpointError, load_checkpoint, save_checkpoint
from sympow.training import checkpoint as module
from sympow.training.checkpoint import HEADER, Checkpoint, is_checkpoint, latest, list_checkpoints
from sympow.training.ranks import Ranks
from sympow.training.shards import ShardError, read_shards, write_shards
from tests.pickles import Evil

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class FirstOfTwo(Ranks):
    """Hears nothing of the other, as if it had nothing to add."""

    def sum(self, value: float) -> float:
        return value

    def max(self, value: float) -> float:
        return value


TWO = FirstOfTwo(size=2)


@pytest.fixture
def folder(tmp_path):
    """A folder of two tensors."""
    write_shards(tmp_path / "x", {"a.b": torch.arange(600.0).reshape(20, 30), "step": torch.tensor(3)})
    return tmp_path / "x"


def whole(name: str) -> None:
    return None


def refusal(folder) -> str:
    with pytest.raises(ShardError) as caught:
        read_shards(folder, whole)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_written_comes_back(folder):
    tensors = read_shards(folder, whole)
    assert tensors.keys() == {"a.b", "step"} and tensors["step"] == 3
    assert torch.equal(tensors["a.b"], torch.arange(600.0).reshape(20, 30))


def test_truncated_and_missing(folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    assert refusal(folder) == f"is truncated: {file.name} is missing or too short"
    file.unlink()
    assert refusal(folder) == f"is truncated: {file.name} is missing or too short"
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])
    assert refusal(folder).startswith("is damaged (")
    (folder / ".metadata").unlink()
    assert refusal(folder).startswith("is damaged (")


def test_damaged(folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(bytes(len(file.read_bytes())))
    assert refusal(folder).startswith("is damaged (")


def test_foreign_contents_are_not_executed(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    assert refusal(folder) == "is damaged (its table of contents names posix.mkdir)"
    assert not (tmp_path / "executed").exists()


def test_other_objects_are_refused(tmp_path):
    write_shards(tmp_path / "x", {"a": Evil(tmp_path / "executed")})
    assert refusal(tmp_path / "x") == "holds something else than tensors: 'a'"
    assert not (tmp_path / "executed").exists()


# --------------------------------------------------------------------------------------- as a checkpoint


@pytest.fixture
def save(tmp_path):
    """save(step) -> the checkpoint that two ranks would have written, this process being the first, in a run folder."""

    def write(step: int, keep: int = 2):
        weights = {"weight": torch.full((4, 5), float(step))}
        state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 5) * i} for i in range(11)}
        checkpoint = Checkpoint(
            config={"name": "x"},
            model=weights,
            optimizer={"state": state, "param_groups": [{"lr": 0.1, "params": list(range(11))}]},
            step=step,
            tokens=100,
            seconds=0.5,
            data={"position": step},
            rng={"cpu": torch.get_rng_state()},
        )
        return save_checkpoint(checkpoint, tmp_path, keep, TWO), checkpoint

    return write


def test_a_checkpoint_comes_back(save, tmp_path):
    path, saved = save(3)
    assert path == tmp_path / "checkpoints" / "step-00000003.shards" == latest(tmp_path) and is_checkpoint(path)
    loaded = load_checkpoint(path)
    for name in ("config", "step", "tokens", "seconds", "data"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    assert loaded.optimizer["param_groups"] == saved.optimizer["param_groups"]
    assert list(loaded.optimizer["state"]) == list(range(11))
    assert torch.equal(loaded.optimizer["state"][10]["exp_avg"], torch.full((4, 5), 10.0))


def test_the_newest_are_kept_and_unfinished_ones_removed(save, tmp_path):
    unfinished = tmp_path / "checkpoints" / ".step-00000001.shards.tmp"
    unfinished.mkdir(parents=True)
    for step in (1, 2, 3):
        save(step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002.shards", "step-00000003.shards"]
    assert not unfinished.exists()


def test_a_damaged_checkpoint_names_the_older_one(save):
    older, _ = save(1)
    path, _ = save(2)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=rf"^{path} is damaged \(.*\); remove it to continue from {older}$"):
        load_checkpoint(path)
    (path / HEADER).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{path / HEADER} is no sympow checkpoint: it is empty"):
        load_checkpoint(path)


@pytest.mark.parametrize("at", ["write_shards", "_save_file"])
def test_full_disk_leaves_the_last_good_checkpoint(save, tmp_path, monkeypatch, at):
    good, _ = save(1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, at, full)
    with pytest.raises(CheckpointError, match=f"No space left on device; the last good one stays: {good}"):
        save(2)
    assert list_checkpoints(tmp_path) == [good] and load_checkpoint(good).step == 1


def test_a_disk_error_of_the_library_is_told_in_one_line(folder):
    with pytest.raises((OSError, ShardError)) as caught:
        write_shards(folder / ".metadata" / "below a file", {"a": torch.ones(2)})
    assert "\n" not in str(caught.value)


def test_a_kill_while_an_old_folder_is_removed_leaves_nothing_that_looks_whole(save, tmp_path, monkeypatch):
    def killed(folder):
        (folder / HEADER).unlink()
        raise KeyboardInterrupt

    save(1, keep=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.shutil, "rmtree", killed)
        save(2, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002.shards"]
    save(3, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003.shards"]
