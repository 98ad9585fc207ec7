"""Run folders of sympow as folders of transformers, and back, without loss."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sympow.data import load_tokenizer
from sympow.data.byte_level import bpe_model, byte_characters
from sympow.data.tokenizer_files import CONFIG, end_tokens, json_object, read_beside, tokenizer_config, write_beside
from sympow.data.tokens import BYTES_TAG
from sympow.fields import is_integer
from sympow.files import naming, whole_folder, write_text
from sympow.integrations.transformers.configuration import SympowConfig
from sympow.integrations.transformers.errors import reading, without_bars
from sympow.integrations.transformers.modeling import SympowForCausalLM
from sympow.integrations.transformers.weight_files import check_finite, check_loaded, check_no_adapter
from sympow.integrations.transformers.weights import native_name, weights
from sympow.models import LanguageModel
from sympow.models.lm import Undrawn
from sympow.training import load_model
from sympow.training.run_folder import LoadedModel, config_in, new_folder, write_run_folder

RUN_FILE = "sympow_run.json"
_TOKENIZER = "tokenizer.json"


def to_transformers(
    run_folder: str | os.PathLike[str], out: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> Path:
    """Writes the model of a run as a folder that `from_pretrained` reads, with its tokenizer.

    Args:
        run_folder: a run folder, whose newest checkpoint is taken, or a checkpoint in one.
        out: a new or an empty folder. It gets config.json, the weights as safetensors, tokenizer.json and
            tokenizer_config.json if the run has a tokenizer, with its special tokens and its chat template if
            the run's folder has these, and sympow_run.json: the run's config and its steps.
        max_shard_size: of a file of weights, as in `PreTrainedModel.save_pretrained`.

    Raises FileNotFoundError where there is no checkpoint, FileExistsError where `out` is not empty, OSError where the
    disk takes no more. After an error or a kill there is no folder, so that the call can be repeated.
    """
    loaded = load_model(run_folder, dtype=None)
    folder = new_folder(out)
    source = loaded.run_dir / _TOKENIZER
    if not source.is_file() and loaded.config.data.tokenizer != "none":
        raise FileNotFoundError(f"{source} is missing: the run's config names a tokenizer, saved there")
    with whole_folder(folder) as partial:
        _write(loaded, source, partial, max_shard_size, out=folder)
    return folder


def _write(loaded: LoadedModel, source: Path, folder: Path, max_shard_size: int | str, out: Path) -> None:
    """Fills the folder that becomes `out`. Messages of errors name `out`."""
    model = _sharing(loaded.model)
    if source.is_file() and (ends := end_tokens(loaded.run_dir, load_tokenizer(source))):
        model.generation_config.eos_token_id = sorted(ends)
    try:
        with naming(out), nullcontext() if sys.stderr.isatty() else without_bars():
            model.save_pretrained(folder, max_shard_size=max_shard_size)
    except SafetensorError as error:
        raise OSError(f"cannot write {out}: {error}") from error
    run: dict[str, Any] = {"step": loaded.step, "config": loaded.config.to_dict()}
    if source.is_file():
        text = source.read_text(encoding="utf-8")
        run["tokenizer"] = "bytes" if json.loads(text) == BYTES_TAG else "bpe"
        write_text(folder / _TOKENIZER, _byte_level() if run["tokenizer"] == "bytes" else text)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings = tokenizer_config(loaded.run_dir) | settings
        write_beside(read_beside(loaded.run_dir) | {CONFIG: json.dumps(settings, indent=2) + "\n"}, folder)
    write_text(folder / RUN_FILE, json.dumps(run, indent=2) + "\n")
    for file in folder.glob("*.safetensors"):  # which the library writes for the owner alone
        shutil.copymode(folder / RUN_FILE, file)


def from_transformers(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Writes a folder that `to_transformers` made as a run folder, with the weights that are in it now.

    The states of the optimizer and of the data, which the folder does not contain, are left empty. The run is meant for
    evaluation and generation, and counts as finished.

    Args:
        folder: the folder that `to_transformers` wrote, possibly with weights that were trained in transformers.
        out: a new or an empty folder.

    Raises FileNotFoundError for a folder without sympow_run.json, ValueError for a model that is not of
    sympow and for a file of weights that is cut, FileExistsError where `out` is not empty.
    """
    source = Path(folder)
    for name in ("config.json", RUN_FILE):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} is no folder of to_transformers: it has no {name}")
    _check_type(source)
    run = json_object(source / RUN_FILE)
    target = new_folder(out)
    model = load_exported(source)
    config = config_in(source / RUN_FILE, run.get("config"))
    step = run.get("step")
    if not is_integer(step) or step < 0:
        raise ValueError(f"{source / RUN_FILE}: step must be an integer of at least 0, got {step!r}")
    warmup = min(config.training.warmup_steps, max(1, step))
    training = replace(config.training, steps=max(1, step), warmup_steps=warmup)
    config = replace(config, model=model.config, training=training)
    tokenizer = None
    if "tokenizer" in run:
        own = run["tokenizer"] == "bytes"
        tokenizer = json.dumps(BYTES_TAG) if own else (source / _TOKENIZER).read_text(encoding="utf-8")
    beside = read_beside(source)
    return write_run_folder(target, config, model, step=step, tokenizer=tokenizer, beside=beside)


