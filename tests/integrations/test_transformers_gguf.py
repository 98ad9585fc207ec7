"""GGUF files as native models: the logits of transformers, and refusals in one line before much memory is taken."""

import json
import struct
from functools import partial

import numpy
import pytest
import torch
import transformers
from torch.testing import assert_close

from sympow.data import BPETokenizer
from sympow.data.tokenizer_files import tokenizer_config, write_beside
from sympow.integrations.transformers.pretrained import load_pretrained
from sympow.integrations.transformers.pretrained.gguf_file import read_header
from sympow.integrations.transformers.pretrained.gguf_tokenizer import gguf_beside, gguf_tokenizer
from tests.integrations.pretrained_models import KINDS, ROTATIONS, SHAPE, TOKENIZER, assert_refused, loud, pretrained

gguf = pytest.importorskip("gguf")


def rows_of_llama(weight, heads):
    """The rows of a projection in the order of a GGUF file: rows that are rotated as a pair are neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def write_gguf(folder, model, more=lambda writer: None, stored=None):
    """Writes a GGUF file of a small model; `more` adds fields and tensors, `stored` has quantized weights by name."""
    TOKENIZER.save(folder)
    file, config = folder / "tiny.gguf", model.config
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
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
    return file


@pytest.fixture
def gguf_file(tmp_path):
    """A GGUF file of a small Qwen2 whose rows of queries and keys are in the order of transformers."""
    return write_gguf(tmp_path, pretrained("Qwen2"))


IN_GGUF = [kind for kind in KINDS if kind != "SmolLM3, its own layers"]  # a file does not say which layers rotate


@pytest.mark.parametrize("kind", IN_GGUF)
@torch.no_grad()
def test_logits_of_gguf_files_are_those_of_transformers(kind, tmp_path):
    model = pretrained(kind)
    for layer in model.model.layers:  # so that positions matter
        attention = layer.self_attn
        (attention.qkv_proj if kind.startswith("Phi") else attention.q_proj).weight.mul_(3)
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    file = write_gguf(tmp_path, model)
    found = load_pretrained(file)
    assert_close(found.model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    assert found.tokenizer is not None and found.context == 64


def gguf_rotation(rotation, width):
    """What a converter writes for a rotation: factors of frequencies for "llama3", otherwise fields."""

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
def test_rotations_of_gguf_files(kind, rotation, tmp_path):
    tokens = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(2))
    scaled = ROTATIONS.get(rotation, {"rope_type": "default"})
    model = loud(kind, rope_parameters=scaled | {"rope_theta": 1e4})
    more = (lambda writer: None) if rotation is None else gguf_rotation(scaled, getattr(model.config, "head_dim", 8))
    file = write_gguf(tmp_path, model, more)
    found = load_pretrained(file).model
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
def test_gguf_files_that_are_another_model_are_refused(more, message, tmp_path):
    assert_refused(write_gguf(tmp_path, pretrained("Llama"), more), message)


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
    assert_refused(gguf_file, message)


@pytest.mark.parametrize("place", ["fields", "tensors", "tokens", "string", "shape"])
def test_a_gguf_file_that_names_more_than_it_holds_is_refused(gguf_file, place):
    data, many = gguf_file.read_bytes(), struct.pack("<Q", 2**40)
    tokens = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    at = {"tensors": 8, "fields": 16, "tokens": tokens, "string": 24,
          "shape": data.index(b"token_embd.weight") + len("token_embd.weight") + 4}[place]  # fmt: skip
    gguf_file.write_bytes(data[:at] + many + data[at + 8 :])
    assert_refused(gguf_file, r"is not a whole GGUF file|has the shape")


def set_field(writer, field, value):
    writer.kv_data[0].pop(field, None)
    writer.add_key_value(field, value, gguf.GGUFValueType.get_type(value))


@pytest.mark.parametrize("value", [-4, float("nan"), float("inf"), True, "a\nb", [1, 2], ["a"]], ids=str)
@pytest.mark.parametrize("kind", ["Llama", "Granite", "Phi-4"])
def test_fields_of_a_gguf_file_that_are_of_another_type_are_refused_in_one_line(kind, value, tmp_path):
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
        file = write_gguf(tmp_path, pretrained(kind), partial(set_field, field=field, value=value))
        with pytest.raises(ValueError, match=r"tiny\.gguf") as error:
            load_pretrained(file)
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
def test_fields_of_a_gguf_file_that_contradict_it_are_named(field, value, message, tmp_path):
    change = partial(set_field, field=field, value=value)
    assert_refused(write_gguf(tmp_path, pretrained("Llama"), change), rf"tiny\.gguf .*{message}")


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
    # No weight is read before.
    monkeypatch.setattr("sympow.integrations.transformers.pretrained.loading.read_weight", None)
    assert_refused(gguf_file, rf"tiny\.gguf .*{message}")


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
def test_special_tokens_of_a_gguf_file_are_checked(more, message, tmp_path):
    model = pretrained("Llama")
    file = write_gguf(tmp_path, model, more)
    if message is None:
        tokens = torch.arange(40)[None]
        with torch.no_grad():
            assert_close(load_pretrained(file).model(tokens), model(tokens).logits, rtol=0, atol=1e-4)
        return
    assert_refused(file, message)


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


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
@torch.no_grad()
def test_quantized_weights_of_gguf_files(kind, tmp_path):
    """The model is that of the dequantized weights."""
    model = pretrained("Phi-3", hidden_size=96, intermediate_size=64, num_attention_heads=6)
    quantized = {}
    for name, weight in model.state_dict().items():
        if weight.ndim == 2:
            of = gguf.GGMLQuantizationType[kind]
            quantized[name] = (gguf.quantize(weight.numpy(), of), of)
            weight.copy_(torch.from_numpy(gguf.dequantize(*quantized[name])))
    file = write_gguf(tmp_path, model, stored=quantized)
    tokens = torch.randint(300, (2, 37), generator=torch.Generator().manual_seed(2))
    found = load_pretrained(file).model
    assert_close(found(tokens), model(tokens).logits, rtol=0, atol=1e-4)


def test_special_tokens_of_a_gguf_file(tmp_path):
    template, writer = "{{ messages }}", gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_token_list(["a", "<end>", "<pad>"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_beside(gguf_beside(read_header(tmp_path / "tiny.gguf").fields), tmp_path)
    assert tokenizer_config(tmp_path) == {"eos_token": "<end>", "pad_token": "<pad>", "chat_template": template}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 1, "pad_token_id": 2}


@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ({"eos": 1, "eot": 3}, [1, 3]),
        ({"eos": 1, "eot": 1}, 1),
        ({"eot": 3}, 3),
        ({"eos": 4, "eot": 3, "eom": 1}, [4, 3, 1]),
        ({"bos": 2}, None),
    ],
)
def test_all_ends_of_texts_in_a_gguf_file(named, ends, tmp_path):
    tokens = {"tokenizer.ggml.tokens": ["a", "<end>", "<pad>", "<turn>", "<text>"]}
    fields = tokens | {f"tokenizer.ggml.{kind}_token_id": number for kind, number in named.items()}
    write_beside(gguf_beside(fields), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()).get("eos_token_id") == ends
    for kind in named:
        message = f"expected a special token below 5 as tokenizer.ggml.{kind}_token_id; got 5"
        with pytest.raises(ValueError, match=message):
            gguf_beside(fields | {f"tokenizer.ggml.{kind}_token_id": 5})


@pytest.mark.parametrize(("pre", "said", "begins"), [("llama-bpe", None, True), ("llama-bpe", False, False),
                                                     ("qwen2", None, False), ("qwen2", True, True),
                                                     ("refact", None, False), ("dbrx", None, False)])  # fmt: skip
def test_texts_begin_as_a_gguf_file_says(pre, said, begins, tmp_path):
    """The words of Llama 3 that are tokens need no merges."""
    TOKENIZER.save(tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    tokens = [*made["model"]["vocab"], "<begin>", "abcdef"]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * (len(tokens) - 2) + [3, 1],
              "merges": [" ".join(pair) for pair in made["model"]["merges"]],
              "bos_token_id": len(tokens) - 2}  # fmt: skip
    fields |= {} if said is None else {"add_bos_token": said}
    text = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items()}, "file")
    tokenizer = BPETokenizer(text)
    assert tokenizer.start == ((len(tokens) - 2,) if begins else ())
    assert (tokenizer.encode("abcdef").tolist() == [len(tokens) - 1]) is (pre == "llama-bpe")


@pytest.mark.parametrize(("pre", "count"), [("smollm", 6), ("refact", 6), ("qwen2", 6), ("llama-bpe", 4), ("dbrx", 4)])
def test_digits_are_split_as_a_gguf_file_says(pre, count):
    """One at a time, or in threes, whose merges then apply."""
    letters = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 324))]
    tokens = [*letters, "12", "123"]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * len(tokens), "merges": ["1 2", "12 3"]}
    text = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items()}, "file")
    assert len(BPETokenizer(text).encode("123456")) == count
