"""Times decode with halves 1, 2 and other sizes: dec1.py"""
import os, sys, itertools
from dataclasses import replace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import torch
from benchmarks.common.measure import graphed, milliseconds
from benchmarks.decoding_gpu import CASES, STATE_DTYPES, Step, error, copy_call, states_in_turn, tokens, turn, _read
from sympow.ops import DecodingState, PowerState, power_attention_step
from sympow.ops.triton import plan, decode

OWN = plan.decoding
def use(elements, programs, warps, registers, stages):
    limits = plan.DecodingLimits(elements, programs, 2048, warps, registers, stages)
    plan.DECODING.update(few=limits, many=limits)

STEPS = [s for s in CASES if not s.slotted]
STEPS += [replace(STEPS[1], state_dtype=d) for d in ("bfloat16", "int8")]
def variants(step):
    few = step.case.B * step.case.G < 132
    p = 3 if few else 32
    if step.state_dtype == "float32":
        return [(4096, p, 2, 168, 3), (2048, p, 2, 128, 3), (2048, p, 2, 128, 4)]
    out = [(el, p, w, r, st) for el in (2048, 4096, 8192) for w, r in ((2, 168), (2, 128), (4, 128)) for st in (3, 4)]
    return out + [(4096, 2 if few else 12, 2, 168, 3), (4096, 4 if few else 64, 2, 168, 3)]
def compiled(step, v):
    use(*v)
    case = step.case
    zeros = PowerState.zeros(case.B, case.G, case.K, case.V, case.p, device="cuda")
    state = DecodingState.from_state(zeros, dtype=torch.bfloat16, state_dtype=STATE_DTYPES[step.state_dtype])
    try:
        power_attention_step(*tokens(case, 1, "cuda", seed=1), state=state, p=case.p, inplace=True)
    except Exception as e:
        print("FAIL", step, v, str(e)[:200], flush=True)
if __name__ == "__main__":
    torch.set_grad_enabled(False)
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        for w in [pool.submit(compiled, s, v) for s in STEPS for v in variants(s)]: w.result()
    copy = copy_call("cuda", 1 << 30)
    for step in STEPS:
        states = states_in_turn(step, "cuda"); read = _read(states[0]); found = []
        for v in variants(step):
            use(*v)
            try:
                wrong = error(step, "cuda")
                ms, copy_ms = milliseconds([graphed(turn(step.case, "cuda", states)), copy], "cuda", rounds=3, least=0.03)
            except Exception as e:
                print("FAIL", step, v, str(e)[:100], flush=True); continue
            ms /= states[0].capacity * len(states)
            found.append((round(ms * 1e3, 2), round(read / ms / (2 * (1 << 30) / copy_ms), 3), v, f"{wrong:.1e}"))
        for f in sorted(found)[:5] + [f for f in found if f[2] == (4096, 3 if step.case.B == 1 else 32, 2, 168, 3)]:
            print(step.case.B, step.case.G, step.case.K, step.state_dtype, *f, flush=True)
        del states
