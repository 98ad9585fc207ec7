"""Mamba against its formula, written out, and against the layer of transformers where that package is installed."""

import math

import pytest
import torch
from torch.nn import functional as F

from sympow.layers import MIXERS
from sympow.layers.mamba import graph_selective_scan, selective_scan
from tests.draws import normal


def made(d: int, **options) -> torch.nn.Module:
    mixer = MIXERS["mamba"](d, 1, **options).double()
    mixer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mixer.dt.bias += 2  # so that some tokens forget within the row
        mixer.log_rate += 0.1 * normal(mixer.log_rate.numel(), seed=1)
        mixer.skip += normal(2 * d, seed=2)
    return mixer


def test_it_is_its_formula():
    """Every token adds what it has written times all decays since."""
    d, n, time = 3, 2, 6
    mixer, x = made(d, state_dim=n), normal(time, d)
    u, z = (x @ mixer.uz.weight.T).split(2 * d, dim=-1)
    taps, before = mixer.convolution.weight, torch.cat([torch.zeros(3, 2 * d), u])
    u = F.silu(sum(taps[:, i] * before[i : i + time] for i in range(4)) + mixer.convolution.bias)
    low, b, c = (u @ mixer.selection.weight.T).split([1, n, n], dim=-1)
    dt = torch.log1p(torch.exp(low @ mixer.dt.weight.T + mixer.dt.bias))
    a = -mixer.log_rate.exp().view(2 * d, n)
    expected = mixer.skip * u
    for t in range(time):
        for s in range(t + 1):
            decay = torch.exp(a * dt[s + 1 : t + 1].sum(0)[:, None])
            expected[t] = expected[t] + dt[s] * u[s] * (decay * b[s] * c[t]).sum(-1)
    torch.testing.assert_close(mixer(x[None])[0], (expected * F.silu(z)) @ mixer.out.weight.T)


def test_the_operator_of_graphs_is_the_scan_with_its_gradient():
    shapes = ((2, 5, 4), (2, 5, 4), (2, 5, 3), (2, 5, 3), (4, 3), (2, 4, 3))
    inputs = [normal(*shape, seed=seed).exp().requires_grad_() for seed, shape in enumerate(shapes)]
    torch.compiler.reset()
    results = [torch.compile(graph_selective_scan, backend="aot_eager")(*inputs), selective_scan(*inputs)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum() + memory.square().sum(), inputs) for y, memory in results)
    )
    torch.compiler.reset()


def test_it_starts_as_published():
    mixer = MIXERS["mamba"](1024, 1, state_dim=2)
    mixer.reset_parameters(generator=torch.Generator().manual_seed(0))
    dt = F.softplus(mixer.dt.bias)
    assert 1e-3 * 0.999 < dt.min() < 1.02e-3 and 0.098 < dt.max() < 0.1 * 1.001
    assert abs(dt.log().mean() - math.log(1e-2)) < 4 * math.log(100) / math.sqrt(12 * 2048)  # of a log-uniform draw
    torch.testing.assert_close(mixer.log_rate.exp().view(2048, 2), torch.tensor([1.0, 2.0]).repeat(2048, 1))
    assert (mixer.skip == 1).all() and 0.124 < mixer.dt.weight.abs().max() <= 64**-0.5


def test_it_is_the_layer_of_transformers():
    """That layer rounds A, log(-A), dt's bias and D to float32, each by 6e-8 of numbers below 10.

    So a decay exp(-s), whose s is off by at most 1e-6 of itself, is off by less than 1e-6, as s exp(-s) < 1.
    """
    package = pytest.importorskip("transformers.models.mamba.modeling_mamba", reason="needs transformers")
    d, mixer = 40, made(40)
    config = package.MambaConfig(hidden_size=d, num_hidden_layers=1)
    layer = package.MambaMixer(config, 0).double().eval()
    ours = dict(mixer.named_parameters())
    names = {"in_proj.weight": "uz", "conv1d.weight": "convolution", "x_proj.weight": "selection",
             "dt_proj.weight": "dt", "out_proj.weight": "out"}  # fmt: skip
    weights = {theirs: ours[f"{name}.weight"] for theirs, name in names.items()}
    weights |= {"conv1d.weight": weights["conv1d.weight"][:, None], "conv1d.bias": ours["convolution.bias"]}
    weights |= {"dt_proj.bias": ours["dt.bias"], "A_log": ours["log_rate"].view(2 * d, 16), "D": ours["skip"]}
    layer.load_state_dict(weights)
    x = normal(2, 40, d)
    with torch.no_grad():
        y = mixer(x)
        torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-6 * float(y.abs().max()))


def test_a_state_without_numbers_is_refused():
    with pytest.raises(ValueError, match="state_dim must be at least 1; got 0"):
        MIXERS["mamba"](8, 1, state_dim=0)
