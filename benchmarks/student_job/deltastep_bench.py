"""Checks and times the kernel of a step of the delta rule on a GPU, beside plain torch.

    PYTHONPATH=WORKTREE python deltastep_bench.py check      # against float64, compiled, in a graph; a minute
    PYTHONPATH=WORKTREE python deltastep_bench.py time       # kernel, step, plain steps, a pass over the state, the host
    PYTHONPATH=WORKTREE python deltastep_bench.py sweep [N]  # sizes of a launch, for all shapes or the Nth; a minute each

Times are of CUDA graphs over so many states that none is still in the L2 cache; the median of 20 replays.
Without a GPU, `check` runs small shapes in Triton's interpreter (TRITON_INTERPRET=1).
"""

import statistics
import sys
import time
from unittest import mock

import torch

from sympow.ops import delta_rule, power_delta_rule_step
from sympow.ops.feature_map import spow, spow_dim
from sympow.ops.fused.unit_heads import unit_heads
from sympow.ops.triton import delta_step

GPU = torch.cuda.is_available()
DEV = "cuda" if GPU else "cpu"
SHAPES = [(1, 9, 9, 64), (32, 9, 9, 64), (32, 12, 12, 64), (1, 8, 32, 128), (32, 8, 32, 128)]  # B, G, H, K = V


def make(B, G, H, K, p=2, dtype=torch.bfloat16, T=1, gate=True):
    gen = torch.Generator(DEV).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=gen, device=DEV)

    q, k, v = (normal(B, T, h, K).to(dtype) for h in (H, G, G))
    return [q, k, v, torch.rand(B, T, G, generator=gen, device=DEV), -normal(B, T, G).abs() if gate else None]


def states(B, G, K, p, count):
    return [torch.randn(B, G, spow_dim(K, p), K, device=DEV) for _ in range(count)]


def step(tokens, state, p=2):
    return power_delta_rule_step(*tokens, state=state, p=p, inplace=True)


def plain(tokens, state, p=2):
    """The step of this branch in plain torch."""
    with mock.patch.object(delta_rule, "has_kernels", lambda *_: False):
        return step(tokens, state, p)


def plain_of_main(tokens, state, p=2):
    """The step as main has it: queries and key read the state separately."""
    q, k, v, beta, log_g = tokens
    q, k = unit_heads(q, k)
    phi_q = spow(q.to(state.dtype).unflatten(2, (k.shape[2], -1)), p)
    phi_k = spow(k.to(state.dtype), p)
    values, beta = v.to(state.dtype), beta.to(state.dtype)
    gates = None if log_g is None else log_g.to(state.dtype).exp()
    outs = []
    for i in range(q.shape[1]):
        if gates is not None:
            state *= gates[:, i, :, None, None]
        key = phi_k[:, i, :, None]
        written = beta[:, i, :, None] * (values[:, i] - (key @ state)[:, :, 0])
        state.addcmul_(key.mT, written[:, :, None])
        outs.append(phi_q[:, i] @ state)
    return delta_rule.DeltaOutput(torch.stack(outs, 1).flatten(2, 3).to(v.dtype), state)


def errors(tokens, before, got, after, p):
    """Errors of output and state over the norm of a column of the state."""
    q, k = unit_heads(*tokens[:2])
    exact = [None if x is None else x.double() for x in (q, k, *tokens[2:])]
    with mock.patch.object(delta_rule, "has_kernels", lambda *_: False):
        want = power_delta_rule_step(*exact, state=before.double(), p=p, qk_norm=False)
    size = before.double().norm(dim=2).amax()
    out = (got.double() - want.out).abs() - torch.finfo(got.dtype).eps * want.out.abs()
    return (out.amax() / size).item(), ((after.double() - want.state).norm(dim=2).amax() / size).item()


def check():
    worst = 0.0
    cases = [(*s, 2) for s in SHAPES] + [(3, 2, 16, 64, 2), (2, 4, 8, 32, 3), (2, 2, 4, 16, 4), (4, 3, 6, 128, 1)]
    cases = cases if GPU else [(2, 2, 4, 4, 2), (1, 1, 8, 3, 3)]
    for *shape, p in cases:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for T, gate in ((1, True), (2, False)):
                tokens, (before,) = make(*shape, p, dtype, T, gate), states(shape[0], shape[1], shape[3], p, 1)
                q, k = unit_heads(*tokens[:2])
                results = []
                for _ in range(2):  # by Triton, then by the launcher
                    state = before.clone()
                    results.append((delta_step.power_delta_step(q, k, *tokens[2:], state, p), state))
                same = torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
                found = errors(tokens, before, *results[0], p)
                worst = max(worst, *found)
                bad = "" if max(found) < 4e-6 and same else "   WRONG"
                print(f"{shape} p {p} {str(dtype)[6:]:9} T {T} gate {gate}: errors {found[0]:.1e} {found[1]:.1e}{bad}")
    print(f"worst {worst:.1e}; allowed 4e-6")
    if not GPU:
        return
    tokens, (before,) = make(*SHAPES[1]), states(32, 9, 64, 2, 1)
    want = step(tokens, before.clone())
    got = torch.compile(step, fullgraph=True)(tokens, before.clone())
    print("compiled equals eager:", torch.equal(got.out, want.out) and torch.equal(got.state, want.state))
    state, graph = before.clone(), torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        out = step(tokens, state).out
    torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    print("graph equals eager:", torch.equal(out, want.out) and torch.equal(state, want.state))


