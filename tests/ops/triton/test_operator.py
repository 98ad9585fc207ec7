"""The kernels as PyTorch operators: compilation, autocast, checkpointing, streams, graphs, refusals."""

import math
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from sympow.ops import PowerState, power_attention
from sympow.ops.runtime.launcher import Launcher
from tests.ops.contract import DEVICE

triton = pytest.importorskip("sympow.ops.triton.adapt", reason="needs triton")
plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def inputs(T: int = 300, K: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, K, generator=gen).to(DEVICE, dtype).requires_grad_() for _ in range(3))
    log_g = -torch.rand(1, T, 2, generator=gen)
    return [q, k, v, log_g.to(DEVICE).requires_grad_()]


def attend(*tensors, chunk_size=256):
    return power_attention(*tensors, chunk_size=chunk_size, impl="triton").out


def results(call, tensors):
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("chunk_size", [256, None])
def test_compile_fullgraph(chunk_size):
    call = partial(attend, chunk_size=chunk_size)
    assert_same(results(torch.compile(call, fullgraph=True), inputs()), results(call, inputs()))


def test_compile_fullgraph_in_a_fresh_process():
    """In which no call has loaded the kernels: torch.compile does as it traces."""
    code = f"""
import sys, torch
from sympow.ops import power_attention
assert "sympow.ops.triton" not in sys.modules
x = [torch.randn(1, 20, 1, 16, device={DEVICE!r}, requires_grad=True) for _ in range(3)]
def call(*x): return power_attention(*x, impl="triton").out.square().sum()
compiled = torch.autograd.grad(torch.compile(call, backend="aot_eager", fullgraph=True)(*x), x)
for a, b in zip(compiled, torch.autograd.grad(call(*x), x)): assert torch.equal(a, b)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


@gpu
def test_checkpointing():
    assert_same(results(lambda *x: checkpoint(attend, *x, use_reentrant=False), inputs()), results(attend, inputs()))


@gpu
def test_autocast_leaves_the_inputs_their_dtype():
    expected = results(attend, inputs(dtype=torch.float32))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_same(results(attend, inputs(dtype=torch.float32)), expected)


def test_the_device_is_that_of_the_inputs(monkeypatch):
    """A kernel that is launched on another GPU than that of its tensors ends in an illegal access."""
    guarded, launched = [], []

    @contextmanager
    def device_of(x):
        guarded.append(x)
        yield
        guarded.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(triton, "is_elsewhere", lambda x: not guarded)
    monkeypatch.setattr(Launcher, "__call__", lambda *_, **__: launched.append(bool(guarded)))
    q, k, v, log_g = (x.detach() for x in inputs())
    for chunk_size in (32, 4096):
        attend(q, k, v, log_g, chunk_size=chunk_size)
    assert len(launched) > 4 and all(launched)


@gpu
def test_stream():
    expected, stream = results(attend, inputs()), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = results(attend, inputs())
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(actual, expected)


@gpu
def test_graph():
    tensors = [x.detach() for x in inputs()]
    expected = attend(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors)
    graph.replay()
    assert torch.equal(out, expected)


@gpu
def test_more_elements_than_int32_counts():
    """B T H K = 2**31 + ...: the last sequence comes out as it does alone."""
    shape = (2**31 // (4096 * 16 * 64) + 1, 4096, 16, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        for chunk_size in (1024, 4096):
            out = power_attention(q, k, v, chunk_size=chunk_size, impl="triton").out[-1:]
            alone = power_attention(q[-1:], k[-1:], v[-1:], chunk_size=chunk_size, impl="triton").out
            assert torch.equal(out, alone)


@gpu
def test_views_of_one_projection():
    """q, k and v as slices of one tensor, as a fused projection leaves them."""
    whole = torch.randn(2, 300, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
    views = whole.unbind(2)
    assert torch.equal(attend(*views), attend(*(x.contiguous() for x in views)))


@gpu
def test_strided_gate():
    """Of heads before tokens, as some have them: a copy of it lives as long as it is read, by any run."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 2048, 12, 64, generator=gen).to(DEVICE, torch.bfloat16).requires_grad_() for _ in "qkv")
    heads_first = -torch.rand(4, 12, 2048, generator=gen).to(DEVICE)

    def gradients(log_g):
        return results(lambda *x: attend(*x, chunk_size=4096), [q, k, v, log_g.requires_grad_()])

    expected = gradients(heads_first.transpose(1, 2).contiguous())
    for _ in range(20):
        assert_same(gradients(heads_first.detach().transpose(1, 2)), expected)


