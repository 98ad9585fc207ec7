"""Calls that have no values to read: fake tensors, torch.export and torch.compile, of the op, layers and models."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.export import Dim, export

from sympow.layers import (
    HybridHeads,
    LinearAttention,
    PowerAttention,
    PowerDeltaAttention,
    ShortConvolution,
    SoftmaxAttention,
    WindowAttention,
)
from sympow.layers.attention import BLOCK
from sympow.layers.registry import make_mixer
from sympow.models import LanguageModel, MixerConfig, ModelConfig, preset
from sympow.ops import PowerState, Rotation, power_attention, power_attention_step
from sympow.ops.delta_rule import power_delta_rule
from sympow.ops.feature_map import spow, spow_dim
from sympow.ops.rotary import rotary_positions
from tests.layers.contract import D_MODEL, OPTIONS, make, tokens_of

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
    config = replace(preset("mini", vocab_size=9), n_layers=2)  # the others are as the second
    model, tokens = LanguageModel(config).eval(), torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, (tokens,)).module()(tokens), model(tokens))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 9)


def test_borders_without_values_are_refused():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"^cu_seqlens must have values here; got a fake or a meta"):
        power_attention(*inputs(4), cu_seqlens=torch.zeros(3, dtype=torch.int64))


LENGTHS = [2, 3, 5, 8, 16, 17, 31, 64, 100, 127, 128, 129, 200, 255, 256, 257, 300, 384, 385, 500]  # by 20 of a user
DYNAMIC = {"dynamic": True, "fullgraph": True}
FEW = ("power", "power_delta", "linear", "window", "hybrid_heads")  # their options are in MIXERS
ONE_GRAPH = ("long_convolution", "rwkv4", "rwkv7", "mamba", "selection")  # of which all sizes may be symbols
OTHERS = [
    (name, options, DYNAMIC if name in ONE_GRAPH and ("selection" not in options or "noise" in options) else {})
    for name, sets in OPTIONS.items()
    for options in sets[: 4 if name == "selection" else 1]  # whose ways of selecting differ
    if name not in FEW
]
PLAIN = {"short_convolution": 0, "head_norm": False, "output_gate": False}  # which would be in every graph
MIXERS = [
    (PowerAttention, {}, {}),
    (PowerAttention, PLAIN | {"p": 4, "gate": False, "n_kv_heads": 1, "qk_norm": True}, DYNAMIC),
    (PowerAttention, PLAIN | {"rotation": "data", "chunk_size": 64}, DYNAMIC),
    (PowerDeltaAttention, {}, DYNAMIC),
    (LinearAttention, {"feature_map": "taylor", "head_dim": 4}, DYNAMIC),
    (WindowAttention, {"window": 40, "n_kv_heads": 1}, {}),
    (HybridHeads, {"window": 1}, DYNAMIC),  # a window that holds no row
]


def values_and_gradients(
    module: nn.Module, x: torch.Tensor, weights: list[nn.Parameter], **more: torch.Tensor
) -> list[torch.Tensor]:
    x = x if x.requires_grad else x.clone().requires_grad_()
    y = module(x, **more)
    rows = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * rows).sum(), [x, *weights])]


@pytest.fixture
def one_trace():
    """With dynamic=True the compiler traces floats of modules as inputs, finds that it must not, and traces all again.
    `test_training_of_several_layers_needs_few_graphs` is for that."""
    with torch._dynamo.config.patch(specialize_float=True):
        yield


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(("layer", "more", "options"), MIXERS, ids=str)
def test_20_lengths_need_few_graphs(layer, more, options):
    mixer = layer(8, 2, **more).double()
    weights, generator = list(mixer.parameters()), torch.Generator().manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(mixer, backend="aot_eager", **options)
    for time in LENGTHS:
        x = torch.randn(1, time, 8, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(values_and_gradients(compiled, x, weights), values_and_gradients(mixer, x, weights))
    # Rows that a window holds have a graph of their own, and so has the first length where lengths are no symbols yet.
    assert counters["stats"]["unique_graphs"] <= 1 + ("window" in more) + (options is not DYNAMIC)
    assert not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "options", "how"), OTHERS, ids=str)
def test_every_mixer_needs_few_graphs(name, options, how):
    """Filters, scans and recurrences too, whose traces would be of one length each. The first length is a symbol, as a
    second one would be. In training, an auxiliary loss breaks the graph of learned selection."""
    mixer, generator = (
        make((name, options)).train(options.get("selection") != "learned"),
        torch.Generator().manual_seed(0),
    )
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(mixer, backend="aot_eager", **how)
    for time in LENGTHS[3::7]:
        x, found = torch.randn(1, time, D_MODEL, dtype=torch.float64, generator=generator).requires_grad_(), []
        extras = mixer.extras(tokens_of(x.detach()))
        for tensor in (x, *extras.values()):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        for call in (compiled, mixer):
            torch.manual_seed(0)  # of random selection
            found.append(values_and_gradients(call, x, list(mixer.parameters()), **extras))
        torch.testing.assert_close(*found)
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["long_convolution", "rwkv4"])
def test_derivatives_by_transforms_in_a_graph(name):
    """Of torch.func and in forward mode, which an operator does not have; also after a graph without them."""
    mixer, gen = make((name, OPTIONS[name][0])), torch.Generator().manual_seed(0)
    x = torch.randn(1, 11, D_MODEL, dtype=torch.float64, generator=gen)

    def forward_mode(call, x):
        return torch.func.jvp(call, (x,), (x.cos(),))[1]

    def reverse_mode(call, x):
        return torch.func.grad(lambda z: call(z).pow(2).sum())(x)

    torch.compiler.reset()
    with torch.no_grad():
        for derivative in (forward_mode, reverse_mode):
            found = torch.compile(lambda x, of=derivative: of(mixer, x), backend="aot_eager", **DYNAMIC)(x)
            torch.testing.assert_close(found, derivative(mixer, x))
        compiled = torch.compile(mixer, backend="aot_eager", **DYNAMIC)
        compiled(x)
        with dual_level():
            found, expected = (unpack_dual(call(make_dual(x, x.cos()))).tangent for call in (compiled, mixer))
            torch.testing.assert_close(found, expected)
    torch.compiler.reset()


def test_tables_in_a_graph_have_no_symbols():
    """With symbols, compiled code would expect the sizes and strides of an input that once had the same numbers."""
    shapes = []

    def keep(graph, inputs):
        constants = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "get_attr"]
        shapes.extend((*x.shape, *x.stride()) for x in constants)
        return graph.forward

    torch.compiler.reset()
    for rows in (2, 3):
        x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
        torch._dynamo.mark_static(x, 1)
        found = torch.compile(lambda x: spow(x, 2), backend=keep, dynamic=True, fullgraph=True)(x)
        torch.testing.assert_close(found, spow(x, 2))
    assert shapes and all(type(size) is int for shape in shapes for size in shape) and set(shapes) == {(15, 1)}
    torch.compiler.reset()


def assert_few_graphs(options, batches):
    """Compares a compiled model of one layer with the same model on `batches`, each tokens and cu_seqlens."""
    model = LanguageModel(ModelConfig(11, d_model=16, n_layers=1, n_heads=2, mixers=(MixerConfig("power"),)), seed=0)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", **options)
    with torch.no_grad():
        for tokens, cu_seqlens in batches:
            torch.testing.assert_close(compiled(tokens, cu_seqlens=cu_seqlens), model(tokens, cu_seqlens=cu_seqlens))
    assert counters["stats"]["unique_graphs"] <= 1 + (options is not DYNAMIC)
    assert not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.usefixtures("one_trace")
def test_20_lengths_of_a_model_need_few_graphs():
    generator = torch.Generator().manual_seed(0)
    assert_few_graphs({}, [(torch.randint(11, (1, time), generator=generator), None) for time in LENGTHS])


LAYERS = [
    MixerConfig("power"),
    MixerConfig("power_delta"),
    MixerConfig("softmax", dict(BLOCK) | {"gate": True, "rotation": "none"}),
    MixerConfig("window", {"window": 40}),
    MixerConfig("hybrid_heads", {"window": 40}),
    MixerConfig("linear", {"feature_map": "taylor"}),
]
IN_HYBRID = ("power_delta", "window")  # which hybrid_heads has in its heads


@pytest.mark.parametrize("layer", [x for x in LAYERS if x.name not in IN_HYBRID], ids=lambda layer: layer.name)
def test_training_of_several_layers_needs_few_graphs(layer):
    """With dynamic=True a float of a module would be an input of the graph, which two layers cannot share. Rows that a
    window holds have a graph of their own, which is left to the tests of mixers, as are graphs of gradients."""
    model = LanguageModel(ModelConfig(11, d_model=16, n_layers=2, n_heads=2, mixers=(layer,)), seed=0)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager", **DYNAMIC)
    for time in LENGTHS[7::6]:
        tokens = torch.randint(11, (1, time), generator=torch.Generator().manual_seed(time))
        losses = [run(tokens).square().sum() for run in (compiled, model)]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.compiler.reset()


DOCUMENTS = [3, 5, 2, 9, 1, 4, 7, 3, 6, 12, 2, 1, 8, 4, 5, 6, 3, 10, 4, 2]  # of 20 packed batches of a user
PACKED = [
    (PowerAttention, PLAIN | {"p": 4, "gate": False, "n_kv_heads": 1, "rotation": "data"}),
    (PowerDeltaAttention, PLAIN),
    (SoftmaxAttention, {}),
    (SoftmaxAttention, {"gate": True, "n_kv_heads": 1}),
    (WindowAttention, {"window": 20, "gate": True}),
    (ShortConvolution, {"mixer": "softmax"}),
    (LinearAttention, {"feature_map": "taylor"}),
]


def borders(time: int, documents: int, generator: torch.Generator) -> torch.Tensor:
    """Draws cu_seqlens int32 [N + 1]; some documents are empty."""
    inner = torch.randint(time + 1, (documents - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([time])]).int()


@pytest.mark.parametrize(("layer", "more"), PACKED, ids=str)
def test_20_packed_batches_need_few_graphs(layer, more):
    """One for the first batch, which is left out where a mixer has options, and one for other numbers of documents and
    other totals of tokens. Totals that stay are in the tests of training and of a model."""
    mixer, generator = layer(8, 2, **more).double(), torch.Generator().manual_seed(0)
    weights = list(mixer.parameters())
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    for i, documents in enumerate(DOCUMENTS):
        time = 50 + 7 * i
        x = torch.randn(1, time, 8, dtype=torch.float64, generator=generator).requires_grad_()
        packing = {"cu_seqlens": borders(time, documents, generator)}
        if more:
            torch._dynamo.maybe_mark_dynamic(x, 1)
            torch._dynamo.maybe_mark_dynamic(packing["cu_seqlens"], 0)
        found, expected = (values_and_gradients(call, x, weights, **packing) for call in (compiled, mixer))
        torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"] <= 1 + (not more)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["rwkv7", "h3"])
def test_documents_of_other_layers_make_no_graphs(name):
    """Their functions of a document read weights. They run beside the graphs, uncompiled."""
    mixer, generator = make_mixer(name, 8, 2, {}), torch.Generator().manual_seed(0)
    weights = list(mixer.parameters())
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(mixer, backend="aot_eager")
    for documents in DOCUMENTS[:8]:
        x = torch.randn(1, 50, 8, generator=generator)
        packing = {"cu_seqlens": borders(50, documents, generator)}
        found, expected = (values_and_gradients(call, x, weights, **packing) for call in (compiled, mixer))
        torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"] <= 3
    torch.compiler.reset()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_training_on_packed_batches_needs_few_graphs(layer):
    """With blocks compiled one by one, as a run compiles them: two blocks share their graphs. Graphs of gradients are
    left to the tests of mixers."""
    config = ModelConfig(11, d_model=16, n_layers=2, n_heads=2, mixers=(layer,))
    models = [LanguageModel(config, seed=0) for _ in range(2)]
    torch.compiler.reset()
    counters.clear()
    models[0].compile_parts(backend="eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for documents in DOCUMENTS[:3]:
        tokens, cu_seqlens = torch.randint(11, (1, 50), generator=generator), borders(50, documents, generator)
        losses = [model(tokens, cu_seqlens=cu_seqlens).square().sum() for model in models]
        pairs = zip(losses, models, strict=True)
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss, model in pairs]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert counters["stats"]["unique_graphs"] <= 3  # two of the blocks, and the last norm
    torch.compiler.reset()


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("options", [{}, DYNAMIC], ids=str)
def test_20_packed_batches_of_a_model_need_few_graphs(options):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(11, (1, 50), generator=generator) for _ in DOCUMENTS]
    assert_few_graphs(options, zip(rows, (borders(50, n, generator) for n in DOCUMENTS), strict=True))


@pytest.mark.parametrize("layer", [SoftmaxAttention, WindowAttention], ids=lambda layer: layer.__name__)
def test_packed_documents_under_autocast_in_a_graph(layer):
    """An operator sees no autocast, which makes the products of attention ones in bfloat16."""
    mixer = layer(16, 2, **({"window": 8} if layer is WindowAttention else {}))
    x, cu_seqlens = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 7, 40])
    q, k, v = (part.float() for part in mixer.rotated_heads(x))
    mixer.rotated_heads = lambda x: (q, k, v)  # wider than a projection makes them
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (
            call(x, cu_seqlens) for call in (torch.compile(mixer.mix, backend="aot_eager", fullgraph=True), mixer.mix)
        )
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("call", [
    lambda x, ends: power_attention(x, x, x, cu_seqlens=ends).out,
    lambda x, ends: power_delta_rule(x, x, x, x[..., 0].sigmoid(), cu_seqlens=ends).out,
    lambda x, ends: SOFTMAX(x.flatten(2), cu_seqlens=ends),
    lambda x, ends: CONVOLUTION(x.flatten(2), cu_seqlens=ends),
], ids=["power", "power_delta", "softmax", "convolution"])  # fmt: skip
def test_borders_are_checked_in_compiled_code(call):
    torch.compiler.reset()
    compiled, x = torch.compile(call, backend="aot_eager", fullgraph=True), torch.ones(1, T, 2, 4)
    compiled(x, torch.tensor([0, 2, T]))
    for ends in ([0, 3, 11], [1, 5, 12], [0, 9, 5, 12]):
        with pytest.raises(ValueError, match=r"^cu_seqlens must rise from 0 to T = 12 without falling; got"):
            compiled(x, torch.tensor(ends))
    torch.compiler.reset()


SOFTMAX, CONVOLUTION = SoftmaxAttention(8, 2), ShortConvolution(8, 2)


def assert_same_gradients(calls: Iterable[Callable], tensors: list[torch.Tensor], used: tuple[int, ...]) -> None:
    """Compares the results of two calls, and the gradients of those that are used. What a result does not come from has
    zeros in a graph and None without, as v has where the rotation alone is used."""
    found = []
    for call in calls:
        leaves = [x.double().requires_grad_() for x in tensors]
        results = call(*leaves)
        grads = torch.autograd.grad(sum(results[i].sin().sum() for i in used), leaves, allow_unused=True)
        found.append([*(x.detach() for x in results), *(torch.zeros(()) if g is None else g for g in grads)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected.expand_as(own).to(own.dtype))


class PackedWithStates(nn.Module):
    """A call of packed documents with states before and after."""

    def forward(self, q, k, v, log_g, s, z, cu_seqlens):
        state = PowerState(s, z, 2, q.shape[3])
        out, state = power_attention(
            q, k, v, log_g, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, chunk_size=8
        )
        return out, state.s, state.z


def test_states_of_packed_documents_in_a_graph_have_their_gradients():
    """Also those of documents without tokens, which stay as they were, and where few of the results have a gradient."""
    torch.compiler.reset()
    compiled = torch.compile(PackedWithStates(), backend="aot_eager", dynamic=True, fullgraph=True)
    for ends in ([0, 5, 5, 40], [0, 0, 30, 33, 40, 40]):
        n = len(ends) - 1
        tensors = [*inputs(4, 40), torch.rand(n, H, spow_dim(4, 2), V, generator=torch.Generator().manual_seed(1))]
        tensors.append(2 * torch.ones(n, H, spow_dim(4, 2)))
        for used in ((0,), (1,), (0, 1, 2)):
            calls = (partial(call, cu_seqlens=torch.tensor(ends)) for call in (compiled, PackedWithStates()))
            assert_same_gradients(calls, tensors, used)
    torch.compiler.reset()


@pytest.mark.parametrize("op", [power_attention, power_delta_rule], ids=lambda op: op.__name__)
def test_kernels_of_packed_documents_need_few_graphs(op):
    pytest.importorskip("triton", reason="needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, beta = torch.Generator().manual_seed(0), op is power_delta_rule

    def call(q, k, v, log_g, cu_seqlens):
        given = (q, k, v, log_g.exp(), log_g) if beta else (q, k, v, log_g)
        return op(*given, cu_seqlens=cu_seqlens, impl="triton").out

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for time, documents in ((40, 3), (40, 5), (40, 1), (33, 9)):
        leaves = [x.to(device).requires_grad_() for x in inputs(16, time)]
        leaves[2] = leaves[2].detach().repeat(1, 1, 1, 6)[..., :16].requires_grad_()
        cu_seqlens = borders(time, documents, generator).to(device)
        found, expected = (
            [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
            for y in (compiled(*leaves, cu_seqlens), call(*leaves, cu_seqlens))
        )
        torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"] <= 3
    torch.compiler.reset()


class WithStates(nn.Module):
    """A call that has a state before and after, and a rotation whose positions have gradients."""

    def forward(self, q, k, v, log_g, s, z):
        positions = rotary_positions(log_g.sigmoid()[..., :1])
        rotation = Rotation(positions, torch.tensor([1.0, 0.1], dtype=torch.float64))
        state = PowerState(s, z, 2, q.shape[3])
        out, state = power_attention(q, k, v, log_g, initial_state=state, return_state=True, rotation=rotation)
        return out, state.s, state.z


def test_states_in_a_graph_have_their_gradients():
    """Also where only one of the results has a gradient."""
    torch.compiler.reset()
    compiled = torch.compile(WithStates(), backend="aot_eager", dynamic=True, fullgraph=True)
    for time in (150, 7):
        tensors = [*inputs(4, time), torch.ones(1, H, spow_dim(4, 2), V), 2 * torch.ones(1, H, spow_dim(4, 2))]
        for used in ((1,), (0, 1, 2)):
            assert_same_gradients((compiled, WithStates()), tensors, used)
    torch.compiler.reset()


def test_values_are_checked_in_compiled_code():
    compiled = torch.compile(power_attention, backend="eager", fullgraph=True)
    q = torch.full((1, 4, 1, 2), 1e20)
    with pytest.raises(ValueError, match=r"^the sums of \(scale q.k\)\*\*p leave the range"):
        compiled(q, q, q)
    torch.compiler.reset()


@pytest.mark.parametrize(("form", "strict"), [({}, True), ({"chunk_size": 4, "return_state": True}, False)], ids=str)
def test_export_of_the_op_with_a_dynamic_length(form, strict):
    """In operators of torch alone, with resets of the gate."""
    op, time = Op(**form), {1: Dim("time")}
    program = export(op, inputs(4), dynamic_shapes=(time, time, time, time), strict=strict)
    assert {node.target.namespace for node in program.graph.nodes if node.op == "call_function"
            and hasattr(node.target, "namespace")} == {"aten"}  # fmt: skip
    for length in (2, 5, 300):
        q, k, v, log_g = inputs(4, length)
        log_g[:, length // 2] = -1e9
        for own, expected in zip(program.module()(q, k, v, log_g), op(q, k, v, log_g), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "more"), [(PowerAttention, {"rotation": "data"}), (WindowAttention, {"window": 8})], ids=str
)
def test_export_of_layers_with_a_dynamic_length(layer, more):
    mixer = layer(16, 2, **more).eval()
    program = export(mixer, (torch.ones(1, T, 16),), dynamic_shapes=({1: Dim("time")},))
    for length in (3, 40, 200):
        x = torch.randn(1, length, 16, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(program.module()(x), mixer(x), rtol=1e-4, atol=1e-5)


def test_export_of_a_model_with_a_dynamic_length(tmp_path):
    """Of any batch too; the saved file is loaded again."""
    config = ModelConfig(9, d_model=16, n_layers=1, n_heads=2, mixers=(MixerConfig("power"),), body="llama")
    model = LanguageModel(config, seed=0).eval()
    with torch.no_grad():
        shapes = ({0: Dim("batch"), 1: Dim("time")},)
        torch.export.save(
            export(model, (torch.zeros(2, 8, dtype=torch.int64),), dynamic_shapes=shapes), tmp_path / "m.pt2"
        )
        program = torch.export.load(tmp_path / "m.pt2").module()
        for batch, length in ((1, 3), (3, 40), (2, 300)):
            tokens = torch.randint(9, (batch, length), generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(program(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def from_zeros(q, k, v):
    return power_attention(q, k, v, initial_state=PowerState.zeros(1, H, 4, V)).out


class FromZeros(nn.Module):
    def forward(self, *tensors):
        return from_zeros(*tensors)


def test_zeros_are_made_in_a_graph():
    tensors = inputs(4)[:3]
    expected = from_zeros(*tensors)
    compiled = torch.compile(from_zeros, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), expected)
    for strict in (False, True):
        exported = export(FromZeros(), tensors, strict=strict).module()
        torch.testing.assert_close(exported(*tensors), expected)
