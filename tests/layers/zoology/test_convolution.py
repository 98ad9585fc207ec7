"""Long convolutions against their sums, and the mixers made of them against their formulas."""

import math

import pytest
import torch

from sympow.layers import MIXERS
from sympow.layers.zoology.filters import ImplicitFilter
from sympow.layers.zoology.hyena import filtered_attention
from sympow.ops.convolution import (
    causal_convolution,
    convolve_by_matrices,
    convolve_by_taps,
    convolve_by_transforms,
    fastest_form,
)
from tests.draws import normal


def summed(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    rows = [sum(h[s] * x[:, t - s] for s in range(min(t + 1, len(h)))) for t in range(x.shape[1])]
    return torch.stack(rows, dim=1)


WAYS = {"taps": convolve_by_taps, "matrices": convolve_by_matrices, "transforms": convolve_by_transforms}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("time", "taps"), [(1, 1), (7, 3), (8, 8), (13, 13), (33, 1), (33, 12), (70, 70)])
def test_every_way_is_the_sum_with_its_gradient_and_looks_at_no_later_token(way, time, taps):
    x, h = normal(2, time, 3), normal(taps, 3, seed=1)
    for signal, filter in ((x, h), (normal(2, time, 3, 4), h[..., None]), (x[..., None], normal(taps, 1, 2, seed=2))):
        signal, filter = signal.requires_grad_(), filter.requires_grad_()
        y, exact = WAYS[way](signal, filter[None]), summed(signal, filter)
        torch.testing.assert_close(y, exact, rtol=0, atol=1e-13)
        weight = normal(*y.shape, seed=3)
        got, wanted = (torch.autograd.grad((out * weight).sum(), (signal, filter)) for out in (y, exact))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        changed = signal.detach().clone()
        changed[:, time // 2 :] += 1
        torch.testing.assert_close(WAYS[way](changed, filter[None])[:, : time // 2], y[:, : time // 2])
    rows = normal(2, taps, 1, seed=2)  # a filter for every row
    each = torch.cat([summed(x[i : i + 1], rows[i]) for i in range(2)])
    torch.testing.assert_close(WAYS[way](x, rows), each, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("batch", "time", "channels", "taps", "form"),
    [
        (64, 64, 3, 8, "taps"),
        (32, 64, 3, 64, "matrices"),
        (31, 64, 3, 64, "transforms"),
        (200, 129, 3, 129, "transforms"),
        (1, 20, 3, 20, "transforms"),
        (1, 20, 10, 20, "matrices"),
    ],
)
def test_matrices_are_taken_for_short_sequences_of_many_signals(batch, time, channels, taps, form):
    filters = 1 if batch == 1 else channels
    assert fastest_form(torch.empty(batch, time, channels), torch.empty(1, taps, filters)) is WAYS[form]


def test_matrices_round_no_more_than_a_sum_does_and_ignore_autocast():
    x, h = normal(70, 120, 3).float(), normal(120, 3, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = causal_convolution(x, h)
    torch.testing.assert_close(y, convolve_by_matrices(x, h[None]), rtol=0, atol=0)
    error = (y - summed(x.double(), h.double())).abs()
    # n products summed in any order: n roundings of at most the sum of magnitudes.
    assert (error <= 120 * 2**-24 * summed(x.double().abs(), h.double().abs())).all()


def test_convolution_keeps_the_dtype_and_refuses_shapes():
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


@pytest.mark.parametrize("recurrences", [1, 2, 3])
def test_hyena_of_higher_order_convolves_one_after_another(recurrences):
    """Zoology, Algorithm 3, behind the product k * v."""
    mixer = built("hyena", 6, 1, max_length=9, recurrences=recurrences)
    x = normal(2, 11, 6)
    *gates, k, v = mixer.short(mixer.projections(x)).split(6, dim=-1)
    z, filters = k * v, mixer.filter(11).split(6, dim=-1)
    for gate, h in zip(gates[::-1], filters, strict=True):
        z = gate * summed(z, h)
    torch.testing.assert_close(mixer(x), mixer.out(z))
    assert mixer.state_size(100) == recurrences * 6 * 9 + 2 * (recurrences + 2) * 6


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
    bound = (filter.last.weight.abs().sum(1) * 1e-2 ** (1 / 0.3)).max()
    assert h[-1, -1].abs() <= bound  # the channel that forgets fastest


def test_options_of_the_implicit_filter():
    decays = ((0.3, 1.5), (0.6, 3.0))
    both = [ImplicitFilter(4, 50, order=8, decays=shares, frequency=10).double() for shares in decays]
    for filter in both:
        filter.reset_parameters(torch.Generator().manual_seed(0))
        assert (filter.frequency == 10).all()
    fast, slow = (filter(50) for filter in both)  # half the decay: the square root of the same factor
    rate = torch.linspace(1 / 1.5, 1 / 0.3, 4) * -math.log(1e-2)
    factor = torch.exp(0.5 * rate.double() * torch.linspace(0, 1, 50).double()[1:, None])
    torch.testing.assert_close(slow[1:], fast[1:] * factor, rtol=1e-5, atol=1e-9)


def test_relu_filter_is_its_formula_and_base_conv_adds_its_input_if_asked():
    mixer = built("base_conv", 5, 1, max_length=11, filter="relu", order=6, bands=1, residual=True)
    time = torch.arange(11).double()
    angle = 2 * math.pi * 1e-4 / 11 * time
    features = torch.stack([time / 10, angle.cos(), angle.sin()], dim=1)
    h = mixer.filter.last(torch.relu(mixer.filter.first(features)))
    torch.testing.assert_close(mixer.filter(11), h)
    x = normal(2, 11, 5)
    torch.testing.assert_close(mixer(x), x + mixer.projection(x) * (summed(x, h) + mixer.bias))


def test_a_filter_of_n_taps_sees_n_tokens():
    mixer = built("long_convolution", 4, 1, max_length=5)
    x = normal(1, 30, 4)
    torch.testing.assert_close(mixer(x)[:, -1], mixer(x[:, -5:])[:, -1])
