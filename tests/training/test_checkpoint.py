"""Checkpoints: written whole or not at all, read as data, refused in one line."""

import errno
import io
import math
import os
import pickle
import zipfile

import pytest
import torch
from torch import nn

from sympow import files
from sympow.training import Checkpoint, CheckpointError, fine_tuning_run, latest, load_checkpoint, save_checkpoint
from sympow.training.checkpoint import checkpoint_path, latest_step, list_checkpoints, restore_model
from tests.pickles import Evil


def example(step: int = 3) -> Checkpoint:
    return Checkpoint(
        config={"name": "x", "training": {"betas": [0.9, 0.95]}},
        model={"weight": torch.arange(600.0).reshape(20, 30)},
        optimizer={"state": {0: {"exp_avg": torch.ones(20, 30)}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        step=step,
        tokens=100,
        seconds=0.5,
        data={"batches": {"corpus": "abc"}, "position": step},
        rng={"cpu": torch.get_rng_state()},
    )


def names(run_dir) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_was_saved_comes_back(tmp_path):
    path = save_checkpoint(example(), tmp_path, keep=1)
    assert path == checkpoint_path(tmp_path, 3) == latest(tmp_path)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.model["weight"], example().model["weight"])
    assert torch.equal(loaded.rng["cpu"], example().rng["cpu"])
    for name in ("config", "step", "tokens", "seconds", "data"):
        assert getattr(loaded, name) == getattr(example(), name)
    assert loaded.optimizer["param_groups"] == example().optimizer["param_groups"]


def test_the_newest_are_kept_in_order_of_their_steps(tmp_path):
    assert latest(tmp_path) is None and latest_step(tmp_path) == 0
    for step in (90_000_000, 100_000_000, 110_000_000):  # one digit more: names do not sort as numbers do
        save_checkpoint(example(step), tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100000000.pt", "step-110000000.pt"]
    assert latest_step(tmp_path) == 110_000_000


def test_strange_files_in_the_folder_are_left_alone(tmp_path):
    save_checkpoint(example(1), tmp_path, keep=1)
    strange = tmp_path / "checkpoints" / "step-00000009.pt.bak"
    strange.write_text("mine")
    (tmp_path / "checkpoints" / "step-best.pt").write_text("mine too")
    save_checkpoint(example(2), tmp_path, keep=1)
    assert names(tmp_path) == ["step-00000002.pt", "step-00000009.pt.bak", "step-best.pt"]
    assert latest_step(tmp_path) == 2


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000001.pt.tmp").write_bytes(b"PK half")
    save_checkpoint(example(2), tmp_path, keep=1)
    assert names(tmp_path) == ["step-00000002.pt"]


class FullDisk(io.FileIO):
    """A file on a disk that has 1,000 bytes left."""

    def write(self, data):
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    good = save_checkpoint(example(1), tmp_path, keep=1)
    monkeypatch.setattr(files, "open", FullDisk, raising=False)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(example(2), tmp_path, keep=1)
    path = checkpoint_path(tmp_path, 2)
    assert str(caught.value) == (
        f"cannot save checkpoint {path}: No space left on device; the last good one stays: {good}"
    )
    assert names(tmp_path) == ["step-00000001.pt"]
    assert load_checkpoint(good).step == 1


def test_full_disk_at_the_first_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "open", FullDisk, raising=False)
    with pytest.raises(CheckpointError, match="No space left on device; there is no older one"):
        save_checkpoint(example(2), tmp_path, keep=1)
    assert names(tmp_path) == []


def test_an_error_that_is_not_the_disks_is_not_called_one(tmp_path):
    broken = example()
    broken.model = {"weight": lambda: 0}
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(broken, tmp_path, keep=1)
    assert names(tmp_path) == []


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9, 0.999])
def test_truncated(tmp_path, part):
    older = save_checkpoint(example(1), tmp_path, keep=2)
    path = save_checkpoint(example(2), tmp_path, keep=2)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    assert refusal(path) == f"{path} is truncated; remove it to continue from {older}"
    older.unlink()
    assert refusal(path) == f"{path} is truncated"


