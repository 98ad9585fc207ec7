"""What is known of the memory, and sizes that are compared with it."""

import pytest
import torch

from sympow.ops import memory
from sympow.ops.memory import Memory, allocation_error, check_memory, memory_of

GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 5.10 GiB is "
    "free. Including non-PyTorch memory, this process has 73.99 GiB memory in use."
)


def test_the_memory_of_this_machine():
    free, total = memory_of("cpu")
    assert 1 << 20 < free <= total
    assert memory_of("meta") is None


def test_sizes(monkeypatch):
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(10**9, 4 * 10**9))
    check_memory("a", 10**9)
    with pytest.raises(ValueError, match=r"^a needs 1\.1 GB of memory; this machine has 1\.0 GB free$"):
        check_memory("a", 11 * 10**8)
    check_memory("a", 4 * 10**9, whole=True)
    with pytest.raises(ValueError, match=r"^a needs 4\.1 GB of memory; cuda:1 has 4\.0 GB$"):
        check_memory("a", 41 * 10**8, torch.device("cuda", 1), whole=True)


def test_errors_of_allocators():
    expected = "not enough memory: 20.00 GiB were asked for; GPU 0 has a total capacity of 79.11 GiB of which 5.10 GiB"
    assert allocation_error(torch.OutOfMemoryError(GPU)) == f"{expected} is free"
    assert allocation_error(RuntimeError("a kernel failed")) is None
