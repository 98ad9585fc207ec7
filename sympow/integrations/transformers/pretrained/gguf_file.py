"""Reads the header of a GGUF file, the config of the model in it, and its weights.

All sizes are compared with the file first. The package gguf only dequantizes: it trusts the sizes that a file names.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sympow.fields import is_integer, is_number
from sympow.packages import from_extra

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9  # types of values
_LEAST = {kind: struct.calcsize(f"<{code}") for kind, code in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}  # bytes
_DIMENSIONS = 4  # of a tensor at most
_MOST = 1 << 24  # bytes of a text, and elements of all lists together: damaged numbers must not take memory
_F32 = 0  # a type of tensors
ROPE_FACTORS = "rope_freqs.weight"

# The fields of a config.json, by the fields of a GGUF file behind the name of the architecture.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Those of some architectures only.
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
_WINDOW = "attention.sliding_window"
_MORE = {"granite": tuple(_MULTIPLIERS), "llama": (_WINDOW,), "phi3": (_WINDOW,)}
_ROPE = "rope.scaling."
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Other fields that a file may have, with the values that change nothing; None: `model_config` reads the field.
_OTHERS: dict[str, Any] = {
    "vocab_size": None,
    "rope.dimension_count": None,
    "rope.freq_base": None,
    "rope.scale_linear": 1.0,
    "attention.key_length": None,
    "attention.value_length": None,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    _ROPE + "type": None,
    _ROPE + "attn_factor": 1.0,
    _ROPE + "yarn_attn_factor": 1.0,
    _ROPE + "yarn_ext_factor": 1.0,
    _ROPE + "yarn_log_multiplier": 0.0,
}

_INTEGERS = (
    *(field for field in _FIELDS if field != "attention.layer_norm_rms_epsilon"), _WINDOW, "vocab_size",
    "rope.dimension_count", "attention.key_length", "attention.value_length", _ROPE + "original_context_length",
)  # fmt: skip
_TRUTHS = ("attention.causal", _ROPE + "finetuned")  # one has a single value, and nothing depends on the other
_KNOWN = {*_FIELDS, *_OTHERS, *_MULTIPLIERS, _WINDOW, *_TRUTHS, *(_ROPE + field for field in _SCALING)}
_MAY_BE_0 = (_WINDOW, _ROPE + "original_context_length")


class GGUFHeader(NamedTuple):
    """Holds what a GGUF file says before its weights.

    Attributes:
        file: the path of the file.
        fields: the values by their names.
        shapes: the shapes of tensors by their names, in the order of axes of torch.
        rope_factors: the numbers in `rope_freqs.weight`, which divide the frequencies of the rotation; None: none.
        places: the types of tensors and their first bytes in the file, by their names.
    """

    file: Path
    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    rope_factors: list[float] | None
    places: dict[str, tuple[int, int]]


class _Cut(ValueError):
    """Says that a file names more than it holds."""


class _Bytes:
    """Reads values of a file in their order, and nothing behind its end."""

    def __init__(self, data: Any):
        self.data, self.at, self.elements = data, 0, 0

    def need(self, count: int, what: str) -> None:
        if count > len(self.data) - self.at:
            raise _Cut(f"it ends within {what}")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        size = self.number("Q", what)
        self.need(size, what)
        if size > _MOST:
            raise _Cut(f"{what} has a text of {size:,} bytes")
        return self.take(size, what).decode("utf-8")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or depth > 1:
            raise _Cut(f"{what} is of the unknown type {kind}")
        inner, count = self.number("I", what), self.number("Q", what)
        self.need(count * _LEAST.get(inner, 1), what)
        self.elements += count
        if self.elements > _MOST:
            raise _Cut(f"{what} has {count:,} elements")
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code), what)))
        return [self.value(inner, what, depth + 1) for _ in range(count)]


def read_header(file: str | os.PathLike[str]) -> GGUFHeader:
    """Reads what a GGUF file says before its weights.

    Raises ImportError without the packages that reading a GGUF file needs, ValueError for a file that is cut, that
    names more than it holds, or that is of another kind.
    """
    path = Path(file)
    with from_extra("gguf", f"reading {path} needs gguf"):
        from gguf import GGML_QUANT_SIZES
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    try:
        if not path.stat().st_size:
            raise _Cut("it is empty")
        return _header(path, np.memmap(path, mode="r"), sizes)
    except (ValueError, OverflowError, struct.error) as error:
        raise ValueError(f"{path} is not a whole GGUF file ({error})") from None


def _header(path: Path, data: Any, sizes: Mapping[int, tuple[int, int]]) -> GGUFHeader:
    """Returns the header; `sizes`: the elements of a block and its bytes, by types of tensors."""
    reader = _Bytes(data)
    if reader.take(4, "its first bytes") != _MAGIC:
        raise _Cut("it does not begin with GGUF")
    version = reader.number("I", "its version")
    if version not in _VERSIONS:
        raise _Cut(f"its version is {version}; known are {' and '.join(map(str, _VERSIONS))}")
    count, fields_count = reader.number("Q", "its counts"), reader.number("Q", "its counts")
    reader.need(fields_count * 13 + count * 24, f"its {fields_count} fields and {count} tensors")
    fields: dict[str, Any] = {}
    for _ in range(fields_count):
        name = reader.string("the name of a field")
        if name in fields:
            raise _Cut(f"it has the field {name} twice")
        fields[name] = reader.value(reader.number("I", name), f"the field {name}")
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[int, int]] = {}
    alignment = fields.get("general.alignment", 32)
    if not is_integer(alignment) or alignment < 8 or alignment & (alignment - 1):
        raise _Cut(f"its general.alignment is {short(alignment)}; expected a power of 2 of at least 8")
    end = 0  # of the tensors so far
    for _ in range(count):
        name = reader.string("the name of a tensor")
        if name in shapes:
            raise _Cut(f"it has the tensor {name} twice")
        axes = reader.number("I", name)
        if axes > _DIMENSIONS:
            raise _Cut(f"the tensor {name} has {axes} axes")
        shape = tuple(reader.number("Q", name) for _ in range(axes))
        kind, offset = reader.number("I", name), reader.number("Q", name)
        if kind not in sizes:
            raise _Cut(f"the tensor {name} is of the unknown type {kind}")
        elements, block = sizes[kind]
        if shape[:1] and shape[0] % elements:
            raise _Cut(f"the tensor {name} has rows of {shape[0]} numbers; expected a multiple of {elements}")
        expected = -(-end // alignment) * alignment
        if offset != expected:
            raise _Cut(f"the tensor {name} begins at {offset}; expected {expected}, behind the tensor before")
        shapes[name], places[name] = shape[::-1], (kind, offset)
        end = offset + math.prod(shape) // elements * block
    start = -(-reader.at // alignment) * alignment
    if count and start + end > len(data):
        raise _Cut("it ends within its tensors")
    factors = None
    if ROPE_FACTORS in shapes:
        kind, offset = places[ROPE_FACTORS]
        if kind != _F32:
            raise _Cut(f"{ROPE_FACTORS} is not in float32")
        first = start + offset
        factors = np.frombuffer(data[first : first + 4 * math.prod(shapes[ROPE_FACTORS])].tobytes(), "<f4").tolist()
    whole = {name: (kind, start + offset) for name, (kind, offset) in places.items()}
    return GGUFHeader(path, fields, shapes, factors, whole)


def check_types(header: GGUFHeader) -> None:
    """Raises NotImplementedError for a type of tensors that the package gguf does not dequantize."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    for kind in {GGMLQuantizationType(kind) for kind, _ in header.places.values()}:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)


