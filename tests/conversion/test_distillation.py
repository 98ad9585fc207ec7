"""Distillation by the trainer: stages, gaps, kills, ranks, and the two losses against their formulas."""

import dataclasses
import shutil
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from sympow.cli import main
from sympow.conversion import Distillation, distill, distillation_run, swap_mixers
from sympow.conversion.distillation import hides_nothing, narrow_windows
from sympow.data import Batches, BPETokenizer, ByteTokenizer, DataConfig, TokenCorpus
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.training import (
    DistillationConfig,
    RunConfig,
    TrainingConfig,
    load_checkpoint,
    load_model,
    read_metrics,
    run,
    train,
)
from sympow.training.checkpoint import list_checkpoints
from sympow.training.devices import usual_precision
from sympow.training.run_folder import read_config, write_run_folder
from tests.draws import disturb
from tests.ranks import run_ranks

VOCAB, STEPS = 17, 9
SOFTMAX = MixerConfig("softmax", {"bias": False})
CONFIG = ModelConfig(VOCAB, 16, 3, 2, (SOFTMAX,), body="llama")


def teacher(scale: float = 0.3, layers: int = 3) -> LanguageModel:
    config = dataclasses.replace(CONFIG, n_layers=layers)
    return disturb(LanguageModel(config, seed=1), scale, seed=2).eval()


def job(
    stages: DistillationConfig | None = None, kind: str = "power", **training
) -> tuple[RunConfig, Batches, LanguageModel]:
    student = swap_mixers(teacher(), (kind, kind, "softmax"))
    settings = {"context": 16, "batch_size": 4, "micro_batch_size": 1, "steps": STEPS, "warmup_steps": 2,
                "learning_rate": 1e-2, "log_every": 1, "checkpoint_every": 2, "evaluate_every": 100,
                "evaluation_batches": 2}  # fmt: skip
    stages = stages or DistillationConfig("start", "teacher", layer_steps=3, text_steps=3)
    data = DataConfig(tokenizer="bytes", pack=False)
    config = RunConfig("tiny", student.config, data, TrainingConfig(**settings | training), distillation=stages)
    texts = [(torch.arange(70) * step % VOCAB).numpy() for step in (1, 2, 3, 5)]
    corpus = TokenCorpus.from_documents(texts, VOCAB)
    return config, Batches(corpus, 16, config.training.rows_per_pass, 0, pack=False), student


def distilled(folder, **training) -> list[dict]:
    config, batches, student = job(**training)
    objective = Distillation(config.distillation, STEPS, teacher(), torch.device("cpu"))
    start = student.state_dict()
    train(config, batches, folder, held_out=batches, start=start, objective=objective, quiet=True)
    return read_metrics(folder)


def timeless(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows]


