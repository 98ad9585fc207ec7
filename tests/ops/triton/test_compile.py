"""Every kernel compiles for Hopper, within a limit on spilled registers, and the portable ones for an AMD GPU."""

import json
import os
import subprocess
import sys

import pytest

config = pytest.importorskip("sympow.ops.triton.config", reason="needs triton")
# Bytes a thread. Spills in a loop cost more than the registers they free; these come from code around the loops,
# the most of the key pass at K = 128.
MOST_SPILLED = 96


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_kernels_compile(target):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # which costs time and changes no instruction
    command = [sys.executable, "-m", "tests.ops.triton.compile_kernels", target]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout.splitlines()[-1])
    passes = {"state_pass", "output_pass", "query_pass", "key_pass", "weigh"}
    passes |= {"gate_sums", "gate_totals", "gate_gradient", "sum_decays", "carry_states"}
    passes |= {"through_states", "gate_gradient_by_chunk", "turn_terms", "turned_states"}
    passes |= {"decode", "turn_heads", "convolve", "convolve_backward", "convolve_step"}
    assert passes <= {row["kernel"].rpartition(".")[2] for row in results}
    if target == "cuda":
        files = {"powers", "states", "output", "query_gradient", "key_gradient", "quadratic"}
        files |= {"power_query_gradient", "power_key_gradient"}
        assert {f"hopper.{name}" for name in files} <= {row["kernel"].rpartition(".")[0] for row in results}
        state_passes = [row for row in results if row["kernel"] == "hopper.states.state_pass" and row["key_dim"] == 64]
        registers = [row["registers"] for row in state_passes if row["tiles"] == 2]
        assert registers and max(registers) <= config.THREE_PROGRAMS
    spilled = [row for row in results if (row["stack"] or 0) > MOST_SPILLED]
    assert not spilled
