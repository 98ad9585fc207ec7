"""Sends metrics to a service: Weights & Biases by its own package, MLflow and Comet by the trackers of Accelerate."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

_PROJECT = "sympow"


class Tracker(Protocol):
    """Describes an open run of a service."""

    def log(self, row: dict[str, Any], step: int) -> None:
        """Sends the values of a step."""

    def finish(self) -> None:
        """Ends the run."""


def open_tracker(
    service: str, name: str, config: Mapping[str, Any], folder: str | os.PathLike[str] | None = None
) -> Tracker:
    """Opens a run in the project (the experiment, for MLflow) "sympow".

    Args:
        service: one of `sympow.training.config.TRACKERS`.
        name: the name that is shown.
        config: the configuration of the run.
        folder: the folder of the run. A folder has one run of the service, so that a run that continues also continues
            there. None: a new run.

    Raises ImportError naming the missing extra or package.
    """
    key = None if folder is None else hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    if service == "wandb":
        resumed = {} if key is None else {"id": f"{name}-{key[:12]}", "resume": "allow", "dir": folder}
        run: Tracker = _package("wandb").init(project=_PROJECT, name=name, config=dict(config), **resumed)
        return run
    package, tracking = _package(service), _package("accelerate", "accelerate.tracking")
    tracking.PartialState()  # without which its trackers do not work
    if service == "comet_ml":
        resumed = {} if key is None else {"experiment_key": key, "mode": "get_or_create"}
        run = tracking.CometMLTracker(_PROJECT, **resumed)
        new = True
    else:
        found = [] if key is None else _runs(package, key)
        resumed = {"run_id": found[0].info.run_id} if found else {"run_name": name}
        run = tracking.MLflowTracker(_PROJECT, tags=None if key is None else {"sympow.folder": key}, **resumed)
        new = not found  # MLflow refuses other values of parameters, and a run may continue with another `execution`
    run.start()  # type: ignore[attr-defined]
    if new:
        run.store_init_configuration(_flat(config))  # type: ignore[attr-defined]
    return run


def _runs(mlflow: Any, key: str) -> list[Any]:
    experiment, words = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT), f"tags.`sympow.folder` = '{key}'"
    found: list[Any] = mlflow.search_runs(experiment_names=[experiment], filter_string=words, output_format="list")
    return found


def _package(name: str, module: str | None = None) -> Any:
    import importlib

    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        extra = (
            f"{name}: pip install 'sympow[track]'" if name in ("wandb", "accelerate") else f"{name}: pip install {name}"
        )
        raise ImportError(f"the tracker needs {extra} ({error})") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by names such as "training.steps"."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