def test_stages_follow_each_other_and_end_with_a_gap(tmp_path):
    rows = distilled(tmp_path / "run")
    assert [row["stage"] for row in rows] == [1] * 3 + [2] * 3 + [3] * 3
    ends = [row for row in rows if "gap" in row]
    assert [row["step"] for row in ends] == [3, 6, 9]
    assert len({row["teacher_loss"] for row in ends}) == 1
    assert all(row["gap"] == row["held_out_loss"] - row["teacher_loss"] for row in ends)
    rates = [row["lr"] for row in rows]
    assert rates[3] < rates[4] and rates[6] < rates[5]  # it rises anew where a stage begins


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_is_killed_in_any_stage_ends_in_the_same_numbers(tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr("sympow.training.optimizer.LEAST_SIDE", 8)  # the model is small
    distilled_so = partial(distilled, keep_checkpoints=9, optimizer=optimizer)
    whole = distilled_so(tmp_path / "whole")
    states = load_checkpoint(list_checkpoints(tmp_path / "whole")[0]).optimizer["state"].values()
    assert any("momentum_buffer" in state for state in states) == (optimizer == "muon")
    for stop in (2, 4, 8):
        folder = tmp_path / f"killed-{stop}"
        shutil.copytree(tmp_path / "whole", folder)
        for file in list_checkpoints(folder):
            if int(file.stem.split("-")[1]) > stop:
                file.unlink()
        assert timeless(distilled_so(folder)) == timeless(whole)


def test_a_run_goes_on_with_the_teacher_that_it_had(tmp_path):
    """Not with another one at the same path."""
    distilled(tmp_path / "run", keep_checkpoints=9)
    for file in list_checkpoints(tmp_path / "run")[1:]:
        file.unlink()
    config, batches, student = job(keep_checkpoints=9)
    other = Distillation(config.distillation, STEPS, teacher(scale=0.2), torch.device("cpu"))
    start = student.state_dict()
    with pytest.raises(ValueError, match="the weights of the teacher have changed since step 2; restore them, remove"):
        train(config, batches, tmp_path / "run", held_out=batches, start=start, objective=other, quiet=True)


@pytest.mark.parametrize("kind", ["power", "delta"])
def test_layers_and_predictions_approach_the_teacher(tmp_path, kind):
    stages = DistillationConfig("start", "teacher", layer_steps=STEPS)
    rows = distilled(tmp_path / "layers", stages=stages, kind=kind)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    student = load_model(tmp_path / "layers").model
    start = swap_mixers(teacher(), (kind, kind, "softmax"))
    own, before = dict(student.named_parameters()), dict(start.named_parameters())
    assert torch.equal(own["embedding.weight"], before["embedding.weight"])
    assert torch.equal(own["blocks.2.mixer.qkv.weight"], before["blocks.2.mixer.qkv.weight"])
    assert not torch.equal(own["blocks.0.mixer.qkv.weight"], before["blocks.0.mixer.qkv.weight"])
    rows = distilled(tmp_path / "predictions", stages=DistillationConfig("start", "teacher"), kind=kind)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


def test_the_losses_are_their_formulas():
    other, (_, batches, student) = teacher().double(), job()
    student.double()
    tokens, targets = batches[0].tokens, batches[0].targets.clone()
    targets[:, ::3] = -100
    real = targets != -100
    p, q = (model(tokens).log_softmax(-1) for model in (other, student))
    expected = ((p.exp() * (p - q)).sum(-1) * real).sum()
    found = student.divergence_sum(tokens, targets, other)
    assert_close(found, expected)
    weights = [student.embedding.weight, student.blocks[0].mixer.qkv.weight]
    for own, formula in zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True):
        assert_close(own, formula)
    x, errors = other.embedding(tokens), []
    for number, (own_block, block) in enumerate(zip(student.blocks, other.blocks, strict=True)):
        normed = block.mixer_norm(x)
        right = block.mixer(normed)
        error = (own_block.mixer(normed) - right).square().mean(-1)
        if number < 2:  # the third layer is softmax attention in both
            errors.append((error * real).sum() / right.square().mean())
        x = block(x)
    found = student.mixing_error_sum(tokens, targets, other)
    assert_close(found.double(), torch.stack(errors).mean(), rtol=1e-5, atol=0)


def windowed(folder, stages: DistillationConfig, pattern: str = "window,power,gated", window: int = 12, **run):
    """Distills a model with windows; returns its metrics, and the windows in every pass of a step, with its stage."""
    config, batches, _ = job(stages, **run)
    student, seen = swap_mixers(teacher(), pattern, window=window), []
    config = dataclasses.replace(config, model=student.config)

    class Watched(Distillation):
        def loss_sum(self, model, rows, step):
            seen.append((step, self.stage(step)[0], model.blocks[0].mixer.window))
            return super().loss_sum(model, rows, step)

    objective = Watched(stages, STEPS, teacher(), torch.device("cpu"), seed=config.training.seed)
    train(config, batches, folder, held_out=batches, start=student.state_dict(), objective=objective, quiet=True)
    return read_metrics(folder), seen


def test_a_run_is_not_written_into_the_folder_of_a_model_that_it_reads(tmp_path):
    """`restart` would remove this model."""
    config, _, student = job()
    plain = dataclasses.replace(config, distillation=None)
    for name, model in (("start", student), ("teacher", teacher())):
        write_run_folder(tmp_path / name, dataclasses.replace(plain, model=model.config), model, tokenizer=None)
    stages = DistillationConfig(str(tmp_path / "start"), str(tmp_path / "teacher"))
    for name, what in (("start", "from which it begins"), ("teacher", "which holds its teacher")):
        message = f"the run cannot be written into {tmp_path / name}, {what}: give another folder"
        for restart in (False, True):
            with pytest.raises(ValueError, match=message):
                distill(dataclasses.replace(config, distillation=stages), tmp_path / name, restart=restart, quiet=True)
        assert load_model(tmp_path / name).model.config.n_layers == 3
    with pytest.raises(ValueError, match="from which it begins"):
        run(dataclasses.replace(plain, start=stages.start), tmp_path / "start", restart=True, quiet=True)
    assert load_model(tmp_path / "start").model.config == student.config


