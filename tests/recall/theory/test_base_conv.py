"""The primitives, Hyena and BaseConv in terms of each other, and filters that depend on the input."""

import pytest
import torch
from torch.nn.functional import pad

from sympow.layers import MIXERS
from sympow.recall.theory.base_conv import (
    Layer,
    add,
    apply,
    circular_convolution,
    remember,
    running_sum,
    shift_down,
    shift_up,
)
from sympow.recall.theory.input_dependent import largest_lags, matches_by_lag, recall_by_filters
from sympow.recall.theory.instances import NONE, draw_with_lags, tape
from sympow.recall.theory.simulation import base_conv_as_hyena, hyena_as_base_conv

ROWS, N, D = 10_000, 12, 3


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small integers, whose sums and products are exact in float64."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("by", [0, 1, 5, 11])
def test_shifts(by):
    u = integers(ROWS, N, D)
    assert torch.equal(shift_down(N, D, by)(u), pad(u, (0, 0, by, 0))[:, :N])
    assert torch.equal(shift_up(N, D, by)(u), pad(u, (0, 0, 0, by))[:, by:])


@pytest.mark.parametrize("count", [1, 4, 6])
def test_add_is_the_primitive_of_the_appendix(count):
    """Proposition H.9: rows x, S, 0 become 1, x + S, 0; adding the next x to the sum goes on from there."""
    small = torch.tensor([[1, 2, 10, 20, 0, 0]]).double()[..., None]
    assert apply(add(6, 1, 2), small).flatten().tolist() == [1, 1, 11, 22, 0, 0]
    u = integers(ROWS, N, D)
    u[:, 2 * count :] = 0
    got = apply(add(N, D, count), u)
    assert (got[:, :count] == 1).all() and not got[:, 2 * count :].any()
    assert torch.equal(got[:, count : 2 * count], u[:, :count] + u[:, count : 2 * count])
    with pytest.raises(ValueError, match="a tape of 12 rows holds x and S of 1 to 6 rows each; got 7"):
        add(12, 1, 7)


def test_running_sum():
    u = integers(ROWS, N, D)
    assert torch.equal(running_sum(N, D)(u), u.cumsum(1))


def test_circular_convolution_is_its_sum():
    u, h = integers(5, N, D), integers(4, D, seed=1)
    torch.testing.assert_close(circular_convolution(u, h), sum(h[s] * u.roll(s, 1) for s in range(4)))


@pytest.mark.parametrize("count", [1, 2])
def test_remember_applies_layers_behind_what_waits(count):
    head, length = 4, N - 4
    shapes = ((D, D), (length, D), (length, D), (length, D))
    inner = [Layer(*(integers(*shape, seed=7 * i + j) for j, shape in enumerate(shapes))) for i in range(count)]
    u = integers(ROWS, N, D, seed=9)
    got = apply(remember(head, inner), torch.cat([u, 0 * u], dim=2))
    assert torch.equal(got[:, :head, :D], u[:, :head])
    assert torch.equal(got[:, head:, :D], apply(inner, u[:, head:])) and not got[..., D:].any()
    with pytest.raises(ValueError, match="a circular layer has the period of its own tape"):
        remember(1, [shift_up(length, D, 1)])


def random_mixer(name: str, **options) -> torch.nn.Module:
    mixer = MIXERS[name](D, 1, max_length=N, **options).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(generator=generator)
    return mixer


@pytest.mark.parametrize("recurrences", [1, 2, 3])
def test_base_conv_computes_hyena(recurrences):
    mixer = random_mixer("hyena", recurrences=recurrences)
    u = integers(ROWS // recurrences, N, D) / 9
    with torch.no_grad():
        layers = hyena_as_base_conv(mixer, N)
        tape = pad(u, (0, (recurrences + 1) * D))
        torch.testing.assert_close(apply(layers, tape)[..., :D], mixer(u), rtol=1e-12, atol=1e-8)
    assert len(layers) == 4 + recurrences
    with pytest.raises(ValueError, match="Hyena must have a filter for every channel; got 2 heads for 4"):
        hyena_as_base_conv(MIXERS["hyena"](4, 2, max_length=N, multi_head=True), N)


@pytest.mark.parametrize("kind", ["explicit", "implicit"])
def test_hyena_computes_base_conv(kind):
    mixer = random_mixer("base_conv", filter=kind)
    u = integers(ROWS, N, D) / 9
    with torch.no_grad():
        torch.testing.assert_close(base_conv_as_hyena(mixer)(pad(u, (0, D)))[..., :D], mixer(u), rtol=1e-12, atol=1e-10)


def test_matches_are_counted_at_every_lag():
    instances = draw_with_lags(20, 8, 11, 2, seed=0)
    u = tape(instances)
    query, key = u[..., 22:], u[..., :11]
    expected = torch.stack([(query[:, lag:] * key[:, : 24 - lag]).sum((1, 2)) for lag in range(24)], dim=1)
    expected[:, :3] = 0
    torch.testing.assert_close(matches_by_lag(u), expected)


def test_filters_of_the_largest_lags_answer_every_query(scanned):
    """Right with as many lags as a row has; with one fewer some answers are missing, and none is wrong."""
    for part in range(10):
        instances = draw_with_lags(1000, 5, 6, 2, seed=part)
        answers = scanned(instances)
        assert torch.equal(recall_by_filters(instances, 2), answers)
    fewer = recall_by_filters(instances, 1)
    assert torch.equal(fewer[fewer != NONE], answers[fewer != NONE])
    assert 0.5 < (fewer == answers).double().mean() < 0.95
    assert largest_lags(tape(instances), 2).shape == (1000, 2)
