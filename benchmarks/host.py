"""Times what a call costs the host: `python -m benchmarks.host --device cuda --csv FILE`.

On a GPU a call returns when its kernels are launched; where rows are short, the launching is what a user waits for.
So `us` is the time until a call has returned, as called, without a CUDA graph. `wall_us` is the time of a call in a
sequence of calls, until the GPU has finished all of them. The peer is cuDNN's softmax attention on the same shapes; for
the layer, the same layer with softmax attention. On the CPU a call returns when it has computed, and both times agree.

A GPU's backward runs in a thread of its own, which Python and PyTorch's code first have to reach. `one_thread_us` is
`us` with the backward in the thread of the caller (`torch.autograd.set_multithreading_enabled(False)`). `--profile`
prints which functions take that time. `--launches` prints the kernels of a call and what the host does in it, by parts:
for a compiled layer, the guards of torch.compile, what it runs around the graph, the code that it made, and operators.

Every call is checked before it is timed: power attention as `benchmarks.ops` does, a layer against itself in float32 by
the implementation in plain torch.
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.cases import DTYPES, MODES, Case, make_inputs, power_call
from benchmarks.common.measure import measured, options, write
from benchmarks.common.peers import heads_first
from benchmarks.ops import check, expected, relative
from benchmarks.training_profile import kernels
from sympow.layers.attention import BLOCK
from sympow.layers.power import PowerAttention
from sympow.layers.softmax import SoftmaxAttention


def _gpu(T: int, B: int = 1) -> Case:
    return Case(T, B=B, H=12, G=12, K=64, V=64, dtype="bfloat16")


# Forward and backward of a layer of width H K, its products in the case's dtype: called as it is, through
# torch.compile, and through torch.compile with CUDA graphs (mode="reduce-overhead").
LAYERS = ("layer", "layer compiled", "layer compiled, graphs")
# By device, of the op and of the layer, which takes half a minute to compile.
CASES = {
    "cpu": [Case(64, H=2, G=2, K=16, V=16)],
    "cuda": [_gpu(256), _gpu(1024), _gpu(4096), _gpu(1024, 8), _gpu(4096, 8)],
}
LAYER_CASES = {"cpu": CASES["cpu"], "cuda": [_gpu(1024), _gpu(1024, 8), _gpu(4096, 8)]}
CALLS = 20  # timed together, one after the other: few enough that the queue of the GPU takes them all
ROUNDS = 15
FUNCTIONS = 15  # of a profile
# What the profiler of PyTorch records on the host, by the beginnings of the names; all others are "other".
HOST_PARTS = {
    "guards": ("TorchDynamo Cache Lookup",),
    "around the graph": ("Torch-Compiled Region", "CompiledFunction", "autograd::"),
    "compiled code": ("## Call CompiledFxGraph",),
    "operators of sympow": ("sympow::", "Direct_", "Registered_"),
    "operators of PyTorch": ("aten::",),
    "launches": ("cudaLaunch", "cuLaunch", "cudaMemset", "cudaMemcpy"),
}
# Of a layer's output and of the gradient of its input: a few roundings of the dtype, one behind the other.
ROUNDINGS = 8


def microseconds(calls: Sequence[Callable[[], object]], device: str) -> list[tuple[float, float]]:
    """Returns, for each call, the median time until it returns, and the median time until its work is done."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed(call: Callable[[], object]) -> tuple[float, float]:
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        launched = time.perf_counter()
        wait()
        return (launched - start) / CALLS * 1e6, (time.perf_counter() - start) / CALLS * 1e6

    for call in calls:
        timed(call)
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(ROUNDS):
        for i in order.sample(range(len(calls)), len(calls)):
            times[i].append(timed(calls[i]))
    return [(statistics.median(us for us, _ in kept), statistics.median(wall for _, wall in kept)) for kept in times]


def softmax_call(inputs: dict[str, Tensor], mode: str) -> list[Tensor]:
    """Returns the output of torch's softmax attention, and with a backward the gradients; heads before tokens."""
    leaves = [inputs[name] for name in "qkv"]
    with torch.set_grad_enabled(mode != "forward"):
        out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1])
    return [out] if mode == "forward" else [out, *torch.autograd.grad(out, leaves, inputs["dout"])]


