"""Checkpoints of transformers in native form: the same logits, tokenizers beside them, and refusals in one line."""

import io
import json
import pickle
import sys

import pytest
import torch
import transformers
from torch.testing import assert_close

from sympow.conversion import swap_mixers
from sympow.data import BPETokenizer
from sympow.integrations.transformers.pretrained import load_pretrained
from sympow.integrations.transformers.scoring import load_causal_lm
from sympow.models import ModelConfig
from tests.integrations.pretrained_models import KINDS, ROTATIONS, TOKENIZER, assert_refused, loud, pretrained
from tests.pickles import Evil


@pytest.fixture
def folder(tmp_path):
    """A folder of a small Llama with a tokenizer."""
    pretrained("Llama").save_pretrained(tmp_path / "hf")
    TOKENIZER.save(tmp_path / "hf")
    return tmp_path / "hf"


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


@pytest.mark.parametrize("theta", [1e4, 31.0])
@pytest.mark.parametrize("rotation", ROTATIONS)
@torch.no_grad()
def test_scaled_rotations_are_those_of_transformers(rotation, theta, tmp_path):
    """Also after the model has been written as a run, and token by token."""
    tokens = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(2))
    plain = loud("Llama", rope_parameters={"rope_type": "default", "rope_theta": theta})(tokens).logits
    model = loud("Llama", rope_parameters=ROTATIONS[rotation] | {"rope_theta": theta})
    expected = model(tokens).logits
    assert (expected - plain).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        found = load_pretrained(source).model
        assert_close(found(tokens), expected, rtol=0, atol=1e-4)
    state, parts = found.init_state(2), []
    for token in tokens.split(1, dim=1):
        logits, state = found.step(token, state)
        parts.append(logits)
    assert_close(torch.stack(parts, 1), expected, rtol=0, atol=1e-4)
    assert ModelConfig.from_dict(json.loads(json.dumps(found.config.to_dict()))) == found.config


@pytest.mark.parametrize("rotation", ["llama3", "yarn"])
@torch.no_grad()
def test_the_original_length_beside_the_rotation_takes_priority(rotation, tmp_path):
    """As in transformers, also where the rotation names another one."""
    tokens = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(2))
    scaled = ROTATIONS[rotation] | {"rope_theta": 1e4}
    loud("Llama", rope_parameters=scaled).save_pretrained(tmp_path)
    for rope in (scaled, {key: value for key, value in scaled.items() if "original" not in key}):
        rewritten(tmp_path, rope_parameters=rope, original_max_position_embeddings=8)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        expected = model(tokens).logits
        for source in (model, tmp_path):
            assert_close(load_pretrained(source).model(tokens), expected, rtol=0, atol=1e-4)


