"""Every kernel compiles for Hopper, within a limit on spilled registers, and the portable ones for an AMD GPU."""

import warnings

import pytest

plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
compile_record = pytest.importorskip("tests.ops.triton.compile_record", reason="needs triton")
compile_kernels = pytest.importorskip("tests.ops.triton.compile_kernels", reason="needs triton")
# Bytes a thread. Spills in a loop cost more than the registers they free; these come from code around the loops, the
# most of the delta rule's `block_corrections` and `solve_pass` for K = 128.
MOST_SPILLED = 216
LEAST_SHARED = 99 << 10  # bytes for a program on an RTX 3090 to 5090; an A100 has 163 KB, an H100 or H200 227 KB
# Of the launch that solves all groups of a chunk, whose outer loop keeps addresses for each of its parts.
MOST_SPILLED_BY_GROUPS = 640


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_kernels_compile(target):
    results = compile_record.recorded(target)
    if results is None:
        warnings.warn("compiled.json is of other code: python -m tests.ops.triton.compile_record", stacklevel=1)
        results = compile_record.compiled(target)
    passes = {"state_pass", "output_pass", "query_pass", "key_pass", "weigh"}
    passes |= {"gate_sums", "gate_totals", "gate_gradient", "sum_decays", "carry_states"}
    passes |= {"join_segments", "through_states", "gate_gradient_by_chunk", "turn_terms", "turned_states"}
    passes |= {"decode", "correct", "turn_heads", "convolve", "convolve_backward", "convolve_step"}
    passes |= {"norm_gate", "norm_gate_backward", "token_losses", "narrow", "narrow_backward"}
    passes |= {"unit_vectors", "unit_vectors_backward"}
    passes |= {"gelu", "gelu_backward", "column_sums", "few_rows", "prepare_rows", "more_rows"}
    assert passes <= {row["kernel"].rpartition(".")[2] for row in results}
    if target == "cuda":
        files = {"states_levels", "states", "output", "query_gradient", "key_gradient", "gradients_quadratic"}
        files |= {"query_gradient_levels", "key_gradient_levels"}
        assert {f"hopper.{name}" for name in files} <= {row["kernel"].rpartition(".")[0] for row in results}
        state_passes = [row for row in results if row["kernel"] == "hopper.states.state_pass" and row["key_dim"] == 64]
        registers = [row["registers"] for row in state_passes if row["tiles"] == 2]
        assert registers and max(registers) <= plan.THREE_PROGRAMS
    limits = {"delta_kernels.solve_pass": MOST_SPILLED_BY_GROUPS}
    spilled = [row for row in results if (row["stack"] or 0) > limits.get(row["kernel"], MOST_SPILLED)]
    assert not spilled


def test_steps_fit_into_shared_memory():
    """Of the GPUs with the least of it. `power_decode` makes the planned tiles smaller where they are too large."""
    results = compile_record.printed("shared_memory")
    assert results and not [row for row in results if row["bytes"] > LEAST_SHARED]


def code(*instructions: str) -> str:
    """Text of cuobjdump."""
    return "".join(f"        /*{16 * n:04x}*/    {x} ;    /* 0x0 */\n" for n, x in enumerate(instructions))


RIGHT = {
    "an address": ("UMOV UR6, 0x400", "UMOV UR7, 0x80000020", "HGMMA.64x32x8.F32.TF32 R24, R40, gdesc[UR4], RZ, !UPT"),
    "two addresses": ("ULDC.64 UR4, c[0x0][0x210]", "ULDC.64 UR6, c[0x0][0x218]", "HGMMA R24, gdesc[UR4], RZ, !UPT"),
    "a saved register": ("MOV R193, UR41", "R2UR UR41, R193"),
    "a carry": ("UMOV UR4, URZ", "UIADD3 UR6, UP0, UR4, 0x40, URZ", "UIADD3.X UR7, UR4, URZ, URZ, UP0, !UPT"),
    "the stack": ("LDC R1, c[0x0][0x28]", "IADD3 R1, R1, -0x8, RZ", "STL [R1+0x4], R6"),
}
WRONG = {
    "an address": ("UMOV UR7, 0x80000020", "HGMMA.64x32x8.F32.TF32 R24, R40, gdesc[UR4], RZ, !UPT"),
    "a copied address": ("UMOV UR6, UR8", "UMOV UR7, 0x20", "HGMMA.64x32x8.F32.TF32 R24, R40, gdesc[UR4], RZ, !UPT"),
    "two addresses": ("ULDC.64 UR6, c[0x0][0x218]", "HGMMA R24, gdesc[UR4], RZ, !UPT"),
    "a step": ("UMOV UR14, 0x400", "UIADD3 UR18, UP0, UR18, 0x40, URZ"),
    "a carry": ("UMOV UR4, URZ", "UIADD3.X UR7, UR5, URZ, URZ, UP0, !UPT"),
    "the stack": ("LDC R1, c[0x0][0x28]", "IADD3 R4, R1, 0x40, RZ"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_values_that_are_set(name):
    assert not compile_kernels.lost_values(code(*RIGHT[name]))


@pytest.mark.parametrize("name", WRONG)
def test_lost_values(name):
    assert compile_kernels.lost_values(code(*WRONG[name])) == [WRONG[name][-1]]


PRODUCTS = ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, {%r5}, %rd1, p, 1, 1, 0;",
            "wgmma.commit_group.sync.aligned;")  # fmt: skip


def ptx(waits: int) -> str:
    """Two products, a wait for all but `waits` of them, and a copy of their sums."""
    wait = ("// wait for regs: %r1,%r2", f"wgmma.wait_group.sync.aligned {waits};")
    return "\n\t".join((*PRODUCTS, *PRODUCTS, *wait, "mov.b32 %r5, %r4;", "mov.b32 %r3, %r1;"))


def test_early_reads():
    assert not compile_kernels.early_reads(ptx(0))
    assert compile_kernels.early_reads(ptx(1)) == ["mov.b32 %r3, %r1;"]