def layer_call(layer: nn.Module, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """Returns the output in the dtype of `dout`, and the gradients of `leaves`, of which the first is the input."""
    x, dtype = leaves[0], dout.dtype
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast(x.device.type, dtype)
    with autocast:
        out = layer(x)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def prepared(layer: nn.Module, x: Tensor, dout: Tensor) -> Callable[[], list[Tensor]]:
    """Returns `layer_call` with its tensors, so that collecting the parameters is not timed."""
    return partial(layer_call, layer, [x, *layer.parameters()], dout)


def layer_calls(case: Case, device: str, what: str) -> tuple[Callable, Callable, float]:
    """Returns a call of the layer and of the same with softmax attention, and the error of the first."""
    width, dtype = case.H * case.K, DTYPES[case.dtype]
    gen = torch.Generator(device).manual_seed(0)
    x, dout = (torch.randn(case.B, case.T, width, generator=gen, device=device) for _ in range(2))
    x.requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours: nn.Module = PowerAttention(width, case.H, p=case.p, **BLOCK).to(device)
        peer: nn.Module = SoftmaxAttention(width, case.H, **BLOCK).to(device)
    exact = copy.deepcopy(ours)
    exact.impl = "eager"
    if what in LAYERS[1:]:
        torch.compiler.reset()
        mode = "reduce-overhead" if what == LAYERS[2] else None
        ours, peer = torch.compile(ours, mode=mode), torch.compile(peer, mode=mode)
    call = prepared(ours, x, dout.to(dtype))
    for _ in range(3):  # with CUDA graphs, the first call runs without them and the second captures them
        got = [each.clone() for each in call()[:2]]
    wanted = prepared(exact, x, dout)()
    wrong = max(relative(a, b.double()) for a, b in zip(got, wanted[:2], strict=True))
    allowed = ROUNDINGS * torch.finfo(dtype).eps
    if not wrong <= allowed:
        raise RuntimeError(f"{case}, {what}: errs by {wrong:.1e} where {allowed:.1e} is allowed; not timed")
    return call, prepared(peer, x, dout.to(dtype)), wrong


def op_calls(case: Case, device: str, mode: str) -> tuple[Callable, Callable, float]:
    """Returns a call of power attention and of softmax attention, and the error of the first."""
    inputs = make_inputs(case, device)
    wrong = check(case, mode, power_call(case, inputs, "auto", mode), expected(case, inputs, mode))
    return partial(power_call, case, inputs, "auto", mode), partial(softmax_call, heads_first(inputs), mode), wrong


def print_profile(call: Callable[[], object]) -> None:
    """Prints the functions of a call that take the most time of their own, the profiler's share included."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(CALLS * ROUNDS):
            call()
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(FUNCTIONS)


def host_parts(times: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Returns the sum of the times of each of HOST_PARTS and of "other", the largest first."""
    parts: Counter[str] = Counter()
    for name, us in times:
        parts[next((part for part, begins in HOST_PARTS.items() if name.startswith(begins)), "other")] += us
    return dict(parts.most_common())


def print_launches(call: Callable[[], object], device: str) -> None:
    """Prints the kernels of a call on the GPU, and the time of its parts on the host, the profiler's share included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(CALLS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    on_host = [(event.key, event.self_cpu_time_total) for event in profiler.key_averages()]
    parts = {part: us / CALLS for part, us in host_parts(on_host).items() if us}
    print("host, us a call: " + ", ".join(f"{part} {us:.0f}" for part, us in parts.items()))
    events = [x for x in profiler.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    if events:
        rows, busy, _ = kernels(events, CALLS)
        launches = sum(row["launches"] for row in rows)
        print(f"kernels: {launches:.0f} a call, {busy * 1e3:.0f} us")
        for row in rows:
            print(f"{row['launches']:>6} {row['ms'] * 1e3:>8.0f} us  {row['kernel'][:100]}")


def measure(case: Case, device: str, what: str, profile: bool = False, launches: bool = False) -> dict:
    """Returns the row of a case; `what` is one of MODES or LAYERS.

    With `profile` and `launches`, prints what our call does.
    """
    # Of softmax attention, only cuDNN's on a GPU: chosen once, as the choice takes time on the host.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if device == "cuda" else nullcontext():
        calls = layer_calls if what in LAYERS else op_calls
        ours, peer, wrong = calls(case, device, what)
        (us, wall), (peer_us, peer_wall) = microseconds([ours, peer], device)
        with torch.autograd.set_multithreading_enabled(False):
            (one, _), (peer_one, _) = microseconds([ours, peer], device)
            if profile:
                print_profile(ours)
            if launches:
                print_launches(ours, device)
    return (
        {"what": what, "device": device, "dtype": case.dtype, "gated": case.gated, "p": case.p}
        | {"B": case.B, "T": case.T, "H": case.H, "G": case.G, "K": case.K, "V": case.V}
        | {"us": round(us, 1), "peer_us": round(peer_us, 1), "wall_us": round(wall, 1)}
        | {"one_thread_us": round(one, 1), "peer_one_thread_us": round(peer_one, 1)}
        | {"peer_wall_us": round(peer_wall, 1), "ratio": round(peer_wall / wall, 3), "err": float(f"{wrong:.2e}")}
        | {"peer": "cuDNN softmax attention" if device == "cuda" else "torch scaled_dot_product_attention"}
        | measured(device)
    )


def main() -> None:
    parser = options("benchmarks.host", __doc__)
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    parser.add_argument(
        "--launches", action="store_true", help="print the kernels of calls, and parts of the host's time"
    )
    parser.add_argument(
        "--what", nargs="+", default=(*MODES, *LAYERS), choices=(*MODES, *LAYERS), help="(default: all)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict] = []
    names = ("us", "peer_us", "one_thread_us", "peer_one_thread_us", "wall_us", "peer_wall_us")
    titles = " ".join(f"{name.removesuffix('_us').replace('_', ' '):>15}" for name in names)
    print(f"{'what':>22} {'B':>3} {'T':>6} {titles} {'ratio':>6} {'err':>8}")
    for what in args.what:
        for case in (LAYER_CASES if what in LAYERS else CASES)[args.device]:
            row = measure(case, args.device, what, args.profile, args.launches)
            times = " ".join(f"{row[name]:>15.1f}" for name in names)
            print(f"{what:>22} {row['B']:>3} {row['T']:>6} {times} {row['ratio']:>6.2f} {row['err']:>8.1e}", flush=True)
            rows.append(row)
            write(args.csv, rows)  # a run that is stopped keeps what it has


if __name__ == "__main__":
    main()
