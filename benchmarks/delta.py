"""Times the delta rule beside cuDNN and power attention: `python -m benchmarks.delta --device cuda --csv FILE`.

Every call is checked before it is timed: output and gradients of sampled heads are compared with the form in plain
torch in float64. A call whose error exceeds the bound of `benchmarks.ops` stops the run. `--launches` prints the
kernels of a call, and what the host does in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common.cases import MODES, Case, make_inputs, power_call
from benchmarks.common.measure import gpu_peak_extra_bytes, measured, milliseconds, options, write
from benchmarks.common.peers import PEERS
from benchmarks.host import print_launches
from benchmarks.ops import bound, relative
from sympow.ops import power_delta_rule

CASES = {
    "cpu": [Case(T) for T in (1024, 4096)],
    "cuda": [
        *(Case(T, B=8, H=12, G=12, K=64, V=64, dtype="bfloat16") for T in (4096, 16_384, 65_536)),
        Case(65_536, B=8, H=12, G=2, K=64, V=64, dtype="bfloat16"),
        Case(65_536, B=8, H=12, G=12, K=32, V=32, dtype="bfloat16"),
        Case(131_072, B=1, H=32, G=8, K=128, V=128, dtype="bfloat16"),
    ],
}
PEER = {"cpu": "sdpa", "cuda": "cudnn"}


def delta_inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Returns the inputs of `make_inputs`, with queries and keys of norm 1, and beta [B, T, G] between 0 and 1."""
    inputs = make_inputs(case, device)
    for name in "qk":
        inputs[name] = normalize(inputs[name].detach().float(), dim=-1).to(inputs[name].dtype).requires_grad_()
    gen = torch.Generator(device).manual_seed(1)
    beta = torch.rand(case.B, case.T, case.G, generator=gen, device=device).requires_grad_()
    dout = inputs.pop("dout")
    return inputs | {"beta": beta, "dout": dout}


def delta_call(case: Case, inputs: dict[str, Tensor], impl: str, mode: str) -> list[Tensor]:
    """Returns the output, and with a backward the gradients of all inputs."""
    leaves = {name: x for name, x in inputs.items() if name != "dout"}
    with torch.set_grad_enabled(mode != "forward"):
        out = power_delta_rule(**leaves, p=case.p, impl=impl).out
    if mode == "forward":
        return [out]
    return [out, *torch.autograd.grad(out, list(leaves.values()), inputs["dout"])]


def error(case: Case, inputs: dict[str, Tensor], results: list[Tensor], mode: str) -> float:
    """Returns the largest error, in norm, of the output and the gradients of the first and the last key/value head.

    The gradient of the gate adds up q.dq - k.dk over the tokens after it. Its error is divided by how much larger these
    sums are, because it has their roundings.
    """
    heads = case.H // case.G
    worst = 0.0
    for b, g in {(0, 0), (case.B - 1, case.G - 1)}:

        def own(x: Tensor, b: int = b, g: int = g) -> Tensor:
            return x[b : b + 1, :, g * heads : (g + 1) * heads] if x.shape[2] == case.H else x[b : b + 1, :, g : g + 1]

        wide = {n: own(x.detach()).double().requires_grad_(n != "dout") for n, x in inputs.items()}
        wanted = delta_call(case, wide, "eager", mode)
        names = ["out", *(name for name in inputs if name != "dout")][: len(wanted)]
        found = dict(zip(names, wanted, strict=True))
        for name, got in zip(names, results, strict=True):
            wrong = relative(own(got), found[name])
            if name == "log_g":
                terms = (wide["k"].detach() * found["k"]).sum(-1).norm() / case.p
                wrong /= max(1.0, (case.T**0.5 * terms / found[name].norm()).item())
            worst = max(worst, wrong)
    return worst


def row_of(case: Case, device: str, mode: str, launches: bool = False) -> dict:
    """Checks and times one call, the peer and power attention with p = 2, in turns; `launches` prints its kernels."""
    inputs = delta_inputs(case, device)
    call: Callable[[], list[Tensor]] = partial(delta_call, case, inputs, "auto", mode)
    wrong = error(case, inputs, call(), mode)
    if not wrong <= bound(case):
        raise RuntimeError(f"{case}, {mode}: errs by {wrong:.1e} where {bound(case):.1e} is allowed; not timed")
    if launches:
        print_launches(call, device)
    plain = {name: x for name, x in inputs.items() if name != "beta"}
    title, prepare = PEERS[PEER[device]]
    calls = [call, partial(power_call, case, plain, "auto", mode), prepare(case, plain, mode)]
    ours, power, peer = milliseconds(calls, device, rounds=3)
    memory = [None, None]
    if device == "cuda" and mode != "forward":
        memory = [round(gpu_peak_extra_bytes(each) / 1e6, 1) for each in calls[:2]]
    shape = {name: getattr(case, name) for name in ("dtype", "B", "T", "H", "G", "K", "V", "p")}
    return {"mode": mode, "device": device, **shape, "ms": round(ours, 3), "power_ms": round(power, 3), "peer": title,
            "peer_ms": round(peer, 3), "ratio": round(peer / ours, 3), "err": float(f"{wrong:.2e}"),
            "extra_mb": memory[0], "power_extra_mb": memory[1], **measured(device)}  # fmt: skip


def main() -> None:
    parser = options("benchmarks.delta", __doc__)
    parser.add_argument("--times", type=int, nargs="+", help="only cases of so many tokens")
    parser.add_argument("--launches", action="store_true", help="print the kernels of calls")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict] = []
    for case in CASES[args.device]:
        if args.times and case.T not in args.times:
            continue
        for mode in MODES:
            rows.append(row_of(case, args.device, mode, args.launches))
            write(args.csv, rows)  # a run that is stopped keeps what it has
            row = rows[-1]
            shape = f"T {row['T']:>7,} K {row['K']:>3} G {row['G']:>2} {mode:>16}"
            times = f"{row['ms']:9.2f} ms, p = 2 {row['power_ms']:9.2f} ms, {row['peer']} {row['peer_ms']:9.2f} ms"
            print(f"{shape}: {times}, error {row['err']:.1e}", flush=True)


if __name__ == "__main__":
    main()
