"""The FLOPs of every mixer: that all count, and that the counts are those of their products."""

import math

import pytest

from sympow.layers import MIXERS
from sympow.ops.cost import attention_pairs, convolution_flops, least_power_flops, softmax_flops
from tests.layers.contract import CASES

D, HEADS, T = 24, 4, 37
MADE = {case.values[0][0]: case.values[0][1] for case in CASES}


def count(name: str, time: int = T, **options) -> int:
    return MIXERS[name](D, HEADS, **options).training_flops(time)


def softmax(time: int, window: int | None = None) -> int:
    sizes = {"window": window, "heads": HEADS}
    return sum(softmax_flops(time, D // HEADS, D // HEADS, **sizes, backward=b) for b in (False, True))


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_counts_and_longer_rows_cost_more(name):
    mixer = MIXERS[name](D, HEADS, **MADE[name])
    counts = [mixer.training_flops(time) for time in (1, T, 100 * T)]
    assert all(isinstance(flops, int) for flops in counts)
    if (name, MADE[name]) == ("programmatic_conv", {"matching": True}):  # looks up tokens, and multiplies nothing
        assert counts == [0, 0, 0]
    else:
        assert 0 <= counts[0] <= counts[1] < counts[2]


def test_a_convolution_costs_the_less_of_two_forms():
    """A product and a sum for each pair of tokens that a tap joins, three times; or six transforms."""
    pairs = sum(1 for i in range(T) for j in range(i + 1) if i - j < 3)
    assert convolution_flops(T, 3, channels=5) == 5 * 3 * 2 * pairs
    n = 2**13
    transforms, products = 6 * 2.5 * n * math.log2(n), 3 * 6 * n / 2
    assert convolution_flops(4096, 4096) == transforms + products < 6 * attention_pairs(4096)
    assert convolution_flops(8, 100) == convolution_flops(8, 8)
    with pytest.raises(ValueError, match="taps must be"):
        convolution_flops(8, 0)


def test_long_convolutions_cost_half_of_what_the_source_counts():
    """Zoology counts 10 T log2 T multiply-adds a channel, each as 6 FLOPs. Transforms of 2 T need half of that."""
    ours, theirs = convolution_flops(2048, 2048), 6 * 10 * 2048 * math.log2(2048)
    assert 0.5 < ours / theirs < 0.6


def test_counts_of_mixers():
    assert count("base_conv", max_length=9) == count("long_convolution", max_length=9) == convolution_flops(T, 9, D)
    short = convolution_flops(T, 3, 3 * D)
    assert count("hyena", max_length=T) == short + convolution_flops(T, T, D)
    assert count("hyena", max_length=T, multi_head=True) == short + softmax(T)  # by scores
    long, width = 100 * T, D // HEADS
    by_states = convolution_flops(long, long, D * width) + 3 * 2 * long * D * width
    assert count("hyena", long, max_length=long, multi_head=True) == convolution_flops(long, 3, 3 * D) + by_states
    assert count("h3", state_dim=8) == convolution_flops(T, 8, D) + convolution_flops(T, T, D) + 6 * T * D
    assert count("liquid_s4") == 3 * convolution_flops(T, T, D)
    assert count("rwkv4") == 12 * T * D and count("rwkv7") == 27 * T * D * D // HEADS
    assert count("mamba", state_dim=5) == convolution_flops(T, 4, 2 * D) + 18 * T * 2 * D * 5
    retnet = least_power_flops(T, D // HEADS, 2 * D // HEADS, 1, True, heads=HEADS, kv_heads=HEADS)
    assert count("retnet") == retnet
    assert count("blocked_window", window=10) == 3 * softmax(10) + softmax(7)
    assert count("short_convolution", width=4) == convolution_flops(T, 4, D)
    assert count("short_convolution", width=4, mixer="softmax") == convolution_flops(T, 4, D) + softmax(T)
    assert count("programmatic_conv") == convolution_flops(T, T, D)
    assert count("autocorrelation_conv", top_k=2, matching=True) == convolution_flops(T, T, D) // 2 + 12 * T * 2 * D


def test_selection_counts_the_pairs_of_selected_tokens():
    """Of scores in random order, token t + 1 is among the k largest so far with the probability k / (t + 1)."""
    assert count("selection", selection="random", probability=0.25) == round(softmax(T) / 4)
    assert count("selection", selection="programmatic") == softmax(T)
    assert count("selection", selection="learned", top_k=5, whole_row=True) == round(5 / T * softmax(T))
    pairs = sum(min(1, 5 / (t + 1)) * (t + 1) for t in range(T))
    assert count("selection", selection="learned", top_k=5) == pytest.approx(pairs / attention_pairs(T) * softmax(T))