def test_python_files_of_a_folder_are_never_run(folder, monkeypatch):
    """Neither with a "y" on the terminal, nor of a known or an unknown architecture."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    rewritten(folder, auto_map=auto)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto}))
    load_pretrained(folder)  # of the weights alone
    rewritten(folder, model_type="evil")
    assert_refused(folder, "is of the architecture 'evil'")
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_causal_lm(folder)
    assert "\n" not in str(error.value) and not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"\x80\x04N.", "config.json is no JSON"),
        ("config.json", b"[1]", "config.json must hold a JSON object; got list"),
        ("config.json", b"{", "config.json is no JSON"),
        ("config.json", b"[" * 100_000, "config.json is no JSON"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "merges": [], "vocab": {}}, "decoder": {"type": "ByteLevel"}, '
                           b'"pre_tokenizer": {"type": "Sequence", "pretokenizers": [1]}}', "tokenizer.json of"),
        ("model.safetensors", b"\x80\x04N.", "cannot be read"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_one_line(folder, file, content, message):
    (folder / file).write_bytes(content)
    assert_refused(folder, message)


def test_a_pickle_in_place_of_weights_is_refused(folder, tmp_path):
    evil = Evil(tmp_path / "ran")
    (folder / "model.safetensors").unlink()
    for content in (evil, {"model.embed_tokens.weight": 3}, [1]):
        torch.save(content, folder / "pytorch_model.bin")
        assert_refused(folder, "bin cannot be read: Weights only load failed|bin must hold weights by name")
        assert not (tmp_path / "ran").exists()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(evil))
    assert_refused(folder, "^[^ ]*hf/pytorch_model.bin cannot be read: ")
    assert not (tmp_path / "ran").exists()


@torch.no_grad()
def test_weights_in_the_format_of_pytorch_and_in_shards(folder):
    tokens = torch.arange(40)[None]
    model, state = pretrained("Llama"), pretrained("Llama").state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert_close(load_pretrained(folder).model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    wide = state | {"model.norm.weight": torch.ones(1).expand(2**40)}
    torch.save(wide, folder / "pytorch_model.bin")
    assert_refused(folder, r"model\.norm\.weight")
    (folder / "pytorch_model.bin").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_close(load_pretrained(folder).model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert_refused(folder, "^[^ ]*index.json names .* as the file of ghost, which is in none of its files$")
    content["weight_map"]["model.norm.weight"] = "../other.safetensors"
    index.write_text(json.dumps(content))
    assert_refused(folder, "expected a file beside it")


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "SmolLM3", "Granite", "Phi-4"])
@torch.no_grad()
def test_a_head_dim_of_null_is_none(kind, tmp_path):
    tokens, model = torch.arange(40)[None], pretrained(kind)
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, head_dim=None)
    assert_close(load_pretrained(tmp_path).model(tokens), model(tokens).logits, rtol=0, atol=1e-4)


def test_a_weight_that_the_config_does_not_know_is_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, folder / "model.safetensors")
    assert_refused(folder, r"has the weight model.layers.0.self_attn.q_norm.weight, which its config")
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    load_pretrained(folder)


@pytest.mark.parametrize("kind", ["Mistral", "SmolLM3", "Granite", "Phi-4"])
@torch.no_grad()
def test_layers_are_swapped_as_they_are(kind):
    """A pattern keeps the windows and the layers without rotation, and narrows windows only."""
    teacher = load_pretrained(pretrained(kind)).model
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    assert_close(swap_mixers(teacher, "softmax")(tokens), teacher(tokens), rtol=0, atol=1e-5)
    mixed = swap_mixers(teacher, "window,power,softmax", window=12)
    first, second, third = (mixed.config.mixer(layer) for layer in range(3))
    kept = teacher.config.mixer(2)
    assert first.name == "window" and first.options["window"] == (9 if kind == "Mistral" else 12)
    assert second.name == "power" and "window" not in second.options and third == kept
    rotations = [block.mixer.rotation for block in mixed.blocks]
    assert rotations == [block.mixer.rotation for block in teacher.blocks]
    assert rotations.count("none") == (1 if kind == "SmolLM3" else 0)
    whole, state, parts = mixed(tokens), mixed.init_state(2), []
    for token in tokens.split(1, dim=1):
        logits, state = mixed.step(token, state)
        parts.append(logits)
    assert_close(torch.stack(parts, 1), whole, rtol=0, atol=1e-4)


def test_the_tokenizer_comes_along(folder):
    found = load_pretrained(folder)
    assert (
        BPETokenizer(found.tokenizer).encode("to be").tolist()
        == BPETokenizer.load(folder / "tokenizer.json").encode("to be").tolist()
    )


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
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"rotation of the type 'dynamic' \(rope_type in its config\); sympow reads default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            "has a scaled rotation of the type 'longrope'",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}},
            "cannot be read",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "factor of a scaled rotation"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rotates a part of the channels only",
        ),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layers with another attention"),
        ({"num_attention_heads": 0}, "has num_attention_heads = 0; expected an integer of at least 1"),
        ({"num_key_value_heads": 4}, "has 6 heads, which is no multiple of its 4 key/value heads"),
        ({"hidden_size": "32"}, "has hidden_size = '32'; expected an integer of at least 1"),
        ({"dtype": "floatx"}, "has dtype = 'floatx'; expected the name of a dtype of torch"),
        ({"torch_dtype": "float16x"}, "has torch_dtype = 'float16x'"),
        ({"rms_norm_eps": -1.0}, "has rms_norm_eps = -1.0; expected a number between 0 and 1"),
        ({"tie_word_embeddings": "yes"}, "has tie_word_embeddings = 'yes'; expected true or false"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "has rope_theta = 'x'"),
        ({"rope_parameters": {"rope_type": ""}}, r"of the type '' \(rope_type in its config\); sympow reads default"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": ""}}},
            "of its own for layers of full_attention; expected",
        ),
        ({"model_type": "granite", "residual_multiplier": 0}, "has residual_multiplier = 0; expected a pos"),
        ({"model_type": "mistral", "sliding_window": 0}, "has sliding_window = 0; expected an integer of at least 1"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2, 1]}, "has no_rope_layers = "),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "has 3 layers, and no_rope_layers of 1"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}}, "type 'su'"),
        ({"rope_parameters": [1]}, r"has the rotation \[1\]"),
        ({"model_type": ["llama"]}, r"is of the architecture \['llama'\]"),
        ({"vocab_size": 2**40}, "embed_tokens.weight has the shape"),
        ({"intermediate_size": 2**40}, "mlp.gate_proj.weight has the shape"),
        ({"num_hidden_layers": 10**12}, "it has 1,000,000,000,000 layers and 30 weights"),
        ({"num_hidden_layers": 2}, "has the weight model.layers.2.*, which its config does not know"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"num_hidden_layers": 4}, "lacks weights of its config: model.layers.3"),
    ],
)
def test_what_the_body_cannot_hold_is_refused(folder, changes, message):
    rewritten(folder, **changes)
    assert_refused(folder, message)


def test_missing_files_are_named(folder, tmp_path):
    for source, message in (
        (tmp_path / "nothing.gguf", "no GGUF file at"),
        (tmp_path / "nothing", "no model at"),
        (tmp_path, "it has no config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_pretrained(source)
    with pytest.raises(
        ValueError, match=r"config\.json is no model: expected a folder, a GGUF file \(\*\.gguf\), or an id"
    ):
        load_pretrained(folder / "config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="cannot be read") as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["zz"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert_refused(folder, "has 300 embeddings, but its tokenizer has the token 300")


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
    assert_refused(folder, "got decoder type 'Sequence'")


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_cut_weights_are_refused(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert_refused(folder, "^[^ ]*hf/model.safetensors cannot be read: Error while deserializing header")


def test_the_package_that_gguf_files_need_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ImportError, match=r"gguf needs gguf: pip install 'sympow\[gguf\]'"):
        load_pretrained(tmp_path / "tiny.gguf")


OTHER_WEIGHTS = {
    "C64": (lambda x: x + 1j, "is of .*C.*64, not F64", r"is quantized \(complex64\)"),
    "I8": (lambda x: x.to(torch.int8), "is of .*I.*8, not F64", r"is quantized \(int8\)"),
    "BOOL": (lambda x: x > 0, "is of BOOL|is of torch.bool, not F64", r"is quantized \(bool\)"),
    "F8": (lambda x: x.to(torch.float8_e4m3fn), "is of .*8_e4m3.*, not F64", r"is quantized \(float8_e4m3fn\)"),
    "NaN": (lambda x: x / 0 * 0, "holds values that are not finite", "holds values that are not finite"),
    "inf": (lambda x: x.double() * 1e300, "holds values that are not finite", "holds values that are not finite"),
    "shape": (lambda x: x[1:], "has the shape", "has the shape"),
}


@pytest.mark.parametrize("form", ["safetensors", "PyTorch", "memory"])
@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_weights_that_are_no_finite_real_numbers_are_refused(change, form, folder):
    """A cast to float32 would lose an imaginary part, or the scale of quantized weights."""
    from safetensors.torch import load_file, save_file

    function, of_files, in_memory = OTHER_WEIGHTS[change]
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"):
        source, message = folder, of_files
        if form == "memory":
            source, message = pretrained("Llama"), in_memory
            module = source.get_submodule(name.removesuffix(".weight"))
            module.weight = torch.nn.Parameter(function(module.weight.detach()), requires_grad=False)
        else:
            pretrained("Llama").save_pretrained(folder)
            weights = load_file(folder / "model.safetensors")
            weights[name] = function(weights[name]).contiguous()
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            if form == "PyTorch":
                (folder / "model.safetensors").unlink()
                torch.save(weights, folder / "pytorch_model.bin")
        assert_refused(source, rf"(?i){name} ({message})")


def test_a_head_that_is_not_the_embedding_to_which_it_is_tied_is_refused(folder):
    """Versions of transformers differ in which of the two they take."""
    rewritten(folder, tie_word_embeddings=True)
    assert_refused(folder, r"hf has tie_word_embeddings = True, and a lm_head\.weight that is not")
    model = pretrained("SmolLM")
    load_pretrained(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    assert_refused(model, r"LlamaForCausalLM has tie_word_embeddings = True, and a lm_head\.weight")


def test_progress_bars_of_transformers_are_not_shown(folder, capsys):
    from transformers.utils import logging

    logging.enable_progress_bar()
    load_pretrained(folder)
    load_causal_lm(folder)
    assert "%|" not in capsys.readouterr().err and logging.is_progress_bar_enabled()
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "%|" in capsys.readouterr().err  # of others


def test_an_adapter_beside_the_weights_is_refused(folder):
    """transformers would load it too, and its layers in place of the model's."""
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    with pytest.raises(ValueError, match=r"hf cannot be read: it has an adapter beside its weights; merge it") as error:
        load_pretrained(folder)
    assert str(error.value).count("cannot be read") == 1
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = pretrained("Llama")
    model.add_adapter(config)
    assert_refused(model, r"^LlamaForCausalLM lacks weights of its config: .*q_proj.weight is missing$")


def test_quantized_models_in_memory_are_refused():
    model = pretrained("Llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    assert_refused(model, r"model.layers.1.mlp.up_proj.weight is quantized \(int8\)")
