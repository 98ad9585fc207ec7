"""Softmax, window and linear attention against their formulas; the cache they keep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from sympow.layers import (
    HybridHeads,
    LinearAttention,
    PowerAttention,
    SoftmaxAttention,
    WindowAttention,
    flex_window,
    softmax,
    window,
)
from sympow.layers.cache import KVCache, WindowCache, capacity
from sympow.layers.flex_window import flex_attend_in_window
from sympow.layers.softmax import attend_to_past
from sympow.layers.window import attend_in_window
from tests.draws import normal

TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def dense(q, k, v, window=None):
    """Softmax over the last `window` tokens, all scores at once: q [B, H, T, K], k, v [B, G, S, .]."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    total = k.shape[2]
    distance = torch.arange(total)[total - q.shape[2] :, None] - torch.arange(total)
    seen = (distance >= 0) & (distance < (window or total))
    score = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return score.softmax(-1) @ v


@given(
    new=st.integers(1, 40),
    past=st.integers(0, 40),
    size=st.integers(1, 50),
    block=st.integers(1, 12),
    heads=st.sampled_from([(2, 2), (4, 2)]),
)
def test_blocks_are_dense_attention(new, past, size, block, heads):
    h, g = heads
    q, k, v = normal(1, h, new, 4), normal(1, g, new + past, 4, seed=1), normal(1, g, new + past, 6, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "LEAST_BLOCK", block)
        patch.setattr(window, "MOST_BLOCK", block)
        patch.setattr(softmax, "MASK_ELEMENTS", block * (new + past))
        torch.testing.assert_close(attend_in_window(q, k, v, size), dense(q, k, v, size), **TIGHT)
        torch.testing.assert_close(attend_to_past(q, k, v), dense(q, k, v), **TIGHT)


def test_window_never_scores_the_whole_sequence(monkeypatch):
    scored = []

    def spy(q, k, v, **options):
        scored.append(q.shape[2] * k.shape[2])
        return real(q, k, v, **options)

    real = window.attend
    monkeypatch.setattr(window, "attend", spy)
    time, size = 3000, 100
    q, k, v = (normal(1, 1, time, 2, seed=seed) for seed in range(3))
    attend_in_window(q, k, v, size)
    assert max(scored) <= 256 * 128 and sum(scored) <= 3 * time * 128


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("time", "size", "heads", "key_dim"),
    [(300, 3, (2, 2), 16), (259, 128, (4, 2), 16), (640, 300, (2, 2), 16), (640, 300, (2, 2), 24)],
)
def test_flex_attention_is_the_block_form(monkeypatch, time, size, heads, key_dim):
    """With windows of a few tokens, a block, and neither; with keys that are wider than values. On a CPU as torch runs
    it there, not compiled and without gradients; on a GPU in bfloat16, as the layer calls it.

    There rounded by half a unit, 2**-9: weights, what the gradient of the scores is made of, and results; 4 for all.
    """
    (h, g), on_gpu = heads, torch.cuda.is_available()
    shapes = ((h, key_dim), (g, key_dim), (g, 16), (h, 16))
    inputs = [normal(1, n, time, width, seed=seed).bfloat16() for seed, (n, width) in enumerate(shapes)]
    if not on_gpu:
        monkeypatch.setattr(flex_window, "compiled_flex_attention", lambda: flex_attention)

    def run(attend, dtype):
        q, k, v, dout = (x.to("cuda" if on_gpu else "cpu", dtype) for x in inputs)
        given = [x.requires_grad_(on_gpu) for x in (q, k, v)]
        out = attend(*given, size)
        return [out, *(torch.autograd.grad(out, given, dout) if on_gpu else ())]

    dtype, rtol = (torch.bfloat16, 4 * 2**-9) if on_gpu else (torch.float64, TIGHT["rtol"])
    wanted = run(attend_in_window, torch.float64)
    for found, right in zip(run(flex_attend_in_window, dtype), wanted, strict=True):
        assert (found.double() - right).norm() <= rtol * right.norm()


@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_flex_attention_is_the_block_form():
    """In one graph, without a warning."""
    q, k, v = (normal(1, heads, 300, 16, seed=heads).float() for heads in (4, 2, 2))
    compiled = torch.compile(flex_attend_in_window, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, 100), attend_in_window(q, k, v, 100))


