"""For every test: one thread a process, so that parallel workers do not fight, reproducible examples and random
numbers, and a way to run kernels."""

import gc
import importlib.util
import multiprocessing
import os
import signal
from multiprocessing import forkserver

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by subprocesses
if not any(os.path.exists(x) for x in ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels run in Triton's interpreter

import pytest
import torch
from hypothesis import settings

from sympow import progress
from tests.ranks import PRELOAD

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 20)  # the compiler and the interpreter make many small objects, and few cycles
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore: tests send it
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from tests import interpreter

    interpreter.speed_up()
    interpreter.compute_in_bfloat16()
    interpreter.multiply_in_tf32()
LONG = ("test_ranks.py", "test_documents.py", "test_resume.py", "test_shell_blocks.py", "test_serving.py",
        "test_context_parallel.py", "test_sweep.py", "test_release.py", "test_compile.py")  # fmt: skip
settings.register_profile("sympow", derandomize=True, deadline=None, database=None, max_examples=40)
settings.load_profile("sympow")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_auto_num_workers():
    """Returns one worker more than there are processors, because many tests wait for processes that they start."""
    return (os.cpu_count() or 1) + 1


def pytest_configure():
    """Lets every worker have one server of forked processes, with all that the processes of any test import."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        multiprocessing.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def pytest_collection_modifyitems(items):
    """Puts files with long tests first, so that no worker waits for a long test of the other at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish():
    """Lets no collection of garbage look through all modules and tests, which the package asks for now and then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws without a generator of its own, such as a layer's weights, is the same in any order of tests.
    Now and then a first token's score is so near zero that its slope carries roundings beyond what is allowed."""
    torch.manual_seed(0)


@pytest.fixture
def every_count_is_told(monkeypatch):
    """A line for each advance of what `Progress` counts, and no other."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "LOOK_EVERY", 3600.0)


@pytest.fixture
def fails(capsys):
    """fails(arguments) runs a command that must fail, and returns its one line."""
    from sympow.cli import main

    def run(*arguments) -> str:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        lines = err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("sympow: error: "), err
        return lines[0].removeprefix("sympow: error: ")

    return run