STAGES = DistillationConfig("start", "teacher", layer_steps=3, text_steps=3, window_dropout=0.5)


def test_windows_are_narrow_in_a_share_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("sympow.conversion.distillation.NARROW", 2)
    rows, seen = windowed(tmp_path / "run", STAGES)
    widths: dict[int, set[int]] = {}
    for step, _, window in seen:
        widths.setdefault(step, set()).add(window)
    assert all(len(each) == 1 for each in widths.values())  # all passes of a step agree
    assert [widths[step] for step in range(3)] == [{12}] * 3  # stage 1
    later = [next(iter(widths[step])) for step in range(3, STEPS)]
    assert set(later) == {2, 12}
    again, same = windowed(tmp_path / "again", STAGES)
    assert same == seen and timeless(again) == timeless(rows)
    _, other = windowed(tmp_path / "other", STAGES, seed=3)
    assert [window for *_, window in other] != [window for *_, window in seen]
    always, seen = windowed(tmp_path / "always", dataclasses.replace(STAGES, window_dropout=1))
    assert {window for _, stage, window in seen if stage > 1} == {2}
    never, _ = windowed(tmp_path / "never", dataclasses.replace(STAGES, window_dropout=0.0))
    assert timeless(always)[:3] == timeless(never)[:3] and timeless(always)[4:] != timeless(never)[4:]
    model = load_model(tmp_path / "always").model
    assert model.blocks[0].mixer.window == 12  # of evaluations and checkpoints
    assert model.config.mixer(0).options["window"] == 12


def test_a_run_with_narrow_windows_that_is_killed_ends_in_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("sympow.conversion.distillation.NARROW", 2)
    whole, _ = windowed(tmp_path / "whole", STAGES, keep_checkpoints=9)
    for stop in (4, 6):
        shutil.copytree(tmp_path / "whole", tmp_path / str(stop))
        for file in list_checkpoints(tmp_path / str(stop)):
            if int(file.stem.split("-")[1]) > stop:
                file.unlink()
        again, _ = windowed(tmp_path / str(stop), STAGES, keep_checkpoints=9)
        assert timeless(again) == timeless(whole)


def test_losses_and_gradients_of_narrow_windows_are_those_of_a_model_with_such_windows():
    """Also where the backward computes the blocks again."""
    _, batches, _ = job()
    stages = dataclasses.replace(STAGES, layer_steps=0, text_steps=0, window_dropout=1.0)
    objective = Distillation(stages, STEPS, teacher(), torch.device("cpu"))
    wide, narrow = (swap_mixers(teacher(), "window,power,gated", window=window) for window in (90, 64))
    rows = batches[0]
    tokens = torch.cat([rows.tokens] * 6, 1)
    rows = rows._replace(tokens=tokens, targets=tokens)
    found = []
    for model in (wide, narrow):
        model.checkpoint_activations()
        with objective.during(model, 0):
            loss = objective.loss_sum(model, rows, 0)
            loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
        assert not torch.equal(loss, model.divergence_sum(tokens, tokens, teacher())) or model is narrow
    assert_close(found[0], found[1])
    assert wide.blocks[0].mixer.window == 90


def test_windows_are_as_they_were_after_an_error():
    objective = Distillation(dataclasses.replace(STAGES, window_dropout=1.0), STEPS, teacher(), torch.device("cpu"))
    model = swap_mixers(teacher(), "window", window=90)
    with pytest.raises(RuntimeError, match="on purpose"), objective.during(model, 5):
        assert [block.mixer.window for block in model.blocks] == [64] * 3
        raise RuntimeError("on purpose")
    assert [block.mixer.window for block in model.blocks] == [90] * 3


