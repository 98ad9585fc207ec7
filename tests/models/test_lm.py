"""The language model: causal, the same by steps as whole, losses that equal cross entropy, GPT-2's initialisation."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from sympow.layers.auxiliary import auxiliary_losses
from sympow.models import BODIES, LanguageModel, MixerConfig, ModelConfig, ModelState, lm, preset
from tests.draws import disturb

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 53
WIDTHS = range(VOCAB, 64 + 1)  # of logits, which may be padded
HYBRID = (MixerConfig("power"), MixerConfig("window", {"window": 5}), MixerConfig("softmax"), MixerConfig("linear"))


def model(mixers=HYBRID, seed: int = 0) -> LanguageModel:
    return disturb(LanguageModel(ModelConfig(VOCAB, 24, len(mixers), 3, mixers), seed=seed).double(), 0.2, seed)


def tokens(batch: int = 2, time: int = 30, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("elements", [1, 7 * VOCAB, 1 << 25])
def test_losses_and_gradients_are_those_of_cross_entropy(monkeypatch, elements):
    monkeypatch.setitem(lm.LOGIT_ELEMENTS, "cpu", elements)
    built, x, targets = model().float(), tokens(), tokens(seed=2)
    targets[0, 3:9] = lm.IGNORE
    weight = torch.rand(targets.shape, generator=torch.Generator().manual_seed(0))
    parameters = list(built.parameters())
    expected = F.cross_entropy(built(x).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    expected = expected.view_as(targets)
    losses = built.token_losses(x, targets)
    assert losses.dtype == torch.float32 and losses.shape == targets.shape
    assert losses[0, 3:9].eq(0).all() and losses[1].gt(0).all()
    torch.testing.assert_close(losses, expected)
    with torch.no_grad():
        assert torch.equal(built.token_losses(x, targets), losses)
    gradients = [torch.autograd.grad((y * weight).sum(), parameters) for y in (losses, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_losses_of_packed_documents():
    built, x, targets = model(), tokens(1), tokens(1, seed=2)
    packed = built.token_losses(x, targets, cu_seqlens=torch.tensor([0, 11, 30]))
    torch.testing.assert_close(packed[:, 11:], built.token_losses(x[:, 11:], targets[:, 11:]))


@pytest.mark.parametrize("method", ["token_losses", "loss_sum"])
def test_whole_logits_never_stand_in_memory(monkeypatch, method):
    """No tensor of B T vocab elements is formed, and none of logits is kept for the backward."""
    monkeypatch.setitem(lm.LOGIT_ELEMENTS, "cpu", 10 * VOCAB)
    built, x = model().float(), tokens(2, 300)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for made in out if isinstance(out, list | tuple) else (out,):
                if isinstance(made, torch.Tensor) and made.dim() and made.shape[-1] in WIDTHS:
                    largest = max(largest, made.numel())
            return out

    saved = []
    with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        getattr(built, method)(x, x).sum().backward()
    assert 0 < largest <= max(10 * VOCAB, WIDTHS.stop * built.config.d_model)
    assert not any(shape and shape[-1] in WIDTHS for shape in saved)


@pytest.mark.parametrize("selection", ["random", "learned"])
def test_checkpointed_activations_draw_and_lose_the_same(selection):
    """Mixers draw random numbers in training, and have auxiliary losses."""
    text, grads = tokens(), []
    for recompute in (False, True):
        lm = model((MixerConfig("selection", {"selection": selection, "top_k": 2}),)).train()
        if recompute:
            lm.checkpoint_activations()
        torch.manual_seed(0)
        with auxiliary_losses() as extra:
            loss = lm.token_losses(text, text).mean()
        (loss + sum(extra)).backward()
        assert len(extra) == (selection == "learned")
        grads.append([parameter.grad for parameter in lm.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_seed_decides_the_weights_and_nothing_else_is_touched():
    config = ModelConfig(VOCAB, 24, 2, 3)
    before = torch.get_rng_state()
    a, b, c = (LanguageModel(config, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)


def test_weights_are_drawn_once_and_on_the_device_asked_for():
    """What torch's modules would draw for themselves is not: every number drawn is one of the weights."""
    drawn = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal drawn
            out = function(*args, **(kwargs or {}))
            if {"normal_", "uniform_"} & {function.__name__.split(".")[0]} and not out.is_meta:
                drawn += out.numel()
            return out

    config = ModelConfig(VOCAB, 24, 4, 3, HYBRID)
    with Watch():
        built = LanguageModel(config, seed=0)
    assert drawn == sum(p.numel() for p in built.parameters() if p.dim() == 2)
    assert all(p.requires_grad and p.is_leaf and p.device.type == "cpu" for p in built.parameters())
    with torch.device("meta"):
        assert all(p.is_meta for p in LanguageModel(config, seed=0).parameters())


