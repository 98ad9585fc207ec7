"""A run's folder: config.json, tokenizer.json, metrics.jsonl, checkpoints/, tensorboard/, profile/, and a .lock."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sympow.data.tokenizer_files import BESIDE, write_beside
from sympow.files import parsed_json, whole_folder, write_text
from sympow.layers.registry import UntrustedCodeError
from sympow.locks import locked
from sympow.models import LanguageModel
from sympow.models.lm import Undrawn
from sympow.models.weight_shapes import check_shapes
from sympow.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    is_checkpoint,
    latest,
    load_checkpoint,
    restore_model,
    save_checkpoint,
)
from sympow.training.config import RunConfig, decisive, first_difference
from sympow.training.ranks import ALONE, Ranks

_OWN = ("tokenizer.json", *BESIDE, "metrics.jsonl", "checkpoints", "tensorboard", "profile", "wandb", "config.json")


@contextmanager
def open_run_folder(
    run_dir: str | os.PathLike[str], config: RunConfig, ranks: Ranks = ALONE, restart: bool = False
) -> Iterator[Path]:
    """Makes the folder of a new run, or checks that an existing one belongs to `config`, and locks it for the block.

    Every rank calls it. No other process can open the folder in the meantime, unless its file system has no locks: then
    a line on stderr says so.

    A folder of another config without a checkpoint is made again. The fields of the config that change nothing in the
    run may differ (see `decisive`). With `restart`, an earlier run in the folder is removed first.

    Raises RuntimeError if another process has opened the folder, ValueError if there is a checkpoint of another config,
    FileExistsError if the folder contains something other than a run, and FileNotFoundError if another rank does not
    see the folder that rank 0 made. With `restart` also the errors of `clear_run_folder`.
    """
    path = Path(run_dir)
    with ExitStack() as stack:
        with ranks.together():
            if ranks.main:
                _check_run_folder(path)
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path, "trains"))
                if restart:
                    clear_run_folder(path)
                _write_config(path, config)
        with ranks.together():
            if not (path / "config.json").is_file():
                raise FileNotFoundError(
                    f"{path} is not on a disk that all ranks share: rank {ranks.rank} does not see it"
                )
        yield path


def _check_run_folder(path: Path) -> None:
    """Raises FileExistsError unless a run can be in the folder `path`: an earlier run, or nothing."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; a run needs a folder")
    if not path.exists() or not _names(path):
        return
    if not (path / "config.json").exists():
        raise FileExistsError(f"{path} holds other things than a run (it has no config.json); give another folder")
    if not _is_of_run(_read_json(path / "config.json")):
        raise FileExistsError(f"{path} holds other things than a run (config.json is no run's); give another folder")


def _write_config(path: Path, config: RunConfig) -> None:
    file = path / "config.json"
    if file.exists():
        stored = _with_all_fields(_read_json(file))
        if stored == config.to_dict():
            return
        if latest(path):
            check_config(stored, config, path)
        elif decisive(stored) != decisive(config.to_dict()):
            clear_run_folder(path)
    write_text(file, json.dumps(config.to_dict(), indent=2) + "\n")


def _is_of_run(stored: dict[str, Any]) -> bool:
    """Tells whether the content of a config.json is that of a run, of whatever version."""
    return all(isinstance(stored.get(part), dict) for part in ("model", "data", "training"))


def _names(path: Path) -> list[str]:
    """Returns the names in a folder, without hidden ones."""
    return sorted(other.name for other in path.iterdir() if not other.name.startswith("."))


def clear_run_folder(run_dir: str | os.PathLike[str]) -> None:
    """Removes the files that a run wrote into its folder.

    Raises FileNotFoundError without a run, FileExistsError if the folder contains other files. Nothing is removed then.
    """
    path = Path(run_dir)
    if not path.is_dir() or not _names(path):
        return
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no run at {path}: it has no config.json, so nothing in it is removed")
    if not _is_of_run(_read_json(path / "config.json")):
        raise FileNotFoundError(f"no run at {path}: its config.json is of no run, so nothing in it is removed")
    others = [name for name in _names(path) if name not in _OWN]
    if others:
        raise FileExistsError(f"{path} holds other files than those of a run, {', '.join(others)}: move them first")
    for name in _OWN:  # the config last, so that a removal cut short can be repeated
        target = path / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def read_config(run_dir: str | os.PathLike[str]) -> RunConfig:
    """Reads the config of the run in a folder; FileNotFoundError where there is none."""
    file = Path(run_dir) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no run at {Path(run_dir)}: it has no config.json")
    stored = _read_json(file)
    if stored.get("model_type") == "sympow":
        raise ValueError(
            f"{Path(run_dir)} is no run: its config.json is of a model that `sympow export` made of a run; give the "
            "folder of the run, or load this one with transformers"
        )
    if "model_type" in stored:
        raise ValueError(
            f"{Path(run_dir)} is no run: its config.json is of a model of Hugging Face transformers, of which "
            "`sympow convert` makes a run"
        )
    return config_in(file, stored)