def test_windows_within_other_mixers_are_narrow_too():
    mixers = (
        MixerConfig("hybrid_heads", {"window": 90}),
        MixerConfig("short_convolution", {"mixer": "window", "options": {"window": 90}}),
    )
    model = LanguageModel(ModelConfig(16, 24, 2, 2, mixers))
    with narrow_windows(model, 64):
        assert [model.blocks[0].mixer.near.window, model.blocks[1].mixer.mixer.window] == [64, 64]
    assert [model.blocks[0].mixer.near.window, model.blocks[1].mixer.mixer.window] == [90, 90]


def test_windows_that_cannot_be_narrower_are_told(folders, tmp_path, capsys):
    """The command goes on, because a run that began so must be able to end."""
    fields = f"data.kind=text data.path={folders}/text data.pack=true data.held_out=0.5 training.context=16 " \
        "training.batch_size=2 training.steps=2 training.warmup_steps=0 training.evaluation_batches=1 " \
        "distillation.layer_steps=1 distillation.text_steps=0 training.device=cpu"  # fmt: skip
    words = ["distill", f"{folders}/student", "--teacher", f"{folders}/teacher", "--quiet", *fields.split()]
    for share, lines in (("0.0", 0), ("0.5", 1)):
        assert main([*words, "--out", f"{tmp_path}/{share}", f"distillation.window_dropout={share}"]) == 0
        err = capsys.readouterr().err
        assert err.count("window_dropout has no effect: no layer has a window of more than 64 tokens\n") == lines
    inner = {"mixer": "window", "options": {"window": 90}}
    for mixer, none in (
        (MixerConfig("window", {"window": 64}), True),
        (MixerConfig("window", {"window": 65}), False),
        (MixerConfig("short_convolution", inner), False),
        (MixerConfig("power_delta"), True),
    ):
        model = ModelConfig(16, 24, 2, 2, (MixerConfig("softmax"), mixer))
        config = dataclasses.replace(to_distill(folders), model=model)
        assert not hides_nothing(config)
        stages = dataclasses.replace(config.distillation, window_dropout=0.5)
        assert hides_nothing(dataclasses.replace(config, distillation=stages)) == none


def test_the_kinds_of_layers_and_two_windows_are_few_graphs():
    """A graph for each kind of layer, and one more for windows that are narrow."""
    _, batches, _ = job()
    stages = dataclasses.replace(STAGES, layer_steps=0, text_steps=0, window_dropout=0.5)
    tokens = torch.cat([batches[0].tokens] * 6, 1)
    rows = batches[0]._replace(tokens=tokens, targets=tokens)
    own, other = teacher(layers=4), teacher(layers=4)
    model = swap_mixers(own, "window,power,delta,gated", window=90).train()
    objective = Distillation(stages, STEPS, other, torch.device("cpu"))
    steps = [next(s for s in range(99) if narrow == (type(objective.during(model, s)) is not nullcontext))
             for narrow in (False, True)]  # fmt: skip

    def losses(step):
        with objective.during(model, step):
            loss = objective.loss_sum(model, rows, step)
            loss.backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        model.zero_grad()
        return loss.detach(), gradient

    expected = [losses(step) for step in steps]
    assert not torch.equal(expected[0][0], expected[1][0])
    torch.compiler.reset()
    counters.clear()
    for each in (model, objective.reference):
        each.compile_parts(backend="eager", fullgraph=True)
    for step in (*steps, *steps):
        assert_close(losses(step), expected[steps.index(step)], rtol=1e-4, atol=1e-4)
    # Blocks of four kinds, a narrow one, a norm and the divergence; the teacher's block and norm.
    assert counters["stats"]["unique_graphs"] == 9
    with torch.no_grad():
        for each in (model.eval(), objective.reference):
            each.loss_sum(tokens, tokens)
    assert counters["stats"]["unique_graphs"] == 15
    torch.compiler.reset()


def test_the_teacher_can_be_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(LanguageModel, "compile_parts", lambda self, **_: compiled.append(self))
    made = Distillation(STAGES, STEPS, teacher(), torch.device("cpu"), compile=True)
    assert compiled == [made.reference]
    Distillation(STAGES, STEPS, teacher(), torch.device("cpu"))
    assert len(compiled) == 1


