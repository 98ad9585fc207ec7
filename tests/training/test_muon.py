"""Muon: the orthogonalization, the weights it moves, the optimizer that it is with AdamW, runs on one rank and more."""

import dataclasses
import json
from math import prod, sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from sympow.layers import MIXERS, Mixer
from sympow.layers.float32_linear import Float32Linear
from sympow.layers.rwkv7 import LowRank
from sympow.layers.short_convolution import DepthwiseConvolution
from sympow.layers.zoology.filters import LongFilter
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.training import ExecutionConfig, TrainingConfig, latest, load_checkpoint, read_metrics, train
from sympow.training.config import RunConfig
from sympow.training.muon import COEFFICIENTS, MOMENTUM, STEPS, Muon, is_sharded, orthogonalized
from sympow.training.optimizer import make_optimizer, muon_weights, set_learning_rate
from tests.layers.contract import OPTIONS
from tests.ranks import run_ranks
from tests.tiny_runs import forget_last_checkpoint

WIDE = {"d_model": 64, "n_layers": 2, "n_heads": 2}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def exact(matrix: Tensor, scale: float = 1.0) -> Tensor:
    """The orthogonalization of one matrix by its singular values, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        s = a * s + b * s**3 + c * s**5
    return scale * (u * s) @ v


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------------------------------------- orthogonalization


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 160), (65, 67)], ids=str)
def test_orthogonalized_applies_the_polynomial_to_the_singular_values(shape, dtype, error):
    matrices = drawn(3, *shape, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3]).double()[:, None, None]
    found = orthogonalized(matrices.to(dtype), 0.3)
    assert found.dtype == dtype
    for matrix, own in zip(matrices.to(dtype), found, strict=True):
        assert relative(own, exact(matrix, 0.3)) < error
        inner = torch.linalg.svdvals(own.double() / 0.3)[: min(shape) // 2]
        assert inner.min() > 0.65 and inner.max() < 1.22


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalized(torch.zeros(2, 64, 80)), torch.zeros(2, 64, 80))


# ---------------------------------------------------------------------------------------------------- the updates


def reference(weight: Tensor, gradients: list[Tensor], rows: list[int], rate: float, decay: float) -> Tensor:
    """The weight after a step for every gradient, by the formulas, matrix by matrix in float64."""
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient.double()
        ahead = MOMENTUM * average + (1 - MOMENTUM) * gradient.double()
        update = [exact(part, 0.2 * sqrt(max(part.shape))) for part in ahead.split(rows)]
        weight = (1 - rate * decay) * weight - rate * torch.cat(update)
    return weight


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_follows_the_formulas(dtype, device):
    """Also of fused weights and of grouped heads, and with a learning rate of its own."""
    weights = [([80], 64), ([64, 64, 64], 80), ([96, 70, 70], 64), ([96, 70, 70], 64), ([64, 64, 64], 80)]
    starts = [drawn(sum(rows), width, seed=i, dtype=dtype) for i, (rows, width) in enumerate(weights)]
    gradients = [
        [drawn(*start.shape, seed=10 * i + step, dtype=dtype) for step in range(3)] for i, start in enumerate(starts)
    ]
    made = [nn.Parameter(start.to(device, copy=True)) for start in starts]
    matrices = list(zip(made, (rows for rows, _ in weights), strict=True))
    optimizer = Muon(matrices, [{"params": []}], lr=1.0, weight_decay=0.3, rate=2.0)
    set_learning_rate(optimizer, 0.02)
    for step in range(3):
        for parameter, own in zip(made, gradients, strict=True):
            parameter.grad = own[step].to(device)
        optimizer.step()
    error = 1e-11 if dtype == torch.float64 else 1e-5 if device == "cpu" else 2e-2
    for (rows, _), parameter, start, own in zip(weights, made, starts, gradients, strict=True):
        expected = reference(start, own, rows, 0.04, 0.3)
        unmoved = start.double() * (1 - 0.04 * 0.3) ** 3
        assert relative(parameter.detach().cpu() - unmoved, expected - unmoved) < error


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)], ids=str)
def test_a_single_matrix_moves_as_by_torchs_muon(shape):
    """Up to the rounding of its products, which are in bfloat16: 1.2% of the update, 2.5% after some steps."""
    start = drawn(*shape)
    own, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        Muon([(own, [shape[0]])], [{"params": []}], lr=1e-2, weight_decay=0.1),
        torch.optim.Muon([other], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(3):
        before = own.detach().clone()
        own.grad = drawn(*shape, seed=step + 1)
        other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert relative(other.detach() - before, (own.detach() - before).double()) < 0.04
    momenta = [optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, (own, other), strict=True)]
    torch.testing.assert_close(*momenta)


def test_fused_matrices_move_as_matrices_of_their_own():
    """Bit for bit, and however large the gradient of one is; the whole as one matrix moves otherwise."""
    parts = [drawn(rows, 64, seed=rows) for rows in (128, 64, 70)]
    gradients = [drawn(*part.shape, seed=i) * 30**i for i, part in enumerate(parts)]
    fused, whole = (nn.Parameter(torch.cat(parts)) for _ in range(2))
    alone = [nn.Parameter(part.clone()) for part in parts]
    fused.grad, whole.grad = torch.cat(gradients), torch.cat(gradients)
    for part, gradient in zip(alone, gradients, strict=True):
        part.grad = gradient
    given = [(fused, [128, 64, 70]), (whole, [262]), *((part, part.shape[:1]) for part in alone)]
    Muon(given, [{"params": []}], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(fused, torch.cat(alone))
    start = torch.cat(parts)
    assert relative(whole.detach() - start, (fused.detach() - start).double()) > 0.5


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("shape", "rows"), [((192, 67), [64, 128]), ((64, 256), [64]), ((768, 768), [768])], ids=str)
def test_a_matrix_moves_alike_beside_any_others(device, shape, rows):
    """Bit for bit. So ranks may share the matrices in any way."""
    count = 2 if shape[0] > 192 and device == "cpu" else 7
    starts = [drawn(*shape, seed=i).to(device) for i in range(count)]
    together, alone = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    for weights in (together, *([weight] for weight in alone)):
        for weight in weights:
            weight.grad = weight.detach().sin()
        Muon([(weight, rows) for weight in weights], [{"params": []}], lr=0.1, weight_decay=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_rows_must_add_up():
    with pytest.raises(ValueError, match=r"a weight of rows \[64, 64\] must be a matrix of as many; got \[192, 64\]"):
        Muon([(nn.Parameter(torch.zeros(192, 64)), [64, 64])], [{"params": []}], lr=0.1, weight_decay=0.1)


# ------------------------------------------------------------------------------------- the groups of one optimizer

MLP = {"gpt2": {"mlp_in": [512], "mlp_out": [128]}, "llama": {"mlp_in": [384] * 2, "mlp_out": [128]},
       "rwkv7": {"mlp_in": [512], "mlp_out": [128]}}  # fmt: skip
HEADS = {"mixer.qkv": [128] * 3, "mixer.out": [128]}
MATRICES: dict[str, tuple[dict, dict[str, list[int]]]] = {
    "power": ({"n_kv_heads": 2}, {"mixer.qkv": [128, 64, 64], "mixer.out": [128], "mixer.output_gate": [128]}),
    "power_delta": ({"n_kv_heads": 2}, {"mixer.qkv": [128, 64, 64], "mixer.out": [128], "mixer.output_gate": [128]}),
    "softmax": ({"gate": True, "value_dim": 64}, {"mixer.qkv": [128, 128, 256], "mixer.out": [128]}),
    "linear": ({}, HEADS),
    "window": ({"window": 4, "short_convolution": 4}, HEADS),
    "hybrid_heads": ({"window": 4}, {f"mixer.{part}.{name}": rows for part in ("near", "far") for name, rows in
                                     {"qkv": [64] * 3, "out": [128], "output_gate": [64]}.items()}),
    "blocked_window": ({"window": 4}, HEADS),
    "selection": ({"selection": "learned", "top_k": 3}, HEADS),
    "short_convolution": ({"mixer": "power", "options": {"output_gate": False}},
                          {"mixer.mixer.qkv": [128] * 3, "mixer.mixer.out": [128]}),
    "long_convolution": ({"max_length": 256}, {"mixer.out": [128] * 2}),
    "base_conv": ({"max_length": 256}, {"mixer.projection": [128]}),
    "hyena": ({"max_length": 256, "order": 128}, {"mixer.projections": [128] * 3, "mixer.out": [128]}),
    "h3": ({"state_dim": 64}, {"mixer.qkv": [128] * 3, "mixer.out": [128]}),
    "liquid_s4": ({"state_dim": 128}, {"mixer.out": [128] * 2}),
    "rwkv4": ({}, {f"mixer.{name}": [128] for name in ("key", "value", "receptance", "out")}),
    "rwkv7": ({}, {f"mixer.{name}": [128] for name in ("receptance", "key", "value", "out")}),
    "mamba": ({}, {"mixer.uz": [256, 256], "mixer.out": [128]}),
    "retnet": ({}, {"mixer.qkv": [128, 128, 256], "mixer.out": [128], "mixer.gate": [256]}),
    "programmatic_conv": ({}, {"mixer.projection": [128]}),
    "autocorrelation_conv": ({"matching": True}, {f"mixer.{name}": [128] for name in ("projection", "query", "key")}),
}  # fmt: skip


@pytest.mark.parametrize("body", MLP)
@pytest.mark.parametrize("name", MIXERS)
def test_the_matrices_of_every_mixer_and_body(name, body):
    """Everything else is AdamW's, and every weight is in one group."""
    options, expected = MATRICES[name]
    model = LanguageModel(ModelConfig(200, 128, 1, 4, (MixerConfig(name, options),), body=body), seed=0)
    names = {parameter: key for key, parameter in model.named_parameters()}
    found = {names[weight]: rows for weight, rows in muon_weights(model)}
    assert found == {f"blocks.0.{key}.weight": rows for key, rows in (expected | MLP[body]).items()}
    muon, decayed, plain = make_optimizer(model, TrainingConfig(optimizer="muon", weight_decay=0.2)).param_groups
    assert dict(zip((names[p] for p in muon["params"]), muon["rows"], strict=True)) == found
    assert [group["weight_decay"] for group in (muon, decayed, plain)] == [0.2, 0.2, 0.0]
    given = [names[p] for group in (muon, decayed, plain) for p in group["params"]]
    assert sorted(given) == sorted(names.values())
    assert "embedding.weight" in {names[p] for p in decayed["params"]} and all(p.ndim < 2 for p in plain["params"])


