"""Checkpoints, which are written atomically. Reading one never runs code from it.

A run on one rank writes a file, a run on several ranks a folder. The folder has the same content as the file: tensors
are stored as `shards`, the rest in run.pt. A run can be continued from either on any number of ranks.
"""

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from sympow.files import atomic_write, sync
from sympow.training.ranks import ALONE, Ranks
from sympow.training.shards import ShardError, check_shards, read_shards, write_shards

FORMAT = "sympow-checkpoint"
VERSION = 1
HEADER = "run.pt"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NAME = re.compile(r"step-(\d{8,})\.(pt|shards)")


class CheckpointError(RuntimeError):
    """Says that a checkpoint cannot be written, read or used. The message names the checkpoint and the reason."""


@dataclass
class Checkpoint:
    """Holds all that a run needs to continue as if it had never stopped, in types that `torch.load` reads as data.

    Attributes:
        step: optimizer steps done.
        tokens: target tokens seen.
        seconds: time of training steps so far, with waits for batches, without held-out losses and checkpoints.
        data: the state of the batches, and the next position in them.
        rng: the states of torch's generators: "cpu", and "cuda" if the run uses it.
    """

    config: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    step: int
    tokens: int
    seconds: float
    data: dict[str, Any]
    rng: dict[str, torch.Tensor]


def checkpoint_path(run_dir: str | os.PathLike[str], step: int, sharded: bool = False) -> Path:
    """Returns the path of the checkpoint of `step` in a run folder."""
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}.{'shards' if sharded else 'pt'}"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is a checkpoint, not the folder of a run, at `path`."""
    return Path(path).is_file() or (Path(path) / HEADER).is_file()


def list_checkpoints(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints of a run folder, oldest first."""
    return _in_folder(Path(run_dir) / "checkpoints")


def latest(run_dir: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint of a run folder, or None."""
    found = list_checkpoints(run_dir)
    return found[-1] if found else None


def latest_step(run_dir: str | os.PathLike[str]) -> int:
    """Returns the step of the newest checkpoint of a run folder; 0 where there is none."""
    path = latest(run_dir)
    return _step(path) if path else 0


def save_checkpoint(checkpoint: Checkpoint, run_dir: str | os.PathLike[str], keep: int, ranks: Ranks = ALONE) -> Path:
    """Writes a checkpoint, then removes all but the newest `keep`.

    On several ranks the checkpoint is a folder, and every rank calls this function.

    Raises CheckpointError if the disk refuses to write (full, over quota, read-only). Then nothing is removed.
    """
    path = checkpoint_path(run_dir, checkpoint.step, sharded=ranks.size > 1)
    try:
        with ranks.together():
            if ranks.main:
                path.parent.mkdir(parents=True, exist_ok=True)
        if ranks.size == 1:
            _save_file(checkpoint, path)
        else:
            _save_folder(checkpoint, path, ranks)
    except (OSError, RuntimeError) as error:
        cause = _disk_error(error)
        if cause is None and not isinstance(error, ShardError):
            raise
        last = latest(run_dir)
        kept = f"the last good one stays: {last}" if last else "there is no older one"
        reason = cause.strerror or cause if cause else error
        raise CheckpointError(f"cannot save checkpoint {path}: {reason}; {kept}") from error
    if ranks.main:
        keep_newest(run_dir, keep)
    return path


def keep_newest(run_dir: str | os.PathLike[str], keep: int) -> None:
    """Removes all checkpoints of a run folder but the newest `keep`, and what killed processes left unfinished."""
    unfinished = (Path(run_dir) / "checkpoints").glob(".step-*.tmp")  # killed while it wrote or removed
    for old in [*unfinished, *list_checkpoints(run_dir)[:-keep]]:
        _remove(old)


def _save_file(checkpoint: Checkpoint, path: Path) -> None:
    content = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    with atomic_write(path) as file:
        torch.save({"format": FORMAT, "version": VERSION, **content}, file)


def _save_folder(checkpoint: Checkpoint, path: Path, ranks: Ranks) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with ranks.together():
        if ranks.main:
            _remove(temporary)
    write_shards(temporary, _flat(checkpoint))
    with ranks.together():
        if ranks.main:
            groups = {"param_groups": checkpoint.optimizer["param_groups"]}
            _save_file(replace(checkpoint, model={}, optimizer=groups), temporary / HEADER)
            sync(temporary)
            _remove(path)
            os.replace(temporary, path)
            sync(path.parent)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads a checkpoint onto the CPU.

    Raises FileNotFoundError where there is none, and CheckpointError for a file that is empty, truncated,
    damaged, no checkpoint of this library, or of a newer version of it. Nothing in the file is executed.
    """
    header = load_header(path)
    return _with_shards(header, Path(path), lambda name: None) if Path(path).is_dir() else header


def load_checkpoint_into(
    header: Checkpoint, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> Checkpoint:
    """Loads the complete checkpoint at `path`, whose header is `header`. Tensors are sharded as those of `model`.

    Every rank calls this function. Raises the errors of `load_checkpoint`.
    """
    if ranks.size == 1 and not path.is_dir():
        return header
    weights = model.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def like(name: str) -> Tensor | None:
        kind, _, rest = name.partition(".")
        if kind == "model":
            return weights.get(rest)
        index = int(rest.partition(".")[0])
        return parameters[index] if index < len(parameters) else None

    if path.is_dir():
        return _with_shards(header, path, like)
    return _with_tensors(header, {name: _placed(tensor, like(name)) for name, tensor in _flat(header).items()})


def load_header(path: str | os.PathLike[str]) -> Checkpoint:
    """Loads a checkpoint without the tensors that are stored in shards. A file has no shards and is loaded completely.

    Raises the errors of `load_checkpoint`.
    """
    path = Path(path)
    if path.is_dir():
        path = path / HEADER
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: expected a run folder, or a checkpoint of one")
    _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise CheckpointError(f"{path} is no sympow checkpoint: it is not an archive of plain tensors") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no sympow checkpoint: it has no {FORMAT!r} mark")
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(f"{path} has format version {version}; this sympow reads up to {VERSION}: upgrade sympow")
    names = [field.name for field in fields(Checkpoint)]
    missing = [name for name in names if name not in content]
    if missing:
        raise CheckpointError(f"{path} is no complete sympow checkpoint: it has no {missing[0]!r}")
    for name, kind in get_type_hints(Checkpoint).items():
        if not isinstance(content[name], get_origin(kind) or kind):
            found = type(content[name]).__name__
            raise CheckpointError(f"{path} is no sympow checkpoint: its {name!r} is of type {found}")
    return Checkpoint(**{name: content[name] for name in names})


def check_whole(path: str | os.PathLike[str]) -> None:
    """Raises the errors of `load_checkpoint` for a checkpoint that is cut or damaged. Shards are not all read."""
    load_header(path)
    if Path(path).is_dir():
        try:
            check_shards(Path(path))
        except ShardError as error:
            raise CheckpointError(f"{path} {error}{_instead(Path(path))}") from error


def restore_model(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Loads the weights of checkpoint `path`; CheckpointError names the first that does not fit `model`.

    With `dtype`, the tensors of `state` become the weights, cast to it if they have another one. The model may then be
    on the meta device.
    """
    own = model.state_dict()
    for name, tensor in state.items():
        if name not in own:
            raise CheckpointError(f"{path} does not fit the model: the model has no weight {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path} does not fit the model: {name!r} is no tensor")
        if own[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path} does not fit the model: {name!r} has shape {list(tensor.shape)}, "
                f"the model needs {list(own[name].shape)}"
            )
        if own[name].is_floating_point() and tensor.dtype not in _FLOATS:
            wanted = "weights are real and of 16 bits or more"
            raise CheckpointError(f"{path} does not fit the model: {name!r} is {tensor.dtype}, {wanted}")
    if dtype is not None:
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not _local(tensor).isfinite().all():
            raise CheckpointError(f"{path} cannot be used: its weight {name!r} holds values that are not finite")
    for name in model.load_state_dict(state, strict=False, assign=dtype is not None).missing_keys:
        raise CheckpointError(f"{path} does not fit the model: it has no weight {name!r}")


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _remove(path: Path) -> None:
    """Removes a file or a folder. A folder is renamed first, so that a kill leaves no part under its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}.old.tmp"))
    shutil.rmtree(path)


def _flat(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns all tensors by name: model.NAME for weights, optimizer.NUMBER.KEY with the parameter's number."""
    states = checkpoint.optimizer.get("state", {})
    flat = {f"model.{name}": tensor for name, tensor in checkpoint.model.items()}
    return flat | {f"optimizer.{i}.{key}": tensor for i, state in states.items() for key, tensor in state.items()}