def test_no_step_looks_at_tokens_where_gradients_are_off(monkeypatch):
    """On a GPU each look would wait for the device; with gradients there is none."""
    _, batches, student = job()
    tokens, targets, look, looks = batches[0].tokens, batches[0].targets.clamp(min=0), torch.Tensor.aminmax, []

    def counted(self, **options):
        looks.append(torch.is_grad_enabled())
        return look(self, **options)

    monkeypatch.setattr(torch.Tensor, "aminmax", counted)
    student.divergence_sum(tokens, targets, teacher())
    student.mixing_error_sum(tokens, targets, teacher())
    assert looks and all(looks)
    for loss in (student.divergence_sum, student.mixing_error_sum):
        with pytest.raises(ValueError, match="tokens must lie in a vocabulary of 17 tokens; got 32"):
            loss(tokens + 17, targets, teacher())


def test_layers_behind_the_last_one_that_differs_are_not_computed():
    _, batches, _ = job()
    other, student = teacher(), swap_mixers(teacher(), "softmax,power,softmax")

    def fails(*_):
        raise AssertionError("computed")

    other.blocks[1].with_mlp = other.blocks[2].mixed = student.blocks[0].mixed = fails
    assert student.mixing_error_sum(batches[0].tokens, batches[0].tokens, other) > 0


def test_a_teacher_reads_pieces_and_its_model_whole_rows():
    _, batches, student = job()
    tokens, targets = batches[0].tokens, batches[0].targets
    other = teacher()
    with torch.no_grad():
        p = other(tokens.reshape(-1, 4)).log_softmax(-1).view(*tokens.shape, -1)
        q = student(tokens).log_softmax(-1)
        expected = ((p.exp() * (p - q)).sum(-1) * (targets != -100)).sum()
    stages = DistillationConfig("start", "teacher", layer_steps=1, teacher_context=4)
    objective = Distillation(stages, STEPS, other, torch.device("cpu"))
    assert_close(objective.loss_sum(student, batches[0], 1), expected)
    assert_close(
        objective.loss_sum(student, batches[0], 0),
        student.mixing_error_sum(tokens.reshape(-1, 4), targets.reshape(-1, 4), other),
    )
    with pytest.raises(ValueError, match="expected rows of a multiple of 5 tokens for the teacher; got rows of 16"):
        student.divergence_sum(tokens, targets, other, teacher_context=5)


@pytest.mark.parametrize(
    ("stages", "data", "line"),
    [
        ({"window_dropout": 1.5}, {}, "distillation.window_dropout must be from 0 to 1, got 1.5"),
        ({"window_dropout": float("nan")}, {}, "distillation.window_dropout must be finite"),
        ({"teacher_context": -1}, {}, "distillation.teacher_context must be at least 0"),
        ({"teacher_context": 5}, {}, "must be a multiple of distillation.teacher_context, got 16 and 5"),
        ({"teacher_context": 8}, {"pack": True}, "cuts rows, but not rows of packed documents: set data.pack = false"),
    ],
)
def test_windows_and_pieces_that_do_not_fit_are_refused(stages, data, line):
    config, _, _ = job()
    with pytest.raises(ValueError, match=line):
        dataclasses.replace(config, distillation=DistillationConfig("start", "teacher", **stages),
                            data=dataclasses.replace(config.data, **data))  # fmt: skip


def on_ranks(folder: str) -> None:
    distilled(folder)


def test_two_ranks_train_as_one(tmp_path):
    alone = distilled(tmp_path / "alone")
    run_ranks(on_ranks, 2, tmp_path / "ranks")
    together = read_metrics(tmp_path / "ranks")
    assert [row["loss"] for row in together] == pytest.approx([row["loss"] for row in alone], rel=1e-3)
    assert together[-1]["gap"] == pytest.approx(alone[-1]["gap"], abs=1e-3)


