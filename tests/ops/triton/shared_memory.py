"""The shared memory of a step of decoding, without a GPU: `python -m tests.ops.triton.shared_memory`.

The kernel is compiled until its shared memory is allocated, which takes half a second. Prints JSON, a list of
{step, bytes}: the sizes of each step, and the bytes of one program.
"""

from __future__ import annotations

import json
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ir, nvidia, passes
from triton.compiler.compiler import make_backend

from sympow.ops import DecodingState, PowerState
from sympow.ops.triton import plan
from sympow.ops.triton.adapt import step_with_tail
from tests.ops.triton.compile_kernels import TARGETS, recording, source_of

PTX = 83  # a version of NVIDIA's code, which decides nothing here
# Query heads that share a state, K, V, p and dtype.
STEPS = (
    (1, 5, 1, 4, torch.float32),  # tiles of many rows, for each of which the channels of the query are copied
    (4, 2, 1, 4, torch.float32),
    (4, 4, 1, 6, torch.bfloat16),
    (3, 64, 1, 2, torch.bfloat16),
    (128, 16, 256, 2, torch.bfloat16),  # parts of many heads
    (1, 2, 16384, 2, torch.float32),
    (1, 16384, 2, 1, torch.float32),  # wide keys in the tail
)


def step_launch(heads: int, key_dim: int, value_dim: int, p: int, dtype: torch.dtype) -> tuple:
    """Returns (function, arguments by name, options) of a step, as an H200 launches it."""
    with mock.patch.object(plan, "processors", lambda device: 132), recording() as recorded:
        state = DecodingState.from_state(PowerState.zeros(1, 1, key_dim, value_dim, p), dtype=dtype)
        q, k, v = (torch.empty(1, 1, h, n, dtype=dtype) for h, n in ((heads, key_dim), (1, key_dim), (1, value_dim)))
        step_with_tail(q, k, v, torch.empty(1, 1, 1), state, p=p, scale=0.5, normalize=p % 2 == 0, eps=1e-6)
    return recorded[0]


def shared_memory(function, bound: dict, options: dict, target: GPUTarget) -> int:
    backend, source, context, metadata = make_backend(target), source_of(function, bound), ir.context(), {}
    chosen = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(chosen)
    module = source.make_ir(target, chosen, functions, backend.get_module_map(), context)
    module = backend.make_ttir(module, metadata, chosen, target.arch)
    module = backend.make_ttgir(module, metadata, chosen, target.arch)
    lower = ir.pass_manager(module.context)
    passes.convert.add_scf_to_cf(lower)
    passes.gluon.add_inliner(lower)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(lower, target.arch, PTX)
    lower.run(module, "shared_memory")
    return module.get_int_attr("ttg.shared")


def main() -> None:
    found = [{"step": str(step), "bytes": shared_memory(*step_launch(*step), TARGETS["cuda"])} for step in STEPS]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
