"""Long convolutions against their sums, and the mixers made of them against their formulas."""

import pytest
import torch

from sympow.layers import MIXERS
from sympow.layers.filters import ImplicitFilter
from sympow.layers.hyena import filtered_attention
from sympow.ops.convolution import causal_convolution


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    rows = [sum(h[s] * x[:, t - s] for s in range(min(t + 1, len(h)))) for t in range(x.shape[1])]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize(("time", "taps"), [(1, 1), (1, 5), (7, 3), (8, 8), (9, 9), (13, 40), (33, 1), (33, 12)])
def test_fft_convolution_is_the_sum(time, taps):
    x, h = normal(2, time, 3), normal(taps, 3, seed=1)
    torch.testing.assert_close(causal_convolution(x, h), summed(x, h), rtol=0, atol=1e-13)
    x, h = normal(2, time, 3, 4), normal(taps, 3, 1, seed=1)
    torch.testing.assert_close(causal_convolution(x, h), summed(x, h), rtol=0, atol=1e-13)
    rows = normal(2, taps, 1, 4, seed=2)  # a filter for every row
    each = torch.cat([summed(x[i : i + 1], rows[i]) for i in range(2)])
    torch.testing.assert_close(causal_convolution(x, rows), each, rtol=0, atol=1e-13)


def test_fft_convolution_keeps_the_dtype_and_refuses_shapes():
    x, h = normal(2, 9, 3), normal(9, 3, seed=1)
    half = causal_convolution(x.bfloat16(), h.float())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), summed(x.bfloat16().double(), h), rtol=2**-7, atol=2**-7)
    with pytest.raises(ValueError, match=r"h \[S, ...\] of one axis less, or .*; got \[2, 9, 3\] and \[9\]"):
        causal_convolution(x, h[:, 0])


def built(name: str, d_model: int, n_heads: int, **options) -> torch.nn.Module:
    mixer = MIXERS[name](d_model, n_heads, **options).double()
    mixer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(3))
    return mixer


def test_base_conv_is_its_formula():
    mixer = built("base_conv", 5, 1, max_length=20)
    x = normal(2, 11, 5)
    gate = x @ mixer.projection.weight.T + mixer.projection.bias
    torch.testing.assert_close(mixer(x), gate * (summed(x, mixer.filter(20)) + mixer.bias))


def test_hyena_in_heads_of_one_channel_is_hyena():
    single, heads = (built("hyena", 6, 6, max_length=20, multi_head=multi) for multi in (False, True))
    heads.load_state_dict(single.state_dict())
    x = normal(2, 11, 6)
    torch.testing.assert_close(heads(x), single(x))


def test_hyena_in_heads_is_linear_attention_with_a_filter():
    mixer = built("hyena", 6, 2, max_length=20, multi_head=True)
    x = normal(2, 11, 6)
    q, k, v = (part.unflatten(-1, (2, 3)) for part in mixer.short(mixer.projections(x)).chunk(3, dim=-1))
    h = mixer.filter(20)
    lag = torch.arange(11)[:, None] - torch.arange(11)
    weights = torch.einsum("btmk,bsmk->bmts", q, k) * (h[lag.clamp(min=0)] * (lag >= 0)[..., None]).permute(2, 0, 1)
    y = torch.einsum("bmts,bsmv->btmv", weights, v)
    torch.testing.assert_close(mixer(x), mixer.out(y.flatten(2)))


@pytest.mark.parametrize("taps", [9, 40, 500])
def test_filtered_attention_by_scores_is_that_by_convolution(taps):
    q, k, v = (normal(2, 200, 3, 2, seed=seed) for seed in range(3))  # so long that it convolves
    h = normal(taps, 3, seed=3)
    rows = torch.cat([filtered_attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], h) for t in range(200)], dim=1)
    torch.testing.assert_close(filtered_attention(q, k, v, h), rows)
    torch.testing.assert_close(filtered_attention(q[:, 50:], k, v, h), rows[:, 50:])
    torch.testing.assert_close(filtered_attention(q[:, 20:30], k[:, :30], v[:, :30], h), rows[:, 20:30])


def test_in_front_of_a_mixer_a_short_convolution_starts_near_the_identity():
    alone, before = built("short_convolution", 4, 1), built("short_convolution", 4, 1, mixer="softmax")
    own = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(before.convolution.weight, alone.convolution.weight + own)
    assert alone.convolution.weight.abs().max() <= 0.5 and not before.convolution.bias.any()
    x = normal(1, 6, 4)
    torch.testing.assert_close(before(x), before.mixer(before.convolution(x)))


def test_implicit_filter_decays_and_its_first_taps_do_not_depend_on_how_many_are_asked_for():
    filter = ImplicitFilter(4, 50, order=8).double()
    filter.reset_parameters(torch.Generator().manual_seed(0))
    h = filter(1000)
    assert h.shape == (50, 4)
    torch.testing.assert_close(filter(7), h[:7])
    bound = (filter.last.weight.abs().sum(1) * 1e-2 ** (49 / 50 / 0.3)).max()
    assert h[-1, -1].abs() <= bound  # the channel that forgets fastest


def test_a_filter_of_n_taps_sees_n_tokens():
    mixer = built("long_convolution", 4, 1, max_length=5)
    x = normal(1, 30, 4)
    torch.testing.assert_close(mixer(x)[:, -1], mixer(x[:, -5:])[:, -1])
