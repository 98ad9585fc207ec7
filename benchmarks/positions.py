"""Measures the error of the gradient of data-dependent positions, against the gradient in float32, on one row.

`python -m benchmarks.positions --device cuda --json FILE`. The table has two rows: the gradient that the op computes,
whose sum starts again at every chunk (`sympow.ops.Rotation`), and the gradient through rotated queries and keys. Inputs
are random. The error is that of the gradient of the steps, relative, in norm.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case, make_inputs
from benchmarks.measure import measured, milliseconds, options, write
from sympow.ops import Rotation, power_attention, rotary_frequencies, rotary_positions, rotate_alike


def gradient(inputs: dict[str, Tensor], steps: Tensor, by_op: bool, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of the steps [B, T, G], of which positions are the running sums."""
    steps = steps.clone().requires_grad_()
    positions, frequencies = rotary_positions(steps), rotary_frequencies(inputs["q"].shape[3], device=steps.device)
    q, k = (inputs[name].detach().to(dtype).requires_grad_() for name in "qk")
    q, k = rotate_alike((q, k), positions.detach() if by_op else positions, frequencies)
    rotation = Rotation(positions, frequencies) if by_op else None
    v, log_g = inputs["v"].detach().to(dtype), inputs["log_g"].detach()
    out = power_attention(q, k, v, log_g, rotation=rotation).out
    out.backward(inputs["dout"].to(dtype))
    if steps.grad is None:
        raise RuntimeError("the steps have no gradient")
    return steps.grad


def main() -> None:
    parser = options("benchmarks.positions", __doc__ or "")
    parser.add_argument("--tokens", type=int, default=65536, help="of the row (default: 65536)")
    args = parser.parse_args()
    case = Case(args.tokens, B=1, H=12, G=12, K=64, V=64, dtype="bfloat16")
    inputs = make_inputs(case, args.device)
    gen = torch.Generator(args.device).manual_seed(1)
    steps = 1 + torch.randn(case.B, case.T, case.G, generator=gen, device=args.device) / 10
    exact = gradient(inputs, steps, False, torch.float32).double()
    calls = [partial(gradient, inputs, steps, by_op, torch.bfloat16) for by_op in (True, False)]
    errors = [((call().double() - exact).norm() / exact.norm()).item() for call in calls]
    rows = [
        {"T": case.T, "H": case.H, "K": case.K, "form": form, "err": round(error, 5), "ms": round(ms, 3)}
        | measured(args.device)
        for form, error, ms in zip(
            ("by the op", "through q and k"), errors, milliseconds(calls, args.device, rounds=3), strict=True
        )
    ]
    write(args.json, rows)
    for row in rows:
        print(f"{row['form']}: errs by {row['err']}, forward and backward {row['ms']} ms")


if __name__ == "__main__":
    main()
