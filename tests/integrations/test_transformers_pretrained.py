"""Checkpoints of transformers in native form: the same logits, tokenizers beside them, and refusals in one line."""

import io
import json
import pickle
import struct
import sys

import numpy
import pytest
import torch
import transformers
from torch.testing import assert_close

from sympow.conversion import swap_mixers
from sympow.data import BPETokenizer
from sympow.integrations.transformers.pretrained import load_pretrained
from sympow.integrations.transformers.scoring import load_causal_lm
from sympow.models import ModelConfig
from tests.draws import disturb
from tests.pickles import Evil

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
    "Mistral": ("Mistral", {"sliding_window": 9, "head_dim": 10}),
    "Mistral without a window": ("Mistral", {"sliding_window": None}),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": None}),
    "SmolLM3, its own layers": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "pad_token_id": None}),
    "Seed-OSS": ("SeedOss", {"head_dim": 12, "pad_token_id": None}),
    "Seed-OSS with all biases": ("SeedOss", {"attention_out_bias": True, "attention_bias": False}),
    "Granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.05,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "Granite, untied": ("Granite", {"embedding_multiplier": 3, "logits_scaling": 0.25}),
    "Phi-3": ("Phi3", {"sliding_window": 11, "pad_token_id": None}),
    "Phi-4": (
        "Phi3",
        {
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
}


def pretrained(kind: str, **changes) -> transformers.PreTrainedModel:
    """A random model whose norms and biases are not at their start either."""
    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | options | changes)
    torch.manual_seed(1)
    return disturb(getattr(transformers, f"{name}ForCausalLM")(config).eval(), 0.1, seed=1)


@pytest.fixture
def folder(tmp_path):
    """A folder of a small Llama with a tokenizer."""
    pretrained("Llama").save_pretrained(tmp_path / "hf")
    BPETokenizer.train(["to be or not to be"], 260).save(tmp_path / "hf")
    return tmp_path / "hf"


