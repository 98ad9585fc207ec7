"""When a kernel's compiled code is taken again: without a GPU, under a driver that writes down what it launches."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sympow.ops import power_attention
from sympow.ops.runtime import launcher
from tests.ops.contract import DEVICE

triton = pytest.importorskip("triton", reason="needs triton")
pytest.importorskip("triton.experimental.gluon")  # which cannot be imported after the interpreter is turned off


class Driver:
    """As much of a driver as launches ask for."""

    device = 0

    def __init__(self):
        self.launched = []
        self.utils = self

    def launcher_cls(self, src, metadata):
        def launch(x, y, z, stream, function, *rest):
            arguments = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in rest[4:]]
            self.launched.append(((x, y, z), stream, function, arguments))

        return launch

    def load_binary(self, name, kernel, shared, device):
        return object(), (name, hash(kernel)), 0, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 20}

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(monkeypatch):
    from tests import interpreter

    interpreter.restore_language()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    yield driver
    triton.runtime.driver.set_active(None)  # Triton chooses anew when it needs one


def add(x, y, out, n, factor, BLOCK: "tl.constexpr"):  # noqa: F821
    i = tl.arange(0, BLOCK)  # noqa: F821
    value = tl.load(x + i, mask=i < n, other=0.0) * factor  # noqa: F821
    if y is not None:
        value += tl.load(y + i, mask=i < n, other=0.0)  # noqa: F821
    tl.store(out + i, value, mask=i < n)  # noqa: F821


@pytest.fixture
def kernel(driver):
    import triton.language as tl

    add.__globals__["tl"] = tl
    function = triton.JITFunction(add)
    calls, run = [], function.run
    function.run = lambda *args, **options: calls.append(1) or run(*args, **options)
    function.calls = calls
    return function


def tensors(count=3, offset=0, dtype=torch.float32):
    return [torch.zeros(64, dtype=dtype)[offset : offset + 32] for _ in range(count)]


def test_the_code_is_chosen_once(driver, kernel):
    launch = launcher.Launcher(kernel, (5, 2), {"n": 32, "factor": 2.0, "BLOCK": 32, "num_warps": 2})
    kept = []
    for _ in range(3):
        x, y, out = tensors()
        kept.append([x, y, out])
        launch(x=x, y=y, out=out)
    assert len(kernel.calls) == 1
    for (x, y, out), (grid, stream, (name, _), arguments) in zip(kept, driver.launched, strict=True):
        assert (grid, stream, name) == ((5, 2, 1), 7, "add")
        assert arguments == [x.data_ptr(), y.data_ptr(), out.data_ptr(), 32, 2.0, 32]
    assert len({function for _, _, function, _ in driver.launched}) == 1


def test_it_is_chosen_anew_where_other_code_is_needed(driver, kernel):
    """For another dtype, a tensor more or less, an address that copies of 16 bytes do not take, another device."""
    launch = launcher.Launcher(kernel, (1,), {"n": 32, "factor": 2.0, "BLOCK": 128, "num_warps": 1})
    x, y, out = tensors()
    launch(x=x, y=y, out=out)
    others = [
        {"x": x, "y": None, "out": out},
        {"x": x, "y": y, "out": tensors(dtype=torch.bfloat16)[2]},
        {"x": tensors(offset=1)[0], "y": y, "out": out},
    ]
    for count, other in enumerate(others):
        launch(**other)
        launch(x=x, y=y, out=out)
        assert len(kernel.calls) == count + 2
    functions = [function for _, _, function, _ in driver.launched]
    assert len(set(functions[::2])) == 1 and functions[0] not in functions[1::2]
    driver.device = 1
    launch(x=x, y=y, out=out)
    assert len(kernel.calls) == len(others) + 2


def test_calls_with_a_tensor_more_have_a_launcher_of_their_own(driver, kernel):
    arguments = {"n": 32, "factor": 2.0, "BLOCK": 64}
    x, y, out = tensors()
    for more in (y, None, y, None):
        launcher.launch(kernel, (1,), arguments, x=x, y=more, out=out)
    assert len(kernel.calls) == 2
    launcher.forget_launchers()


def test_a_first_launch_at_an_odd_address_is_not_kept(driver, kernel):
    launch = launcher.Launcher(kernel, (1,), {"n": 32, "factor": 2.0, "BLOCK": 32})
    x, y, out = tensors()
    launch(x=tensors(offset=1)[0], y=y, out=out)
    launch(x=x, y=y, out=out)
    launch(x=x, y=y, out=out)
    assert len(kernel.calls) == 2


def test_profilers_see_every_launch(driver, kernel):
    launch = launcher.Launcher(kernel, (1,), {"n": 32, "factor": 2.0, "BLOCK": 32})
    x, y, out = tensors()
    launch(x=x, y=y, out=out)
    hook = triton.knobs.runtime.launch_enter_hook
    seen = []
    hook.add(seen.append)
    try:
        launch(x=x, y=y, out=out)
    finally:
        hook.remove(seen.append)
    assert len(kernel.calls) == 2


def test_the_drivers_function_gets_what_triton_hands_to_it():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.driver_launches"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    launches = json.loads(run.stdout)
    kernels = {ours["kernel"] for ours, _ in launches}
    assert {"gate_sums", "output_pass", "query_pass", "key_pass", "state_pass"} <= kernels
    assert any("descriptor" in str(ours) for ours, _ in launches)
    for ours, tritons in launches:
        assert ours == tritons


def test_a_kernel_is_given_to_triton_when_it_is_first_needed():
    """With the functions and the numbers of its file that it names, once."""
    script = """
import sys
from sympow.ops.fused import gelu_linear
assert "triton" not in sys.modules
kernel, helper = gelu_linear.gelu.by_triton, gelu_linear._sigmoid.by_triton
names = kernel.fn.__globals__
assert kernel is gelu_linear.gelu.by_triton and names["_sigmoid"] is helper
assert type(helper.fn.__globals__["_CUBE"]).__name__ == "constexpr" and isinstance(gelu_linear._CUBE, float)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_queries_pass_five_files_to_every_kernel(monkeypatch):
    paths, ops = [], Path(launcher.__file__).parents[1]

    def note(self, **tensors):
        frame, files = sys._getframe(1), [Path(launcher.__file__)]
        while frame is not None:
            files.append(Path(frame.f_code.co_filename))
            frame = frame.f_back
        paths.append([file.name for file in dict.fromkeys(files) if file.is_relative_to(ops)])

    monkeypatch.setattr(launcher.Launcher, "__call__", note)
    q = torch.zeros(1, 64, 1, 16, device=DEVICE, requires_grad=True)
    log_g = torch.zeros(1, 64, 1, device=DEVICE)
    for chunk_size in (32, 64):
        power_attention(q, q, q, log_g, chunk_size=chunk_size, impl="triton").out.sum().backward()
    assert ["launcher.py", "launch.py", "adapt.py", "power.py"] in paths
    assert max(len(path) for path in paths) == 4


def test_launches_name_their_arguments():
    """All but those of kernels with few."""
    for file in Path(launcher.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert len(node.args) <= 20, f"{file.name}:{node.lineno}"
