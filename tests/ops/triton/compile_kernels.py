"""Compiles every kernel that a call launches, without a GPU: `python -m tests.ops.triton.compile_kernels cuda|hip`.

The launches of real calls are recorded instead of made. For Hopper these are the variants of all key dims, because a
limit on spilled registers holds for each; for an AMD GPU one launch of each kernel and dtype. Prints JSON, a list of
{kernel, key_dim, tiles, stack, registers, code}: TILES, if the kernel has such; of a thread, the bytes of local memory
that it spills to and its registers, null where the toolchain does not tell; and 12 hex digits of its machine code
without names, so that a comparison of two records shows whether a move of files or names changed any instruction.
Raises RuntimeError if code for NVIDIA reads the stack pointer as a number, a uniform register that is not set, or the
sums of products that may still run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from sympow.ops import DecodingState, PowerState, Rotation
from sympow.ops.delta_types import DeltaOptions
from sympow.ops.feature_map import spow_dim
from sympow.ops.fused import step_products
from sympow.ops.fused.cross_entropy import cross_entropy_of_rows
from sympow.ops.fused.float32_linear import float32_linear_backward, fused_float32_linear
from sympow.ops.fused.gated_norm import fused_gated_norm, gated_norm_backward
from sympow.ops.fused.gelu_linear import gelu_linear, gelu_linear_backward
from sympow.ops.fused.rotation import fused_rotate_heads, rotate_heads_backward
from sympow.ops.fused.short_convolution import (
    fused_short_convolution,
    fused_short_convolution_step,
    short_convolution_backward,
)
from sympow.ops.fused.step_products import GELU, LOG_SIGMOID, SWIGLU, Norm, Product, Shift, Taps, Turn
from sympow.ops.fused.step_products import step_products as multiply
from sympow.ops.fused.unit_heads import fused_unit_heads, unit_heads_backward
from sympow.ops.triton import context_parallel, decode, delta_step, plan, segments
from sympow.ops.triton.adapt import attention, step_with_tail
from sympow.ops.triton.delta import delta_rule

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
AHEAD = {"AHEAD": True}  # of kernels that Hopper can start before the kernel before has ended
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int8: "*i8",
         torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip


# ptxas of CUDA 12.8 loses the address of an operand of a product in shared memory where another operand, in another
# layout, has been at the same place before. It then reads the stack pointer, or a uniform register that is not set.
# Right code loads the stack pointer, moves it, and addresses memory by it.
STACK_POINTER = re.compile(r"\bR1\b")
OF_THE_STACK = re.compile(r"LDC R1,|R1, R1,|\[R1\b")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@\S+ )?(\S+) (.*?) *;")
COPY = re.compile(r"U?MOV|IMAD\.(U32|MOV)")  # a copy may save a register that is not used

# In a row of hundreds of products, LLVM copies the sums to other registers at any place. Where products still write
# them, ptxas lets all products of the kernel run one by one, or the copy has sums that are not finished.
PRODUCT = re.compile(r"wgmma\.mma_async\S* \{([^}]*)\}")
WAIT = re.compile(r"wgmma\.wait_group\S* (\d+)")


@contextmanager
def recording() -> Iterator[list[tuple]]:
    """Of the launches made inside: (function, arguments by name, options)."""
    recorded: list[tuple] = []

    def record(function, *args, grid, warmup, **options):
        names = [parameter.name for parameter in function.params]
        bound = dict(zip(names, args, strict=False)) | {n: x for n, x in options.items() if n in names}
        recorded.append((function, bound, {n: x for n, x in options.items() if n not in names or n == "num_warps"}))

    real, JITFunction.run = JITFunction.run, record
    try:
        yield recorded
    finally:
        JITFunction.run = real


def attention_launches(key_dim: int, chunk_size: int, hopper: bool, p: int = 2) -> list[tuple]:
    """Of a gated forward, of one that keeps its states, and of the backward, with the gradient of positions."""
    plan.on_hopper = lambda device: hopper
    plan.forget_plans()
    with recording() as recorded:
        q, k, v = (torch.empty(1, 2048, 4, key_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        log_g = torch.empty(1, 2048, 4, requires_grad=True)
        options = {"p": p, "scale": 1.0, "normalize": p % 2 == 0, "eps": 1e-6, "return_state": False}
        with torch.no_grad():
            attention(q, k, v, log_g, None, chunk_size=chunk_size, **options)
        positions = torch.empty(1, 2048, 2, dtype=torch.float64, requires_grad=True)
        rotation = Rotation(positions, torch.empty(key_dim // 2, dtype=torch.float64))
        out, _ = attention(q, k, v, log_g, None, chunk_size=chunk_size, rotation=rotation, **options)
        out.backward(torch.empty_like(out))
    return recorded


def launches_of_one_token(key_dim: int, p: int) -> list[tuple]:
    """For Hopper, of a row of one token that returns its state, forward and backward. Its length is a constant."""
    plan.on_hopper = lambda device: True
    plan.forget_plans()
    with recording() as recorded:
        q, k, v = (torch.empty(1, 1, 1, key_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        options = {"p": p, "scale": 1.0, "normalize": p % 2 == 0, "eps": 1e-6, "return_state": True}
        out, _ = attention(q, k, v, torch.empty(1, 1, 1, requires_grad=True), None, chunk_size=512, **options)
        out.backward(torch.empty_like(out))
    return [launch for launch in recorded if launch[0].__name__ in ("output_pass", "query_pass", "key_pass")]


def delta_launches(key_dim: int, hopper: bool) -> list[tuple]:
    """Of the delta rule, forward and backward, with a gate and without, of rows of chunks whose groups one launch
    solves, and of one chunk of more groups; with a gate, the last state too."""
    plan.on_hopper = lambda device: hopper
    plan.forget_plans()
    with recording() as recorded:
        q, k, v = (torch.empty(1, 1536, 2, key_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        beta, gates = (torch.empty(1, 1536, 2, requires_grad=True) for _ in range(2))
        for log_g, chunk in itertools.product((gates, None), (512, 1536)):
            out, _ = delta_rule(q, k, v, beta, log_g, None, DeltaOptions(2, chunk, log_g is not None))
            out.backward(torch.empty_like(out))
    own = [launch for launch in recorded if launch[0].__module__ == "sympow.ops.triton.delta_kernels"]
    # The reads of states, and the passes that write the next state for them, or the last one.
    of_states = [launch for launch in recorded if launch[1].get("AFTER") or launch[1].get("FINAL")]
    return own + [launch for launch in recorded if launch[1].get("reach") is not None] + of_states


def context_launches(key_dim: int, hopper: bool) -> list[tuple]:
    """Of the states that a rank forms and sends, and of what comes in from other ranks, added to states and to their
    gradients; with a gate and without, of rows of one chunk and of rows that are divided into segments."""
    plan.on_hopper = lambda device: hopper
    plan.forget_plans()
    few = mock.patch.object(plan, "processors", lambda device: 132)  # the state pass of an H200, for few heads
    divided = mock.patch.object(segments, "number", lambda chunks, *_: min(chunks, 2))
    with few, divided, recording() as recorded:
        for time, gated in itertools.product((512, 2048), (True, False)):
            k = torch.empty(2, time, 2, key_dim, dtype=torch.bfloat16)
            log_g = torch.empty(2, time, 2) if gated else None
            call = context_parallel.Call(k, k, k, log_g, None, 2, 1.0, 512, False)
            for gradient in (None, (k, torch.empty(2, 2 * time), torch.empty(2, 2 * time))):
                s, z, decays, message = context_parallel.own_states(call, gradient)
                context_parallel.all_states(call, s, z, decays, message)
            context_parallel.launch.through_states(call, s, z, s, z, True)
    names = ("state_pass", "join_segments", "sum_decays", "carry_states", "through_states")
    return [launch for launch in recorded if launch[0].__name__ in names]


def decoding_launches(key_dim: int, hopper: bool) -> list[tuple]:
    """Of a gated step: a batch of one, also of two tokens, and one with many heads, in bfloat16 and float32, heads that
    share, and a state in int8."""
    shapes = (
        (1, 2, 2, torch.bfloat16, None),
        (4, 1, 2, torch.float32, None),
        (4, 1, 12, torch.bfloat16, None),
        (4, 1, 12, torch.bfloat16, torch.int8),
    )
    early = mock.patch.object(decode, "ahead", lambda device: AHEAD if hopper else {"AHEAD": False})
    with early, recording() as recorded:
        for batch, time, heads, dtype, state_dtype in shapes:
            before = PowerState.zeros(batch, 2, key_dim, key_dim)
            state = DecodingState.from_state(before, dtype=dtype, state_dtype=state_dtype)
            q, k, v = (torch.empty(batch, time, h, key_dim, dtype=dtype) for h in (heads, 2, 2))
            options = {"p": 2, "scale": 0.5, "normalize": True, "eps": 1e-6}
            step_with_tail(q, k, v, torch.empty(batch, time, 2), state, **options)
    return recorded


def delta_step_launches(key_dim: int) -> list[tuple]:
    """Of the delta rule, for few heads and for many, as an H200 launches them, with query heads of their own and in
    groups."""
    shapes = ((1, 2, torch.bfloat16), (16, 16, torch.float32), (16, 64, torch.bfloat16))
    with mock.patch.object(delta_step, "processors", lambda device: 132), recording() as recorded:
        for batch, heads, dtype in shapes:
            groups = min(heads, 16)
            q, k, v = (torch.empty(batch, 1, h, key_dim, dtype=dtype) for h in (heads, groups, groups))
            s, gates = torch.empty(batch, groups, spow_dim(key_dim, 2), key_dim), torch.empty(batch, 1, groups)
            delta_step.power_delta_step(q, k, v, gates, gates, s, 2)
    return recorded


def rotation_launches(key_dim: int) -> list[tuple]:
    """Forward and backward, with the gradient of positions and without, of fused projections and of queries alone."""
    with recording() as recorded:
        for dtype, groups, kv_heads in ((torch.bfloat16, 1, 4), (torch.bfloat16, 4, 4), (torch.float32, 4, 0)):
            qkv = torch.empty(1, 2048, (12 + 2 * kv_heads) * key_dim, dtype=dtype)
            positions = torch.empty(1, 2048, groups, dtype=torch.float64)
            frequencies = torch.empty(key_dim // 2, dtype=torch.float64)
            q, k, v = fused_rotate_heads(qkv, positions, frequencies, 12, kv_heads, None, None, 0.0)
            for turned in ((None, None), (q, k)):
                rotate_heads_backward(q, k, v, *turned, positions, frequencies, None, None, None, 0.0)
    return recorded


def block_launches() -> list[tuple]:
    """Forward and backward of the short convolution, of the norm with the gate, of the GELU, of linear maps to a few
    channels and of queries and keys of norm 1, a step of the convolution, and the losses of logits."""
    with recording() as recorded:
        for dtype in (torch.bfloat16, torch.float32):
            y, weight = torch.empty(1, 2048, 12, 64, dtype=dtype), torch.empty(64)
            fused_gated_norm(y, weight, y.flatten(2), 1e-6)
            gated_norm_backward(y.flatten(2), y, weight, y.flatten(2), 1e-6)
            unit_heads_backward(y, y[:, :, :4], *fused_unit_heads(y, y[:, :, :4], 1e-6), 1e-6)
            cross_entropy_of_rows(torch.empty(8, 50_304, dtype=dtype), torch.zeros(8, dtype=torch.int64), -100)
            x, weight, bias = torch.empty(1, 2048, 768, dtype=dtype), torch.empty(768, 4), torch.empty(768)
            fused_short_convolution(x, weight, bias, None)
            short_convolution_backward(x, x, weight, bias, None)
            fused_short_convolution_step(x[:, :1], x[:, 1:4], weight, bias)
            hidden, bias, weight = torch.empty(2048, 3072, dtype=dtype), torch.empty(3072), torch.empty(768, 3072)
            gelu_linear(hidden, bias, weight, None)
            gelu_linear_backward(x[0], hidden, bias, weight)
        x, weight = torch.empty(2048, 768, dtype=torch.bfloat16), torch.empty(12, 768)
        float32_linear_backward(fused_float32_linear(x, weight), x, weight)
    return recorded


def step_product_launches(hopper: bool) -> list[tuple]:
    """Of the projections, the output and the MLP of a layer, for a few rows and for many, in bfloat16 and float32."""
    early = mock.patch.object(step_products, "ahead", lambda device: AHEAD if hopper else {"AHEAD": False})
    memory = mock.patch.object(step_products, "shared_memory", lambda device: (227 if hopper else 64) << 10)
    sms = mock.patch.object(step_products, "processors", lambda device: 132)
    with early, memory, sms, recording() as recorded:
        for batch, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (1, torch.float32)):
            x, hidden = torch.empty(batch, 1, 768, dtype=dtype), torch.empty(batch, 1, 3072, dtype=dtype)
            wide, weight, bias = (torch.empty(*size, dtype=dtype) for size in ((3072, 768), (768, 768), (768,)))
            norm = Norm(bias, bias, 1e-5, True)
            taps = Taps(torch.empty(768, 4, dtype=dtype), bias, torch.empty(batch, 3, 768, dtype=dtype))
            turn = Turn(torch.zeros(batch, dtype=torch.int64), torch.empty(32, dtype=torch.float64), 1536)
            gates = Product(weight[:12], bias[:12], function=LOG_SIGMOID)
            first = Product(torch.empty(2304, 768, dtype=dtype), torch.empty(2304, dtype=dtype))
            found = multiply(x, first, Product(weight), [gates], norm=norm, taps=taps, turn=turn)
            shift = None if found.inputs is None else Shift(taps.past, found.inputs)
            heads = Norm(bias[:64], None, 1e-6, False)
            multiply(x, Product(weight, bias), norm=heads, gate=x, residual=x, shift=shift)
            multiply(x, Product(wide, hidden[0, 0], function=GELU), norm=norm)
            multiply(x, Product(wide, function=SWIGLU), norm=Norm(bias, None, 1e-5, False))
            multiply(hidden, Product(wide.view(768, 3072), bias), residual=x)
            multiply(x, Product(torch.empty(50257, 768, dtype=dtype)), norm=norm)
    return recorded


def compile_launch(function, bound: dict, options: dict, target: GPUTarget):
    return triton.compile(source_of(function, bound), target=target, options=options)


def source_of(function, bound: dict) -> ASTSource:
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        value = bound[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and (value is False or value == 1)):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, TensorDescriptor):
            element = TYPES[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    return source(function, signature, constants, attributes)


def resources(compiled) -> dict[str, int | str | None]:
    if "cubin" not in compiled.asm:
        return {"stack": None, "registers": None, "code": digits(compiled, compiled.asm["amdgcn"])}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (dumped(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    lost = lost_values(code)
    if lost:
        raise RuntimeError(f"expected {compiled.metadata.name} to read registers that it sets, got {lost}")
    early = early_reads(compiled.asm["ptx"])
    if early:
        raise RuntimeError(f"expected {compiled.metadata.name} to wait for the sums that it reads, got {early[:4]}")
    sizes = {"stack": r"STACK:(\d+)", "registers": r"REG:(\d+)"}
    found = {name: int(re.search(pattern, usage)[1]) for name, pattern in sizes.items()}
    return found | {"code": digits(compiled, code)}


def lost_values(code: str) -> list[str]:
    """Returns the instructions, in the text of cuobjdump, that read the stack pointer as a number, or a uniform
    register that no instruction before them has set."""
    known: set[int] = set()
    lost = []
    for match in filter(None, map(INSTRUCTION.match, code.splitlines())):
        name, operands = match[1], match[2].split(", ")
        targets = operands[: 2 if re.fullmatch(r"U?P(T|\d)", operands[0]) else 1]
        target = re.fullmatch(r"UR(\d+)", targets[-1])
        read = {int(x) for x in re.findall(r"\bUR(\d+)", ", ".join(operands[len(targets) if target else 0 :]))}
        if name.startswith("HGMMA"):  # descriptors of both operands; of the second one, if the first is in registers
            read = {first + n for first in read for n in range(0 if operands[1].startswith("gdesc") else 2, 4)}
        unset, copies = not read <= known, COPY.match(name)
        stack = STACK_POINTER.search(match[0]) and not OF_THE_STACK.search(match[0])
        if stack or (unset and not copies):
            lost.append(f"{name} {match[2]}")
        if target and not (unset and copies):
            width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            known |= set(range(int(target[1]), int(target[1]) + width))
    return lost


def early_reads(code: str) -> list[str]:
    """Returns the instructions, in PTX, with a register of the sums of products that may still run. At a label, to
    which several ways lead, none is known to run."""
    running: list[set[str]] = [set()]  # the registers of these sums, by groups of products; the last one is open
    early = []
    for line in map(str.strip, code.splitlines()):
        product, wait = PRODUCT.match(line), WAIT.match(line)
        if product:
            running[-1].update(product[1].replace(" ", "").split(","))
        elif line.startswith("wgmma.commit_group"):
            running.append(set())
        elif line.startswith("$"):
            running = [set()]
        elif wait:
            running = running[-1 - int(wait[1]) :]
        elif not line.startswith("//") and any(x in sums for sums in running for x in re.findall(r"%\w+", line)):
            early.append(line)
    return early


def dumped(option: str, file: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


def digits(compiled, code: str) -> str:
    """Returns a hash of machine code in which the kernel has no name."""
    nameless = re.sub(rf"\b{re.escape(compiled.metadata.name)}(?=\b|_)", "kernel", code)
    return hashlib.sha256(nameless.encode()).hexdigest()[:12]


def first_of_each(launches: list[tuple]) -> list[tuple]:
    """Returns the first launch of each kernel and dtypes of tensors."""
    found: dict[tuple, tuple] = {}
    for launch in launches:
        _, function, bound, _ = launch
        dtypes = tuple(x.dtype for x in bound.values() if isinstance(x, torch.Tensor))
        found.setdefault((function.__module__, function.__name__, dtypes), launch)
    return list(found.values())


def main() -> None:
    target = TARGETS[sys.argv[1]]
    hopper = target.backend == "cuda"
    launches: list[tuple] = []
    for key_dim in (32, 64, 128) if hopper else (64,):
        for chunk_size in (512, 4096):
            launches += [(key_dim, *launch) for launch in attention_launches(key_dim, chunk_size, hopper)]
        if key_dim > 32:  # a smaller K needs fewer registers
            steps = (*decoding_launches(key_dim, hopper), *delta_step_launches(key_dim))
            others = (*context_launches(key_dim, hopper), *steps, *rotation_launches(key_dim))
            launches += [(key_dim, *launch) for launch in others]
        launches += [(key_dim, *launch) for launch in delta_launches(key_dim, hopper)]
    if hopper:
        launches += [(16, *launch) for launch in delta_launches(16, hopper)]
    for p, key_dim in ((2, 64), (3, 32)) if hopper else ():
        launches += [(key_dim, *launch) for launch in launches_of_one_token(key_dim, p)]
    launches += [(0, *launch) for launch in (*block_launches(), *step_product_launches(hopper))]
    if not hopper:
        launches = first_of_each(launches)
    for p, key_dim in ((3, 16), (3, 32), (3, 64), (4, 16), (4, 24), (4, 32)) if hopper else ():
        launches += [(key_dim, *launch) for launch in attention_launches(key_dim, 512, hopper, p)]
    results = []
    for key_dim, function, bound, options in launches:
        compiled = compile_launch(function, bound, options, target)
        module = function.__module__.removeprefix("sympow.ops.").removeprefix("triton.")
        row = {"kernel": f"{module}.{function.__name__}", "key_dim": key_dim}
        row["tiles"] = bound.get("TILES")
        results.append(row | resources(compiled))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
