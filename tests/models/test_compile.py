"""Models under torch.compile: a graph for each part, the same numbers, and no compiling from step to step."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.draws import disturb
from tests.ops.contract import DEVICE

triton = pytest.importorskip("sympow.ops.triton.adapt", reason="needs triton")


@pytest.mark.parametrize(
    ("body", "rotation", "chunk_size", "recompute"),
    [("gpt2", "data", None, True), ("llama", "fixed", 16, False), ("rwkv7", "data", 16, False)],
)
def test_each_part_is_one_graph(monkeypatch, body, rotation, chunk_size, recompute):
    if DEVICE == "cpu":  # in Triton's interpreter, of which the compiler cannot see whether it is on
        monkeypatch.setattr(triton, "unsupported_tensors", lambda device, dtype: None)
    mixer = MixerConfig("power", {"rotation": rotation, "impl": "triton", "chunk_size": chunk_size})
    layers = 2 if body == "gpt2" else 1
    config = ModelConfig(11, d_model=16, n_layers=layers, n_heads=1, mixers=(mixer,), body=body)
    model = disturb(LanguageModel(config, seed=0).to(DEVICE), 0.02, seed=1)
    if recompute:
        model.checkpoint_activations()
    text = torch.randint(11, (1, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tokens, targets = text[:, :-1], text[:, 1:]

    def step() -> list[torch.Tensor]:
        loss = model.loss_sum(tokens, targets)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step()
    torch.compiler.reset()
    counters.clear()
    model.compile_parts(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(), expected)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().loss_sum(tokens, targets), expected[0])
    torch.testing.assert_close(model.train() and step(), expected)
    # With gradients and without, a block and a norm, which two layers share; and the losses.
    assert counters["stats"]["unique_graphs"] == 5
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_a_model_without_kernels_is_one_graph():
    """At the second length the compiler learns that lengths differ. It says nothing of tables that are kept."""
    mixers = (MixerConfig("power"), MixerConfig("power", {"chunk_size": 16}))
    model = LanguageModel(ModelConfig(29, d_model=16, n_layers=2, n_heads=2, mixers=mixers))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", "Dynamo detected")
        for time in (40, 70):
            tokens = torch.randint(29, (1, time))
            torch.testing.assert_close(compiled(tokens), model(tokens))
    torch.compiler.reset()


def test_many_kinds_of_layers_are_all_compiled():
    """Torch compiles a function for few kinds of layers only, and runs it as it is for the others."""
    mixers = tuple(MixerConfig("window", {"window": size}) for size in range(3, 7))
    model = LanguageModel(ModelConfig(11, 16, len(mixers), 2, mixers, body="llama"), seed=0)
    tokens = torch.randint(11, (1, 20), generator=torch.Generator().manual_seed(0))
    expected = model.loss_sum(tokens, tokens)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        model.compile_parts(backend="eager", fullgraph=True)
        torch.testing.assert_close(model.loss_sum(tokens, tokens), expected)
        with torch.no_grad():
            torch.testing.assert_close(model.loss_sum(tokens, tokens), expected)
    torch.compiler.reset()