def test_a_token_sees_a_window_of_tokens_itself_included():
    layer = WindowAttention(8, 2, window=5).double()
    x = normal(1, 30, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[0, 20].sum(), x)
    assert gradient[0].abs().sum(-1).nonzero().flatten().tolist() == list(range(16, 21))


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("chunks", [(1, 5, 3), (20, 1, 2), (2, 13)])
def test_rows_of_different_lengths_read_chunks(monkeypatch, size, chunks):
    """A chunk is few calls of attention, however long it is. The rows have read 0, 2 and 9 tokens before."""
    layer, calls = WindowAttention(16, 2, window=size, n_kv_heads=1, value_dim=5).double(), []
    attend = softmax.attend
    for module in (softmax, window):
        monkeypatch.setattr(module, "attend", lambda *given, **more: calls.append(0) or attend(*given, **more))
    begun, total = (0, 2, 9), sum(chunks)
    rows = [normal(1, before + total, 16, seed=before) for before in begun]
    with torch.no_grad():
        empty = layer.init_state(1)
        states = [layer.step(x[:, :n], empty)[1] if n else empty for x, n in zip(rows, begun, strict=True)]
        k, v = (torch.cat([getattr(s.with_all_room(), name) for s in states]) for name in ("k", "v"))
        state, outs = WindowCache(k, v, length=torch.tensor(begun), limit=size), []
        x = torch.cat([x[:, n:] for x, n in zip(rows, begun, strict=True)])
        for chunk in x.split(chunks, dim=1):
            calls.clear()
            y, state = layer.step(chunk, state)
            assert 1 <= len(calls) <= 2
            outs.append(y)
        expected = torch.cat([layer(row)[:, n:] for row, n in zip(rows, begun, strict=True)])
    assert state.length.tolist() == [n + total for n in begun]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, **TIGHT)


def test_only_differences_of_positions_count():
    layer = SoftmaxAttention(8, 2).double()
    q, k, _ = layer.heads(normal(1, 12, 8))
    early, late = layer.rotate(q, k), layer.rotate(q, k, 2**26)  # float32 counts to 2**24
    scores = [torch.einsum("bthk,bshk->bhts", *pair) for pair in (early, late)]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-7)


def test_the_base_of_the_rotation():
    """A pair m turns by base**(-2m / K) at every token."""
    layer = SoftmaxAttention(8, 2, rope_base=1e6).double()
    q, k, _ = layer.heads(normal(1, 5, 8))
    turned, _ = layer.rotate(q, k)
    angle = torch.arange(5.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 1e-3], dtype=torch.float64)
    pairs = torch.view_as_complex(q.unflatten(-1, (2, 2)).contiguous()) * torch.exp(1j * angle)[:, None]
    torch.testing.assert_close(turned, torch.view_as_real(pairs).flatten(-2), **TIGHT)
    assert not torch.allclose(turned, SoftmaxAttention(8, 2).double().rotate(q, k)[0])


@pytest.mark.parametrize(("bias", "out_bias", "has"), [(True, None, True), (True, False, False), (False, True, True)])
def test_the_bias_of_the_output_projection(bias, out_bias, has):
    layer = SoftmaxAttention(8, 2, bias=bias, out_bias=out_bias)
    assert (layer.qkv.bias is not None) == bias
    assert (layer.out.bias is not None) == has


@given(length=st.integers(0, 1 << 22), more=st.integers(0, 1 << 12), limit=st.none() | st.integers(1, 1 << 22))
def test_capacity_grows_by_an_eighth_and_does_not_depend_on_the_way(length, more, limit):
    room = capacity(length, limit)
    held = length if limit is None else min(length, limit)
    assert held <= room <= max(held * 9 / 8, held + 16)
    assert room <= capacity(length + more, limit)
    assert capacity(room, limit) == room


@torch.no_grad()
def test_cache_is_seldom_copied():
    cache = KVCache(normal(1, 1, 0, 2), normal(1, 1, 0, 2))
    places = set()
    for t in range(4000):
        cache = cache.extend(*torch.full((2, 1, 1, 1, 2), float(t), dtype=torch.float64))
        places.add((cache.k.data_ptr(), cache.k.shape[2]))
    assert len(places) < 80
    assert torch.equal(cache.filled()[0][0, 0, :, 0], torch.arange(4000.0, dtype=torch.float64))