def load_exported(folder: Path) -> LanguageModel:
    """Loads the native model of a folder that `to_transformers` made, in evaluation mode.

    Raises ValueError for a model of another type and for weights that are not finite, and the errors of `check_loaded`
    and of `reading`, such as ValueError for a file of weights that is cut.
    """
    _check_type(folder)
    with reading(folder), without_bars():
        check_no_adapter(folder)
        options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "output_loading_info": True}
        model, report = SympowForCausalLM.from_pretrained(folder, **options)
        native = native_view(model)
    check_loaded(report, str(folder), own=True)
    for name, weight in weights(model).items():
        if weight.is_floating_point():
            check_finite(weight, name, str(folder))
    return native


def _check_type(folder: Path) -> None:
    """Raises ValueError where the folder's config is of a model that is not of this package, such as a Llama."""
    kind = json_object(folder / "config.json").get("model_type")
    if kind != SympowConfig.model_type:
        wanted = f"a model of type {SympowConfig.model_type!r}"
        raise ValueError(f"{folder} must hold {wanted}; got {kind!r}, of which `sympow convert` makes a run")


def from_native(model: LanguageModel) -> SympowForCausalLM:
    """Makes a `SympowForCausalLM` of a native model, in evaluation mode, with a copy of its weights."""
    return _sharing(deepcopy(model))


def _sharing(model: LanguageModel) -> SympowForCausalLM:
    """Makes a `SympowForCausalLM` with the weights of a native model, which it shares, in evaluation mode."""
    weight = model.embedding.weight
    with torch.device("meta"):
        made = SympowForCausalLM(SympowConfig(model=model.config.to_dict()))
    state = weights(model)
    found = {name: state[native_name(name)].detach() for name in weights(made)}
    made.load_state_dict(found, assign=True, strict=False)
    made.tie_weights()
    return made.to(weight.dtype).eval()


def to_native(model: SympowForCausalLM) -> LanguageModel:
    """Makes a native model of a `SympowForCausalLM`, in evaluation mode, with a copy of its weights."""
    native, view = Undrawn(model.config.model_config), weights(native_view(model))
    for name, tensor in weights(native).items():
        tensor.data = view[name].clone()
    return native.eval()


def native_view(model: SympowForCausalLM) -> LanguageModel:
    """Makes a native model that shares the weights of a `SympowForCausalLM`, in evaluation mode.

    Raises ValueError for a head that is not the embedding to which the config ties it.
    """
    head, embedding = model.lm_head.weight, model.model.embedding.weight
    if model.config.tie_word_embeddings and head is not embedding and not torch.equal(head, embedding):
        raise ValueError("the model has tie_word_embeddings = True, and a lm_head.weight that is not its embedding")
    native = Undrawn(model.config.model_config)
    state = {native_name(name): tensor for name, tensor in weights(model).items()}
    for name, tensor in weights(native).items():
        tensor.data = state[name].detach()
    return native.eval()


def _byte_level() -> str:
    """Returns the tokenizer of bytes for the library tokenizers: a BPE without merges, byte b as token b."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = bpe_model(dict(sorted(byte_characters().items(), key=lambda item: item[1])), [])
    spec: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    spec |= {"normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
    return json.dumps(spec, ensure_ascii=False)