def read_weight(header: GGUFHeader, name: str) -> Tensor:
    """Reads a tensor of a GGUF file, dequantized to float32, in the order of axes of torch; see `check_types`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    (kind, first), shape = header.places[name], header.shapes[name]
    elements, block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    rows, size = math.prod(shape[:-1]), shape[-1] // elements * block
    data = np.memmap(header.file, mode="r", offset=first, shape=(rows, size))
    return torch.from_numpy(dequantize(data, GGMLQuantizationType(kind)).astype(np.float32)).view(shape)


def model_config(header: GGUFHeader) -> dict[str, Any]:
    """Returns the config of the model in a GGUF file, in the fields of a config.json of transformers.

    It does not contain the scaling of the rotation; see `rope_parameters`.

    Raises ValueError for a field that is missing, and for a field that changes the model in an unknown way.
    """
    name, kind, own = str(header.file), header.fields.get("general.architecture"), _own(header)
    for field, value in own.items():
        scaling = field.startswith(_ROPE) and field.removeprefix(_ROPE) in (*_SCALING, "finetuned")
        known = scaling or field in _FIELDS or field in _OTHERS or field in _MORE.get(str(kind), ())
        usual = _OTHERS.get(field)
        if not known or (usual is not None and value != usual):
            raise ValueError(f"{name} has {kind}.{field} = {short(value)}, which is not known here")
        if field == f"{_ROPE}type":
            expected, right = "a text", isinstance(value, str)
        elif field in _INTEGERS:
            least = 0 if field in _MAY_BE_0 else 1
            expected, right = f"an integer of at least {least}", is_integer(value) and value >= least
        elif field in _TRUTHS:
            expected, right = "true or false", isinstance(value, bool)
        else:
            expected, right = "a number", is_number(value) and math.isfinite(value)
        if not right:
            raise ValueError(f"{name} has {kind}.{field} = {short(value)}; expected {expected}")
    for field in header.fields:
        prefix, _, rest = field.partition(".")
        if prefix != kind and (field in _KNOWN or rest in _KNOWN):
            raise ValueError(f"{name} has {field}, which is not of its architecture, {kind}")
    for field in _FIELDS:
        if field not in own:
            raise ValueError(f"{name} lacks the field {kind}.{field}")
    config: dict[str, Any] = {"model_type": kind} | {theirs: own[field] for field, theirs in _FIELDS.items()}
    tokens = header.fields.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise ValueError(f"{name} has tokenizer.ggml.tokens = {short(tokens)}; expected a list")
    config["vocab_size"] = own.get("vocab_size", len(tokens))
    config["tie_word_embeddings"] = "output.weight" not in header.shapes
    if kind != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.shapes
    if kind == "seed_oss":
        config["attention_out_bias"] = "blk.0.attn_output.bias" in header.shapes
    if kind in ("llama", "phi3"):
        config["sliding_window"] = own.get(_WINDOW) or None  # Phi-4 has 0, for none
    if kind == "llama" and config.pop("sliding_window") is not None:
        config |= {"model_type": "mistral", "sliding_window": own[_WINDOW]}
    heads = config["num_attention_heads"]
    usual = config["hidden_size"] // heads if isinstance(heads, int) and heads > 0 else None
    rotated = own.get("rope.dimension_count", usual)
    width = own.get("attention.key_length", usual if kind == "phi3" else rotated)
    known_widths = {"attention.value_length": width} | ({} if kind == "phi3" else {"rope.dimension_count": width})
    for field, wanted in known_widths.items():
        if own.get(field, wanted) != wanted:
            raise ValueError(f"{name} has {kind}.{field} = {own[field]}; known is the width of a head, {width}")
    if kind == "qwen2" and width != usual:
        raise ValueError(f"{name} has heads of {width} channels; qwen2 has embedding_length / head_count, {usual}")
    if kind != "qwen2":
        config["head_dim"] = width
    if kind == "granite":  # where 0 means the usual one, as no field does
        config |= {theirs: own.get(field) or 1.0 for field, theirs in _MULTIPLIERS.items()}
        config["attention_multiplier"] = own.get("attention.scale") or float(width or 1) ** -0.5
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10_000.0)}
    if kind == "phi3" and rotated != width:
        config["rope_parameters"]["partial_rotary_factor"] = _share(rotated, width)
    return config


def _share(part: Any, whole: Any) -> float:
    """Returns the share of a part, of which int(share * whole) is the part, also after rounding."""
    if not all(isinstance(each, int) and each > 0 for each in (part, whole)):
        return 0.0  # which is refused
    share = part / whole
    return share if int(share * whole) == part else math.nextafter(share, 1.0)


def rope_parameters(header: GGUFHeader) -> dict[str, Any]:
    """Returns the scaling of the rotation, {"rope_type": ...}, as for `sympow.ops.rope_scaling.check_scaling`.

    Raises ValueError for a rotation that is scaled twice.
    """
    own = _own(header)
    rule = own.get(f"{_ROPE}type", "linear" if f"{_ROPE}factor" in own else "none")
    if header.rope_factors is not None:
        if rule != "none":
            raise ValueError(f"{header.file} scales its rotation by {ROPE_FACTORS} and by {_ROPE}type = {rule!r}")
        return {"rope_type": "factors", "factors": header.rope_factors}
    if rule == "none":
        return {"rope_type": "default"}
    numbers = {theirs: own[_ROPE + field] for field, theirs in _SCALING.items() if _ROPE + field in own}
    if rule == "linear":
        numbers.pop("original_max_position_embeddings", None)  # which says how long the context was, and no more
    return {"rope_type": rule} | numbers


def _own(header: GGUFHeader) -> dict[str, Any]:
    """Returns the fields that begin with the name of the architecture, without this name."""
    prefix = f"{header.fields.get('general.architecture')}."
    return {key.removeprefix(prefix): value for key, value in header.fields.items() if key.startswith(prefix)}


def short(value: Any) -> str:
    """Returns a value as Python writes it, or its beginning."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."