def rows_of_llama(weight, heads):
    """The rows of a projection in the order of a GGUF file: rows that are rotated as a pair are neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def write_gguf(file, model, tokenizer, more=lambda writer: None, stored=None):
    """Writes a GGUF file of a small model; `more` adds fields and tensors, `stored` has quantized weights by name."""
    gguf = pytest.importorskip("gguf")
    config, vocabulary = model.config, json.loads(tokenizer.read_text())["model"]
    kind = "llama" if config.model_type == "mistral" else config.model_type
    tokens = [*vocabulary["vocab"], *(f"<{i}>" for i in range(300 - len(vocabulary["vocab"])))]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 300)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    width = getattr(config, "head_dim", None) or config.hidden_size // 6
    if width != config.hidden_size // 6:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind == "phi3":
        writer.add_rope_dimension_count(int(width * config.rope_parameters.get("partial_rotary_factor", 1)))
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_sliding_window(config.sliding_window or 0)
    elif kind == "llama" and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind in ("llama", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
            weight = rows_of_llama(weight, 6 if "q_proj" in name else 2)
        data, kept = (stored or {}).get(name, (weight.numpy(), None))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=kept)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(folder):
    """A GGUF file of a small Qwen2 whose rows of queries and keys are in the order of transformers."""
    file = folder / "tiny.gguf"
    write_gguf(file, pretrained("Qwen2"), folder / "tokenizer.json")
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


IN_GGUF = [kind for kind in KINDS if kind != "SmolLM3, its own layers"]  # a file does not say which layers rotate


@pytest.mark.parametrize("kind", IN_GGUF)
@torch.no_grad()
def test_logits_of_gguf_files_are_those_of_transformers(kind, folder):
    model = pretrained(kind)
    for layer in model.model.layers:  # so that positions matter
        attention = layer.self_attn
        (attention.qkv_proj if kind.startswith("Phi") else attention.q_proj).weight.mul_(3)
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    write_gguf(folder / "tiny.gguf", model, folder / "tokenizer.json")
    found = load_pretrained(folder / "tiny.gguf")
    assert_close(found.model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    assert found.tokenizer is not None and found.context == 64


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROTATIONS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3, other factors": LLAMA3 | {"low_freq_factor": 2.5, "high_freq_factor": 17.0, "factor": 32},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn with its magnitude": YARN | {"attention_factor": 1.7},
    "yarn with mscale": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn with one mscale": YARN | {"mscale": 2.0},
    "yarn of the lengths": YARN | {"factor": None},
}


def loud(kind, **changes):
    """A model whose attention depends on positions."""
    model = pretrained(kind, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(6)
    return model


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


def gguf_rotation(rotation, width):
    """What a converter writes for a rotation: factors of frequencies for "llama3", otherwise fields."""
    import gguf

    def more(writer):
        if rotation["rope_type"] == "llama3":
            config = transformers.LlamaConfig(**SHAPE, head_dim=width, rope_parameters=rotation | {"rope_theta": 1e4})
            scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
            plain = 1e4 ** -(torch.arange(0, width, 2) / width)
            writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotation["rope_type"]))
        writer.add_rope_scaling_factor(rotation["factor"])
        writer.add_rope_scaling_orig_ctx_len(rotation.get("original_max_position_embeddings", 16))
        writer.add_rope_scaling_finetuned(True)

    return more


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("rotation", [None, "linear", "llama3", "yarn"])
@torch.no_grad()
def test_rotations_of_gguf_files(kind, rotation, folder):
    pytest.importorskip("gguf")
    tokens = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(2))
    scaled = ROTATIONS.get(rotation, {"rope_type": "default"})
    model = loud(kind, rope_parameters=scaled | {"rope_theta": 1e4})
    more = (lambda writer: None) if rotation is None else gguf_rotation(scaled, getattr(model.config, "head_dim", 8))
    write_gguf(folder / "tiny.gguf", model, folder / "tokenizer.json", more)
    found = load_pretrained(folder / "tiny.gguf").model
    assert_close(found(tokens), model(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda w: w.add_tensor("blk.1.attn_q_norm.weight", numpy.ones(8, "f4")), "has the weight blk.1.attn_q_norm"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", numpy.ones(48, "f4")), "attn_k.bias is missing"),
        (lambda w: w.add_tensor("blk.1.attn_q.bias", numpy.ones(48, "f4")), "has the weight blk.1.attn_q.bias"),
        (lambda w: w.add_tensor("blk.3.attn_norm.weight", numpy.ones(48, "f4")), "has the weight blk.3.attn_norm"),
        (lambda w: w.add_tensor("rope_freqs.weight", numpy.ones(3, "f4")), "factors of a scaled rotation must be 4"),
        (lambda w: w.add_tensor("rope_freqs.weight", numpy.zeros(4, "f4")), "factors of a scaled rotation must be 4"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "a scaled rotation of the type 'longrope'"),
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "scaled by yarn needs the number 'factor'"),
        (lambda w: w.add_float32("llama.rope.scaling.yarn_log_multiplier", 0.1), "yarn_log_multiplier = 0.1"),
        (lambda w: w.add_float32("llama.rope.scale_linear", 4.0), "llama.rope.scale_linear = 4.0, which is not known"),
        (lambda w: w.add_float32("llama.attention.scale", 0.5), "llama.attention.scale = 0.5, which is not known"),
        (lambda w: w.add_uint32("llama.expert_count", 8), "llama.expert_count = 8, which is not known"),
        (lambda w: w.add_rope_dimension_count(4), "embed_tokens|lacks weights of its config: blk.0.attn_q.weight"),
        (lambda w: (w.add_rope_dimension_count(4), w.add_key_length(8)), "llama.rope.dimension_count = 4; known is"),
    ],
)
def test_gguf_files_that_are_another_model_are_refused(more, message, folder):
    pytest.importorskip("gguf")
    write_gguf(folder / "tiny.gguf", pretrained("Llama"), folder / "tokenizer.json", more)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder / "tiny.gguf")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_count", 10**9, "1,000,000,000 layers and"),
        ("block_count", 4, "lacks weights of its config: blk.3.attn_q.weight is missing"),
        ("embedding_length", 2**31, "has a hidden_size of 2147483648, which is no multiple"),
        ("embedding_length", 6 * 2**28, "lacks weights of its config: token_embd.weight has the shape"),
        ("vocab_size", 2**31, "lacks weights of its config: token_embd.weight has the shape"),
        ("feed_forward_length", 2**31, "lacks weights of its config: blk.0.ffn_gate.weight has the shape"),
        ("attention.head_count", 0, "attention.head_count = 0; expected an integer of at least 1"),
    ],
)
def test_sizes_of_a_gguf_file_are_compared_with_it(gguf_file, field, value, message):
    key = f"qwen2.{field}".encode() + struct.pack("<I", 4)
    data = gguf_file.read_bytes()
    at = data.index(key) + len(key)
    gguf_file.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(gguf_file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["fields", "tensors", "tokens", "string", "shape"])
def test_a_gguf_file_that_names_more_than_it_holds_is_refused(gguf_file, place):
    data, many = gguf_file.read_bytes(), struct.pack("<Q", 2**40)
    tokens = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    at = {"tensors": 8, "fields": 16, "tokens": tokens, "string": 24,
          "shape": data.index(b"token_embd.weight") + len("token_embd.weight") + 4}[place]  # fmt: skip
    gguf_file.write_bytes(data[:at] + many + data[at + 8 :])
    with pytest.raises(ValueError, match=r"is not a whole GGUF file|has the shape") as error:
        load_pretrained(gguf_file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [-4, float("nan"), float("inf"), True, "a\nb", [1, 2], ["a"]], ids=str)
@pytest.mark.parametrize("kind", ["Llama", "Granite", "Phi-4"])
def test_fields_of_a_gguf_file_that_are_of_another_type_are_refused_in_one_line(kind, value, folder):
    gguf = pytest.importorskip("gguf")
    own = [
        "context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
        "attention.key_length", "attention.value_length", "rope.freq_base", "vocab_size",
    ]  # fmt: skip
    own += [] if kind == "Phi-4" else ["rope.dimension_count"]
    own += ["attention.sliding_window"] * (kind != "Granite") + ["embedding_scale"] * (kind == "Granite")
    fields = [f"{KINDS[kind][0].lower()}.{field}" for field in own]
    fields += [f"tokenizer.ggml.{field}" for field in ("tokens", "token_type", "merges", "pre", "add_bos_token")]
    for field in fields:
        if (value, field) == (True, "tokenizer.ggml.add_bos_token"):
            continue  # which is right

        def other(writer, field=field):
            writer.kv_data[0].pop(field, None)
            writer.add_key_value(field, value, gguf.GGUFValueType.get_type(value))

        write_gguf(folder / "tiny.gguf", pretrained(kind), folder / "tokenizer.json", other)
        with pytest.raises(ValueError, match=r"tiny\.gguf") as error:
            load_pretrained(folder / "tiny.gguf")
        assert "\n" not in str(error.value), field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("llama.attention.head_count", -6, "llama.attention.head_count = -6; expected an integer of at least 1"),
        ("llama.attention.head_count_kv", [2, 2, 2], r"head_count_kv = \[2, 2, 2\]; expected an integer of at least 1"),
        ("llama.context_length", 0, "llama.context_length = 0; expected an integer of at least 1"),
        ("llama.rope.scaling.original_context_length", -4, "= -4; expected an integer of at least 0"),
        ("llama.rope.scaling.finetuned", "x", "llama.rope.scaling.finetuned = 'x'; expected true or false"),
        ("qwen2.rope.freq_base", 1e6, "has qwen2.rope.freq_base, which is not of its architecture, llama"),
        ("rope.scaling.factor", 4.0, "has rope.scaling.factor, which is not of its architecture, llama"),
        ("gemma3.attention.sliding_window", 8, "has gemma3.attention.sliding_window, which is not of its arch"),
        ("general.alignment", 1, "its general.alignment is 1; expected a power of 2 of at least 8"),
        ("tokenizer.ggml.scores", [0.5] * 3, "has 300 tokens, and tokenizer.ggml.scores of 3"),
        ("tokenizer.ggml.scores", "x", "has 300 tokens, and tokenizer.ggml.scores of 'x'"),
        ("tokenizer.ggml.token_type", [1] * 301, "has 300 tokens, and tokenizer.ggml.token_type of 301"),
        ("tokenizer.ggml.token_type", [True] * 300, "has no list of int as tokenizer.ggml.token_type"),
        ("tokenizer.ggml.tokens", ["a"] * 300, "has the token 'a' twice in tokenizer.ggml.tokens"),
    ],
)
def test_fields_of_a_gguf_file_that_contradict_it_are_named(field, value, message, folder):
    gguf = pytest.importorskip("gguf")

    def other(writer):
        writer.kv_data[0].pop(field, None)
        writer.add_key_value(field, value, gguf.GGUFValueType.get_type(value))

    write_gguf(folder / "tiny.gguf", pretrained("Llama"), folder / "tokenizer.json", other)
    with pytest.raises(ValueError, match=rf"tiny\.gguf .*{message}") as error:
        load_pretrained(folder / "tiny.gguf")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("place", 32, r"attn_q.weight begins at \d+; expected \d+, behind the tensor before"),
        ("place", -1, r"attn_q.weight begins at \d+; expected"),
        ("type", 8, "attn_q.weight has rows of 48 numbers; expected a multiple of 32"),  # Q8_0
        ("type", 1, "begins at"),  # F16, which leaves a hole behind
        ("type", 26, "not yet implemented"),  # I32, as large as F32
    ],
)
def test_tensors_of_a_gguf_file_are_where_and_what_they_must_be(change, value, message, gguf_file, monkeypatch):
    data, name = bytearray(gguf_file.read_bytes()), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes and the axes
    if change == "place":
        data[at + 4 : at + 12] = struct.pack("<Q", struct.unpack_from("<Q", data, at + 4)[0] + value)
    else:
        data[at : at + 4] = struct.pack("<I", value)
    gguf_file.write_bytes(data)
    monkeypatch.setattr(
        "sympow.integrations.transformers.pretrained.loading.read_weight", None
    )  # no weight is read before
    with pytest.raises(ValueError, match=rf"tiny\.gguf .*{message}") as error:
        load_pretrained(gguf_file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<IIQ", 9, 0, 2**25), "has 33,554,432 elements"),
        (struct.pack("<IIQ", 9, 9, 2) + 2 * (struct.pack("<IQ", 0, 2**24) + bytes(2**24)), "has 16,777,216 elements"),
        (struct.pack("<IQ", 8, 2**25), "has a text of 33,554,432 bytes"),
    ],
    ids=["list", "lists", "text"],
)
def test_a_value_of_a_gguf_file_takes_little_memory(value, message, tmp_path):
    """A damaged number of elements can be as large as the weights behind the header."""
    pytest.importorskip("gguf")
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + value
    with (tmp_path / "tiny.gguf").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2**26)
    with pytest.raises(ValueError, match=rf"tiny\.gguf is not a whole GGUF file .the field a {message}"):
        load_pretrained(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            lambda w: w.add_bos_token_id(300),
            r"tiny.gguf: expected a special token below 300 as tokenizer.ggml.bos_token_id; got 300",
        ),
        (
            lambda w: w.add_string("tokenizer.ggml.eos_token_id", "x"),
            r"tiny.gguf: expected a special token below 300 as tokenizer.ggml.eos_token_id; got 'x'",
        ),
        (
            lambda w: w.add_uint32("tokenizer.chat_template", 3),
            "tiny.gguf: expected a text as tokenizer.chat_template; got 3",
        ),
        (lambda w: w.add_name("a mistral"), None),  # the name of a model changes nothing
    ],
)
def test_special_tokens_of_a_gguf_file_are_checked(more, message, folder):
    pytest.importorskip("gguf")
    model = pretrained("Llama")
    write_gguf(folder / "tiny.gguf", model, folder / "tokenizer.json", more)
    if message is None:
        tokens = torch.arange(40)[None]
        with torch.no_grad():
            assert_close(load_pretrained(folder / "tiny.gguf").model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
        return
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder / "tiny.gguf")
    assert "\n" not in str(error.value)


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
    with pytest.raises(ValueError, match="is of the architecture 'evil'"):
        load_pretrained(folder)
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
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_pickle_in_place_of_weights_is_refused(folder, tmp_path):
    evil = Evil(tmp_path / "ran")
    (folder / "model.safetensors").unlink()
    for content in (evil, {"model.embed_tokens.weight": 3}, [1]):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"hf cannot be read|must hold weights by name") as error:
            load_pretrained(folder)
        assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(evil))
    with pytest.raises(ValueError, match="hf cannot be read"):
        load_pretrained(folder)
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
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_close(load_pretrained(folder).model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../other.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected a file beside it"):
        load_pretrained(folder)


def test_a_weight_that_the_config_does_not_know_is_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has the weight model.layers.0.self_attn.q_norm.weight, which its config"):
        load_pretrained(folder)
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
            "has a scaled rotation of the type 'dynamic'; sympow reads default, linear, llama3, yarn",
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


def test_the_package_that_gguf_files_need_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ImportError, match=r"gguf needs gguf: pip install 'sympow\[gguf\]'"):
        load_pretrained(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
@torch.no_grad()
def test_quantized_weights_of_gguf_files(kind, folder):
    """The model is that of the dequantized weights."""
    gguf = pytest.importorskip("gguf")
    model = pretrained("Phi-3", hidden_size=96, intermediate_size=64, num_attention_heads=6)
    quantized = {}
    for name, weight in model.state_dict().items():
        if weight.ndim == 2:
            of = gguf.GGMLQuantizationType[kind]
            quantized[name] = (gguf.quantize(weight.numpy(), of), of)
            weight.copy_(torch.from_numpy(gguf.dequantize(*quantized[name])))
    write_gguf(folder / "tiny.gguf", model, folder / "tokenizer.json", stored=quantized)
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    found = load_pretrained(folder / "tiny.gguf").model
    assert_close(found(tokens), model(tokens).logits, rtol=0, atol=1e-4)


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
        with pytest.raises(ValueError, match=rf"(?i){name} ({message})") as error:
            load_pretrained(source)
        assert "\n" not in str(error.value)


def test_a_head_that_is_not_the_embedding_to_which_it_is_tied_is_refused(folder):
    """Versions of transformers differ in which of the two they take."""
    rewritten(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"hf has tie_word_embeddings = True, and a lm_head\.weight that is not"):
        load_pretrained(folder)
    model = pretrained("SmolLM")
    load_pretrained(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has tie_word_embeddings = True, and a lm_head\.weight"):
        load_pretrained(model)


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
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM lacks weights of its config: .*q_proj.weight is missing$"):
        load_pretrained(model)


def test_quantized_models_in_memory_are_refused():
    model = pretrained("Llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight is quantized \(int8\)"):
        load_pretrained(model)
