"""`sympow serve`: serves a run folder, or a folder of Hugging Face transformers, with OpenAI's interface."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from sympow.cli.run_checks import dtype_of, text_tokenizer
from sympow.data import Tokenizer, load_tokenizer
from sympow.data.tokenizer_files import end_tokens, json_object
from sympow.files import naming
from sympow.models import LanguageModel
from sympow.models.slots import CacheRoom
from sympow.ops.cost import counted, format_bytes
from sympow.ops.memory import check_memory
from sympow.training import load
from sympow.training.devices import resolve_device
from sympow.training.run_folder import folder_of

KEYS = "SYMPOW_API_KEYS"
CACHE_DISK = 10.0  # GiB in --cache-dir, unless --cache-disk says otherwise
_GIB = 1 << 30
_BYTES_A_TOKEN = 16  # of a prompt in the body of a request


class Served(NamedTuple):
    """Holds a model to serve, and the folder of its tokenizer."""

    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path


def run(options: argparse.Namespace) -> None:
    """Loads the model, and serves it until SIGINT or SIGTERM."""
    from sympow.serving import Engine, PrefixCache
    from sympow.serving.http import ChatTemplate, Limits, Service, run_server  # which need the extra

    device = resolve_device(options.device)
    torch.set_num_threads(engine_threads(device))
    served = load_served(options.folder, device, dtype_of(options.dtype))
    check_sizes(options, device)
    limits = Limits(options.max_prompt_tokens, options.max_new_tokens, seconds=options.timeout)
    keys = api_keys(options.api_keys)
    cache = None if options.cache_dir is None else Path(options.cache_dir)
    disk = CACHE_DISK if options.cache_disk is None else options.cache_disk
    memory = round(_GIB * options.cache_memory)
    narrow = None if options.state_dtype == "float32" else getattr(torch, options.state_dtype)
    engine = Engine(
        served.model,
        served.tokenizer,
        slots=options.slots,
        most=options.max_prompt_tokens + options.max_new_tokens,
        queue=options.queue,
        chunk=options.prefill_chunk or (1024 if device.type == "cuda" else 256),
        prefixes=PrefixCache(served.model, memory, cache, round(_GIB * disk), narrow),
        ends=end_tokens(served.folder, served.tokenizer),
        state_dtype=narrow,
    )
    template = ChatTemplate.of(served.folder)
    name = options.name or served.folder.resolve().name
    service = Service(engine, served.tokenizer, name, template, limits, keys)

    def started(address: str) -> None:
        chats = "completions and chats" if template else "completions (no chat template)"
        each = f"{format_bytes(engine.nbytes // options.slots)}{room_shown(engine.room)}"
        sums = f", sums in {options.state_dtype}" if narrow else ""
        states = f"{counted(options.slots, 'slot')} of {each}{sums}"
        print(f"serving {name} at {address}/v1: {chats}, {states}", file=sys.stderr, flush=True)

    def ending() -> None:
        told = f"stopping: running requests have {grace} s; Ctrl-C again stops now"
        print(told, file=sys.stderr, flush=True)

    hosts, grace = options.allowed_host, max(1, round(options.grace))
    run_server(service, options.host, options.port, grace=grace, started=started, ending=ending, allowed_hosts=hosts)
    print("stopped", file=sys.stderr)


def room_shown(room: CacheRoom | None) -> str:
    """Says in the first line of output what room the key/value caches have; nothing for a model without such caches."""
    if room is None or not room.nbytes:
        return ""
    if room.fixed:
        return f" with key/value caches of {room.tokens:,} tokens"
    if room.allowed is None:
        why = "the free memory is not known"
    else:
        asked, allowed = format_bytes(room.nbytes), format_bytes(room.allowed)
        why = (f"caches of {room.tokens:,} tokens in all slots would take {asked}, more than a tenth of the free "
               f"memory, {allowed}: see --max-prompt-tokens")  # fmt: skip
    return f"; softmax attention is stepped row by row, because {why}"


def check_sizes(options: argparse.Namespace, device: torch.device) -> None:
    """Raises ValueError for caches and prompts that are larger than the memory or the disk."""
    check_memory(f"--cache-memory {options.cache_memory:g}", _GIB * options.cache_memory, device, whole=True)
    body = _BYTES_A_TOKEN * options.max_prompt_tokens
    check_memory(f"--max-prompt-tokens {options.max_prompt_tokens:,}", body, whole=True)
    if options.cache_dir is not None and Path(options.cache_dir).is_file():
        raise ValueError(f"--cache-dir is a folder; {options.cache_dir} is a file")
    if options.cache_disk is not None:
        folder = Path(options.cache_dir).absolute()
        disk = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).total
        if options.cache_disk > disk / _GIB:
            there = f"the disk of {options.cache_dir} has {disk / _GIB:,.0f} GiB"
            raise ValueError(f"--cache-disk {options.cache_disk:g} asks for that many GiB; {there}")


def engine_threads(device: torch.device) -> int:
    """Returns how many threads torch gets: on a CPU one less than its default, because requests need a core too.

    If the variable OMP_NUM_THREADS is set, the number stays as it is.
    """
    threads = torch.get_num_threads()
    return threads if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ else max(1, threads - 1)


def load_served(path: str, device: torch.device, dtype: torch.dtype | None = None) -> Served:
    """Loads a run folder, a checkpoint in one, or a folder that `sympow export` wrote.

    With `dtype` None, weights keep the dtype of their files.

    Raises ValueError for a model without a tokenizer, and as `sympow.training.load` does.
    """
    folder = Path(path)
    config = folder / "config.json"
    if config.is_file() and "model_type" in json_object(config):
        from sympow.integrations.transformers.folders import load_exported  # which imports transformers

        model = load_exported(folder)
        return Served(model.to(device, dtype), load_tokenizer(folder, model.config.vocab_size), folder)
    run = load(folder, device, dtype)
    return Served(run.model, text_tokenizer(run.tokenizer, path), folder_of(folder))


def api_keys(file: str | None) -> tuple[str, ...]:
    """Returns the keys in a file (one per line), or those in the variable SYMPOW_API_KEYS (separated by commas).

    Raises ValueError for a file without keys, and for keys that are not UTF-8.
    """
    with naming(file or KEYS, reading=True):
        given = os.fsencode(os.environ.get(KEYS, "")) if file is None else Path(file).read_bytes()
    try:
        text = given.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file or KEYS} is not UTF-8 text: {error.reason}") from None
    if file is None:
        return tuple(key for word in text.split(",") if (key := word.strip()))
    keys = tuple(key for line in text.splitlines() if (key := line.strip()))
    if not keys:
        raise ValueError(f"{file} holds no API keys: one a line is expected")
    return keys
