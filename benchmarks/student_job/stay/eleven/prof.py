import sys, torch
from dataclasses import replace
from benchmarks.decoding_gpu import CASES, Step, new_state, tokens, _of_a_llama
from sympow.ops import power_attention_step
from sympow.ops.triton import plan, decode
torch.set_grad_enabled(False)
OWN = plan.decoding
def use(dots):
    decode.decoding = lambda *a: replace(OWN(*a), folded=16 if dots else 4)
for sd in sys.argv[2].split(","):
  for dot in (0, 1):
    use(dot)
    step = Step(_of_a_llama(32), sd)
    states = [new_state(step, "cuda", s) for s in range(2)]
    x = tokens(step.case, 1, "cuda", seed=1)
    def call(st): power_attention_step(*x, state=st, p=2, inplace=True)
    for st in states: call(st)
    torch.cuda.synchronize()
    if sys.argv[1] == "ncu":
        torch.cuda.nvtx.range_push("one"); call(states[0]); call(states[1]); torch.cuda.nvtx.range_pop(); torch.cuda.synchronize(); continue
    def timed(count, fold):
        ms = []
        for _ in range(9):
            for st in states: st.count.fill_(64 if fold else count); st.tail_g.fill_(-0.01)
            e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(200000)
            e[0].record(); call(states[0]); call(states[1]); e[1].record(); torch.cuda.synchronize()
            ms.append(e[0].elapsed_time(e[1]) / 2 * 1e3)
        return sorted(ms)[4]
    print(sd, "dots" if dot else "sums", "empty tail %.0f us, 32: %.0f, 62: %.0f, fold %.0f" % (timed(0, 0), timed(32, 0), timed(62, 0), timed(0, 1)), flush=True)
