"""What is done with a converted model: it is saved, read into a context file, served, and decoded with drafts."""

import pytest
import torch
from torch.testing import assert_close

from sympow.conversion import swap_mixers
from sympow.data import ByteTokenizer, DataConfig
from sympow.models import (
    Context,
    LanguageModel,
    MixerConfig,
    ModelConfig,
    ModelDrafts,
    NgramDrafts,
    generate,
    load_context,
    save_context,
)
from sympow.ops import memory
from sympow.serving import Engine, PrefixCache
from sympow.training import RunConfig, TrainingConfig, load_model
from sympow.training.run_folder import write_run_folder
from tests.draws import disturb
from tests.serving.conftest import Client, ask, tokens

PATTERNS = {
    "delta": ("delta", {}),
    "heads of their own": ("delta,window,power", {"unshare": True, "p": 3}),
    "among gated layers": ("delta*2,gated", {}),
}


@pytest.fixture(params=PATTERNS, scope="module")
def student(request) -> LanguageModel:
    """A converted model of byte tokens and five layers, whose greedy texts do not repeat one token."""
    mixer = MixerConfig("softmax", {"bias": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    teacher = LanguageModel(ModelConfig(256, 32, 5, 4, (mixer,), body="llama", n_kv_heads=2), seed=0)
    pattern, options = PATTERNS[request.param]
    return disturb(swap_mixers(teacher, pattern, window=9, **options), 0.2, seed=1).eval()


def greedy(model: LanguageModel, prompt: torch.Tensor, new: int = 12, **options) -> list[int]:
    return generate(model, prompt[None], new, temperature=0, **options).tokens[0].tolist()


def test_a_folder_holds_the_same_bits(student, tmp_path):
    config = RunConfig("student", student.config, DataConfig(), TrainingConfig(context=16, steps=1, warmup_steps=0))
    read = load_model(write_run_folder(tmp_path / "run", config, student, tokenizer=None)).model.eval()
    assert read.config == student.config
    weights = student.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in read.state_dict().items())
    assert torch.equal(read(tokens(30)[None]), student(tokens(30)[None]))


@torch.no_grad()
def test_a_context_file_goes_on_as_the_text_does(student, tmp_path):
    """Two rows, read in pieces; the state in the file has the size that is told."""
    text, more = torch.stack([tokens(41), tokens(41, 1)]), torch.stack([tokens(7, 2), tokens(7, 3)])
    save_context(tmp_path / "a.ctx", student, Context.begin(student, 2).read(student, text, chunk=16))
    context = load_context(tmp_path / "a.ctx", student)
    assert sum(each.numel() for each in context.state.tensors()) <= 2 * student.state_size(41) + 64
    logits, _ = student.step(more, context.state)
    assert_close(logits, student(torch.cat([text, more], dim=1))[:, -1], rtol=1e-4, atol=1e-4)


def test_requests_that_share_a_beginning_are_answered_as_alone(student):
    engine = Engine(student, ByteTokenizer(), slots=2, queue=16, chunk=16, prefixes=PrefixCache(student, 1 << 24))
    engine.start()
    shared = tokens(48)
    prompts = [torch.cat([shared, tokens(n, n)]) for n in (1, 20, 3)] + [tokens(n, n) for n in (1, 16, 33)]
    clients = [Client(prompt, 9 + n, stream=n % 2 == 0) for n, prompt in enumerate(prompts)]
    answers = [*ask(engine, clients[0]), *ask(engine, *clients[1:])]
    engine.close()
    for n, (prompt, (drawn, *_)) in enumerate(zip(prompts, answers, strict=True)):
        assert drawn == greedy(student, prompt, 9 + n)
    assert answers[1][2].usage.cached_tokens == 32


def test_a_state_that_no_memory_holds_is_refused(student, monkeypatch):
    """Linux would give out the memory, and end the process when it is used."""
    held = 4 * 3 * student.state_size(0)
    monkeypatch.setattr(memory, "memory_of", lambda device: memory.Memory(held - 1, 2 * held))
    with pytest.raises(ValueError, match=r"a state of 5 layers for 3 sequences needs .* of memory; this machine has"):
        student.init_state(3)
    monkeypatch.setattr(memory, "memory_of", lambda device: memory.Memory(held, 2 * held))
    assert student.init_state(3).nbytes >= held


def test_proposed_tokens_change_nothing(student):
    prompt = tokens(20).repeat(2)
    expected = greedy(student, prompt, 20)
    for drafts in (NgramDrafts(), ModelDrafts(student)):
        assert greedy(student, prompt, 20, drafts=drafts) == expected
