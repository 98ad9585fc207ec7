"""The bodies: each keeps what a language model promises, computes its formula, and starts as it says."""

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from sympow.models import BODIES, LanguageModel, MixerConfig, ModelConfig, generate, preset
from sympow.models.bodies.rwkv7 import tokens_before
from sympow.models.norms import RMSNorm
from tests.draws import disturb

VOCAB, D, TIME = 53, 24, 30
TIGHT = {"rtol": 1e-9, "atol": 1e-9}
HYBRID = (MixerConfig("power"), MixerConfig("window", {"window": 5}), MixerConfig("softmax"), MixerConfig("linear"))
RECALL = (
    MixerConfig("short_convolution", {"width": 3, "mixer": "softmax", "options": {"rotation": "none"}}),
    MixerConfig("base_conv", {"max_length": 30}),
    MixerConfig("selection", {"selection": "programmatic"}),
    MixerConfig("short_convolution", {"mixer": "selection", "options": {"selection": "programmatic"}}),
    MixerConfig("hyena", {"max_length": 30}),
    MixerConfig("h3"),
    MixerConfig("retnet"),
)
CASES = {
    "gpt2": {},
    "gpt2, untied": {"tie_embeddings": False},
    "llama": {"body": "llama", "n_kv_heads": 1},
    "llama, untied": {"body": "llama", "tie_embeddings": False, "mlp_hidden": 40, "norm_eps": 1e-2},
    "rwkv7": {"body": "rwkv7"},
    "rwkv7, untied": {"body": "rwkv7", "tie_embeddings": False, "mlp_ratio": 3},
    "gpt2, no MLP": {"mlp_ratio": 0},
    "llama, no MLP": {"body": "llama", "mlp_hidden": 0},
    "rwkv7, no MLP": {"body": "rwkv7", "mlp_ratio": 0},
    "gpt2 of mixers for recall": {"n_layers": len(RECALL), "mixers": RECALL},
    "rwkv7 with its own mixer": {"body": "rwkv7", "mixers": (MixerConfig("rwkv7"), MixerConfig("rwkv4"))},
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
every_body = pytest.mark.parametrize("body", BODIES)


def make(options: dict, seed: int = 0) -> LanguageModel:
    """In float64, and so that every parameter matters: nothing stays at its special initial value."""
    shape = {"vocab_size": VOCAB, "d_model": D, "n_layers": 4, "n_heads": 3, "mixers": HYBRID}
    return disturb(LanguageModel(ModelConfig(**shape | options), seed=seed).double(), 0.2, seed)


def tokens(batch: int = 2, time: int = TIME, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@every_case
def test_logits_are_causal(options):
    built, x = make(options), tokens()
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCAB
    a, b = built(x), built(changed)
    torch.testing.assert_close(a[:, :12], b[:, :12], **TIGHT)
    assert (a[:, 12] - b[:, 12]).abs().max() > 1e-3


@every_case
@pytest.mark.parametrize("lengths", [[1] * TIME, [17, 1, 12], [TIME]])
@torch.no_grad()
def test_steps_are_the_forward(lengths, options):
    built, x = make(options), tokens()
    logits, ends = built(x), torch.tensor(lengths).cumsum(0)
    state = built.init_state(2)
    for piece, end in zip(x.split(lengths, dim=1), ends, strict=True):
        last, state = built.step(piece, state)
        torch.testing.assert_close(last, logits[:, end - 1], **TIGHT)
        assert sum(t.numel() for t in state.tensors()) == 2 * built.state_size(int(end))
    assert state.nbytes == sum(layer.nbytes for layer in state.layers) > 0


@every_case
def test_gradients_flow_through_steps(options):
    built, x = make(options), tokens()
    parameters = list(built.parameters())
    last, _ = built.step(x[:, 20:], built.step(x[:, :20], built.init_state(2))[1])
    ways = (last, built(x)[:, -1])
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in ways), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


@every_case
def test_packed_documents_are_each_alone(options):
    built, x = make(options), tokens(1)
    packed = built(x, cu_seqlens=torch.tensor([0, 11, 11, 12, TIME]))
    alone = [built(document) for document in x.split([11, 1, 18], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **TIGHT)


@every_case
def test_the_losses_and_their_sum(options):
    built, x, targets = make(options), tokens(), tokens(seed=2)
    targets[0, 3:9] = -100
    parameters = list(built.parameters())
    expected = F.cross_entropy(built(x).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    sums = (expected, built.loss_sum(x, targets), built.token_losses(x, targets).sum())
    gradients = [torch.autograd.grad(y, parameters) for y in sums]
    for y, gradient in zip(sums[1:], gradients[1:], strict=True):
        torch.testing.assert_close(y, expected, **TIGHT)
        for one, other in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(one, other, **TIGHT)


@every_case
def test_checkpointed_activations_change_no_gradient(options):
    gradients, kept = [], []
    for recompute in (False, True):
        built, saved = make(options), 0
        if recompute:
            built.checkpoint_activations()

        def count(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            loss = built.loss_sum(tokens(), tokens(seed=2))
        gradients.append(torch.autograd.grad(loss, list(built.parameters())))
        kept.append(saved)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert kept[1] < kept[0] / 2


@every_body
def test_of_an_mlp_only_what_stands_before_its_nonlinearity_is_kept(body):
    built, widths = make({"body": body, "mixers": (MixerConfig("linear"),), "n_layers": 1}), []
    width = built.config.mlp_width
    with torch.autograd.graph.saved_tensors_hooks(lambda t: widths.append(t.shape) or t, lambda t: t):
        built(tokens(2, 7)).sum()
    hidden = [shape for shape in widths if len(shape) == 3 and shape[-1] in (width, 2 * width)]
    assert hidden == [(2, 7, 2 * width if body == "llama" else width)]


@every_body
@pytest.mark.parametrize("tied", [True, False])
def test_models_are_made_on_the_meta_device(body, tied):
    with torch.device("meta"):
        built = LanguageModel(ModelConfig(VOCAB, D, 2, 3, HYBRID, body=body, tie_embeddings=tied), seed=0)
    assert all(tensor.is_meta for tensor in built.state_dict().values())


@every_body
def test_the_seed_decides_the_weights(body):
    before = torch.get_rng_state()
    config = ModelConfig(VOCAB, D, 2, 3, body=body, tie_embeddings=False)
    one, same, other = (LanguageModel(config, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)
    assert not torch.equal(one.head.weight, one.embedding.weight)
    assert one.num_parameters() == LanguageModel(preset_of(body), seed=0).num_parameters() + VOCAB * D


def preset_of(body: str) -> ModelConfig:
    return ModelConfig(VOCAB, D, 2, 3, body=body)


@every_body
def test_generation_by_state_is_that_by_forward(body):
    built, x = make({"body": body, "mixers": (MixerConfig("power"),)}), tokens(2, 9)
    result = generate(built, x, 12, temperature=0, prefill_chunk=4)
    with torch.no_grad():
        for _ in range(12):
            x = torch.cat([x, built(x)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(result.tokens, x[:, -12:])


@every_body
def test_weights_of_blocks_are_counted(body):
    """Of all matrices of a block, those of the mixer left out."""
    for options in ({}, {"llama": {"mlp_hidden": 0}}.get(body, {"mlp_ratio": 0})):
        config = ModelConfig(VOCAB, D, 1, 3, body=body, **options)
        (block,) = LanguageModel(config, seed=0).blocks
        both = [sum(p.numel() for p in part.parameters() if p.ndim >= 2) for part in (block, block.mixer)]
        assert type(block).other_weights(config) == both[0] - both[1]


def test_presets_have_as_many_weights_in_every_body():
    for name in ("small", "xl"):
        with torch.device("meta"):
            counts = [LanguageModel(preset(name, body=body), seed=0).num_parameters() for body in BODIES]
        assert counts == pytest.approx([counts[0]] * len(counts), rel=0.03)


# ---------------------------------------------------------------------------------------------------- llama


@pytest.mark.parametrize(("d_model", "hidden"), [(96, 256), (768, 2048), (1024, 2752), (1600, 4288)])
def test_the_hidden_width_of_llama_is_8_3_of_the_model(d_model, hidden):
    assert ModelConfig(9, d_model, 1, 1, body="llama").mlp_width == hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_rounds_before_its_weight(dtype):
    """Bit for bit in bfloat16: normalized in float32, rounded, multiplied."""
    norm = RMSNorm(64, 1e-3).to(dtype)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data = torch.randn(64, generator=generator).to(dtype)
    x = torch.randn(50, 64, generator=generator).mul(3).to(dtype)
    high = x.to(torch.promote_types(dtype, torch.float32))
    expected = norm.weight * (high * torch.rsqrt(high.square().mean(-1, keepdim=True) + 1e-3)).to(dtype)
    exact = {"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(norm(x), expected, **exact)


def test_initialisation_of_llama():
    built = LanguageModel(ModelConfig(500, 96, 8, 3, body="llama", tie_embeddings=False), seed=0)
    residual = 0.02 / math.sqrt(2 * 8)
    assert built.embedding_norm is None
    for block in built.blocks:
        for linear, std in ((block.mlp_in, 0.02), (block.mlp_out, residual), (block.mixer.out, residual)):
            assert linear.weight.std().item() == pytest.approx(std, rel=0.05)
        assert block.mlp_in.bias is None and block.mlp_out.bias is None
        assert block.mixer_norm.weight.eq(1).all() and block.mlp_norm.weight.eq(1).all()
    for table in (built.embedding, built.head):
        assert table.weight.std().item() == pytest.approx(0.02, rel=0.05)


# ---------------------------------------------------------------------------------------------------- rwkv7


def test_the_block_of_rwkv7_is_its_formula():
    built = make({"body": "rwkv7", "mixers": (MixerConfig("softmax"),), "n_layers": 1})
    block, x = built.blocks[0], torch.randn(2, 9, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def shift(y, mu):
        before = torch.zeros_like(y)
        before[:, 1:] = y[:, :-1]
        return (1 - mu) * y + mu * before

    def norm(y, module):
        return F.layer_norm(y, (D,), module.weight, module.bias, 1e-5)

    y = norm(x, block.mixer_norm)
    gate = torch.sigmoid(shift(y, block.gate_shift) @ block.gate.a) @ block.gate.b + block.gate.c
    expected = x + gate * block.mixer(shift(y, block.mixer_shift))
    z = shift(norm(expected, block.mlp_norm), block.mlp_shift)
    expected = expected + torch.relu(z @ block.mlp_in.weight.T) ** 2 @ block.mlp_out.weight.T
    torch.testing.assert_close(block(x), expected, **TIGHT)


def test_initialisation_of_rwkv7():
    layers, d = 4, 96
    built = LanguageModel(ModelConfig(500, d, layers, 3, body="rwkv7"), seed=0)
    channel = torch.arange(d) / d
    for layer, block in enumerate(built.blocks):
        early = 1 - layer / layers
        assert block.mixer.out.weight.eq(0).all() and block.mlp_out.weight.eq(0).all()
        assert block.mlp_in.weight.abs().max().item() == pytest.approx(0.5 / math.sqrt(d), rel=0.01)
        assert block.gate.a.eq(0).all() and block.gate.c.eq(1).all()
        torch.testing.assert_close(block.mixer_shift.data, 1 - channel ** (0.7 * early))
        torch.testing.assert_close(block.gate_shift.data, 1 - channel ** (0.2 * early))
        torch.testing.assert_close(block.mlp_shift.data, 1 - channel ** (early**4))
    x = tokens() % 500
    embedded = built.final_norm(built.embedding_norm(built.embedding(x)))
    torch.testing.assert_close(built(x), embedded @ built.embedding.weight.T)  # blocks start as the identity


def test_mixers_of_rwkv_know_their_place_and_shift_by_themselves():
    mixers = (MixerConfig("rwkv7"), MixerConfig("rwkv4", {"depth": 0.5}), MixerConfig("linear"))
    built = LanguageModel(ModelConfig(VOCAB, D, 5, 3, mixers, body="rwkv7"), seed=0)
    assert [block.shifts for block in built.blocks] == [False, False, True, False, False]
    assert [getattr(block.mixer, "depth", None) for block in built.blocks] == [0.0, 0.5, None, 0.75, 0.5]
    assert LanguageModel(ModelConfig(VOCAB, D, 2, 3, mixers[:1]), seed=0).blocks[1].mixer.depth == 0.0


@pytest.mark.parametrize("bounds", [[0, 7], [0, 3, 3, 4, 7], [0, 0, 7]])
def test_tokens_before(bounds):
    x, last = torch.arange(1.0, 8).view(1, 7, 1), torch.full((1, 1), 9.0)
    expected = torch.cat([last, x[0, :-1]])
    torch.testing.assert_close(tokens_before(x, last, None)[0], expected)
    expected[[bound for bound in bounds if bound < 7]] = 0
    compiled = torch.compile(tokens_before, backend="aot_eager", fullgraph=True)
    for call in (tokens_before, compiled):
        before = call(x, last, torch.tensor(bounds, dtype=torch.int32))
        torch.testing.assert_close(before[0], expected)
    torch.compiler.reset()


# ------------------------------------------------------------------------------------------------ docs/guides/bodies.md


def test_the_tables_of_the_docs_name_every_body_and_field():
    text = (Path(__file__).resolve().parents[2] / "docs/guides/bodies.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    named = {cells[0]: cells[1] for cells in rows}
    assert named.keys() >= BODIES.keys()
    shape = {"vocab_size", "d_model", "n_layers", "n_heads", "mixers", "body"}
    for field in {entry.name for entry in fields(ModelConfig)} - shape:
        having = [body for body in BODIES if ModelConfig(9, 8, 1, 1, body=body).has(field)]
        assert named[field] == ("all" if len(having) == len(BODIES) else ", ".join(having))