def test_building_a_model_does_not_load_the_compiler():
    """Random numbers and copies of tensors on the meta device would import torch._dynamo and sympy, for seconds."""
    script = (
        "import sys, torch; before = {*sys.modules}; from sympow.models import LanguageModel, preset; "
        "LanguageModel(preset('nano', 8), seed=0); heavy = {'torch._dynamo', 'sympy'} & ({*sys.modules} - before); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_model_without_memory_has_flops():
    """On the meta device nothing is computed, and torch counts the products, here of a forward and backward."""
    tokens = torch.zeros(2, 300, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = LanguageModel(preset("nano", vocab_size=64))
    with FlopCounterMode(display=False) as counter:
        model.loss_sum(tokens, tokens).backward()
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert counter.get_total_flops() > 6 * tokens.numel() * matrices


def test_initialisation_is_that_of_gpt2():
    layers = 8
    built = LanguageModel(ModelConfig(500, 96, layers, 3), seed=0)
    residual = 0.02 / (2 * layers) ** 0.5
    for block in built.blocks:
        for linear, std in (
            (block.mixer.qkv, 0.02),
            (block.mixer.out, residual),
            (block.mlp_in, 0.02),
            (block.mlp_out, residual),
        ):
            assert linear.weight.std().item() == pytest.approx(std, rel=0.05)
            assert not linear.bias.any()
        assert block.mixer.qkv_start.count_nonzero() == 24  # channels of every query and key
        assert block.mixer.gate.bias.tolist() == pytest.approx([1, 4.5, 8])
    assert built.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for norm in (built.embedding_norm, built.final_norm, built.blocks[3].mlp_norm):
        assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
    loss = built.token_losses(torch.arange(500)[None], torch.arange(500).flip(0)[None]).mean().item()
    assert loss == pytest.approx(6.21, abs=0.05)  # log 500: it starts by knowing nothing


def test_every_parameter_learns():
    built = model()
    built.token_losses(tokens(), tokens(seed=2)).sum().backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad.abs().sum() > 1e-8, name


@pytest.mark.filterwarnings("error")
def test_bfloat16_autocast_is_close_to_float32():
    built, x = model().float(), tokens()
    losses = built.token_losses(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        half = built.token_losses(x, x)
    half.sum().backward()
    assert half.dtype == torch.float32
    assert (half - losses).abs().mean() < 0.03 * losses.mean()


@torch.no_grad()
def test_autocast_leaves_float64_as_it_is():
    built, x = model(), tokens()
    whole, (steps, _) = built(x), built.step(x[:, :20], built.init_state(2))
    other = model(seed=1)
    loss, divergence = built.loss_sum(x, x), built.divergence_sum(x, x, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(built(x), whole)
        assert torch.equal(built.loss_sum(x, x), loss) and loss.dtype == torch.float64
        assert torch.equal(built.divergence_sum(x, x, other), divergence)
        assert torch.equal(built.step(x[:, :20], built.init_state(2))[0], steps)


@torch.no_grad()
def test_bfloat16_weights():
    built, x = model().float(), tokens()
    losses = built.token_losses(x, x)
    half = built.bfloat16().token_losses(x, x)
    assert half.dtype == torch.float32 and built(x).dtype == torch.bfloat16
    assert (half - losses).abs().mean() < 0.05 * losses.mean()
    logits, state = built.step(x[:, :20], built.init_state(2))
    for t in range(20, 30):
        logits, state = built.step(x[:, t : t + 1], state)
    assert (logits - built(x)[:, -1]).abs().mean() < 0.05 * logits.abs().mean()


def test_weights_save_and_load(tmp_path):
    built, other = model(), model(seed=1)
    torch.save(built.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(built(tokens()), other(tokens()))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.tensor([[0, VOCAB]]), ValueError, "tokens must lie in a vocabulary of 53 tokens; got 53"),
        (torch.tensor([[-1, 0]]), ValueError, "tokens must lie in a vocabulary of 53 tokens; got -1"),
        (torch.zeros(2, 3, dtype=torch.int32), TypeError, "tokens must be int64; got torch.int32"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"tokens must be \[B, T >= 1\]; got \[3\]"),
        (torch.zeros(3, 0, dtype=torch.int64), ValueError, r"tokens must be \[B, T >= 1\]; got \[3, 0\]"),
        (torch.zeros(2, 3, dtype=torch.int64, device="meta"), ValueError, "device of the weights, cpu; got meta"),
        (torch.zeros(2, 3, dtype=torch.int64).numpy(), TypeError, "tokens must be a torch.Tensor; got ndarray"),
        ([[1]], TypeError, "tokens must be a torch.Tensor; got list"),
        (None, TypeError, "tokens must be a torch.Tensor; got NoneType"),
    ],
)
def test_bad_tokens_are_refused(bad, error, message):
    built = model()
    with pytest.raises(error, match=message):
        built(bad)
    for step in (built.step, built.try_step):
        with pytest.raises(error, match=message):
            step(bad, built.init_state(2))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (1.5, TypeError, "batch_size must be an integer; got 1.5"),
        (True, TypeError, "batch_size must be an integer; got True"),
        (None, TypeError, "batch_size must be an integer; got None"),
        (-1, ValueError, "batch_size must be at least 0; got -1"),
    ],
)
def test_a_state_of_no_number_of_sequences_is_refused(bad, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        model().init_state(bad)


@pytest.mark.parametrize("body", BODIES)
def test_a_state_that_is_not_of_the_tokens_is_refused(body):
    built = LanguageModel(ModelConfig(VOCAB, 32, 2, 4, body=body), seed=0)
    x = torch.zeros(3, 1, dtype=torch.int64)
    for step in (built.step, built.try_step):
        with pytest.raises(ValueError, match="as many sequences as the input, 3; got a state of 2"):
            step(x, built.init_state(2))
        with pytest.raises(ValueError, match="one for each of its 2 layers; got 1"):
            step(x, ModelState(built.init_state(3).layers[:1]))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(2, 29, dtype=torch.int64), r"targets and tokens must have one shape; got \[2, 29\] and \[2, 30\]"),
        (torch.full((2, 30), VOCAB), "targets must lie in a vocabulary of 53 tokens; got 53"),
        (torch.full((2, 30), -2), "targets must lie in a vocabulary of 53 tokens; got -2"),
    ],
)
def test_bad_targets_are_refused(targets, message):
    for method in (model().token_losses, model().loss_sum, model().check_tokens):
        with pytest.raises(ValueError, match=message):
            method(tokens(), targets)
        for given, name in (((tokens().tolist(), targets), "tokens"), ((tokens(), targets.tolist()), "targets")):
            with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor; got list$"):
                method(*given)


def test_tokens_are_checked_while_something_is_compiled():
    """Training checks a batch in a thread while the step before it may be compiling."""
    built = model()
    refused = []

    def backend(graph, inputs):
        with pytest.raises(ValueError, match="tokens must lie in a vocabulary of 53 tokens; got 53") as error:
            built.check_tokens(torch.full((2, 30), VOCAB), tokens())
        refused.append(error)
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert len(refused) == 1


def test_complex_weights_are_refused():
    model = LanguageModel(preset("mini", vocab_size=9))
    weights = model.state_dict()
    weights["embedding.weight"] = weights["embedding.weight"] + 1j
    with pytest.raises(TypeError, match=r"^weights must be real; got embedding.weight of torch.complex64$"):
        model.load_state_dict(weights)


def test_weights_that_are_integers_are_refused():
    """Those of a quantized model, whose scale would be lost."""
    for name in ("embedding.weight", "blocks.1.mixer.qkv.weight"):
        model = LanguageModel(preset("mini", vocab_size=9))
        weights = model.state_dict()
        weights[name] = (weights[name] * 100).to(torch.int8)
        with pytest.raises(TypeError, match=rf"^weights must be floating-point numbers; got {name} of torch.int8$"):
            model.load_state_dict(weights)