@pytest.mark.parametrize(("name", "options"), [(name, each) for name in OPTIONS for each in OPTIONS[name]], ids=str)
def test_no_filter_gate_or_convolution_is_a_matrix(name, options, monkeypatch):
    monkeypatch.setattr("sympow.training.optimizer.LEAST_SIDE", 1)  # as if the model were large
    model = LanguageModel(ModelConfig(30, 24, 1, 4, (MixerConfig(name, options),)), seed=0)
    special = [m for m in model.modules() if isinstance(m, LongFilter | DepthwiseConvolution | LowRank | Float32Linear)]
    moved = {weight for weight, _ in muon_weights(model)}
    assert not any(p in moved for module in special for p in module.parameters())
    for module in model.modules():
        if isinstance(module, Mixer):
            rows = {key: len(module.get_submodule(key).weight) for key in module.fused()}
            assert {key: sum(parts) for key, parts in module.fused().items()} == rows


def wide_model(**options) -> LanguageModel:
    return LanguageModel(ModelConfig(90, **WIDE | {"body": "llama"} | options), seed=0)


def learn(model: LanguageModel, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        tokens = torch.randint(90, (2, 17), generator=torch.Generator().manual_seed(step))
        (model.loss_sum(tokens[:, :-1], tokens[:, 1:]) / 32).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_all_other_weights_move_as_by_adamw():
    model, like = wide_model(), wide_model()
    config = TrainingConfig(optimizer="muon", muon_rate=2.0, learning_rate=1e-2, betas=(0.8, 0.9))
    optimizer = make_optimizer(model, config)
    assert isinstance(optimizer, Muon)
    matrices = {weight for weight, _ in muon_weights(model)}
    others = [(p, q) for p, q in zip(model.parameters(), like.parameters(), strict=True) if p not in matrices]
    groups = [{"params": [q for _, q in others if q.ndim >= 2]}, {"params": [q for _, q in others if q.ndim < 2]}]
    adamw = torch.optim.AdamW(
        [groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.9), fused=False
    )
    for seed in range(3):
        for i, (p, q) in enumerate(others):
            p.grad = drawn(*p.shape, seed=100 * seed + i)
            q.grad = p.grad.clone()
        optimizer.step()
        adamw.step()
    assert all(torch.equal(p, q) for p, q in others)
    assert all(weight not in optimizer.state for weight in matrices)


def test_frozen_weights_and_weights_without_a_gradient_stay():
    model = wide_model(tie_embeddings=True)
    frozen = model.blocks[0].mixer.qkv.weight.requires_grad_(False)
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon", learning_rate=0.1))
    assert all(frozen is not p for group in optimizer.param_groups for p in group["params"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mixer = model.blocks[1].mixer
    mixer.out.weight.grad = torch.ones_like(mixer.out.weight)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"blocks.1.mixer.out.weight"} and len(optimizer.state) == 1


def test_a_weight_of_two_layers_and_a_tied_head_stand_once():
    model = wide_model(tie_embeddings=True)
    model.blocks[1].mlp_in.weight = model.blocks[0].mlp_in.weight
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"))
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(given) == len(set(given)) == len(list(model.parameters()))
    assert model.head_weight not in {weight for weight, _ in muon_weights(model)}


class Adapted(nn.Module):
    """A layer as the package PEFT replaces it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 64, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(64, base.out_features, bias=False)})


def test_adapters_are_left_to_adamw():
    model = wide_model()
    model.blocks[0].mixer.qkv = Adapted(model.blocks[0].mixer.qkv)
    names = {parameter: key for key, parameter in model.named_parameters()}
    found = {names[weight] for weight, _ in muon_weights(model)}
    assert not any("blocks.0.mixer.qkv" in name for name in found) and "blocks.1.mixer.qkv.weight" in found


def test_a_model_without_large_matrices_is_trained_by_adamw(make_config):
    models = [LanguageModel(make_config().model, seed=0) for _ in range(2)]
    for model, name in zip(models, ("adamw", "muon"), strict=True):
        optimizer = make_optimizer(model, TrainingConfig(optimizer=name, learning_rate=1e-2))
        learn_tiny(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def learn_tiny(model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        tokens = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_the_state_is_that_of_one_optimizer(tmp_path):
    """Its file holds plain values, and another optimizer continues from it bit for bit."""
    config = TrainingConfig(optimizer="muon", learning_rate=1e-2, muon_rate=2.0)
    model, copy = wide_model(), wide_model()
    optimizer = make_optimizer(model, config)
    learn(model, optimizer, 2)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    copy.load_state_dict(weights)
    other = make_optimizer(copy, dataclasses.replace(config, learning_rate=1.0))
    other.load_state_dict(state)
    for each, its in ((model, optimizer), (copy, other)):
        learn(each, its, 2, first=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), copy.parameters(), strict=True))


def test_parameters_that_are_added_later_move_as_by_adamw():
    first, late, alike = (nn.Parameter(drawn(64, 64, seed=seed)) for seed in (0, 1, 1))
    muon = Muon([(first, [64])], [{"params": []}], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    muon.add_param_group({"params": [late], "weight_decay": 0.3})
    adamw = torch.optim.AdamW([alike], lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))
    for step in range(2):
        for each in (first, late, alike):
            each.grad = drawn(64, 64, seed=2 + step)
        muon.step()
        adamw.step()
    assert torch.equal(late, alike) and not torch.equal(late, drawn(64, 64, seed=1))


def test_a_closure_gives_the_loss():
    weight = nn.Parameter(drawn(64, 64))
    optimizer = Muon([(weight, [64])], [{"params": []}], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        assert torch.is_grad_enabled()
        weight.grad = torch.ones_like(weight)
        return 1.5

    before = weight.detach().clone()
    assert optimizer.step(closure) == 1.5 and not torch.equal(weight, before)


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.fixture
def make_wide(make_config, make_batches):
    """make_wide(**fields of TrainingConfig) -> (config, batches) of a run whose model has matrices for Muon."""

    def make(model: dict | None = None, **training):
        config = make_config(model=WIDE | {"body": "llama", "n_kv_heads": 1} | (model or {}),
                             **{"optimizer": "muon", "steps": 6, "checkpoint_every": 3, "batch_size": 4,
                                "micro_batch_size": 1} | training)  # fmt: skip
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, pack=False))
        return config, make_batches(config)

    return make


def ends(run) -> tuple[dict, dict]:
    checkpoint = load_checkpoint(latest(run))
    return checkpoint.model, checkpoint.optimizer


def assert_equal_ends(*runs) -> None:
    first, second = map(ends, runs)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_resumed_run_equals_a_whole_one(tmp_path, make_wide):
    config, batches = make_wide(muon_rate=2.0)
    train(config, batches, tmp_path / "whole", quiet=True)
    resumed = forget_last_checkpoint(tmp_path / "whole", "resumed")
    assert train(config, batches, resumed, quiet=True).step == 6
    assert_equal_ends(tmp_path / "whole", resumed)
    states = ends(resumed)[1]["state"].values()
    assert {frozenset(state) for state in states} == {frozenset(["momentum_buffer"]),
                                                      frozenset(["step", "exp_avg", "exp_avg_sq"])}  # fmt: skip
    learned = [row["loss"] for row in read_metrics(resumed)]
    assert learned[-1] < learned[0]


def test_another_optimizer_is_refused_on_resumption(tmp_path, make_wide):
    for optimizer, change, message in (
        ("muon", {"optimizer": "adamw"}, r"with training\.optimizer = 'muon', not 'adamw': "),
        ("adamw", {"optimizer": "muon"}, r"with training\.optimizer = 'adamw', not 'muon': "),
        ("muon", {"muon_rate": 2.0}, r"with training\.muon_rate = 1\.0, not 2\.0: "),
    ):
        config, batches = make_wide(optimizer=optimizer, steps=2)
        folder = tmp_path / f"{optimizer}{len(change)}{message[-6]}"
        train(config, batches, folder, quiet=True)
        other = dataclasses.replace(config, training=dataclasses.replace(config.training, **change))
        with pytest.raises(ValueError, match=message) as caught:
            train(other, batches, folder, quiet=True)
        assert len(str(caught.value).splitlines()) == 1


def test_runs_before_the_field_are_runs_of_adamw(tmp_path, make_wide):
    config, batches = make_wide(optimizer="adamw")
    train(config, batches, tmp_path / "run", quiet=True)
    older = forget_last_checkpoint(tmp_path / "run", "older")
    values = json.loads((older / "config.json").read_text())
    for name in ("optimizer", "muon_rate"):
        del values["training"][name]
    (older / "config.json").write_text(json.dumps(values))
    assert RunConfig.from_dict(values) == config
    train(config, batches, older, quiet=True)
    assert_equal_ends(tmp_path / "run", older)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "moun"}, r"unknown training\.optimizer 'moun'; did you mean 'muon'\? known: adamw, muon"),
        ({"optimizer": "muon", "muon_rate": 0.0}, r"training\.muon_rate must be above 0, got 0\.0"),
        ({"optimizer": "muon", "muon_rate": float("nan")}, r"training\.muon_rate must be finite; got nan"),
        ({"muon_rate": 2.0}, r"training\.muon_rate is for training\.optimizer = 'muon' only, got 2\.0 and 'adamw'"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**fields)


def test_compiled_blocks_train_alike(tmp_path, make_wide, monkeypatch):
    config, batches = make_wide(steps=3)
    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, backend="eager"))
    fast = dataclasses.replace(config, execution=ExecutionConfig(compile=True))
    for each, name in ((config, "run"), (fast, "compiled")):
        train(each, batches, tmp_path / name, quiet=True)
    plain, compiled = ([row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-4)


# ----------------------------------------------------------------------------------------------------- several ranks

SHAPES = [([192], 64), ([64, 64, 64], 64), ([65], 64), ([64], 192), ([64, 70], 66), ([64], 192), ([64], 192)]


def moved_weights(device: str, grid: tuple[int, ...] = ()) -> list[Tensor]:
    """The weights after three steps with gradients that are equal on any number of ranks.

    They are sharded over the last dimension of the grid, and replicated over the first of two.
    """

    def placed(tensor: Tensor) -> Tensor:
        if not grid:
            return tensor.to(device)
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placements = [Replicate(), Shard(0)][-len(grid) :]
        return distribute_tensor(tensor.to(device), mesh, placements)

    mesh = init_device_mesh(device, grid) if grid else None

    weights = [nn.Parameter(placed(drawn(sum(rows), width, seed=i))) for i, (rows, width) in enumerate(SHAPES)]
    matrices = list(zip(weights, (rows for rows, _ in SHAPES), strict=True))
    optimizer = Muon(matrices, [{"params": []}], lr=0.1, weight_decay=0.1)
    for step in range(3):
        for i, weight in enumerate(weights):
            # One weight has no gradient in the last step.
            weight.grad = None if (step, i) == (2, 4) else placed(drawn(*weight.shape, seed=10 * i + step))
        optimizer.step()
    states = [optimizer.state[weight]["momentum_buffer"] for weight in weights]
    whole = [x.full_tensor() if is_sharded(x) else x for x in (*weights, *states)]
    return [x.detach().cpu() for x in whole]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("grid", [(2,), (3,), (2, 1), (2, 2)], ids=str)
def test_ranks_move_weights_as_one_rank_does(grid, device):
    """Bit for bit: whole matrices are exchanged, also where the ranks do not share them evenly."""
    expected = moved_weights(device)
    for found in run_ranks(moved_weights, prod(grid), device, grid, device=device):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def train_all(jobs) -> None:
    for config, batches, run in jobs:
        train(config, batches, run, held_out=batches, quiet=True)


def test_runs_on_ranks_resume_to_the_bit_and_equal_one_rank(tmp_path, make_wide):
    """Two data ranks and two context ranks; one that continues the run of another number of ranks."""
    config, batches = make_wide()
    split = dataclasses.replace(config, execution=ExecutionConfig(context_parallel=2))
    one, two, halves = (
        (each, batches, tmp_path / name) for each, name in ((config, "one"), (config, "two"), (split, "halves"))
    )
    train_all([one])
    run_ranks(train_all, 2, [two, halves])
    runs = [forget_last_checkpoint(run, f"{run.name}, continued") for _, _, run in (two, halves, one)]
    configs = (config, split, config)
    run_ranks(train_all, 2, [(each, batches, run) for each, run in zip(configs, runs, strict=True)])
    assert_equal_ends(runs[0], two[2])
    assert_equal_ends(runs[1], halves[2])
    expected = [row["loss"] for row in read_metrics(one[2])]
    for run in (two[2], halves[2], *runs):
        assert [row["loss"] for row in read_metrics(run)] == pytest.approx(expected, rel=1e-3)
    back = forget_last_checkpoint(two[2], "two, then one")
    train_all([(config, batches, back)])
    assert [row["loss"] for row in read_metrics(back)] == pytest.approx(expected, rel=1e-3)
