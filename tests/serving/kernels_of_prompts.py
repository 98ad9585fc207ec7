"""Counts compiled kernels that calls need beyond those of earlier calls: `python -m tests.serving.kernels_of_prompts`.

Reads JSON from the standard input, {earlier: [[prompts, tokens], ...], calls: [[prompts, tokens], ...]}, and prints for
every call how many kernels it would compile. Launches are recorded instead of made, so no GPU is needed. Triton
compiles a kernel anew for other constants, for an integer that is 1 or a multiple of 16 where it was not, and for other
dtypes.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from sympow.ops import PowerState
from sympow.ops.fused.gated_norm import fused_gated_norm
from sympow.ops.fused.rotation import fused_rotate_heads
from sympow.ops.fused.short_convolution import fused_short_convolution_step
from sympow.ops.runtime import launcher
from sympow.ops.triton import plan
from sympow.ops.triton.adapt import attention
from tests.ops.triton.compile_kernels import recording

HEADS, K = 2, 64


def kernels(batch: int, length: int, dtype: torch.dtype) -> set[tuple]:
    """Of one layer that reads `batch` prompts of so many tokens behind their states, on an H200."""
    plan.forget_plans()
    launcher.forget_launchers()
    hopper = mock.patch.object(plan, "on_hopper", lambda device: True)
    with hopper, mock.patch.object(plan, "processors", lambda device: 132), recording() as launches:
        width = 3 * HEADS * K
        qkv = torch.empty(batch, length, width, dtype=dtype)
        past, weight = torch.empty(batch, 3, width, dtype=dtype), torch.empty(width, 4, dtype=dtype)
        fused_short_convolution_step(qkv, past, weight, weight[:, 0])
        positions, frequencies = (torch.empty(shape, dtype=torch.float64) for shape in ((batch, length, 1), K // 2))
        q, k, v = fused_rotate_heads(qkv, positions, frequencies, HEADS, HEADS, None, None, 0.0)
        state, log_g = PowerState.zeros(batch, HEADS, K, K), torch.empty(batch, length, HEADS)
        options = {"p": 2, "scale": 0.1, "normalize": True, "eps": 1.0, "chunk_size": None, "return_state": True}
        out, _ = attention(q, k, v, log_g, state, **options)
        fused_gated_norm(out, None, q.flatten(2), 1e-6)
    return {variant(function, bound, options) for function, bound, options in launches}


def variant(function, bound: dict, options: dict) -> tuple:
    """What Triton looks at to choose the compiled code of a launch."""
    found = [function.__name__, json.dumps(options, default=str, sort_keys=True)]
    for parameter in function.params:
        value = bound[parameter.name]
        if parameter.is_constexpr or value is None or isinstance(value, bool):
            found.append(str(value))
        elif isinstance(value, int) and not parameter.do_not_specialize:
            found.append("1" if value == 1 else f"multiple of 16: {value % 16 == 0}")
        else:
            found.append(str(getattr(value, "dtype", type(value))))
    return tuple(found)


def main() -> None:
    given = json.load(sys.stdin)
    counts = [0] * len(given["calls"])
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            known = set().union(*(kernels(*shape, dtype) for shape in given["earlier"]))
            new = [len(kernels(*shape, dtype) - known) for shape in given["calls"]]
            counts = [sum(pair) for pair in zip(counts, new, strict=True)]
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