@gpu
@pytest.mark.parametrize("chunk_size", [256, 4096])
def test_later_calls(chunk_size):
    """The first call compiles, later ones take its kernels by their handles, at whatever address their inputs lie."""
    call = partial(attend, chunk_size=chunk_size)
    expected = results(call, inputs())
    for offset in (0, 0, 1, 0, 8):
        moved = []
        for x in inputs():
            room = torch.zeros(x.numel() + offset, device=DEVICE, dtype=x.dtype)
            room[offset:] = x.detach().flatten()
            moved.append(room[offset:].view(x.shape).requires_grad_())
        assert_same(results(call, moved), expected)


@gpu
def test_state_continues_in_the_eager_path():
    q, k, v, log_g = (x.detach() for x in inputs(T=600))
    parts = [[x[:, a:b] for x in (q, k, v, log_g)] for a, b in ((0, 333), (333, 600))]
    state = power_attention(*parts[0], return_state=True, impl="triton").state
    mixed = power_attention(*parts[1], initial_state=state, impl="eager").out
    whole = power_attention(q, k, v, log_g, impl="triton", chunk_size=256).out[:, 333:]
    torch.testing.assert_close(mixed, whole, rtol=0.05, atol=0.05)


def test_refusals(monkeypatch):
    q = torch.zeros(1, 4, 1, 200, device=DEVICE)
    with pytest.raises(ValueError, match="key dims up to 128; got K = 200"):
        power_attention(q, q, q, impl="triton")
    q = torch.zeros(1, 4, 1, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"bfloat16, float16 and float32; got torch\.float64"):
        power_attention(q, q, q, impl="triton")
    q = torch.zeros(1, 400, 1, 64, device=DEVICE)
    with pytest.raises(ValueError, match="p = 4: K <= 32; got p = 4, K = 64"):
        power_attention(q, q, q, p=4, return_state=True, impl="triton")
    with pytest.raises(ValueError, match="chunk_size >= T is the quadratic form"):
        power_attention(q, q, q, p=4, chunk_size=64, impl="triton")
    if DEVICE == "cpu":
        monkeypatch.setattr("triton.knobs.runtime.interpret", False)
        with pytest.raises(ValueError, match="needs a GPU"):
            power_attention(q, q, q, impl="triton")


@pytest.mark.parametrize("documents", [None, [0, 70, 70, 71, 110]])
def test_states_are_kept_for_the_backward_or_formed_again(documents, monkeypatch):
    """Which of the two depends on their size. The shapes promised to torch.compile are those of the tensors. Those that
    are formed again are written over by their gradients, those that are kept are not."""
    tensors = [x.detach()[:, :, :1].requires_grad_() for x in inputs(T=110, K=16, dtype=torch.float32)]
    cu_seqlens = None if documents is None else torch.tensor(documents, device=DEVICE)

    def forward(q, k, v, log_g, cu_seqlens, gradient=True):
        given = {"q": q, "k": k, "v": v, "log_g": log_g, "cu_seqlens": cu_seqlens}
        absent = dict.fromkeys(("s_init", "z_init", "positions", "frequencies"))
        options = {"p": 2, "scale": 0.2, "normalize": True, "eps": 1e-6, "chunk": 32, "gradient": gradient}
        options |= dict.fromkeys(("final", "tf32", "wide"), False)
        return torch.ops.sympow.power_forward(**given, **absent, **options)

    def call(*x):
        return power_attention(*x, cu_seqlens=cu_seqlens, chunk_size=32, impl="triton").out

    def shapes(outputs):
        return [(x.shape, x.dtype) for x in outputs]

    arguments = [*tensors, cu_seqlens]
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in arguments]
        promised, unkept = shapes(forward(*fakes)), shapes(forward(*fakes, gradient=False))
    assert shapes(forward(*arguments)) == promised
    assert all(shape.numel() for shape, _ in promised[4:]) and not any(shape.numel() for shape, _ in unkept[4:])
    kept = results(call, tensors)
    monkeypatch.setattr(plan, "most_kept", lambda device: 0)
    with mode:
        assert shapes(forward(*fakes)) == unkept
    assert_same(results(call, tensors), kept)


def test_chunks_are_wider_where_only_those_states_can_be_kept(monkeypatch):
    q = torch.empty(1, 8192, 2, 32, device=DEVICE, dtype=torch.bfloat16)

    def chosen(most: int, gradient: bool = True) -> int:
        monkeypatch.setattr(plan, "most_kept", lambda device: most)
        return triton.automatic_chunk_size(q, q, q, None, None, 2, gradient)

    monkeypatch.setattr(plan, "most_kept", lambda device: 1 << 40)
    shapes = (plan.Shapes(q, q, q, None, 2, size, gradient_rows=True) for size in (256, 512))
    narrow, wide = (2 * math.prod(x.state_shapes(True)[0]) for x in shapes)
    assert [chosen(narrow), chosen(narrow - 1), chosen(wide), chosen(wide - 1)] == [256, 512, 512, 256]
    assert chosen(narrow - 1, gradient=False) == 256


