"""Named tensors in a folder. Every rank writes its part of them, and any number of ranks can read them.

This is torch's distributed checkpoint, read without running code from it.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.metadata import Metadata

# What the pickled table of contents may name, besides torch's dtypes.
_CONTENTS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class ShardError(RuntimeError):
    """Says that a folder cannot be read or written. For reading, the message follows the path of the folder."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, sharded (DTensor) or the same on all ranks, into a new folder.

    Every rank calls it.

    Raises the OSError of the first rank that could not write, or ShardError for another reason.
    """
    import torch.distributed.checkpoint as dcp  # takes a second, which a run on one process need not wait

    try:
        dcp.save(dict(tensors), checkpoint_id=folder)
    except dcp.CheckpointException as error:
        cause = _cause(error)
        raise cause if isinstance(cause, OSError) else ShardError(_line(cause)) from error


def read_shards(folder: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Reads the tensors in a folder.

    Every rank of the default group calls it, if there is one.

    A tensor is loaded to the device of the tensor `like(name)`. If their shapes agree, it is sharded in the same way.
    If `like(name)` is None, the complete tensor is loaded to the CPU. Raises ShardError for a folder that is truncated,
    damaged, or contains something other than tensors.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        contents = _contents(folder)
        _check_sizes(folder, contents)
        tensors = {}
        for name, entry in contents.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # other objects would be unpickled
                raise ShardError(f"holds something else than tensors: {name!r}")
            target = like(name)
            if target is not None and target.shape == entry.size:
                tensors[name] = torch.zeros_like(target, dtype=entry.properties.dtype, requires_grad=False)
            else:
                tensors[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is .*disabled")  # alone, which is meant
            dcp.load(dict(tensors), checkpoint_id=folder)
    except dcp.CheckpointException as error:
        raise ShardError(f"is damaged ({_line(_cause(error))})") from error
    except (pickle.UnpicklingError, EOFError, OSError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise ShardError(f"is damaged ({_line(error)})") from error
    return tensors


def check_shards(folder: Path) -> None:
    """Raises ShardError for a folder whose table of contents or whose files are missing or cut."""
    try:
        _check_sizes(folder, _contents(folder))
    except (pickle.UnpicklingError, EOFError, OSError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise ShardError(f"is damaged ({_line(error)})") from error


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _CONTENTS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its table of contents names {module}.{name}")


def _contents(folder: Path) -> Metadata:
    """Reads the table of contents safely, before the library reads it, which would unpickle anything."""
    with open(folder / ".metadata", "rb") as file:
        return _Contents(file).load()


def _check_sizes(folder: Path, contents: Metadata) -> None:
    for stored in contents.storage_data.values():
        file = folder / stored.relative_path
        if not file.is_file() or os.path.getsize(file) < stored.offset + stored.length:
            raise ShardError(f"is truncated: {stored.relative_path} is missing or too short")


def _cause(error: CheckpointException) -> BaseException:
    """Returns the error of the first rank that failed."""
    first = min(error.failures)
    return error.failures[first][0]


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
