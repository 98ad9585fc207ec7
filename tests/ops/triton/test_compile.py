"""Every kernel compiles for Hopper, within a limit on spilled registers, and the portable ones for an AMD GPU."""

import warnings

import pytest

plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
compile_record = pytest.importorskip("tests.ops.triton.compile_record", reason="needs triton")
# Bytes a thread. Spills in a loop cost more than the registers they free; these come from code around the loops, the
# most of the delta rule's `block_corrections` and `solve_pass` for K = 128.
MOST_SPILLED = 192


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_kernels_compile(target):
    results = compile_record.recorded(target)
    if results is None:
        warnings.warn("compiled.json is of other code: python -m tests.ops.triton.compile_record", stacklevel=1)
        results = compile_record.compiled(target)
    passes = {"state_pass", "output_pass", "query_pass", "key_pass", "weigh"}
    passes |= {"gate_sums", "gate_totals", "gate_gradient", "sum_decays", "carry_states"}
    passes |= {"join_segments", "through_states", "gate_gradient_by_chunk", "turn_terms", "turned_states"}
    passes |= {"decode", "turn_heads", "convolve", "convolve_backward", "convolve_step"}
    passes |= {"norm_gate", "norm_gate_backward", "token_losses", "narrow", "narrow_backward"}
    passes |= {"unit_vectors", "unit_vectors_backward"}
    passes |= {"gelu", "gelu_backward", "column_sums"}
    assert passes <= {row["kernel"].rpartition(".")[2] for row in results}
    if target == "cuda":
        files = {"states_levels", "states", "output", "query_gradient", "key_gradient", "gradients_quadratic"}
        files |= {"query_gradient_levels", "key_gradient_levels"}
        assert {f"hopper.{name}" for name in files} <= {row["kernel"].rpartition(".")[0] for row in results}
        state_passes = [row for row in results if row["kernel"] == "hopper.states.state_pass" and row["key_dim"] == 64]
        registers = [row["registers"] for row in state_passes if row["tiles"] == 2]
        assert registers and max(registers) <= plan.THREE_PROGRAMS
    spilled = [row for row in results if (row["stack"] or 0) > MOST_SPILLED]
    assert not spilled
