"""The names and shapes of weights in files, before a weight is read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from sympow.data.tokenizer_files import json_object
from sympow.integrations.transformers.errors import reading

_WHOLE = ("model.safetensors", "pytorch_model.bin")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights that can be read, by their names in safetensors."""
_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class Stored(NamedTuple):
    """Holds what a file says of a weight: its shape, and the name of its dtype, as in `FLOATS` if it is one of them."""

    shape: tuple[int, ...]
    dtype: str


def check_dtypes(found: Mapping[str, Stored], name: str) -> None:
    """Raises ValueError for a weight whose dtype is not in `FLOATS`: a cast would lose an imaginary part, or a scale.

    Args:
        found: by the names of weights.
        name: of the model, for the message.
    """
    for key, each in found.items():
        if each.dtype not in FLOATS:
            raise ValueError(f"{name} cannot be read: its weight {key} is of {each.dtype}, not {', '.join(FLOATS)}")


def check_loaded(report: Mapping[str, Any], name: str, own: bool = False) -> None:
    """Raises ValueError for a model that was loaded with new weights in place of those that its files lack.

    Args:
        report: what `from_pretrained` returns beside the model with `output_loading_info=True`.
        name: of the model, for the message.
        own: whether to refuse weights that the config does not know, too, which transformers leaves out.
    """
    missing = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise ValueError(f"{name} lacks weights of its config: {missing[0]} is missing or of another shape")
    if own and report["unexpected_keys"]:
        raise ValueError(f"{name} has a weight that its config does not know: {min(report['unexpected_keys'])}")


def check_weight(weight: Tensor, key: str, name: str) -> None:
    """Raises ValueError for a weight of a dtype that is not in `FLOATS`, or with values that are not finite.

    Args:
        weight: a tensor.
        key: its name.
        name: of the model, for the message.
    """
    check_dtypes({key: _stored(weight)}, name)
    check_finite(weight, key, name)


def check_finite(weight: Tensor, key: str, name: str) -> None:
    """Raises ValueError for a weight with values that are not finite in float32.

    Args:
        weight: a floating-point tensor.
        key: its name.
        name: of the model, for the message.
    """
    most = torch.finfo(torch.float32).max
    if weight.numel() and not all(abs(each.item()) <= most for each in weight.aminmax()):
        raise ValueError(f"{name} cannot be read: its weight {key} holds values that are not finite")


def check_no_adapter(source: str | os.PathLike[str]) -> None:
    """Raises ValueError for a folder, or an id on the Hub, with an adapter of PEFT, which transformers would load too.

    Args:
        source: the folder or the id.
    """
    if optional_file(source, "adapter_config.json") is not None:
        how = "merge it into the weights (merge_and_unload of PEFT), or remove adapter_config.json"
        raise ValueError(f"{source} cannot be read: it has an adapter beside its weights; {how}")


def stored_weights(source: str | os.PathLike[str]) -> dict[str, Stored] | None:
    """Describes the weights in a folder, or of an id on the Hub, by name; returns None if there are no weights.

    Of the files that transformers would read, only the headers are read. Files in the format of PyTorch are read
    without memory for their tensors, and run no code.

    Raises ValueError for an index that names files elsewhere or that does not fit its files, and for weights that are
    larger than their files; the errors of `reading`, such as ValueError for files that are cut.
    """
    for whole in _WHOLE:
        if (files := _by_file(source, whole)) is not None:
            return {key: each for some in files.values() for key, each in some.items()}
    return None


def safetensors_files(source: str | os.PathLike[str]) -> dict[Path, dict[str, Stored]]:
    """Describes the weights in every file of the format safetensors, of a folder or of an id on the Hub, by name.

    Raises FileNotFoundError where there are none, ValueError for an index beside a whole file, and the errors of
    `stored_weights`.
    """
    index = f"{_WHOLE[0]}.index.json"
    if all(optional_file(source, name) is not None for name in (_WHOLE[0], index)):
        raise ValueError(f"{source} has {_WHOLE[0]} and {index}, of other files; expected one of the two")
    files = _by_file(source, _WHOLE[0])
    if files is None:
        raise FileNotFoundError(f"{source} has no weights in the format safetensors, {_WHOLE[0]} or its index")
    return files


def _by_file(source: str | os.PathLike[str], whole: str) -> dict[Path, dict[str, Stored]] | None:
    """Describes the weights in the file `whole`, or in those that its index names; None where neither is there."""
    if (file := optional_file(source, whole)) is not None:
        return {file: _described(file)}
    if (index := optional_file(source, f"{whole}.index.json")) is None:
        return None
    names = _weight_map(index)
    files = {shard: _described(shard) for shard in (_shard(source, index, name) for name in sorted({*names.values()}))}
    _check_index(index, names, files)
    return files


def _check_index(index: Path, names: Mapping[str, str], files: Mapping[Path, Mapping[str, Stored]]) -> None:
    """Raises ValueError for a weight that is in two files, and for one that is not in the file that an index names."""
    found: dict[str, str] = {}
    for file, weights in files.items():
        for key in weights:
            if found.setdefault(key, file.name) != file.name:
                raise ValueError(f"{index.parent} has the weight {key} in two files, {found[key]} and {file.name}")
    for key, name in names.items():
        if found.get(key) != name:
            where = found.get(key, "none of its files")
            raise ValueError(f"{index} names {name} as the file of {key}, which is in {where}")


def optional_file(source: str | os.PathLike[str], name: str) -> Path | None:
    """Returns a file in a folder, or of an id on the Hub; None where it is not there."""
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(str(source), name, **optional)
    return None if found is None else Path(found)


def _weight_map(index: Path) -> dict[str, str]:
    names = json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} must hold a JSON object with a weight_map")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names the file {name!r}; expected a file beside it")
    return names


def _shard(source: str | os.PathLike[str], index: Path, name: str) -> Path:
    file = optional_file(source, name)
    if file is None:
        raise FileNotFoundError(f"{index} names the file {name}, which is missing")
    return file


def _described(file: Path) -> dict[str, Stored]:
    with reading(file):
        return _in_safetensors(file) if file.suffix == ".safetensors" else _in_archive(file)


def _in_safetensors(file: Path) -> dict[str, Stored]:
    with safe_open(file, "pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: Stored(tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}


def _in_archive(file: Path) -> dict[str, Stored]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about pickles, of files that are refused then
        content: Any = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
        raise ValueError(f"{file} must hold weights by name")
    memory = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in content.values()}
    if sum(memory.values()) > file.stat().st_size:
        raise ValueError(f"{file} names weights of {sum(memory.values()):,} bytes, more than it holds")
    for name, each in content.items():
        if each.numel() * each.element_size() > each.untyped_storage().nbytes():
            raise ValueError(f"the weight {name} in {file} is larger than its memory")
    return {name: _stored(each) for name, each in content.items()}


def _stored(weight: Tensor) -> Stored:
    return Stored(tuple(weight.shape), _NAMES.get(weight.dtype, str(weight.dtype)))
