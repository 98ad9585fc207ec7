"""The mixers from flash-linear-attention and RWKV-7 by its kernel, as they are trained: on a GPU, weights in float32,
bfloat16 autocast. Needs the package."""

import importlib.util

import pytest
import torch

from sympow.layers import FLA_MIXERS, Mixer, make_mixer
from tests.draws import disturb

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("fla") is None,
    reason="needs a GPU and flash-linear-attention",
)

D_MODEL, HEADS, T = 128, 2, 200  # more than a chunk of 64 tokens, and a rest
# Results and states are sums of products of numbers rounded to bfloat16, each off by 2**-9 at most, in a few layers:
# what every mixer is allowed under autocast (test_contract.py).
RTOL = 0.03
CASES = [*((name, {}) for name in FLA_MIXERS), ("gated_delta_net", {"head_dim": 32, "expand_v": 1}), ("rwkv7", {})]


def make(name: str, options: dict) -> Mixer:
    mixer = make_mixer(name, D_MODEL, HEADS, options).cuda()
    mixer.reset_parameters(std=0.1, generator=torch.Generator().manual_seed(0))
    return disturb(mixer, 0.05, seed=1)


def sequence(batch: int = 2, time: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, time, D_MODEL, generator=torch.Generator().manual_seed(seed)).cuda()


def autocast():
    return torch.autocast("cuda", torch.bfloat16)


def assert_near(got: torch.Tensor, wanted: torch.Tensor, rtol: float = RTOL) -> None:
    assert got.isfinite().all() and wanted.isfinite().all()
    assert (got.double() - wanted.double()).norm() <= rtol * wanted.double().norm()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_trains(name, options):
    mixer = make(name, options)
    x, target = sequence(), sequence(seed=2)
    optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(20):
        with autocast():
            y = mixer(x)
        loss = (y.float() - target).square().mean()
        optimizer.zero_grad()
        try:
            loss.backward()
        except RuntimeError as error:
            if "upgrade Triton" not in str(error):
                raise
            pytest.skip(f"flash-linear-attention refuses this Triton: {error}")
        for parameter_name, parameter in mixer.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_fused_layers_have_the_rows_they_say(name, options):
    mixer = make_mixer(name, D_MODEL, HEADS, options)
    for layer, rows in mixer.fused().items():
        assert sum(rows) == len(mixer.get_submodule(layer).weight)


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_are_the_sequence_in_a_state_of_the_size_it_says(name, options):
    mixer = make(name, options).eval()
    x = sequence()
    with autocast():
        y = mixer(x)
        for lengths in ([100, 1, 1, 28, 70], [1, 199], [T]):
            state, outs = mixer.init_state(2), []
            for piece in x.split(lengths, dim=1):
                out, state = mixer.step(piece, state)
                outs.append(out)
            assert_near(torch.cat(outs, dim=1), y)
            assert sum(tensor.numel() for tensor in state.tensors()) == 2 * mixer.state_size(T)


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), CASES)
def test_packed_documents_are_each_alone(name, options):
    mixer = make(name, options).eval()
    x = sequence(1)
    with autocast():
        packed = mixer(x, cu_seqlens=torch.tensor([0, 70, 70, 71, T], dtype=torch.int32, device="cuda"))
        alone = torch.cat([mixer(x[:, a:b]) for a, b in ((0, 70), (70, 71), (71, T))], dim=1)
        assert_near(packed, alone)
        assert (packed - mixer(x)).abs().max() > 1e-3


def test_rwkv7_by_the_kernel_is_its_own_recurrence(monkeypatch):
    import fla.ops.rwkv7 as package

    real, calls = package.chunk_rwkv7, []
    monkeypatch.setattr(package, "chunk_rwkv7", lambda **inputs: calls.append(inputs["r"].dtype) or real(**inputs))
    plain, chunked = make("rwkv7", {"impl": "plain"}), make("rwkv7", {})
    results = []
    for mixer in (plain, chunked):
        x = sequence().requires_grad_()
        with autocast():
            y = mixer(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *mixer.parameters()])])
    assert calls == [torch.bfloat16]
    for got, wanted in zip(results[1], results[0], strict=True):
        assert_near(got, wanted)
