"""What a forward and backward allocates, by its plan: every launch is left out, and tensors have no memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sympow.ops.runtime import launcher

adapt = pytest.importorskip("sympow.ops.triton.adapt", reason="needs triton")
plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")

MB = 1e6


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that are made and still held."""

    def __init__(self):
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            storage = x.untyped_storage()
            if storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.held.values()))
        return result


def extra_bytes(key_dim: int, monkeypatch, *, gated: bool = True) -> int:
    """Of a forward and backward of [8, 65,536, 12, K] in bfloat16 on an H200: the most beyond inputs and results."""
    monkeypatch.setattr(plan, "on_hopper", lambda device: True)
    monkeypatch.setattr(plan, "processors", lambda device: 132)
    monkeypatch.setattr(plan, "most_kept", lambda device: 150_754_820_096 // 256)
    monkeypatch.setattr(launcher.Launcher, "__call__", lambda self, **tensors: None)
    shape = (8, 65_536, 12)
    q, k, v, dout = (torch.empty(*shape, key_dim, device="meta", dtype=torch.bfloat16) for _ in range(4))
    log_g = torch.empty(shape, device="meta") if gated else None
    chunk = plan.chunk_size(key_dim, 2, shape[1], gradient=True, reach=gated)
    numbers = {"p": 2, "scale": key_dim**-0.5, "normalize": True, "eps": 1e-6, "chunk": chunk, "gradient": True}
    options = adapt.Options(**numbers, final=False, tf32=False, wide=False)
    given = {"q": q, "k": k, "v": v, "log_g": log_g, **dict.fromkeys(("s_init", "z_init", "cu_seqlens"))}
    absent = dict.fromkeys(("ds_final", "dz_final", "frequencies"))
    with Allocated() as allocated:
        result = adapt.forward(**given, options=options)
        grads = adapt.backward(dout=dout, result=result, options=options, **given, **absent)
    return allocated.peak - sum(x.nbytes for x in (result.out, *grads) if x is not None)


@pytest.mark.parametrize(("key_dim", "most"), [(32, 1_440), (64, 3_000), (128, 14_000)])
def test_a_gated_backward_holds_states_or_their_gradients(key_dim, most, monkeypatch):
    """Not both. The most is held by the key pass: one of them, of each boundary and one more, and float32 rows."""
    chunk, rows = {32: (256, 3 * 32**2 // 4), 64: (1024, 3 * 64**2 // 4), 128: (2048, 5 * 128**2 // 8)}[key_dim]
    boundaries = 8 * 65_536 // chunk + 1
    state = 12 * (rows * key_dim + key_dim**2) * 2
    per_token = 7  # three sums of the gate, the normalizer, factor, delta, and q . dq; k . dk is as large as dlog_g
    expected = boundaries * state + per_token * 12 * 8 * 65_536 * 4
    assert expected <= most * MB
    got = extra_bytes(key_dim, monkeypatch)
    assert expected <= got <= 1.002 * expected  # and tables, and the products at the ends of chunks


def test_without_a_gate_there_is_no_more(monkeypatch):
    assert extra_bytes(64, monkeypatch, gated=False) <= 3_400 * MB
