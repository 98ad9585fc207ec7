"""Compares sizes that a user asks for with the memory that is there, before the memory is allocated."""

from __future__ import annotations

import math
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import torch

from sympow.ops.cost import format_bytes

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
_ON_A_GPU = re.compile(r"Tried to allocate ([\d.]+ \w+)\. (GPU \d+ has a total capacity of .*? is free)")
_ON_THE_HOST = re.compile(r"tried to allocate (\d+) bytes")
_TOO_LARGE = re.compile(r"Storage size calculation overflowed with (sizes=\[[\d, ]*\])")


class Memory(NamedTuple):
    """Counts bytes of a device: those that can be allocated now, and all."""

    free: int
    total: int


def check_memory(what: str, nbytes: float, device: torch.device | str = "cpu", *, whole: bool = False) -> None:
    """Raises ValueError if `nbytes` are more than the free memory of a device.

    Linux gives out memory that it does not have, and later ends the process without a message.

    Args:
        what: what needs the memory, for the error.
        nbytes: the bytes needed at least.
        device: "cpu" means the machine.
        whole: compare with all memory of the device, also that which is in use.
    """
    memory = memory_of(device)
    if memory is not None and nbytes > (memory.total if whole else memory.free):
        there = f"{format_bytes(memory.total)}" if whole else f"{format_bytes(memory.free)} free"
        raise ValueError(f"{what} needs {_shown(nbytes)} of memory; {_name(device)} has {there}")


def memory_of(device: torch.device | str = "cpu") -> Memory | None:
    """Returns the memory of a device, or None where it is not known."""
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total)
    return _of_host() if device.type == "cpu" else None


def allocation_error(error: BaseException) -> str | None:
    """Returns one line for an error of an allocator, with what was asked for and what is there; None for others."""
    text = " ".join(str(error).split())
    if found := _ON_A_GPU.search(text):
        return f"not enough memory: {found[1]} were asked for; {found[2]}"
    if found := _ON_THE_HOST.search(text):
        asked = f"{format_bytes(int(found[1]))} were asked for"
    elif found := _TOO_LARGE.search(text):
        asked = f"a tensor of {found[1]} was asked for"
    elif isinstance(error, MemoryError):
        asked = text or "an object of Python was asked for"
    else:
        return None
    memory = memory_of("cpu")
    there = "" if memory is None else f"; {_name('cpu')} has {format_bytes(memory.free)} free"
    return f"not enough memory: {asked}{there}"


def _of_host() -> Memory | None:
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        known = {words[0]: 1024 * int(words[1]) for words in lines}
        free, total = known["MemAvailable:"] + known["SwapFree:"], known["MemTotal:"] + known["SwapTotal:"]
    except (OSError, KeyError):  # not Linux
        try:
            free = total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    for file in map(Path, _LIMITS):
        limit = file.read_text(encoding="ascii").strip() if file.is_file() else "max"
        if limit != "max":
            free, total = min(free, int(limit)), min(total, int(limit))
    return Memory(free, total)


def _name(device: torch.device | str) -> str:
    return "this machine" if torch.device(device).type == "cpu" else str(device)


def _shown(count: float) -> str:
    if count < 1e21:
        return format_bytes(int(count))
    return "inf bytes" if count == math.inf else f"{Decimal(count):.1e} bytes"  # also where no float holds it
