"""The GPU part of `benchmarks.decoding`: a step of power attention on a DecodingState, and of softmax attention over a
cache of 65,536 tokens, as CUDA graphs.

A step is timed over a whole turn of the tail, so the token that folds it counts as often as it comes. A state that
would stay in the L2 takes turns with others, as the states of a model's layers do: every step reads from memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import DTYPES, Case, make_inputs
from benchmarks.measure import graphed, measured, milliseconds
from benchmarks.ops import bound
from sympow.ops import DecodingState, PowerState, power_attention, power_attention_step, reference

CASES = [Case(1, B=batch, H=12, G=12, K=64, V=64, dtype="bfloat16") for batch in (1, 64)]
CONTEXT = 65536  # tokens of the softmax cache
PREFIX = 256  # tokens that the state is made of; what a step takes does not depend on it
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)


def tokens(case: Case, count: int, device: str, seed: int) -> list[Tensor]:
    """q, k, v and log_g of `count` tokens."""
    return [x.detach() for name, x in make_inputs(replace(case, T=count), device, seed).items() if name != "dout"]


def new_state(case: Case, device: str, seed: int = 0) -> DecodingState:
    state = power_attention(*tokens(case, PREFIX, device, seed), p=case.p, return_state=True).state
    if state is None:
        raise RuntimeError("the op returned no state where one was asked for")
    return DecodingState.from_state(state, dtype=DTYPES[case.dtype])


def error(case: Case, device: str) -> float:
    """Of the outputs of more steps than the tail holds, against float64: relative, in norm."""
    state = new_state(case, device)
    inputs = tokens(case, state.capacity + 3, device, seed=1)
    before = PowerState(state.s.double(), state.z.double(), case.p, case.K)
    options = {"p": case.p, "scale": case.K**-0.5, "normalize": True, "eps": 1e-6}
    expected, _ = reference.recurrent(*(x.double() for x in inputs), before, **options)
    outs = []
    for i in range(inputs[0].shape[1]):
        step = power_attention_step(*(x[:, i : i + 1] for x in inputs), state=state, inplace=True, **options)
        outs.append(step.out)
    return ((torch.cat(outs, 1).double() - expected).norm() / expected.norm()).item()


def turn(case: Case, device: str, states: list[DecodingState]) -> Callable[[], None]:
    """As many steps on every state as its tail holds."""
    inputs = tokens(case, 1, device, seed=1)

    def call() -> None:
        for _ in range(states[0].capacity):
            for state in states:
                power_attention_step(*inputs, state=state, p=case.p, inplace=True)

    return call


def softmax_calls(case: Case, device: str, context: int) -> dict[str, Callable[[], object]]:
    """One token over a cache, as a graph, by every backend of torch that does it."""
    gen = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(case.B, heads, time, width, generator=gen, device=device, dtype=DTYPES[case.dtype])
        for heads, time, width in ((case.H, 1, case.K), (case.G, context, case.K), (case.G, context, case.V))
    )
    calls = {}
    for backend in BACKENDS:

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return scaled_dot_product_attention(q, k, v)

        try:
            with warnings.catch_warnings(action="ignore"):  # that say why a backend does not do it
                call()
            calls[backend.name.lower()] = graphed(call)
        except RuntimeError:  # not for this shape, this device or this much memory
            continue
    return calls


def copy_call(device: str, size: int) -> Callable[[], object]:
    """A copy of `size` bytes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


@torch.no_grad()
def measure(case: Case, device: str = "cuda", context: int = CONTEXT, copied: int = 1 << 30) -> dict:
    """The row of a case; `context` tokens are in the softmax cache, `copied` bytes tell how fast memory is."""
    wrong, allowed = error(case, device), bound(case)
    if not wrong <= allowed:
        raise RuntimeError(f"{case}: a step errs by {wrong:.1e} where {allowed:.1e} is allowed; not timed")
    states = [new_state(case, device)]
    read = states[0].s.nbytes + states[0].z.nbytes
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
    states += [new_state(case, device, seed) for seed in range(1, -(-2 * cache // read))]
    peers = softmax_calls(case, device, context)
    calls = [graphed(turn(case, device, states)), copy_call(device, copied), *peers.values()]
    ms, copy_ms, *peer_ms = milliseconds(calls, device, rounds=5)
    ms /= states[0].capacity * len(states)
    fastest = min(range(len(peer_ms)), key=peer_ms.__getitem__)
    bandwidth, copy_bandwidth = read / ms / 1e6, 2 * copied / copy_ms / 1e6
    return (
        {"op": "power_attention_step", "impl": "auto", "device": device, "dtype": case.dtype, "gated": case.gated}
        | {"B": case.B, "H": case.H, "G": case.G, "K": case.K, "V": case.V, "p": case.p}
        | {"capacity": states[0].capacity, "ms_per_token": round(ms, 5), "tokens_per_s": round(case.B / ms * 1e3)}
        | {"state_bytes": read, "held_bytes": states[0].nbytes, "states_in_turn": len(states)}
        | {"gb_per_s": round(bandwidth), "copy_gb_per_s": round(copy_bandwidth)}
        | {"share_of_copy": round(bandwidth / copy_bandwidth, 3)}
        | {"peer": f"torch scaled_dot_product_attention, {list(peers)[fastest]}", "context": context}
        | {"peer_ms": round(peer_ms[fastest], 5), "ratio": round(peer_ms[fastest] / ms, 2)}
        | {"err": float(f"{wrong:.2e}"), **measured(device)}
    )


def line(row: dict) -> str:
    """A row as it is printed."""
    timing = (
        f"{row['ms_per_token'] * 1e3:.1f} us, {row['gb_per_s']} GB/s of state, {row['share_of_copy']:.0%} of a copy"
    )
    peer = f"{row['peer']} over {row['context']:,}: {row['peer_ms'] * 1e3:.1f} us, {row['ratio']:.1f}x"
    return f"B {row['B']}: {timing} ({row['states_in_turn']} states in turn); {peer}; err {row['err']:.1e}"
