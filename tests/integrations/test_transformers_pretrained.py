"""Checkpoints of transformers in native form: the same logits, tokenizers beside them, and refusals in one line."""

import json
import sys

import pytest
import torch
import transformers
from torch.testing import assert_close

from sympow.data import BPETokenizer
from sympow.integrations.transformers.pretrained import load_pretrained

SHAPE = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "Llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "rms_norm_eps": 1e-5}),
    "SmolLM": ("Llama", {"tie_word_embeddings": True}),
    "Llama with biases": ("Llama", {"attention_bias": True}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"head_dim": 10, "rms_norm_eps": 1e-3}),
}


def pretrained(kind: str, **changes) -> transformers.PreTrainedModel:
    """A random model whose norms and biases are not at their start either."""
    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | options | changes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture
def folder(tmp_path):
    """A folder of a small Llama with a tokenizer."""
    pretrained("Llama").save_pretrained(tmp_path / "hf")
    BPETokenizer.train(["to be or not to be"], 260).save(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def gguf_file(folder):
    """A GGUF file of a small Qwen2 whose rows of queries and keys are in the order of transformers."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file, vocabulary = folder / "tiny.gguf", json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [*vocabulary["vocab"], *(f"<{i}>" for i in range(300 - len(vocabulary["vocab"])))]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 3)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_block_count(3)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 300)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    for name, weight in pretrained("Qwen2").state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(kind, tmp_path):
    model = pretrained(kind)
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    expected = model(tokens).logits
    assert expected.std() > 0.5
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        found = load_pretrained(source)
        assert_close(found.model(tokens), expected, rtol=0, atol=1e-4)
        assert found.tokenizer is None and found.context == 64


def test_the_tokenizer_comes_along(folder):
    found = load_pretrained(folder)
    assert BPETokenizer(found.tokenizer).encode("to be").tolist() == BPETokenizer.load(
        folder / "tokenizer.json"
    ).encode("to be").tolist()


def rewritten(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "is of the architecture 'gpt2'; sympow reads llama, qwen2, qwen3"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"the layers of .* are quantized \(gptq\)"),
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu'; the llama body has 'silu'"),
        ({"mlp_bias": True}, "has mlp_bias = True; the llama body has False"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "has a scaled rotation"),
        ({"num_hidden_layers": 4}, "lacks weights of its config: model.layers.3"),
    ],
)
def test_what_the_body_cannot_hold_is_refused(folder, changes, message):
    rewritten(folder, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_missing_files_are_named(folder, tmp_path):
    for source, message in (
        (tmp_path / "nothing.gguf", "no GGUF file at"),
        (tmp_path / "nothing", "no model at"),
        (tmp_path, "it has no config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_pretrained(source)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="cannot be read") as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["zz"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match="has 300 embeddings, but its tokenizer has the token 300"):
        load_pretrained(folder)


BYTE_LEVEL = "the tokenizer.json of {} cannot be used: expected a byte-level BPE tokenizer.json, got "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}', f"{BYTE_LEVEL}model type 'Unigram'"),
        ('{"model": {}}', f"{BYTE_LEVEL}model type None"),
        ('{"model": {"type": "BPE"', "the tokenizer.json of {} cannot be used: expected the text of a tokenizer.json"),
        ('{"model": {"vocab": {"\udcc3', "{}/tokenizer.json cannot be read: 'utf-8' codec"),  # the half of a letter
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(folder, text, message):
    (folder / "tokenizer.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError) as error:
        load_pretrained(folder)
    assert str(error.value).startswith(message.format(folder)) and "\n" not in str(error.value)


def test_a_tokenizer_of_sentencepiece_is_refused_before_weights_are_read(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["byte_fallback"] = True
    spec["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="got decoder type 'Sequence'"):
        load_pretrained(folder)


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_cut_weights_are_refused(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="hf cannot be read: Error while deserializing header"):
        load_pretrained(folder)


@torch.no_grad()
def test_a_gguf_file_is_the_model_in_it(gguf_file):
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    found = load_pretrained(gguf_file)
    assert_close(found.model(tokens), pretrained("Qwen2")(tokens).logits, rtol=0, atol=1e-4)
    expected = BPETokenizer.load(gguf_file.parent / "tokenizer.json").encode("to be")
    assert BPETokenizer(found.tokenizer).encode("to be").tolist() == expected.tolist()


@pytest.mark.parametrize("size", [0, 3, 1000, 3000, 5000, 9000, -1])
def test_a_cut_gguf_file_is_refused(gguf_file, size):
    gguf_file.write_bytes(gguf_file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a whole GGUF file"):
        load_pretrained(gguf_file)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_packages_that_gguf_files_need_are_named(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ImportError, match=r"gguf needs gguf and accelerate: pip install 'sympow\[gguf\]'"):
        load_pretrained(tmp_path / "tiny.gguf")


def test_quantized_models_in_memory_are_refused():
    model = pretrained("Llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight is quantized \(int8\)"):
        load_pretrained(model)