def timed(call, pool, least=20, replays=20):
    """Microseconds of call(state), in a graph of calls on all states of the pool in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for state in pool[:2]:
            call(state)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = max(1, -(-least // len(pool)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for state in pool:
                call(state)
    graph.replay()
    found = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / (rounds * len(pool)))
    return statistics.median(found)


def pool_of(shape):
    B, G, _, K = shape
    nbytes = B * G * spow_dim(K, 2) * K * 4
    return states(B, G, K, 2, min(64, max(2, -(-400_000_000 // nbytes)))), nbytes


def measure():
    for shape in SHAPES:
        tokens, (pool, nbytes) = make(*shape), pool_of(shape)
        q, k = unit_heads(*tokens[:2])
        calls = {
            "kernel": lambda s: delta_step.power_delta_step(q, k, *tokens[2:], s, 2),
            "step": lambda s: step(tokens, s),
            "plain": lambda s: plain(tokens, s),
            "plain of main": lambda s: plain_of_main(tokens, s),
            "a pass": lambda s: s.mul_(1.0),
        }
        print(f"B {shape[0]}, G {shape[1]}, H {shape[2]}, K {shape[3]}: state {nbytes / 1e6:.1f} MB, {len(pool)} states")
        for name, call in calls.items():
            us = timed(call, pool)
            print(f"  {name:14} {us:9.2f} us {2 * nbytes / us / 1e3:8.0f} GB/s of the state once in and once out", flush=True)
        count = 200 if shape[0] == 1 else 20
        for name, kernels in (("step", delta_rule.has_kernels), ("plain", lambda *_: False)):
            with mock.patch.object(delta_rule, "has_kernels", kernels):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    step(tokens, pool[0])
                spent = (time.perf_counter() - start) / count
                torch.cuda.synchronize()
            print(f"  host of {name:6} {spent * 1e6:6.1f} us")
        del pool
        torch.cuda.empty_cache()


def sweep(shapes):
    plan = delta_step._plan
    for shape in shapes:
        tokens, (pool, nbytes) = make(*shape), pool_of(shape)
        B, G, H, K = shape
        dim, heads = spow_dim(K, 2), 1 << (H // G - 1).bit_length()
        q, k = unit_heads(*tokens[:2])
        chosen = plan(B * G, dim, K, H // G, q.device)
        clean = pool[0].clone()
        want = delta_step.power_delta_step(q, k, *tokens[2:], clean.clone(), 2)
        tried = [dict(chosen)]
        for columns, kept, warps, registers, tile, stages in (
            (8, 4096, 8, 255, 128, 2), (16, 2048, 8, 255, 64, 2), (16, 1024, 8, 128, 64, 3), (16, 1024, 8, 128, 128, 3),
            (32, 1024, 8, 255, 32, 3), (32, 512, 8, 128, 32, 3), (32, 512, 8, 128, 64, 3), (64, 256, 8, 128, 32, 3),
            (128, 128, 8, 128, 16, 3), (128, 64, 8, 128, 16, 4), (32, 256, 8, 64, 32, 3), (32, 256, 4, 128, 32, 4),
            (64, 128, 4, 128, 16, 4), (16, 512, 4, 128, 64, 4), (8, 2048, 4, 255, 64, 3), (8, 1024, 4, 128, 64, 3),
            (128, 16, 4, 128, 16, 4), (64, 16, 4, 128, 16, 4), (32, 128, 4, 64, 32, 3), (8, 2048, 8, 128, 64, 2),
        ):
            tried.append({"HEADS": heads, "COLUMNS": columns, "KEPT": kept, "ROWS": tile,
                          "STAGES": stages, "num_warps": warps, "maxnreg": registers})
        for sizes in tried:
            with mock.patch.object(delta_step, "_plan", lambda *_, sizes=sizes: sizes):
                try:
                    got = delta_step.power_delta_step(q, k, *tokens[2:], clean.clone(), 2)
                    right = ((got.float() - want.float()).abs().amax() <= 0.02 * want.float().abs().amax()).item()
                    us = timed(lambda s: delta_step.power_delta_step(q, k, *tokens[2:], s, 2), pool, 6, 5)
                except Exception as error:  # e.g. out of resources
                    print("  ", sizes, "failed:", str(error)[:80])
                    continue
            short = [sizes[name] for name in ("COLUMNS", "KEPT", "ROWS", "STAGES", "num_warps", "maxnreg")]
            print(f"  {us:9.2f} us {2 * nbytes / us / 1e3:7.0f} GB/s {short}{'' if right else ' WRONG'}", flush=True)
        del pool
        torch.cuda.empty_cache()


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "check"
    with torch.no_grad():
        if what == "sweep":
            sweep([SHAPES[int(sys.argv[2])]] if len(sys.argv) > 2 else SHAPES)
        else:
            {"check": check, "time": measure}[what]()
