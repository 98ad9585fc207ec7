"""What is known of the memory, and sizes that are compared with it."""

import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sympow.ops import PowerState, memory, power_attention, power_delta_rule, types
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
    for nbytes, shown in ((32 * 10**30, "3.2e+31"), (3e31, "3.0e+31"), (99 * 10**6000, "9.9e+6001"), (math.inf, "inf")):
        with pytest.raises(ValueError, match=rf"^a needs {re.escape(shown)} bytes of memory; this"):
            check_memory("a", nbytes)


def test_errors_of_allocators():
    expected = "not enough memory: 20.00 GiB were asked for; GPU 0 has a total capacity of 79.11 GiB of which 5.10 GiB"
    assert allocation_error(torch.OutOfMemoryError(GPU)) == f"{expected} is free"
    assert allocation_error(RuntimeError("a kernel failed")) is None


@pytest.fixture
def room(monkeypatch):
    """Leaves memory for one state of `call`, which plain torch holds twice in float32, but not for two states."""
    monkeypatch.setattr(types, "LARGE", 0)
    monkeypatch.setattr(memory, "memory_of", lambda device: Memory(400, 400))  # a state is 10 * (3 + 1) numbers


def call(op, batch, time=6, ends=None, **options):
    q, v, beta = torch.ones(batch, time, 1, 4), torch.ones(batch, time, 1, 3), torch.ones(batch, time, 1)
    if ends is not None:
        options["cu_seqlens"] = torch.tensor(ends)
    return op(q, q, v, beta, **options) if op is power_delta_rule else op(q, q, v, **options)


@pytest.mark.parametrize("op", [power_attention, power_delta_rule])
def test_states_that_a_call_does_not_make_need_no_memory(op, room):
    for batch, options in (
        (8, {}),
        (8, {"chunk_size": 6}),
        (1, {"chunk_size": 2}),
        (1, {"return_state": True}),
        (1, {"ends": [0, 2, 2, 4, 6]}),
        (1, {"ends": [0, 2, 2, 4, 6], "chunk_size": 2}),
        (1, {"ends": [0, 1, 6], "chunk_size": 2}),
        (1, {"time": 0, "ends": [0] * 9}),
    ):
        call(op, batch, **options)
    for batch, options in (
        (8, {"chunk_size": 4}),
        (8, {"return_state": True}),
        (8, {"impl": "reference"}),
        (1, {"ends": [0, 2, 2, 4, 6], "return_state": True}),
        (1, {"time": 0, "ends": [0] * 9, "return_state": True}),
    ):
        with pytest.raises(ValueError, match=r"a state of p = 2 and K = 4 needs .* of memory; this machine has"):
            call(op, batch, **options)


def test_fake_tensors_need_no_memory(room):
    with FakeTensorMode():
        PowerState.zeros(8, 1, 4, 3)
        q, beta = torch.ones(8, 6, 1, 4), torch.ones(8, 6, 1)
        power_attention(q, q, q, return_state=True)
        power_attention(q, q, q, chunk_size=2)
        power_delta_rule(q, q, q, beta, return_state=True)


def test_states_in_float64_need_twice_the_memory(room):
    PowerState.zeros(2, 1, 4, 3)
    with pytest.raises(ValueError, match="needs 640 B of memory"):
        PowerState.zeros(2, 1, 4, 3, dtype=torch.float64)


@pytest.mark.parametrize(("key_dim", "p", "size"), [(4096, 2000, "4.2e+1675"), (1000, 1000, "2.7e+602")])
def test_sizes_that_no_float_holds(key_dim, p, size):
    with pytest.raises(ValueError, match=re.escape(f"needs {size} bytes of memory; ")):
        PowerState.zeros(1, 1, key_dim, 64, p)