def config_in(file: Path, stored: Any) -> RunConfig:
    """Reads the config of a run that a file holds. Raises ValueError, which names the file, for wrong fields."""
    try:
        return RunConfig.from_dict(stored)
    except (TypeError, ValueError) as error:
        kind = UntrustedCodeError if isinstance(error, UntrustedCodeError) else ValueError
        raise kind(f"{file}: {error}") from None


def write_run_folder(
    run_dir: str | os.PathLike[str],
    config: RunConfig,
    model: LanguageModel,
    *,
    step: int = 0,
    tokenizer: str | None,
    beside: Mapping[str, str] | None = None,
) -> Path:
    """Makes the folder of a run at `step` with the weights of `model`.

    The states of the optimizer and of the data are left empty. The run is meant for evaluation,
    for generation, and as the start of other runs.

    Args:
        run_dir: a new or an empty folder.
        config: the config of the run.
        model: the model whose weights are written.
        step: the number of optimizer steps done.
        tokenizer: the text of the tokenizer.json; None for a run without a tokenizer.
        beside: the files beside the tokenizer.json, see `sympow.data.tokenizer_files.read_beside`.

    The folder appears when it is complete, so that a kill leaves none that the next call would refuse.

    Raises FileExistsError if the folder is not empty, CheckpointError if the disk refuses to write.
    """
    folder = new_folder(run_dir)
    with whole_folder(folder) as path:
        if tokenizer is not None:
            write_text(path / "tokenizer.json", tokenizer)
        write_beside(beside or {}, path)
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        empty: dict[str, Any] = {"optimizer": {}, "data": {}, "rng": {}}
        save_checkpoint(Checkpoint(config.to_dict(), weights, step=step, tokens=0, seconds=0.0, **empty), path, 1)
        write_text(path / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
    return folder


def new_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a folder that is new or empty. Raises FileExistsError for another folder."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; give a new or an empty folder")
    return folder


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of the run that a path names: its own folder, or a checkpoint in it."""
    path = Path(path)
    return path if path.is_dir() and not is_checkpoint(path) else path.parent.parent


class LoadedModel(NamedTuple):
    """Holds a trained model in evaluation mode, the config of its run, its folder, and the steps it was trained for.

    `held_out` is the fingerprint of the documents that were held out then; None if it is not known.
    """

    model: LanguageModel
    config: RunConfig
    run_dir: Path
    step: int
    held_out: str | None


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = torch.float32
) -> LoadedModel:
    """Loads the model of a checkpoint file, or of the newest checkpoint in a run folder.

    Args:
        path: the path of the file or of the folder.
        device: the device of the model.
        dtype: of the weights; None: that of the checkpoint, in which all weights are of one floating-point type, and
            float32 for a checkpoint of several types. States of power attention are float32 at least.

    Raises FileNotFoundError where there is none, CheckpointError where it cannot be read.
    """
    path = Path(path)
    if path.is_dir() and not is_checkpoint(path):
        read_config(path)
        file = latest(path)
        if file is None:
            raise FileNotFoundError(f"the run at {path} has no checkpoint yet")
    else:
        file = path
    checkpoint = load_checkpoint(file)
    config = config_in(file, checkpoint.config)
    shapes = {str(name): tuple(each.shape) for name, each in checkpoint.model.items() if isinstance(each, torch.Tensor)}
    try:
        check_shapes(config.model, shapes)
    except ValueError as error:
        raise CheckpointError(f"{file} does not fit the model: {error}") from None
    with torch.device("meta"):
        model = Undrawn(config.model)
    restore_model(model, checkpoint.model, file, dtype=_dtype(checkpoint.model) if dtype is None else dtype)
    batches = checkpoint.data.get("held_out")
    held_out = batches.get("corpus") if isinstance(batches, dict) else None
    return LoadedModel(model.to(device).eval(), config, file.parent.parent, checkpoint.step, held_out)


def _dtype(weights: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype that all weights of a checkpoint have; float32 where they differ."""
    dtypes = {each.dtype for each in weights.values() if isinstance(each, torch.Tensor)}
    return dtypes.pop() if len(dtypes) == 1 and all(each.is_floating_point for each in dtypes) else torch.float32


def check_config(stored: dict[str, Any], config: RunConfig, where: Path) -> None:
    """Raises ValueError at the first field in which the config stored at `where` differs from `config`."""
    stored = _with_all_fields(stored)
    difference = first_difference(decisive(stored), decisive(config.to_dict()))
    if difference:
        field, old, new = difference
        raise ValueError(
            f"{where} holds a run with {field} = {old!r}, not {new!r}: "
            "continue with the same config, remove the run (--restart), or give another folder (--out)"
        )


def _with_all_fields(stored: dict[str, Any]) -> dict[str, Any]:
    """Adds fields that are newer than the run to its stored config, if that config can be read."""
    try:
        return RunConfig.from_dict(stored).to_dict()
    except (KeyError, TypeError, ValueError):
        return stored


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parsed_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content