def test_damaged(tmp_path):
    path = save_checkpoint(example(), tmp_path, keep=1)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(600.0).numpy().tobytes()) + 50] ^= 1
    path.write_bytes(data)
    assert "is damaged (wrong checksum of " in refusal(path)


def test_foreign_files(tmp_path):
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(b"")
    assert refusal(path).endswith("is no sympow checkpoint: it is empty")
    path.write_bytes(b"hello world")
    assert refusal(path).endswith("is no sympow checkpoint: it is not an archive as torch.save writes it")
    path.write_bytes(b"GGUF" + bytes(20))
    assert refusal(path).endswith("it is a GGUF file, of which `sympow convert` makes a run")
    with pytest.raises(FileNotFoundError, match=r"00000001\.pt is no checkpoint in the folder of a run"):
        fine_tuning_run(path)
    with pytest.raises(FileNotFoundError, match=r"^/dev/null is no checkpoint in the folder of a run"):
        fine_tuning_run("/dev/null")
    evil = Evil(tmp_path / "executed")
    path.write_bytes(pickle.dumps(evil))
    assert refusal(path).endswith("it is not an archive as torch.save writes it")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    assert refusal(path).endswith("it is not an archive of plain tensors")
    torch.save({"format": evil}, path)
    assert refusal(path).endswith("it is not an archive of plain tensors")
    assert not evil.folder.exists()
    torch.save(nn.Linear(2, 2).state_dict(), path)
    assert refusal(path).endswith("is no sympow checkpoint: it has no 'sympow-checkpoint' mark")
    torch.save([1, 2], path)
    assert refusal(path).endswith("is no sympow checkpoint: it has no 'sympow-checkpoint' mark")


def test_versions_and_missing_parts(tmp_path):
    path = save_checkpoint(example(), tmp_path, keep=1)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "version": 2}, path)
    assert refusal(path).endswith("has format version 2; this sympow reads up to 1: upgrade sympow")
    del content["rng"]
    torch.save(content, path)
    assert refusal(path).endswith("is no complete sympow checkpoint: it has no 'rng'")


@pytest.mark.parametrize("name", ["config", "model", "optimizer", "step", "tokens", "seconds", "data", "rng"])
def test_parts_of_another_type(tmp_path, name):
    path = save_checkpoint(example(), tmp_path, keep=1)
    torch.save({**torch.load(path, weights_only=True), name: "x"}, path)
    assert refusal(path).endswith(f"is no sympow checkpoint: its {name!r} is of type str")


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {tmp_path}/x.pt"):
        load_checkpoint(tmp_path / "x.pt")


def test_weights_must_fit_the_model():
    model = nn.Linear(3, 2)
    state = nn.Linear(3, 2).state_dict()
    restore_model(model, state, "x.pt")
    assert torch.equal(model.weight, state["weight"])
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"x.pt does not fit the model: 'weight' has shape \[2, 4\], .* \[2, 3\]"):
        restore_model(model, nn.Linear(4, 2).state_dict(), "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt does not fit the model: it has no weight 'bias'"):
        restore_model(model, {"weight": state["weight"]}, "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt does not fit the model: 'weight' is no tensor"):
        restore_model(model, {**state, "weight": 3}, "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt does not fit the model: the model has no weight 'extra'"):
        restore_model(model, {**state, "extra": torch.ones(1)}, "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt does not fit the model: 'weight' is torch.complex64, weights are"):
        restore_model(model, {**state, "weight": state["weight"] + 1j}, "x.pt")
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match=rf"x.pt does not fit .*: 'weight' is {dtype}, weights are real"):
            restore_model(model, {**state, "weight": state["weight"].to(dtype)}, "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt cannot be used: its weight 'weight' holds values .* not finite"):
        restore_model(model, {**state, "weight": state["weight"].double() * 1e300}, "x.pt", dtype=torch.float32)
    for value in (math.nan, math.inf):
        with pytest.raises(CheckpointError, match=r"x.pt cannot be used: its weight 'bias' holds values .* not finite"):
            restore_model(model, {**state, "bias": torch.tensor([0, value])}, "x.pt")
    assert torch.equal(model.weight, before)
