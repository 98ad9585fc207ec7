"""The cost model against published sizes, against brute-force counts, and against what the code really
holds.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from sympow.ops import cost
from sympow.ops.types import PowerState

SMALL = cost.ModelShape.of(768, 12, 12)
GPT2 = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}
sizes = st.integers(1, 24)


@pytest.mark.parametrize(
    ("basis", "p", "published"),
    [
        ("tpow", 2, "77 MB"),
        ("tpow", 4, "314 GB"),
        ("tpow", 6, "1.3 PB"),
        ("tpow", 8, "5.3 EB"),
        ("spow", 2, "39 MB"),
        ("spow", 4, "14 GB"),
        ("spow", 6, "2.2 TB"),
        ("spow", 8, "199 TB"),
    ],
)
def test_published_state_of_the_124m_model(basis, p, published):
    held = 12 * cost.power_state(64, 64, p, kv_heads=12, basis=basis) * 2
    assert cost.format_bytes(held) == published


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (9_960, "10 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (10**21, "1,000 EB"),
    ],
)
def test_format_bytes(count, text):
    assert cost.format_bytes(count) == text


@pytest.mark.parametrize(
    ("model", "elements"), [("small", 589_824), ("medium", 1_572_864), ("large", 2_949_120), ("xl", 4_915_200)]
)
def test_published_state_of_linear_attention(model, elements):
    _, layers, heads = GPT2[model]
    assert layers * cost.power_state(64, 64, 1, kv_heads=heads, normalizer=False) == elements


@pytest.mark.parametrize(
    ("p", "tpow", "spow"),
    [
        (2, 4096, 2080),
        (3, 262144, 45760),
        (4, 16777216, 766480),
        (5, 1073741824, 10424128),
        (6, 68719476736, 119877472),
    ],
)
def test_published_state_dimensions(p, tpow, spow):
    assert cost.power_state(64, 1, p, normalizer=False, basis="tpow") == tpow
    assert cost.power_state(64, 1, p, normalizer=False) == spow


CONTEXTS = (1024, 8192, 65536, 1_000_000)


@pytest.mark.parametrize(
    ("options", "published"),
    [({}, ["8:1", "1:1", "1:8", "1:125"]), ({"p": 1}, ["30:1"] * 4), ({"window": 8192}, ["8:1", "1:1", "1:1", "1:1"])],
)
def test_published_weight_state_flop_ratios(options, published):
    ratios = [cost.weight_state_flop_ratio(SMALL, context, **options) for context in CONTEXTS]
    assert [cost.format_ratio(ratio) for ratio in ratios] == published


def test_weight_state_flop_ratio_before_rounding():
    """The values that the docstring gives, so that the rounding hides nothing."""
    softmax = [cost.weight_state_flop_ratio(SMALL, context) for context in CONTEXTS]
    assert softmax == pytest.approx([7.714, 1 / 1.037, 1 / 8.297, 1 / 126.6], rel=1e-3)
    assert cost.weight_state_flop_ratio(SMALL, 1024, p=1) == pytest.approx(30.857, rel=1e-4)


@pytest.mark.parametrize(
    ("shape", "context", "ratio"),
    [((512, 8, 6), 65_536, 1 / 10.18), ((1024, 24, 16), 4096, 2.571), ((1280, 26, 20), 64, 205.7)],
)
def test_the_shapes_of_figure_2_do_not_have_the_ratios_that_are_printed(shape, context, ratio):
    """[SCRA] Appendix D lists these shapes as 1:12, 4:1 and 99:1. The first has 6 heads of 64 in a width of 512."""
    d_model, layers, heads = shape
    made = cost.ModelShape(d_model, layers, heads, 64, 64, heads)
    assert cost.weight_state_flop_ratio(made, context) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(("p", "context"), [(None, 65_536), (1, 65_536), (2, 131_072)])
def test_weight_state_flop_ratio_is_that_of_the_flop_counts(p, context):
    """Over a long sequence the closed form and the counts of whole sequences agree, but for the normalizer."""
    shape = SMALL
    both = 0
    for backward in (False, True):
        if p is None:
            both += cost.softmax_flops(context, 64, 64, heads=12, backward=backward)
        else:
            both += cost.power_flops(context, 64, 64, p, 128, heads=12, kv_heads=12, backward=backward)
    counted = 6 * shape.block_weights * context / (shape.n_layers * both)
    assert cost.weight_state_flop_ratio(shape, context, p=p) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("ratio", "text"), [(7.6, "8:1"), (1.0, "1:1"), (0.9, "1:1"), (1 / 7.6, "1:8"), (9.7, "10:1"), (1 / 123, "1:125")]
)
def test_format_ratio(ratio, text):
    assert cost.format_ratio(ratio) == text


@given(time=sizes, window=st.none() | sizes)
def test_attention_pairs(time, window):
    pairs = [(i, j) for i in range(time) for j in range(i + 1) if window is None or i - j < window]
    assert cost.attention_pairs(time, window) == len(pairs)
    assert cost.softmax_flops(time, 3, 5, window=window, heads=2) == 2 * 2 * len(pairs) * (3 + 5)


@given(
    time=sizes,
    chunk=st.none() | sizes,
    p=st.integers(1, 3),
    gated=st.booleans(),
    kv_heads=sizes,
    groups=st.integers(1, 3),
)
def test_power_flops_walks_the_chunks(time, chunk, p, gated, kv_heads, groups):
    """Counted by walking through the chunks as (M11) and (M12) do."""
    key_dim, value_dim, heads = 3, 4, kv_heads * groups
    state = cost.power_state(key_dim, value_dim, p)
    forward = backward = 0
    for start in range(0, time, chunk or time):
        length = min(chunk or time, time - start)
        pairs = length * (length + 1) // 2
        forward += 2 * heads * pairs * (key_dim + value_dim)
        backward += 2 * heads * pairs * (3 * key_dim + 2 * value_dim)
        if start > 0:  # there is a state to read
            forward += 2 * state * heads * length
            backward += 2 * 2 * state * heads * length
        if start + length < time:  # someone will read the state
            forward += 2 * state * kv_heads * length + (state * kv_heads if gated else 0)
            backward += 3 * 2 * state * kv_heads * length + (4 * state * kv_heads if gated else 0)
    options = {"heads": heads, "kv_heads": kv_heads}
    assert cost.power_flops(time, key_dim, value_dim, p, chunk, gated, **options) == forward
    assert cost.power_flops(time, key_dim, value_dim, p, chunk, gated, **options, backward=True) == backward


def test_softmax_flops_are_those_torch_counts():
    """torch counts the square, the cost model the causal half of it, diagonal included."""
    time, heads, dim = 64, 3, 16
    q, k, v = (torch.randn(1, heads, time, dim, device="meta") for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    square = counter.get_total_flops()
    assert cost.softmax_flops(time, dim, dim, heads=heads) * 2 * time == square * (time + 1)


@given(batch=st.integers(1, 3), heads=st.integers(1, 3), key_dim=st.integers(1, 6), p=st.integers(1, 3))
def test_state_is_what_the_op_holds(batch, heads, key_dim, p):
    held = PowerState.zeros(batch, heads, key_dim, 5, p=p)
    assert batch * cost.power_state(key_dim, 5, p, kv_heads=heads) * 4 == held.nbytes  # float32


def test_caches_grow_to_the_window():
    assert cost.softmax_state(100, 8, 4, kv_heads=2) == 2 * 100 * 12
    assert cost.softmax_state(100, 8, 4, window=16) == 16 * 12
    assert cost.softmax_state(10, 8, 4, window=16) == 10 * 12


def test_flops_of_a_layer():
    """Small enough to count by hand: T = 4, c = 2, K = V = 1, p = 1, H = G = 1, so D (V + 1) = 2."""
    pairs, read, update, decay = 2 * 3 * 2 * 2, 2 * 2 * 2, 2 * 2 * 2, 2
    assert cost.power_flops(4, 1, 1, 1, 2, gated=True) == pairs + read + update + decay


def test_flops_of_a_window_are_those_of_softmax_once_it_holds_the_sequence():
    assert cost.softmax_flops(32, 8, 8, window=32) == cost.softmax_flops(32, 8, 8)
    assert cost.softmax_flops(64, 8, 8, window=32) < cost.softmax_flops(64, 8, 8)


def test_chunking_pays_at_long_contexts_only():
    assert cost.power_flops(64, 64, 64, 2, 32) > cost.power_flops(64, 64, 64, 2)
    assert cost.power_flops(65536, 64, 64, 2, 1024) < cost.power_flops(65536, 64, 64, 2) / 10


@pytest.mark.parametrize("time", [1, 200, 4096, 100_000])
def test_least_flops_are_those_of_some_chunk_and_of_no_better_one(time):
    sizes = {"gated": True, "heads": 4, "kv_heads": 2}

    def flops(chunk):
        return sum(cost.power_flops(time, 16, 8, 2, chunk, backward=backward, **sizes) for backward in (False, True))

    chunks = [1 << i for i in range(12) if 1 << i <= time]
    least = cost.least_power_flops(time, 16, 8, 2, **sizes)
    assert least == min(map(flops, [time, *chunks]))
    assert time < 1000 or least < flops(None) / 2


def test_block_weights():
    assert SMALL.block_weights == 12 * 12 * 768**2
    grouped = cost.ModelShape(d_model=8, n_layers=2, n_heads=4, key_dim=3, value_dim=5, n_kv_heads=2)
    assert grouped.block_weights == 2 * 8 * (4 * 3 + 2 * 3 + 2 * 5 + 4 * 5 + 8 * 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.power_flops(0, 8, 8, 2), "time must be at least 1, got 0"),
        (lambda: cost.power_flops(8, 8, 8, 2, chunk=0), "chunk must be at least 1, got 0"),
        (lambda: cost.power_state(8, 8, 2, basis="cyclic"), "basis must be 'spow' or 'tpow', got 'cyclic'"),
        (lambda: cost.softmax_flops(8, 8, 8, window=-1), "window must be at least 1, got -1"),
        (lambda: cost.weight_state_flop_ratio(SMALL, 8, p=2, window=8), "p and window exclude each other"),
        (lambda: cost.format_ratio(0), "a ratio is positive, got 0"),
        (lambda: cost.ModelShape.of(10, 2, 3), "d_model must be a multiple of n_heads, got 10 and 3"),
        (lambda: cost.ModelShape(8, 2, 3, 4, 4, 2), "n_heads must be a multiple of n_kv_heads, got 3 and 2"),
    ],
)
def test_bad_sizes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_with_their_nouns():
    assert [cost.counted(n, "token") for n in (0, 1, 2, 2048)] == ["0 tokens", "1 token", "2 tokens", "2,048 tokens"]
