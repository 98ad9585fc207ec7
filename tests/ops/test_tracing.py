"""Calls that have no values to read: fake tensors and torch.export, of the op, its step, the layer and the model."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sympow.layers import LinearAttention, PowerAttention
from sympow.models import LanguageModel, preset
from sympow.ops import PowerState, power_attention, power_attention_step
from sympow.ops.feature_map import spow_dim

T, H, V = 12, 2, 3
FORMS = [{}, {"chunk_size": 4}, {"return_state": True}, {"chunk_size": 4, "return_state": True, "p": 4}, {"p": 6}]


def inputs(key_dim: int, time: int = T) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, time, H, width, generator=gen) for width in (key_dim, key_dim, V))
    return q, k, v, -torch.rand(1, time, H, generator=gen)


class Op(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, log_g):
        out, state = power_attention(q, k, v, log_g, **self.options)
        return (out,) if state is None else (out, state.s, state.z)


class Step(nn.Module):
    def forward(self, q, k, v, log_g, s, z):
        return power_attention_step(q, k, v, log_g, state=PowerState(s, z, 2, q.shape[3])).out


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_fake_tensors_then_real_ones(impl, form):
    """The tables of a call on fake tensors, for a K that no call had before, are not kept for those on real tensors."""
    key_dim = 11 + FORMS.index(form) + len(FORMS) * (impl == "eager")
    if form.get("p", 2) > 2:
        key_dim //= 3
    with FakeTensorMode():
        tensors = [x.requires_grad_() for x in inputs(key_dim)]
        results = Op(impl=impl, **form)(*tensors)
        sum(x.sum() for x in results).backward()
        assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]
    shapes = [x.shape for x in results]
    found = Op(impl=impl, **form)(*inputs(key_dim))
    assert [x.shape for x in found] == shapes and all(x.isfinite().all() for x in found)


@pytest.mark.parametrize(
    ("form", "strict"), [(FORMS[0], True), (FORMS[0], False), (FORMS[1], False), (FORMS[2], False)], ids=str
)
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_export(impl, form, strict):
    op, tensors = Op(impl=impl, **form), inputs(4)
    exported = torch.export.export(op, tensors, strict=strict).module()
    for found, expected in zip(exported(*tensors), op(*tensors), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_step(strict):
    tensors = (*inputs(5, 1), torch.ones(1, H, spow_dim(5, 2), V), torch.ones(1, H, spow_dim(5, 2)))
    exported = torch.export.export(Step(), tensors, strict=strict).module()
    torch.testing.assert_close(exported(*tensors), Step()(*tensors))
    with FakeTensorMode():
        fake = [torch.zeros(x.shape) for x in tensors]
        assert Step()(*fake).shape == (1, 1, H, V)


@pytest.mark.parametrize("layer", [PowerAttention, LinearAttention])
def test_layers(layer):
    mixer, x = layer(16, 2), torch.ones(1, T, 16)
    torch.testing.assert_close(torch.export.export(mixer, (x,)).module()(x), mixer(x))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert mixer(torch.ones(1, T, 16)).shape == x.shape


def test_a_model():
    model, tokens = LanguageModel(preset("mini", vocab_size=9)).eval(), torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, (tokens,)).module()(tokens), model(tokens))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 9)


def test_borders_without_values_are_refused():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"^cu_seqlens must have values here; got a fake or a meta"):
        power_attention(*inputs(4), cu_seqlens=torch.zeros(3, dtype=torch.int64))