def test_settings_that_do_not_fit_are_refused():
    config, _, student = job()
    with pytest.raises(ValueError, match=r"must be at most training\.steps together, got 5 and 5 of 9"):
        dataclasses.replace(config, distillation=DistillationConfig("a", "b", layer_steps=5, text_steps=5))
    wide = LanguageModel(dataclasses.replace(CONFIG, d_model=32), seed=0)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="a model and its teacher must have one d_model; got 16 and 32"):
        student.mixing_error_sum(tokens, tokens, wide)
    with pytest.raises(ValueError, match="there is nothing to compare"):
        teacher().mixing_error_sum(tokens, tokens, teacher())
    assert RunConfig.from_dict(config.to_dict()) == config
    again = distillation_run(distillation_run(config, "start", "teacher"), "student", "teacher")
    assert again.distillation.start == "student" and again.name == f"{config.name}-distilled"  # said once


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A student, its teacher, a teacher of other tokens, and a text."""
    path = tmp_path_factory.mktemp("distillation")
    model = LanguageModel(dataclasses.replace(CONFIG, vocab_size=264), seed=1)
    texts = {"own": "the kernel of a kernel", "other": "abab cdcd, efgh ijkl"}
    tokens = {name: BPETokenizer.train([text], 264) for name, text in texts.items()}
    settings = TrainingConfig(context=16, steps=1, warmup_steps=0)
    runs = (("student", swap_mixers(model), "own"), ("teacher", model, "own"), ("stranger", model, "other"))
    for name, made, own in runs:
        tokens[own].save(path / f"{own}.json")
        text = (path / f"{own}.json").read_text()
        write_run_folder(path / name, RunConfig(name, made.config, DataConfig(), settings), made, tokenizer=text)
    (path / "text").mkdir()
    (path / "text" / "a.txt").write_text("the kernel of a kernel\n" * 40)
    return path


def to_distill(folders, teacher="teacher", **data):
    run = distillation_run(read_config(folders / "student"), f"{folders}/student", f"{folders}/{teacher}")
    training = TrainingConfig(context=16, batch_size=2, steps=2, warmup_steps=0, evaluation_batches=1)
    stages = dataclasses.replace(run.distillation, layer_steps=1, text_steps=1)
    data = DataConfig(**{"kind": "text", "path": f"{folders}/text", "held_out": 0.5, "pack": True} | data)
    return dataclasses.replace(run, training=training, distillation=stages, data=data)


@pytest.mark.parametrize(
    ("field", "sets"),
    [
        ("distillation.teacher=other", "--teacher sets distillation.teacher"),
        ("distillation.start=other", "DIR sets distillation.start"),
        ("distillation=none", "the command sets distillation"),
    ],
)
def test_a_field_does_not_replace_what_the_command_names(folders, tmp_path, fails, field, sets):
    words = ["distill", f"{folders}/student", "--teacher", f"{folders}/teacher", "--out", tmp_path / "out"]
    assert fails(*words, field) == f"{sets} already: leave {field} out"


def test_a_model_that_reads_bytes_gets_no_tokenizer(folders, tmp_path, fails):
    shutil.copytree(folders / "student", tmp_path / "student")
    ByteTokenizer().save(tmp_path / "student" / "tokenizer.json")
    words = ["distill", tmp_path / "student", "--teacher", folders / "teacher", "--out", tmp_path / "out"]
    line = f"{tmp_path}/student reads text by its own tokenizer, bytes: leave data.tokenizer=bpe out"
    assert fails(*words, f"data.path={folders}/text", "data.kind=text", "data.tokenizer=bpe") == line


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_teacher_of_other_tokens_is_refused(folders, tmp_path, checkpoint):
    """Also where the start is a checkpoint in a run folder."""
    run = to_distill(folders, "stranger")
    if checkpoint:
        (start,) = (folders / "student" / "checkpoints").glob("step-*")
        run = dataclasses.replace(run, distillation=dataclasses.replace(run.distillation, start=str(start)))
    with pytest.raises(ValueError, match=r"stranger and .*student.* differ in their tokenizers; a teacher needs"):
        distill(run, tmp_path, quiet=True)


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_a_lost_tokenizer_is_refused(folders, tmp_path, name):
    """A new one, trained on the text of the run, would have other tokens than the models know."""
    shutil.copytree(folders / name, tmp_path / "lost")
    (tmp_path / "lost" / "tokenizer.json").unlink()
    config = to_distill(folders)
    field = {"student": "start", "teacher": "teacher"}[name]
    stages = dataclasses.replace(config.distillation, **{field: f"{tmp_path}/lost"})
    with pytest.raises(FileNotFoundError, match=r"lost/tokenizer\.json is missing"):
        distill(dataclasses.replace(config, distillation=stages), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"tokenizer": "bytes"}, ValueError, "in tokens of bytes, not in those of the model to distill"),
        ({"tokenizer": "nosuch"}, FileNotFoundError, "tokenizer file does not exist: nosuch"),
        ({"vocab_size": 300}, ValueError, "data.vocab_size = 300, but the tokenizer of the model to distill has 264"),
    ],
)
def test_data_in_other_tokens_are_refused(folders, tmp_path, data, error, message):
    with pytest.raises(error, match=message):
        distill(to_distill(folders, **data), tmp_path, quiet=True)


def test_options_that_say_what_holds_are_taken(folders, tmp_path):
    config = to_distill(folders, tokenizer=f"{folders}/own.json", vocab_size=264)
    assert distill(config, tmp_path, quiet=True).step == 2


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_precision_is_chosen_by_the_processor(folders, tmp_path, monkeypatch, precision):
    """And kept where the run continues on another one, or where the command names it."""
    fields = "data.kind=text data.pack=true data.held_out=0.5 training.context=16 training.batch_size=2 " \
        "training.steps=2 training.warmup_steps=0 training.evaluation_batches=1 distillation.layer_steps=1 " \
        "distillation.text_steps=0 training.device=cpu"  # fmt: skip

    def command(out: str, *more: str) -> str:
        words = ["distill", f"{folders}/student", "--teacher", f"{folders}/teacher", "--out", f"{tmp_path}/{out}"]
        assert main([*words, f"data.path={folders}/text", *fields.split(), *more, "--quiet"]) == 0
        return read_config(tmp_path / out).training.precision

    assert usual_precision(torch.device("cuda")) == "bf16"
    assert usual_precision(torch.device("cpu")) in ("bf16", "float32")
    for processor in (precision, "float32" if precision == "bf16" else "bf16"):
        monkeypatch.setattr("sympow.training.devices.usual_precision", lambda device, processor=processor: processor)
        assert command("out") == precision
        assert command("named", "training.precision=float32") == "float32"


def test_a_second_phase_begins_with_the_student_of_the_first(folders, tmp_path, monkeypatch):
    """On longer rows of two sources, with the teacher in pieces, and at last on the text alone."""
    monkeypatch.setattr("sympow.training.optimizer.LEAST_SIDE", 8)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    words = ["--teacher", f"{folders}/teacher", "--quiet"]
    fields = ["data.kind=text", f"data.path={folders}/text", "data.held_out=0.5", "data.pack=false",
              "training.batch_size=2", "training.steps=3", "training.warmup_steps=1", "training.evaluation_batches=1",
              "training.device=cpu", "training.optimizer=muon", "distillation.window_dropout=0.5"]  # fmt: skip
    more = ["training.context=16", "distillation.layer_steps=1", "distillation.text_steps=1"]
    assert main(["distill", f"{folders}/student", "--out", str(first), *words, *fields, *more]) == 0
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(f"the kernel {name} of a kernel\n" * 99)
    both = ["data.path=none", f"data.paths={tmp_path}/a,{tmp_path}/b", "data.weights=3,1",
            f"data.held_out_path={folders}/text"]  # fmt: skip
    fields = [field for field in fields if not field.startswith(("data.path", "data.held_out"))]
    more = ["training.context=64", "distillation.layer_steps=0", "distillation.text_steps=0",
            "distillation.teacher_context=16"]  # fmt: skip
    command = ["distill", str(first), "--out", str(second), *words, *fields, *both, *more]
    assert main(command) == 0
    assert [row["stage"] for row in read_metrics(second)] == [2]
    begun = load_checkpoint(list_checkpoints(first)[-1]).model["embedding.weight"]
    ended = load_checkpoint(list_checkpoints(second)[-1]).model["embedding.weight"]
    assert 0 < (begun - ended).abs().max() < 0.02  # three steps from where the first phase ended
    more = ["training.context=64", "distillation.layer_steps=0", "distillation.text_steps=3"]
    assert main(["distill", str(second), "--out", str(third), *words, *fields, *both, *more]) == 0
    rows = read_metrics(third)
    assert [row["stage"] for row in rows] == [3] and "gap" in rows[-1]
