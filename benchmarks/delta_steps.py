"""Times a step of the delta rule on its state: `python -m benchmarks.delta_steps --device cuda --csv FILE`.

Beside it stand the step in plain torch, and a pass over the state, which reads and writes it once, as a step must. On
a GPU all are CUDA graphs, of so many states in turn that none stays in the L2 cache. A step is checked before it is
timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.common.cases import Case
from benchmarks.common.measure import graphed, measured, milliseconds, options, write
from benchmarks.delta import delta_inputs
from benchmarks.ops import bound, relative
from sympow.ops import delta_rule, power_delta_rule_step
from sympow.ops.feature_map import spow_dim

_gpu = partial(Case, 1, dtype="bfloat16")
CASES = {
    "cpu": [Case(1)],
    "cuda": [
        *(_gpu(B=batch, H=9, G=9, K=64, V=64) for batch in (1, 32)),
        *(_gpu(B=batch, H=32, G=8, K=128, V=128) for batch in (1, 32)),
        _gpu(B=32, H=12, G=12, K=32, V=64, p=3),
        _gpu(B=32, H=12, G=12, K=16, V=64, p=4),
    ],
}


def step(inputs: dict[str, Tensor], p: int, plain: bool, state: Tensor) -> Tensor:
    """Corrects a state in place and returns the output; `plain`: by plain torch, also where there is a kernel."""
    has_kernels = delta_rule.has_kernels
    delta_rule.has_kernels = (lambda *_: False) if plain else has_kernels
    try:
        return power_delta_rule_step(**inputs, state=state, p=p, inplace=True).out
    finally:
        delta_rule.has_kernels = has_kernels


def error(case: Case, inputs: dict[str, Tensor], state: Tensor) -> float:
    """Returns the larger error, in norm, of output and state against plain torch in float64."""
    ours, exact = state.clone(), state.double()
    out = step(inputs, case.p, False, ours)
    want = step({name: x.double() for name, x in inputs.items()}, case.p, True, exact)
    return max(relative(out, want), relative(ours, exact))


@torch.no_grad()
def row_of(case: Case, device: str) -> dict:
    """Checks and times the step, the plain one and a pass over the state, in turns."""
    inputs = {name: x.detach() for name, x in delta_inputs(case, device).items() if name != "dout"}
    gen = torch.Generator(device).manual_seed(2)
    shape = (case.B, case.G, spow_dim(case.K, case.p), case.V)
    states = [torch.randn(shape, generator=gen, device=device)]
    wrong = error(case, inputs, states[0])
    if not wrong <= bound(case):
        raise RuntimeError(f"{case}: a step errs by {wrong:.1e} where {bound(case):.1e} is allowed; not timed")
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
    states += [torch.randn(shape, generator=gen, device=device) for _ in range(-(-2 * cache // states[0].nbytes))]

    def turn(one: Callable[[Tensor], object]) -> Callable[[], object]:
        def call() -> None:
            for state in states:
                one(state)

        return graphed(call) if device == "cuda" else call

    kinds = [partial(step, inputs, case.p, False), partial(step, inputs, case.p, True), lambda state: state.mul_(1.0)]
    times = milliseconds([turn(each) for each in kinds], device, rounds=5)
    ours, plain, once = (ms * 1e3 / len(states) for ms in times)
    about = {name: getattr(case, name) for name in ("dtype", "B", "H", "G", "K", "V", "p")}
    return {"device": device, **about, "us": round(ours, 2), "plain_us": round(plain, 2), "pass_us": round(once, 2),
            "share_of_pass": round(once / ours, 3), "state_bytes": states[0].nbytes, "states_in_turn": len(states),
            "err": float(f"{wrong:.2e}"), **measured(device)}  # fmt: skip


def main() -> None:
    args = options("benchmarks.delta_steps", __doc__).parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict] = []
    for case in CASES[args.device]:
        rows.append(row_of(case, args.device))
        write(args.csv, rows)  # a run that is stopped keeps what it has
        row = rows[-1]
        print(f"B {row['B']} G {row['G']} H {row['H']} K {row['K']} p {row['p']}: {row['us']:.1f} us, plain "
              f"{row['plain_us']:.1f}, a pass {row['pass_us']:.1f}, error {row['err']:.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
