"""A server on a GPU compiles all kernels that read prompts before the first request comes."""

import json
import os
import subprocess
import sys

import pytest

from sympow.models import LanguageModel, ModelConfig
from sympow.serving import PrefixCache
from sympow.serving.engine_time import EngineTime
from sympow.serving.prefill import Reader


def compiled_by(calls: list[tuple[int, int]], earlier: list[tuple[int, int]]) -> list[int]:
    """Kernels that each call would compile behind the earlier ones."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, given = [sys.executable, "-m", "tests.serving.kernels_of_prompts"], {"earlier": earlier, "calls": calls}
    run = subprocess.run(command, env=environment, input=json.dumps(given), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_prompts_read_together_need_no_kernels_but_those_of_the_start():
    pytest.importorskip("triton", reason="needs triton")
    model = LanguageModel(ModelConfig(256, 16, 1, 1), seed=0)
    shapes = Reader(model, 128, PrefixCache(model, 0), in_steps=True, work=EngineTime()).shapes()
    lengths = sorted({length for _, length in shapes if length > 1})
    assert lengths == [16, 32, 64, 128]
    shapes = [shape for shape in shapes if shape[1] > 1]  # a single token takes the kernel of decoding
    together = [(batch, length) for batch in (5, 14) for length in lengths]
    *needed, more = compiled_by([*together, (16, 144)], shapes)
    assert needed == [0] * len(together) and more > 0  # the last call has a length that no piece has
