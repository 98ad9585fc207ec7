"""Models served by vLLM give the greedy tokens of `generate`. docs/guides/vllm.md has commands that run these tests."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sympow.layers import make_mixer
from sympow.layers.attention import BLOCK
from sympow.models import MixerConfig, ModelConfig, generate
from sympow.training import load_model
from tests.integrations.small import loud_model

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS = 24
TIE = 2e-5  # of logits of about 3, in float32: ten times what the order of sums was seen to change
VOCAB = 256
POWER = MixerConfig("power")
MODELS = {
    "llama": {"body": "llama", "n_kv_heads": 2},
    "gpt2": {"n_kv_heads": 2, "mixers": (MixerConfig("power", {"rotation": "data"}),), "tie_embeddings": False},
    "hybrid": {
        "body": "llama",
        "n_kv_heads": 2,
        "n_layers": 3,
        "mixers": (POWER, MixerConfig("window", {"window": 24}), MixerConfig("softmax")),
    },
    "hybrid of windows, delta rule and gated softmax": {
        "n_layers": 3,
        "mixers": (
            MixerConfig("hybrid_heads", {"window": 24}),
            MixerConfig("softmax", dict(BLOCK) | {"gate": True, "rotation": "none"}),
            MixerConfig("hybrid_heads", {"window": 24}),
        ),
    },
    "softmax with all parts": {
        "body": "llama",
        "n_layers": 4,
        "mixers": (
            POWER,
            MixerConfig("softmax", {"gate": True, "n_kv_heads": 2, "head_dim": 48, "qk_norm": True}),
            MixerConfig(
                "window", {"window": 20, "gate": True, "short_convolution": 3, "n_kv_heads": 2, "value_dim": 40}
            ),
            MixerConfig("linear"),
        ),
    },
    "linear": {"mixers": (MixerConfig("linear", {"feature_map": "elu+1"}),)},
    "delta rule": {"n_kv_heads": 2, "mixers": (MixerConfig("power_delta"),)},
    "retnet": {"mixers": (MixerConfig("retnet"),)},
    "rwkv4": {"mixers": (MixerConfig("rwkv4"),)},
    "rwkv7": {"body": "llama", "mixers": (MixerConfig("rwkv7"),)},
    "p = 4 behind a convolution": {
        "body": "llama",
        "mixers": (MixerConfig("short_convolution", {"mixer": "power", "options": {"p": 4, "head_dim": 8}}),),
    },
    "body of RWKV-7": {"body": "rwkv7"},
    "a state that grows": {"mixers": (MixerConfig("short_convolution", {"mixer": "softmax"}),)},
    "no state": {"mixers": (MixerConfig("softmax"),)},
}

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="needs vLLM, in an environment of its own: docs/guides/vllm.md has the commands",
)


def make(name):
    """A model whose greedy text does not repeat at once."""
    shape = {"vocab_size": VOCAB, "d_model": 128, "n_layers": 2, "n_heads": 4}
    return loud_model(ModelConfig(**shape | MODELS[name]))


def rounds_of(sizes, step):
    """Prompts that share their first 0 to 4 `step` tokens, some longer than a chunk of prefill."""
    generator = torch.Generator().manual_seed(3)

    def draw(n):
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    shared = draw(4 * step)
    return [[shared[: step * (i % 5)] + draw(1 + 7 * i % 50) for i in range(size)] for size in sizes]


def run(folder, model, rounds, **engine):
    """Writes a model into a folder, and gives it to `serve`."""
    from sympow.integrations.transformers.folders import from_native

    from_native(model).save_pretrained(folder)
    return serve(folder, rounds, **engine)


def serve(folder, rounds, **engine):
    """Runs vLLM, which writes answer.json in the folder if it succeeds."""
    options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    engine = {"model": str(folder), "block_size": 32, "enable_prefix_caching": True} | options | engine
    request = json.dumps({"engine": engine, "rounds": rounds, "new_tokens": NEW_TOKENS})
    words = [sys.executable, "-m", "tests.integrations.vllm_engine", str(folder / "answer.json")]
    return subprocess.run(words, input=request, capture_output=True, text=True, cwd=ROOT)


def check(folder, name, sizes, step=40, **engine):
    model, rounds = make(name), rounds_of(sizes, step)
    return check_answer(folder, model, rounds, run(folder, model, rounds, **engine))


def check_answer(folder, model, rounds, done):
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((folder / "answer.json").read_text())
    for prompts, answers in zip(rounds, answer["tokens"], strict=True):
        for row, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
            expected = generate(model, torch.tensor([prompt]), NEW_TOKENS, temperature=0).tokens[0].tolist()
            assert tokens == expected or ends_at_a_tie(model, prompt, expected, tokens), f"{len(prompts)}, {row}"
    return answer


def ends_at_a_tie(model, prompt, expected, tokens):
    """Whether the first token that differs has the logit of the expected one, as far as float32 tells them apart.

    Batches of other sizes add up in another order, and logits of 3 then differ by a few 1e-6. In 32 prompts there can
    be a pair of logits as near as that: one is 3.3e-6 apart.
    """
    first = next(n for n, pair in enumerate(zip(expected, tokens, strict=True)) if pair[0] != pair[1])
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.tensor([prompt + expected[:first]]))[0, -1]
    return abs(logits[expected[first]] - logits[tokens[first]]) < TIE


@needs_vllm
def test_batches_of_1_to_32_with_chunks_preemption_and_prefix_hits(tmp_path):
    counts = check(tmp_path, "llama", range(1, 33), num_gpu_blocks_override=12)
    assert counts["preemptions"] > 0 and counts["hits"] > 0


@needs_vllm
def test_pages_without_a_prefix_cache(tmp_path):
    counts = check(tmp_path, "llama", [1, 32], enable_prefix_caching=False, block_size=None)
    assert counts["hits"] == 0


@needs_vllm
@pytest.mark.parametrize(
    "name", ["gpt2", "linear", "delta rule", "retnet", "rwkv4", "rwkv7", "p = 4 behind a convolution"]
)
def test_other_models(tmp_path, name):
    counts = check(tmp_path, name, [1, 3, 32])
    assert counts["hits"] > 0


@needs_vllm
@pytest.mark.parametrize(
    "name", ["hybrid", "hybrid of windows, delta rule and gated softmax", "softmax with all parts"]
)
def test_hybrids(tmp_path, name):
    """vLLM makes their pages so large that only long beginnings are kept."""
    counts = check(tmp_path, name, [1, 3, 32], step=150, num_gpu_blocks_override=24)
    assert counts["preemptions"] > 0 and counts["hits"] > 0


@needs_vllm
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["brumby", "powercoder"])
def test_public_checkpoints_with_power_attention(tmp_path, kind, ranks):
    """A folder with the public names of weights is converted and exported, as a user does."""
    from sympow.cli import main
    from tests.integrations.test_transformers_power_models import CONFIGS, drawn, write

    folder = write(tmp_path / "hf", CONFIGS[kind], drawn(CONFIGS[kind]))
    assert main(["convert", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    rounds = rounds_of([1, 3, 32], step=40)
    engine = {} if ranks == 1 else {"tensor_parallel_size": ranks}
    done = serve(tmp_path / "exported", rounds, **engine)
    model = load_model(tmp_path / "run").model
    assert check_answer(tmp_path / "exported", model, rounds, done)["hits"] > 0


@needs_vllm
@pytest.mark.parametrize("name", ["llama", "hybrid", "softmax with all parts"])
def test_two_ranks(tmp_path, name):
    check(tmp_path, name, [1, 8], tensor_parallel_size=2)


@needs_vllm
def test_sums_in_8_bits_are_refused(tmp_path):
    done = run(tmp_path, make("softmax with all parts"), [], kv_cache_dtype="fp8")
    assert done.returncode != 0 and "the keys of gated softmax attention hold sums, which 8 bits round" in done.stderr


@needs_vllm
def test_lora_is_refused(tmp_path):
    done = run(tmp_path, make("llama"), [], enable_lora=True)
    assert done.returncode != 0 and "models of sympow take no LoRA in vLLM: merge the adapter" in done.stderr


@needs_vllm
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("body of RWKV-7", "vLLM serves the bodies gpt2 and llama; got 'rwkv7'"),
        ("a state that grows", "softmax attention and windows; got 'short_convolution' in layer 0"),
        ("no state", "vLLM serves models of which a layer keeps a state; this one has none"),
    ],
)
def test_what_is_refused(tmp_path, name, line):
    done = run(tmp_path, make(name), [])
    assert done.returncode != 0 and line in done.stderr


@needs_vllm
@pytest.mark.parametrize(
    ("key", "change", "line"),
    [
        ("model.embedding.weight", torch.Tensor.long, "is of torch.int64, not F64, F32, F16, BF16"),
        (
            "model.layers.0.block.mixer.out.weight",
            lambda x: x.to(torch.complex64),
            "is of torch.complex64, not F64, F32,",
        ),
        ("model.layers.1.block.mlp_in.weight", lambda x: x * torch.inf, "holds values that are not finite"),
        ("model.final_norm.weight", lambda x: x[:1].clone(), "has shape [1], the model needs [128]"),
        ("model.layers.1.block.mixer_norm.weight", lambda x: x[:1].clone(), "has shape [1], the model needs [128]"),
        ("model.layers.7.block.mixer.out.weight", None, "is not one of the model"),
    ],
)
def test_weights_that_a_copy_would_change_are_refused(tmp_path, key, change, line):
    """A cast would drop an imaginary part, and a copy would repeat a weight along an axis."""
    from safetensors.torch import load_file, save_file

    from sympow.integrations.transformers.folders import from_native

    from_native(make("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[key] = torch.zeros(3) if change is None else change(weights[key])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done = serve(tmp_path, [])
    assert done.returncode != 0 and f"{tmp_path} cannot be read: its weight {key} {line}" in done.stderr


@needs_vllm
@pytest.mark.parametrize("name", ["llama", "gpt2", "hybrid of windows, delta rule and gated softmax"])
def test_compiled_models(tmp_path, name):
    """On a CPU torch.compile makes one graph, in which a layer's states are one operator."""
    counts = check(tmp_path, name, [1, 3, 8], step=150, enforce_eager=False)
    assert counts["hits"] > 0 and (counts["graphs"], counts["breaks"]) == (1, 0)


@needs_vllm
def test_memory_is_measured_whatever_attention_leaves_in_its_output(monkeypatch):
    """vLLM then calls the layers without pages, and its attention does not write. Numbers may be not finite there."""
    from sympow.integrations.vllm import states

    monkeypatch.setattr(states, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    mixer = make_mixer("power_delta", 16, 2, {})
    layer = SimpleNamespace(
        first=mixer.init_state(1), stepped=lambda x, state: ((mixer.step(x, state)[0],), None), kv_cache=()
    )
    outs = [torch.full((3, 16), torch.nan)]
    with torch.no_grad():
        states.PagedStates.step_batch(layer, torch.full((3, 16), torch.nan), outs)
    assert outs[0].isfinite().all()
