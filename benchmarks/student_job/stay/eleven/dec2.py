import torch
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from dataclasses import replace
from benchmarks.decoding_gpu import CASES, error, copy_call, states_in_turn, turn, _read
from benchmarks.common.measure import graphed, milliseconds
from sympow.ops.triton import decode
OWN = decode.decoding
if __name__ == "__main__":
    torch.set_grad_enabled(False)
    copy = copy_call("cuda", 1 << 30)
    steps = [s for s in CASES if not s.slotted]
    steps += [replace(steps[1], state_dtype=d) for d in ("bfloat16", "int8")]
    for step in steps:
        states = states_in_turn(step, "cuda"); read = _read(states[0])
        for folded in (4, 16):
            decode.decoding = lambda *a, f=folded: replace(OWN(*a), folded=f)
            wrong = error(step, "cuda")
            ms, copy_ms = milliseconds([graphed(turn(step.case, "cuda", states)), copy], "cuda", rounds=3, least=0.03)
            ms /= states[0].capacity * len(states)
            print(step.case.B, step.case.G, step.case.K, step.state_dtype, folded, round(ms * 1e3, 2), round(read / ms / (2 * (1 << 30) / copy_ms), 3), f"{wrong:.2e}", flush=True)
        del states
