"""Tells apart what may make the delta rule with K = V = 128 vary from run to run. In the repository's root, on a GPU:
python3 edges_delta_probe.py. Every variant is a process of its own with a cache of its own, all at once (one processor
each). A line a variant: of each result, the number of different bit patterns in 10 equal calls (4 with gradients), and
by how much they differ; 1 is right."""

import os
import shutil
import subprocess
import sys
import tempfile
import time

# name: (environment, what is changed)
VARIANTS = {
    "as it is": ({}, ()),
    "without the fix": ({}, ("unfixed",)),
    "without the fix, launches one by one": ({"CUDA_LAUNCH_BLOCKING": "1"}, ("unfixed",)),
    "without the fix, new memory filled": ({}, ("unfixed", "filled")),
    "without the fix, rows in 4 parts": ({}, ("unfixed", "quarters")),
    "kernels for any GPU": ({}, ("plain",)),
}
if os.environ.get("PROBE_ALL"):  # takes ptxas two minutes
    VARIANTS["without the fix, every product awaited"] = ({}, ("unfixed", "awaited"))
SMALL = bool(os.environ.get("PROBE_ON_CPU"))  # a dry run of this script in the interpreter


def main() -> None:
    begin, folder = time.time(), tempfile.mkdtemp()
    running = {}
    for number, (name, (environment, changes)) in enumerate(VARIANTS.items()):
        own = os.environ | environment | {"TRITON_CACHE_DIR": f"{folder}/{number}", "PYTHONPATH": os.getcwd()}
        command = [sys.executable, os.path.abspath(__file__), ",".join(changes) or "none"]
        log = open(f"{folder}/{number}.log", "w+")
        running[name] = (subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT), log)
    while running and time.time() - begin < float(os.environ.get("PROBE_SECONDS", "110")):
        for name, (process, log) in list(running.items()):
            if process.poll() is None:
                continue
            log.seek(0)
            lines = log.read().splitlines()
            found = [x for x in lines if x.startswith("  ")] or lines[-3:]
            print(f"[{time.time() - begin:.0f} s] {name}", *found, sep="\n", flush=True)
            del running[name]
        time.sleep(0.2)
    for name, (process, _) in running.items():
        print(f"{name}: not ready in time", flush=True)
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def change(changes: list[str]) -> None:
    from dataclasses import replace

    import torch
    from triton.experimental import gluon

    from sympow.ops.triton import plan
    from sympow.ops.triton.hopper import output, ring

    if "unfixed" in changes and hasattr(output, "_renamed"):
        output._renamed = gluon.jit(same)
    if "filled" in changes:  # with NaN
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    if "awaited" in changes:
        ring.running = gluon.constexpr_function(none_running)
    if "quarters" in changes:
        plan.HOPPER[128] = replace(plan.HOPPER[128], parts=4)
    if "plain" in changes:
        del plan.HOPPER[128]


def same(x):
    return x


def none_running(u, per, n, count, stages):
    return 0


def differences(name: str, call, times: int = 10) -> None:
    import torch

    results = [[x.detach().clone() for x in call()] for _ in range(times)]
    if results[0][0].is_cuda:
        torch.cuda.synchronize()
    for i, part in enumerate(name.split()):
        own = [x[i] for x in results]
        kinds = []
        for x in own:
            if not any(torch.equal(x, y) for y in kinds):
                kinds.append(x)
        most = max((x.float() - own[0].float()).abs().max().item() for x in own)
        bad = "" if own[0].isfinite().all() else ", not finite"
        print(f"  {part}: {len(kinds)} of {times}, by {most:.2g}{bad}", flush=True)


def probe() -> None:
    import torch
    from torch.nn.functional import normalize

    from sympow.ops import power_delta_rule
    from sympow.ops.delta_types import DeltaOptions
    from sympow.ops.triton import delta, launch
    from sympow.ops.triton.gate import REACH_TILE
    from sympow.ops.triton.plan import Call, Gate, Shapes

    device = "cpu" if SMALL else "cuda"
    B, T, G, K, chunk = (1, 128, 1, 4, 64) if SMALL else (2, 1024, 2, 128, 256)
    gen = torch.Generator().manual_seed(0)
    dtype = torch.float32 if SMALL else torch.bfloat16

    def normal(*shape):
        return torch.randn(*shape, generator=gen).to(device, dtype)

    q, k, v = (normal(B, T, G, K) for _ in range(3))
    q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    beta = torch.rand(B, T, G, generator=gen).to(device)
    options = DeltaOptions(2, chunk, False)

    # 1. One kernel at a time, with the same inputs.
    shapes = Shapes(k, k, v, None, 2, chunk, False)
    width = shapes.K
    keys = torch.nn.functional.pad(k[:, :chunk], (0, width - K)).contiguous()
    s = normal(B, G, shapes.row_count, K)
    zeros = v.new_zeros(K).expand(B, chunk, G, K)
    first = torch.arange(0, chunk, REACH_TILE.value, device=device, dtype=torch.int32)
    gate = Gate(v.new_empty(0, dtype=torch.float32), first.repeat(G * B), None)

    def reader():
        call = Call(keys, keys, zeros, None, None, 2, 1.0, chunk, False, gate=gate)
        return launch.output(call, s, None, True, False, 1.0, True)[:1]

    def states():
        call = Call(keys, keys, v[:, :chunk].contiguous(), None, None, 2, 1.0, chunk, False)
        ends = launch.new_ends(call, False)
        launch.states(call, None, None, ends, False)
        return ends[:1]

    differences("output_pass-of-a-state", reader)
    differences("state_pass", states)

    # 2. The solution, and given one solution, the output.
    def solve():
        errors, update, found = delta.solve(k, v, beta, None, None, options)
        return errors, update, found.before.unflatten(0, (B, -1))[:, 1:]  # nothing is in front of the first chunk

    differences("errors updates states", solve)
    _, update, found = delta.solve(k, v, beta, None, None, options)
    differences("output-of-given-updates", lambda: (delta.attend(q, k, update, None, None, found, options)[0],))

    # 3. All of it, with gradients.
    leaves = [x.clone().requires_grad_() for x in (q, k, v, beta)]
    dout = normal(B, T, G, K)

    def whole():
        out = power_delta_rule(*leaves, p=2, chunk_size=chunk).out
        return out, *torch.autograd.grad(out, leaves, dout)

    differences("out dq dk dv dbeta", whole, 4)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        change(sys.argv[1].split(","))
        probe()
    else:
        main()
