"""The GPU part of `benchmarks.decoding`: a step of power attention on a DecodingState, and of softmax attention over a
cache of 65,536 tokens, as CUDA graphs.

The time of a step is a mean over as many tokens as the tail has room for, so that folding counts as often as it occurs.
Several states are used one after the other if one would stay in the L2 cache, as the layers of a model are: every step
reads its state from memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.cases import DTYPES, Case, make_inputs
from benchmarks.common.measure import graphed, measured, milliseconds
from benchmarks.ops import bound
from sympow.ops import DecodingState, power_attention, power_attention_step, reference


@dataclass(frozen=True)
class Step:
    """Describes a step to time.

    Attributes:
        case: the shapes, T = 1.
        state_dtype: of the large part of the state.
        slotted: the batch uses every other slot of a pool of twice the size.
    """

    case: Case
    state_dtype: str = "float32"
    slotted: bool = False


def _of_a_llama(batch: int) -> Case:
    """Returns a case as in models of 7 to 8 billion parameters: 32 query heads share 8 key/value heads of 128
    channels."""
    return Case(1, B=batch, H=32, G=8, K=128, V=128, dtype="bfloat16")


CASES = [
    *(Step(Case(1, B=batch, H=12, G=12, K=64, V=64, dtype="bfloat16")) for batch in (1, 64)),
    *(Step(_of_a_llama(batch), dtype) for batch in (1, 32) for dtype in ("float32", "bfloat16", "int8")),
    Step(_of_a_llama(32), slotted=True),
]
STATE_DTYPES = DTYPES | {"int8": torch.int8}
CONTEXT = 65536  # tokens of the softmax cache
PREFIX = 256  # tokens that the state is made of; what a step takes does not depend on it
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def tokens(case: Case, count: int, device: str, seed: int) -> list[Tensor]:
    """Returns q, k, v and log_g of `count` tokens."""
    return [x.detach() for name, x in make_inputs(replace(case, T=count), device, seed).items() if name != "dout"]


def new_state(step: Step, device: str, seed: int = 0) -> DecodingState:
    case = step.case
    state = power_attention(*tokens(case, PREFIX, device, seed), p=case.p, return_state=True).state
    if state is None:
        raise RuntimeError("the op returned no state where one was asked for")
    held = DecodingState.from_state(state, dtype=DTYPES[case.dtype], state_dtype=STATE_DTYPES[step.state_dtype])
    if not step.slotted:
        return held
    tensors = {name: x.new_zeros(2 * case.B, *x.shape[1:]) for name, x in held.tensors().items()}
    slots = torch.arange(1, 2 * case.B, 2, device=device, dtype=torch.int32).flip(0)
    pool = replace(held, **tensors, slots=slots)
    pool.put(held)
    return pool


def error(step: Step, device: str) -> float:
    """Returns the relative error, in norm, of the outputs of more steps than the tail holds, against float64."""
    state = new_state(step, device)
    inputs = tokens(step.case, state.capacity + 3, device, seed=1)
    outs = []
    for i in range(inputs[0].shape[1]):
        now = (x[:, i : i + 1] for x in inputs)
        outs.append(power_attention_step(*now, state=state, inplace=True, p=step.case.p).out)
    exact = _exact(step, device)
    return ((torch.cat(outs, 1).double() - exact).norm() / exact.norm()).item()


@lru_cache(maxsize=1)
def _exact(step: Step, device: str) -> Tensor:
    """Returns the correct outputs for `error`."""
    case, state = step.case, new_state(step, device)
    inputs = tokens(case, state.capacity + 3, device, seed=1)
    options = {"p": case.p, "scale": case.K**-0.5, "normalize": True, "eps": 1e-6}
    return reference.recurrent(*(x.double() for x in inputs), state.folded(torch.float64), **options)[0]


def turn(case: Case, device: str, states: list[DecodingState]) -> Callable[[], None]:
    """Does as many steps on every state as its tail has room for."""
    inputs = tokens(case, 1, device, seed=1)

    def call() -> None:
        for _ in range(states[0].capacity):
            for state in states:
                power_attention_step(*inputs, state=state, p=case.p, inplace=True)

    return call


def softmax_calls(case: Case, device: str, context: int) -> dict[str, Callable[[], object]]:
    """Returns a step of softmax attention over a cache, as a graph, for every backend of torch that supports it."""
    gen = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(case.B, heads, time, width, generator=gen, device=device, dtype=DTYPES[case.dtype])
        for heads, time, width in ((case.H, 1, case.K), (case.G, context, case.K), (case.G, context, case.V))
    )
    calls = {}
    for backend in BACKENDS:

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return scaled_dot_product_attention(q, k, v, enable_gqa=case.G != case.H)

        try:
            with warnings.catch_warnings(action="ignore"):  # that say why a backend does not do it
                call()
            calls[backend.name.lower()] = graphed(call)
        except RuntimeError:  # not for this shape, this device or this much memory
            continue
    return calls


def copy_call(device: str, size: int) -> Callable[[], object]:
    """Returns a copy of `size` bytes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def states_in_turn(step: Step, device: str) -> list[DecodingState]:
    """Returns so many states that they do not fit into the L2 cache."""
    first = new_state(step, device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
    return [first, *(new_state(step, device, seed) for seed in range(1, -(-2 * cache // _read(first))))]


def _read(state: DecodingState) -> int:
    """Returns the bytes of s, its scales and z that a step reads."""
    scales = 0 if state.scales is None else state.scales[0].nbytes
    return (state.s[0].nbytes + state.z[0].nbytes + scales) * state.batch


def checked_error(step: Step, device: str) -> float:
    """Returns `error`; raises RuntimeError where it is too large for the step to be timed."""
    wrong, allowed = error(step, device), bound(step.case)
    if not wrong <= allowed:
        raise RuntimeError(f"{step}: a step errs by {wrong:.1e} where {allowed:.1e} is allowed; not timed")
    return wrong


@torch.no_grad()
def measure(step: Step, device: str = "cuda", context: int = CONTEXT, copied: int = 1 << 30) -> dict:
    """Returns the row of a step; `context` tokens are in the softmax cache, `copied` bytes tell how fast memory is."""
    case, wrong = step.case, checked_error(step, device)
    states = states_in_turn(step, device)
    read = _read(states[0])
    peers = softmax_calls(case, device, context)
    calls = [graphed(turn(case, device, states)), copy_call(device, copied), *peers.values()]
    ms, copy_ms, *peer_ms = milliseconds(calls, device, rounds=5)
    ms /= states[0].capacity * len(states)
    peer: dict = {"peer": None, "context": context, "peer_ms": None, "ratio": None}
    if peers:  # no backend takes every shape
        fastest, name = min(zip(peer_ms, peers, strict=True))
        peer |= {"peer": f"torch scaled_dot_product_attention, {name}"}
        peer |= {"peer_ms": round(fastest, 5), "ratio": round(fastest / ms, 2)}
    bandwidth, copy_bandwidth = read / ms / 1e6, 2 * copied / copy_ms / 1e6
    return (
        {"op": "power_attention_step", "impl": "auto", "device": device, "dtype": case.dtype, "gated": case.gated}
        | {"B": case.B, "H": case.H, "G": case.G, "K": case.K, "V": case.V, "p": case.p}
        | {"state_dtype": step.state_dtype, "slotted": step.slotted}
        | {"capacity": states[0].capacity, "ms_per_token": round(ms, 5), "tokens_per_s": round(case.B / ms * 1e3)}
        | {"state_bytes": read, "held_bytes": states[0].nbytes, "states_in_turn": len(states)}
        | {"gb_per_s": round(bandwidth), "copy_gb_per_s": round(copy_bandwidth)}
        | {"share_of_copy": round(bandwidth / copy_bandwidth, 3)}
        | peer
        | {"err": float(f"{wrong:.2e}"), **measured(device)}
    )


def line(row: dict) -> str:
    """Returns a row as text to print."""
    timing = (
        f"{row['ms_per_token'] * 1e3:.1f} us, {row['gb_per_s']} GB/s of state, {row['share_of_copy']:.0%} of a copy"
    )
    peer = "no peer takes this shape"
    if row["peer"] is not None:
        peer = f"{row['peer']} over {row['context']:,}: {row['peer_ms'] * 1e3:.1f} us, {row['ratio']:.1f}x"
    shape = f"B {row['B']}, H {row['H']}, G {row['G']}, K {row['K']}, state {row['state_dtype']}"
    shape += ", slots" if row["slotted"] else ""
    return f"{shape}: {timing} ({row['states_in_turn']} states in turn); {peer}; err {row['err']:.1e}"