@given(limit=st.integers(1, 12), pieces=st.lists(st.integers(1, 15), min_size=1, max_size=6))
def test_ring_keeps_the_last_tokens_in_order(limit, pieces):
    cache = KVCache(normal(1, 1, 0, 1), normal(1, 1, 0, 1), limit=limit)
    tokens = torch.arange(float(sum(pieces)), dtype=torch.float64).view(1, 1, -1, 1)
    with torch.no_grad():
        for piece in tokens.split(pieces, dim=2):
            cache = cache.extend(piece, -piece)
    k, v = cache.ordered()
    assert torch.equal(k, tokens[:, :, -limit:]) and torch.equal(v, -k)


@torch.no_grad()
def test_cache_dtype_can_be_chosen():
    for layer in (SoftmaxAttention(8, 2), WindowAttention(8, 2, window=4)):
        x = normal(1, 9, 8).float()
        state = layer.init_state(1, dtype=torch.bfloat16)
        first, state = layer.step(x[:, :6], state)
        second, state = layer.step(x[:, 6:8], state)
        third, state = layer.step(x[:, 8:], state)
        assert state.k.dtype == torch.bfloat16 and third.dtype == torch.float32
        torch.testing.assert_close(torch.cat([first, second, third], dim=1), layer(x), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("rotation", ["fixed", "none"])
def test_elu_features_are_the_formula(rotation):
    layer = LinearAttention(8, 2, feature_map="elu+1", rotation=rotation).double()
    layer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    x = normal(1, 10, 8)
    q, k, v = layer.heads(x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weight = torch.einsum("bthk,bshk->bhts", q, k).tril()
    rotated = torch.einsum("bthk,bshk->bhts", *layer.rotate(q, k)).tril()
    y = torch.einsum("bhts,bshv->bthv", rotated / (weight.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(layer(x), layer.out(y.flatten(2)), **TIGHT)


@pytest.mark.parametrize("rotation", ["fixed", "none"])
def test_taylor_features_are_the_formula(rotation):
    """Weights 1 + s + s^2 / 2, in the state of p = 2 for keys with one more channel."""
    layer = LinearAttention(8, 2, feature_map="taylor", rotation=rotation).double()
    layer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    x = normal(1, 10, 8)
    q, k, v = layer.rotated_heads(x)
    s = torch.einsum("bthk,bshk->bhts", q, k) / 2
    weight = (1 + s + s**2 / 2).tril()
    y = torch.einsum("bhts,bshv->bthv", weight / (weight.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(layer(x), layer.out(y.flatten(2)), **TIGHT)
    assert layer.init_state(1).memory.s.shape == (1, 2, 15, 4)


def test_weights_of_a_taylor_series_add_up_in_float16():
    """Those of 70,000 tokens to more than float16 holds."""
    layer = LinearAttention(8, 2, feature_map="taylor", rotation="none")
    x = normal(1, 1, 8).float().expand(1, 70_000, 8)
    exact = layer(x)
    torch.testing.assert_close(layer.half()(x.half()).float(), exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())


def test_elu_keeps_its_precision_late_in_a_row_of_documents():
    layer = LinearAttention(8, 2, feature_map="elu+1")
    x = normal(1, 20_000, 8).float()
    packed = layer(x, cu_seqlens=torch.tensor([0, 19_990, 20_000]))
    torch.testing.assert_close(packed[:, -10:], layer(x[:, -10:]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"head_dim": 10**9}, {"value_dim": 10**9}])
def test_weights_beyond_memory_are_refused_before_anything_is_made(options):
    with pytest.raises(
        ValueError, match=r"a layer with d_model=64, .*1,000,000,000.* needs .* of memory; this machine"
    ):
        SoftmaxAttention(64, 2, **options)


@pytest.mark.parametrize(
    ("layer", "batch", "what"),
    [
        (PowerAttention(128, 2, p=10), 1, "PowerAttention for 1 sequence"),
        (LinearAttention(32, 2), 10**12, "LinearAttention for 1,000,000,000,000 sequences"),
        (HybridHeads(32, 2, window=8, mixer="linear"), 10**12, "WindowAttention for 1,000,000,000,000 sequences"),
    ],
)
def test_a_state_beyond_memory_is_refused_before_it_is_made(layer, batch, what):
    with pytest.raises(ValueError, match=rf"^a state of {what} needs .* of memory; this machine has"):
        layer.init_state(batch)
