"""A context as one safetensors file.

A file holds the state of every layer, the logits after the last token, the number of tokens that were read, a hash of
these tokens, and fingerprints of the model's config and weights. A SHA-256 covers all bytes of the file. The file is
written under a temporary name and then renamed, so that a kill leaves the old file or the new one.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sympow.files import process_runs, sync
from sympow.layers.state import check_batch, check_form, check_read, form_of
from sympow.layers.state_file import STATE_DTYPES, SerializedState, deserialize, fitted, serialize
from sympow.models.context import Context
from sympow.models.lm import LanguageModel, ModelState
from sympow.packages import from_extra

FORMAT = "sympow-context"
VERSION = 1
_KEY = "sympow"
_SEAL = re.compile(rb"sha256:([0-9a-f]{64})")
_UNSEALED = "0" * 64
_BLOCK = 1 << 20
_DIGEST = re.compile("[0-9a-f]{32}")
_WRONG = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)  # by content
_MOST_HEADER = 100_000_000  # bytes, the limit of the format


class ContextError(RuntimeError):
    """Says that a context file cannot be written, read or used. The message gives the reason."""


@dataclass(frozen=True)
class ContextHeader:
    """Holds the header of a context file.

    Attributes:
        tokens, digest: as in `Context`.
        rows: the number of sequences, B.
        dtype: "float32", "bfloat16" or "int8".
        config, weights: fingerprints of the model.
        tree: plain values that describe how states are built from the tensors of the file.
    """

    tokens: int
    digest: str
    rows: int
    dtype: str
    config: str
    weights: str
    tree: Any


def save_context(
    path: str | os.PathLike[str],
    model: LanguageModel,
    context: Context,
    *,
    dtype: str = "float32",
    known: tuple[str, str] | None = None,
) -> None:
    """Writes a context file, atomically: a kill leaves the file that was there, or the new one.

    Args:
        path: the path of the file.
        model: the model that has read the context.
        context: the context.
        dtype: "float32" stores every tensor exactly, so that the model continues as if it had never stopped.
            "bfloat16" and "int8" round the large tensors, see `sympow.layers.state_file.serialize`.
        known: the `fingerprint` of the model, if the caller has computed it already.

    Raises TypeError for arguments of other types, ValueError for another dtype, ContextError if the file cannot be
    written, and for a context that could not be loaded, such as one of another model; ImportError without safetensors.
    """
    kinds: dict[str, tuple[Any, Any]] = {
        "path": (path, (str, os.PathLike)),
        "model": (model, LanguageModel),
        "context": (context, Context),
    }
    for name, (given, kind) in kinds.items():
        if not isinstance(given, kind):
            raise TypeError(f"save_context takes path, model and context; got {type(given).__name__} as {name}")
    path, save_file = Path(path), _safetensors().torch.save_file
    try:
        _fitted(context.state, context.logits, model, context.rows, context.tokens)
    except torch.OutOfMemoryError:
        raise
    except _WRONG as error:
        raise ContextError(f"cannot write the context {path}: {_line(error)}") from error
    packed = serialize(context.state, dtype)
    tensors = {name: _owned(tensor) for name, tensor in packed.tensors.items()}
    if context.logits is not None:
        tensors["logits"] = _owned(context.logits)
    config, weights = known or fingerprint(model)
    content = {
        "checksum": f"sha256:{_UNSEALED}",
        "format": FORMAT,
        "version": VERSION,
        "tokens": f"{context.tokens:020d}",
        "digest": context.digest,
        "rows": context.rows,
        "dtype": dtype,
        "config": config,
        "weights": weights,
        "tree": packed.tree,
    }
    try:
        with _replacing(path) as temporary:
            save_file(tensors, temporary, metadata={_KEY: json.dumps(content, separators=(",", ":"))})
            (temporary.parent / "mode").touch()
            shutil.copymode(temporary.parent / "mode", temporary)  # the library writes for the owner alone
            _seal(temporary)
    except (OSError, _safetensors().SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
        raise ContextError(f"cannot write the context {path}: {reason}") from error


def load_context(
    path: str | os.PathLike[str], model: LanguageModel, *, known: tuple[str, str] | None = None
) -> Context:
    """Reads a context file of this model; every call gives a state of its own, on the device of the weights.

    `known` is the `fingerprint` of the model, if the caller has computed it already.

    The number of tokens is compared with the counts of the states. Whoever writes a file can change all of them alike:
    states of constant size do not tell how many tokens they have read.

    Raises TypeError for a path of another type; FileNotFoundError if there is no file; ContextError if the file is not
    a context file, was cut or changed, or belongs to another model; ImportError without safetensors.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_context takes path and model; got {type(path).__name__} as path")
    header = read_header(path)
    config, weights = known or fingerprint(model)
    if header.config != config:
        raise ContextError(f"{path} is a context of another model: its config differs")
    if header.weights != weights:
        hint = _other_dtype(path, model.embedding.weight.dtype)
        raise ContextError(f"{path} is a context of another model: its weights differ{hint}")
    device = model.embedding.weight.device
    try:
        with _safetensors().safe_open(os.fspath(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        logits = tensors["logits"].to(device, copy=True) if "logits" in tensors else None
        state = deserialize(SerializedState(tensors, header.tree), device)
        state = _fitted(state, logits, model, header.rows, header.tokens)
    except (*_WRONG, _safetensors().SafetensorError) as error:
        raise ContextError(f"{path} does not hold the states of this model: {_line(error)}") from error
    return Context(state, logits, header.tokens, header.digest)


def _other_dtype(path: str | os.PathLike[str], own: torch.dtype) -> str:
    """Returns how the weights that made a file differ in dtype, as its logits tell; an empty text if they do not."""
    try:
        with _safetensors().safe_open(os.fspath(path), "pt") as file:
            its = file.get_tensor("logits").dtype
    except (OSError, _safetensors().SafetensorError):  # without logits, too
        return ""
    there, here = (str(dtype).removeprefix("torch.") for dtype in (its, own))
    return "" if its == own else f", {there} there and {here} here (see --weights-dtype of sympow read)"


def _fitted(state: Any, logits: Tensor | None, model: LanguageModel, rows: int, tokens: int) -> ModelState:
    """Returns a state as the model keeps it, see `fitted`.

    Raises an error of `_WRONG` for a state that is not that of all layers of the model, for `rows` sequences after
    `tokens` tokens, and for logits that are not of the next token.
    """
    if rows < 1:
        raise ValueError(f"expected at least one row; got {rows}")
    if not isinstance(state, ModelState) or not isinstance(state.layers, list):
        raise ValueError(f"expected a state of {len(model.blocks)} layers, got {type(state).__name__}")
    wanted = [rows, model.config.vocab_size]
    if logits is not None and (list(logits.shape) != wanted or not logits.is_floating_point()):
        raise ValueError(f"expected logits {wanted} of the next token, got {logits.dtype} {list(logits.shape)}")
    like = model.init_state(1)
    found: ModelState = fitted(state, like)
    for layer, block in zip(found.layers, like.layers, strict=True):
        check_form(layer, form_of(block))
        check_batch(layer, rows)
        check_read(layer, tokens)
    return found


def read_header(path: str | os.PathLike[str]) -> ContextHeader:
    """Checks the checksum of a context file, and reads its header. Raises as `load_context`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no context file at {path}")
    with open(path, "rb") as file:
        header, seal = _header(file, path)
        own = _checksum(file, header, seal)
    if seal[1].decode() != own:
        raise ContextError(f"{path} is damaged: its checksum is wrong, so it was cut or changed")
    try:
        content = json.loads(json.loads(header[8:])["__metadata__"][_KEY])
        if content["format"] != FORMAT:
            raise ContextError(f"{path} is not a context file of sympow: its format is {content['format']!r}")
        if content["version"] != VERSION:
            raise ContextError(f"{path} has version {content['version']!r} of the format; this one reads {VERSION}")
        values = {entry.name: content[entry.name] for entry in fields(ContextHeader)}
        found = ContextHeader(**values | {"tokens": int(content["tokens"])})
        if type(found.rows) is not int or found.rows < 1 or found.tokens < 0:
            raise ValueError(f"expected rows of tokens; got {found.rows!r} rows of {found.tokens} tokens")
        if found.dtype not in STATE_DTYPES or not _DIGEST.fullmatch(found.digest):
            raise ValueError(f"expected a dtype and a digest; got {found.dtype!r} and {found.digest!r:.60}")
        return found
    except ContextError:
        raise
    except _WRONG as error:
        raise ContextError(f"{path} is not a context file of sympow: {_line(error)}") from error


def is_context_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file begins as a context file does. Its end may be damaged, which `read_header` checks.

    Raises OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            _header(file, Path(path))
        except ContextError:
            return False
    return True


def fingerprint(model: LanguageModel) -> tuple[str, str]:
    """Hashes the config of a model, and its weights with names, dtypes and shapes: two hexadecimal strings."""
    config = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        weights.update(flat.view(torch.uint8).numpy().data)
    return config.hexdigest(), weights.hexdigest()


def _safetensors() -> Any:
    with from_extra("train", "context files need safetensors"):
        import safetensors
        import safetensors.torch
    return safetensors


def _owned(x: Tensor) -> Tensor:
    """Returns x on the CPU in memory of its own: the format refuses tensors that share theirs."""
    x = x.detach().cpu().contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Gives the path of a temporary file that becomes `path` when the block ends, or is removed if it raises."""
    _remove_leftovers(path)
    # A folder, because safetensors writes a temporary file of its own beside the one it is asked for.
    folder = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    folder.mkdir(exist_ok=True)
    try:
        yield folder / path.name
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Removes temporary files of processes that were killed while they wrote `path`."""
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not process_runs(other.name.removeprefix(f".{path.name}.").partition("-")[0]):
            shutil.rmtree(other, ignore_errors=True)


def _seal(path: Path) -> None:
    """Writes the checksum into the file, and waits until the file is on the disk."""
    with open(path, "r+b") as file:
        header, seal = _header(file, path)
        checksum = _checksum(file, header, seal)
        file.seek(seal.start(1))
        file.write(checksum.encode())
        file.flush()
        os.fsync(file.fileno())


def _header(file: BinaryIO, path: Path) -> tuple[bytes, re.Match[bytes]]:
    """Returns the bytes of the file before its tensors, and the match of the checksum in them."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= _MOST_HEADER or not size:
        raise ContextError(f"{path} is not a context file of sympow: {'it is empty' if not size else 'no safetensors'}")
    if 8 + length > size:
        raise ContextError(f"{path} is no context file of sympow, or was cut: it ends within its header")
    header = start + file.read(length)
    seal = _SEAL.search(header)
    if seal is None:
        raise ContextError(f"{path} is not a context file of sympow: it has no checksum")
    return header, seal


def _checksum(file: BinaryIO, header: bytes, seal: re.Match[bytes]) -> str:
    """Returns the SHA-256 of the whole file, with zeros in place of the checksum."""
    hashed = hashlib.sha256(header[: seal.start(1)] + _UNSEALED.encode() + header[seal.end(1) :])
    while block := file.read(_BLOCK):
        hashed.update(block)
    return hashed.hexdigest()


def _line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"no {text}" if isinstance(error, KeyError) else text
