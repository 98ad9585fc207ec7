"""The adapters to flash-linear-attention, against a stand-in for its layers: what goes in and what comes out."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from sympow.layers import FLA_MIXERS, make_mixer
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.recipes import load_sweep
from tests.draws import disturb, normal


class StandIn(nn.Module):
    """A running sum with a layer's arguments, its weights and its way with caches."""

    def __init__(self, hidden_size, num_heads, layer_idx, **arguments):
        super().__init__()
        self.arguments = {"hidden_size": hidden_size, "num_heads": num_heads, "layer_idx": layer_idx, **arguments}
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.dt_bias = nn.Parameter(torch.rand(num_heads))

    def forward(self, x, past_key_values=None, use_cache=False):
        before = 0
        if past_key_values is not None and len(past_key_values) > 0:
            assert x.shape[1] == 1 and use_cache
            before = past_key_values[0]["recurrent_state"][:, None]
        sums = x.cumsum(1) + before
        if past_key_values is not None:
            past_key_values.update(recurrent_state=sums[:, -1].clone(), conv_state=None, layer_idx=0, offset=x.shape[1])
        return self.o_proj(sums), None, past_key_values


def chunk_rwkv7(r, w, k, v, a, b, scale, initial_state, output_final_state, safe_gate, lower_bound, chunk_size):
    """The package's naive form, dplr_recurrence: S_t = diag(exp(w)) S + b (a^T S) + k v^T, y = S^T r; S [K, V]."""
    assert output_final_state and safe_gate and chunk_size == 64 and lower_bound <= w.min() and w.max() < 0
    state, outs = initial_state, []
    for t in range(r.shape[1]):
        read = (state * a[:, t, :, :, None]).sum(-2, keepdim=True)
        new = k[:, t, :, :, None] * v[:, t, :, None] + read * b[:, t, :, :, None]
        state = state * w[:, t].exp()[..., None] + new
        outs.append(torch.einsum("bhk,bhkv->bhv", scale * r[:, t], state))
    return torch.stack(outs, dim=1), state


@pytest.fixture
def fla(monkeypatch):
    package, layers, ops = ModuleType("fla"), ModuleType("fla.layers"), ModuleType("fla.ops.rwkv7")
    ops.chunk_rwkv7 = chunk_rwkv7
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.rwkv7", ops)
    for mixer in FLA_MIXERS.values():
        setattr(layers, mixer.layer_name, StandIn)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.layers", layers)


@pytest.mark.parametrize("name", FLA_MIXERS)
def test_without_the_package_there_is_one_clear_line(name, monkeypatch):
    for module in [each for each in sys.modules if each.partition(".")[0] == "fla"]:  # of tests with the package
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=r"needs flash-linear-attention: pip install 'sympow\[fla\]'") as caught:
        make_mixer(name, 8, 2, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FLA_MIXERS)
def test_forward_steps_and_documents(fla, name):
    mixer = make_mixer(name, 8, 2, {}).double()
    x = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, state, outs = mixer(x), mixer.init_state(1), []
    assert list(state.tensors()) == [] and mixer.state_size(0) == 0 < mixer.state_size(1)
    for piece in x.split([4, 1, 3, 1], dim=1):
        out, state = mixer.step(piece, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), y)
    assert [tensor.shape for tensor in state.tensors()] == [(1, 8)]
    packed = mixer(x, cu_seqlens=torch.tensor([0, 4, 9]))
    torch.testing.assert_close(packed, torch.cat([mixer(x[:, :4]), mixer(x[:, 4:])], dim=1))
    with pytest.raises(ValueError, match="d_model must be a multiple of n_heads"):
        make_mixer(name, 8, 3, {})


def test_arguments(fla):
    made = {name: make_mixer(name, 8, 2, {}).layer.arguments for name in FLA_MIXERS}
    plain = {"hidden_size": 8, "num_heads": 2, "layer_idx": 0}
    assert made["gla"] == made["delta_net"] == plain
    assert made["gated_delta_net"] == plain | {"head_dim": 4, "expand_v": 2}
    chosen = make_mixer("gated_delta_net", 8, 2, {"head_dim": 6, "expand_v": 1})
    assert chosen.layer.arguments == plain | {"head_dim": 6, "expand_v": 1}
    assert chosen.state_size(1) == 2 * 6 * 6 + 4 * 3 * 12
    assert made["mamba2"] == plain | {"head_dim": 8, "expand": 2, "state_size": 128}
    small = make_mixer("mamba2", 8, 2, {"state_dim": 16})
    assert small.layer.arguments["state_size"] == 16
    assert small.fused() == {"layer.in_proj": [16, 16, 16, 16, 2]}  # z, x, B, C, dt


def test_the_seed_decides_weights_and_nothing_else_is_touched(fla):
    before = torch.get_rng_state()
    config = ModelConfig(11, 8, 2, 2, (MixerConfig("gla"),))
    a, b, c = (LanguageModel(config, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    name = "blocks.1.mixer.layer.dt_bias"
    assert all(torch.equal(a[key], b[key]) for key in a) and not torch.equal(a[name], c[name])


def test_rwkv7_by_the_package_is_its_own_recurrence(fla):
    plain, other = (make_mixer("rwkv7", 8, 2, {"impl": impl}).double() for impl in ("plain", "fla"))
    other.load_state_dict(disturb(plain, 0.3).state_dict())
    x = normal(2, 9, 8, seed=1)
    results = []
    for mixer in (plain, other):
        state, outs = mixer.init_state(2), [mixer(x)]
        for piece in x.split([4, 1, 4], dim=1):
            y, state = mixer.step(piece, state)
            outs.append(y)
        loss = sum(y.square().sum() for y in outs) + state.memory.square().sum()
        results.append([*outs, state.memory, *torch.autograd.grad(loss, list(mixer.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_rwkv7_asked_for_the_package_says_that_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.rwkv7", None)
    with pytest.raises(ImportError, match=r"impl='fla' of RWKV7 needs flash-linear-attention: pip install") as caught:
        make_mixer("rwkv7", 8, 2, {"impl": "fla"})
    assert "\n" not in str(caught.value)
    make_mixer("rwkv7", 8, 2, {})(torch.zeros(1, 3, 8))


def test_rwkv7_loads_the_package_when_it_is_made(fla, monkeypatch):
    """torch.compile cannot trace the import of the package, so that a first call would fail."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    mixers = [make_mixer("rwkv7", 8, 2, {"impl": impl}) for impl in ("auto", "fla", "plain")]
    assert [mixer.chunk_kernel for mixer in mixers] == [chunk_rwkv7, chunk_rwkv7, None]
    monkeypatch.setitem(sys.modules, "fla.ops.rwkv7", None)
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mixers[0](x), mixers[2](x))  # on a CPU
    mixers[1](x)


def test_the_sweep_of_equal_states_has_gated_delta_nets_of_three_sizes(fla):
    """Its other runs are those of the sweep without the package, so that it continues the same file."""
    without, runs = load_sweep("mqar:equal_state").runs, load_sweep("mqar:equal_state_fla").runs
    assert runs[: len(without)] == without
    more = runs[len(without) :]
    assert {run.learning_rate for run in more} == {run.learning_rate for run in without} and len(more) == 18
    with torch.device("meta"):
        sizes = [LanguageModel(run.model).state_size(256) * 4 / 1024 for run in more[::6]]  # KiB in float32
    assert all(0.9 * kib < size < kib for size, kib in zip(sizes, (64, 128, 256), strict=True))