def _with_tensors(header: Checkpoint, flat: dict[str, Tensor]) -> Checkpoint:
    """Returns the inverse of `_flat`."""
    model: dict[str, Tensor] = {}
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            model[rest] = tensor
        else:
            index, _, key = rest.partition(".")
            states.setdefault(int(index), {})[key] = tensor
    groups = {"param_groups": header.optimizer.get("param_groups", [])}
    return replace(header, model=model, optimizer={"state": dict(sorted(states.items())), **groups})


def _with_shards(header: Checkpoint, path: Path, like: Callable[[str], Tensor | None]) -> Checkpoint:
    try:
        return _with_tensors(header, read_shards(path, like))
    except ShardError as error:
        raise CheckpointError(f"{path} {error}{_instead(path)}") from error


def _placed(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Returns this rank's shard of a tensor that is complete on every rank."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import

    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _check_archive(path: Path) -> None:
    """Raises CheckpointError unless `path` is a whole zip archive with right checksums."""
    with open(path, "rb") as file:
        start = file.read(4)
    if not start.startswith(b"PK"):
        what = "it is empty" if not start else "it is not an archive as torch.save writes it"
        if start == b"GGUF":
            what = "it is a GGUF file, of which `sympow convert` makes a run"
        raise CheckpointError(f"{path} is no sympow checkpoint: {what}")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is truncated{_instead(path)}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError) as error:  # also of names in the directory
        raise CheckpointError(f"{path} is damaged ({error}){_instead(path)}") from error
    if damaged:
        raise CheckpointError(f"{path} is damaged (wrong checksum of {damaged}){_instead(path)}")


def _instead(path: Path) -> str:
    """Returns the part of an error message that names an older checkpoint to continue from."""
    # A folder has its name only while it is whole.
    whole = [other for other in _in_folder(path.parent) if other.is_dir() or zipfile.is_zipfile(other)]
    older = [other for other in whole if _step(other) < _step(path)]
    return f"; remove it to continue from {older[-1]}" if older else ""


def _in_folder(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _disk_error(error: BaseException) -> OSError | None:
    """Returns the OSError that caused `error`, or None. torch's writer raises an error of its own for it."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OSError):
            return current
        current = current.__cause__ or current.__context__
    return None