def test_the_form_depends_on_what_a_gate_leaves_out():
    """That is tiles of the quadratic form, of rows that are neither packed nor in need of a state, with heads of their
    own."""
    q = torch.empty(1, 8192, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    gate, documents = torch.empty(1, 8192, 2, device=DEVICE), torch.tensor([0, 8192], device=DEVICE)

    def chosen(*about, k=q, **more) -> int:
        return triton.automatic_chunk_size(q, k, k, *about, 2, True, **more)

    assert chosen(gate, None) == 8192
    assert chosen(None, None) == chosen(gate, documents) == chosen(gate, None, has_state=True) == 768
    assert chosen(gate[..., :1], None, k=q[:, :, :1]) == 768


@pytest.mark.parametrize(("time", "chunk"), [(2048, 2048), (2049, 768)])
def test_a_prompt_is_read_in_chunks_earlier(time, chunk):
    """Its state is computed in either form."""
    q = torch.empty(1, time, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    assert triton.automatic_chunk_size(q, q, q, None, None, 2, False, has_state=True) == chunk
    assert triton.automatic_chunk_size(q, q, q, None, None, 2, False) == time


@pytest.mark.parametrize(("key_dim", "p", "chunks"), [(64, 2, [1024, 512]), (32, 2, [256, 256]), (16, 4, [2048] * 2)])
def test_chunks_are_shorter_where_positions_have_gradients(key_dim, p, chunks):
    """Only where the sum of that gradient starts again at every chunk."""
    q, gate = torch.empty(1, 16_384, 1, key_dim, device=DEVICE, dtype=torch.bfloat16), torch.empty(1, device=DEVICE)
    found = [triton.automatic_chunk_size(q, q, q, gate, None, p, True, positions=each) for each in (False, True)]
    assert found == chunks


def test_kernels_are_compiled_for_few_lengths_of_prompts():
    """A row that is one chunk has at most a quarter of tokens more, or less than the multiple that chunks are of."""
    q = torch.empty(1, 4096, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    rows = (q[:, :time] for time in range(1, 4097))
    sizes = [plan.Shapes(row, row, row, None, 2, row.shape[1], False).chunk for row in rows]
    assert all(0 <= size - time <= max(sizes[0] - 1, time // 4) for time, size in enumerate(sizes, 1))
    assert sizes[0] <= 256 and len(set(sizes)) <= 20 and sizes[-1] == 4096


def test_lengths_of_prompts_share_a_graph():
    def read(x):
        return power_attention(x, x, x, impl="triton", return_state=True).out

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    for time in (130, 150, 200, 300):  # the first length is taken to be the only one
        x = torch.randn(1, time, 1, 16, device=DEVICE)
        torch.testing.assert_close(compiled(x), read(x))
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("tokens", "documents", "chunk"), [(2048, 64, 256), (2048, 2, 1024), (2000, 1, 2000), (4096, 4, 768)]
)
def test_chunks_of_packed_documents_with_states_are_about_as_long_as_documents(tokens, documents, chunk):
    q = torch.empty(1, tokens, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    starts = torch.zeros(documents + 1, device=DEVICE, dtype=torch.int32)
    assert triton.automatic_chunk_size(q, q, q, None, starts, 2, False, has_state=True) == chunk
    assert triton.automatic_chunk_size(q, q, q, None, starts, 2, False) == tokens


@pytest.mark.parametrize("used", ["s", "z"])
def test_gradients_through_one_part_of_the_state_alone(used):
    """What has no gradient counts as zeros: nothing else is to be told of outputs that no loss takes."""
    tensors = [x.detach().float().requires_grad_() for x in inputs(20, 16)]
    out, state = power_attention(*tensors, chunk_size=16, impl="triton", return_state=True)
    part = getattr(state, used)
    alone = torch.autograd.grad(part.square().sum(), tensors[1:], retain_graph=True, allow_unused=True)
    rest = sum(x.sum() for x in (out, state.s, state.z))
    with_zeros = torch.autograd.grad(part.square().sum() + 0 * rest, tensors[1:], allow_unused=True)
    assert_same(alone, with_zeros)


def test_an_empty_batch():
    q = torch.zeros(0, 4, 1, 8, device=DEVICE)
    state = power_attention(q, q, q, impl="triton", return_state=True).state
    assert isinstance(state, PowerState) and state.s.shape[0] == 0
