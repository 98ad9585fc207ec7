"""For every test of the op: where Triton is not installed, those by kernels are skipped."""

import pytest


@pytest.fixture(autouse=True)
def kernels_need_triton(request):
    """A test is by kernels whose parameters name the implementation "triton", alone or in a tuple."""
    call = getattr(request.node, "callspec", None)
    if call is not None and any(value in ("triton", ("triton",)) for value in call.params.values()):
        pytest.importorskip("triton", reason="needs triton")
