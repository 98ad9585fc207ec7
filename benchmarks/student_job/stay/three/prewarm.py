"""Compiles the kernels of the benchmarks' cases: prewarm.py KIND, with PYTHONPATH of the version."""
import sys, time
from dataclasses import replace
import torch
from benchmarks.common.cases import CASES, MODES, make_inputs, power_call
kind = sys.argv[1]
began = time.time()
if kind.startswith("delta"):
    from benchmarks.delta import CASES as DELTA, delta_call, delta_inputs
    cases = [DELTA["cuda"][int(kind[5:])]]
    call = lambda c, x, mode: delta_call(c, x, "auto", mode)
    make = delta_inputs
elif kind in ("retention", "fla"):
    from benchmarks.common.peers import PEERS, supports
    cases = [c for c in CASES["cuda"] if supports(kind, c)][-1:]
    call = lambda c, x, mode: PEERS[kind][1](c, x, mode)()
    make = make_inputs
else:
    cases = [c for c in CASES["cuda"] if f"{c.K}_{c.p}_{c.gated}_{c.G}" == kind]
    call = lambda c, x, mode: power_call(c, x, "auto", mode)
    make = make_inputs
for case in sorted(cases, key=lambda c: c.T):
    case = replace(case, B=1) if case.T >= 16384 else case
    inputs = make(case, "cuda")
    for mode in MODES:
        try:
            call(case, inputs, mode)
        except Exception as error:
            print(kind, case.T, mode, "failed", str(error)[:300], flush=True)
torch.cuda.synchronize()
print(kind, "warm", round(time.time() - began, 1), flush=True)
