"""Brumby and PowerCoder: random checkpoints with the public names, against a form in float64 written from formulas."""

import json
import math
import os
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.testing import assert_close

from sympow.cli import main
from sympow.cli.served_model import load_served
from sympow.data import BPETokenizer
from sympow.integrations.transformers import from_transformers, to_transformers
from sympow.integrations.transformers.pretrained import load_pretrained
from sympow.models import ModelConfig
from sympow.serving import Engine
from sympow.training import load_model
from tests.serving.conftest import Client, ask

SHAPE = {
    "vocab_size": 300, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 10, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rope_scaling": None, "chunk_size": 64, "switch_over_seq_len": 8192,
    "prefill_chunk_size": 1024,
}  # fmt: skip
CONFIGS = {
    "brumby": SHAPE | {
        "model_type": "brumby", "architectures": ["BrumbyForCausalLM"], "head_dim": 8, "intermediate_size": 70,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 3, "use_exp": False, "p": 2,
        "layer_types": ["full_attention"] * 3, "rope_theta": 1e6, "torch_dtype": "float32",
        "auto_map": {"AutoConfig": "configuration_brumby.BrumbyConfig"},
    },
    "powercoder": SHAPE | {
        "model_type": "powercoder", "intermediate_size": 160, "norm_epsilon": 1e-5, "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "rope_theta": 1e4, "residual_dropout": 0.0,
    },
}  # fmt: skip
KINDS = list(CONFIGS)
# The sources add 1e-6 of the largest weight of a row to its sum, and 1e-7 to scores; the rest is rounding in float32.
CLOSE = {"rtol": 0, "atol": 1e-4}


def shapes_of(config):
    """Shapes by the public names."""
    width, hidden, groups = (config[each] for each in ("hidden_size", "intermediate_size", "num_key_value_heads"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    attention = {"q": (heads * head_dim, width), "k": (groups * head_dim, width), "v": (groups * head_dim, width),
                 "g": (groups, width), "o": (width, heads * head_dim)}  # fmt: skip
    layer = {f"self_attn.{each}_proj": shape for each, shape in attention.items()}
    layer |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    if config["model_type"] == "brumby":
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,), "mlp.down_proj": (width, hidden),
                  "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)}  # fmt: skip
    else:
        layer |= {"mlp.c_fc": (hidden, width), "mlp.c_proj": (width, hidden)}
    layers = range(config["num_hidden_layers"])
    stems = {f"model.layers.{i}.{part}": shape for i in layers for part, shape in layer.items()}
    stems["model.norm"] = (width,)
    found = {f"{stem}.weight": shape for stem, shape in stems.items()}
    if config["model_type"] == "powercoder":
        found |= {f"{stem}.bias": shape[:1] for stem, shape in stems.items()}
    table = (config["vocab_size"], width)
    return found | {"model.embed_tokens.weight": table, "lm_head.weight": table}


def drawn(config, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in shapes_of(config).items():
        scale = 1.0 if "embed_tokens" in name else 0.3 if len(shape) == 1 else 2 / math.sqrt(shape[1])
        start = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        weights[name] = (start + scale * torch.randn(shape, generator=generator)).to(dtype)
    return weights


def write(folder, config, weights, *, tokenizer=True):
    """Writes a folder with two shards, the projections of every layer in both."""
    folder.mkdir()
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: weights[name] for name in some}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in halves.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        BPETokenizer.train(["to be or not to be"], 260).save(folder)
    return folder


def expected(config, weights, tokens):
    """Logits [T, vocab] of the formulas in float64, with every pair of tokens in memory."""
    w = {name: each.double() for name, each in weights.items()}
    heads, groups, width = (config[each] for each in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    head_dim, brumby, time = config.get("head_dim") or width // heads, config["model_type"] == "brumby", len(tokens)
    frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(time).double()[:, None] * frequencies
    cos, sin = (torch.cat([each, each], -1)[:, None] for each in (angles.cos(), angles.sin()))

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x, name):
        if brumby:
            return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * w[f"{name}.weight"]
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], config["norm_epsilon"])

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    past = torch.ones(time, time, dtype=torch.bool).tril()
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, f"{at}input_layernorm")
        q, k, v, g = (linear(h, f"{at}self_attn.{each}_proj") for each in "qkvg")
        q, k, v = (each.view(time, -1, head_dim) for each in (q, k, v))
        if brumby:
            q, k = norm(q, f"{at}self_attn.q_norm"), norm(k, f"{at}self_attn.k_norm")
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        level = F.logsigmoid(g).cumsum(0).repeat_interleave(heads // groups, 1).t()  # [heads, time]
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(head_dim)
        log = 2 * torch.log(scores.abs() + 1e-7) + level[:, :, None] - level[:, None]
        log = log.masked_fill(~past, -math.inf)
        weight = torch.exp(log - log.amax(-1, keepdim=True))
        y = torch.einsum("hij,jhd->ihd", weight / (weight.sum(-1, keepdim=True) + 1e-6), v)
        x = x + linear(y.flatten(1), f"{at}self_attn.o_proj")
        h = norm(x, f"{at}post_attention_layernorm")
        if brumby:
            gated = F.silu(linear(h, f"{at}mlp.gate_proj")) * linear(h, f"{at}mlp.up_proj")
            x = x + linear(gated, f"{at}mlp.down_proj")
        else:
            x = x + linear(F.gelu(linear(h, f"{at}mlp.c_fc"), approximate="tanh"), f"{at}mlp.c_proj")
    return linear(norm(x, "model.norm"), "lm_head")


def some_tokens(n=90):
    return torch.randint(0, 258, (1, n), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=KINDS)
def source(request, tmp_path):
    config = CONFIGS[request.param]
    weights = drawn(config)
    weights["lm_head.weight"][260:] = 0  # these are no tokens of the tokenizer
    return write(tmp_path / "hf", config, weights), config, weights


def test_logits_are_those_of_the_formulas(source):
    folder, config, weights = source
    loaded = load_pretrained(folder)
    tokens, model = some_tokens(), loaded.model
    wanted = expected(config, weights, tokens[0])
    with torch.no_grad():
        whole = model(tokens)[0]
        state, steps = model.init_state(1), []
        for token in tokens[0]:
            logits, state = model.step(token.view(1, 1), state)
            steps.append(logits)
    assert_close(whole.double(), wanted, **CLOSE)
    assert_close(torch.cat(steps).double(), wanted, **CLOSE)
    assert wanted.std() > 0.1 and loaded.context == 64
    assert not model.training and model.config.mixers[0].name == "power"


def test_every_part_of_the_formula_counts(source):
    """The comparison above is not blind: other weights and another rotation change logits by more than it allows."""
    _, config, weights = source
    tokens = some_tokens()
    wanted = expected(config, weights, tokens[0])
    for name in [name for name in weights if ".1." in name or "layers" not in name]:
        other = expected(config, weights | {name: weights[name] * 1.1 + 0.01}, tokens[0])
        assert (other - wanted).abs().max() > 10 * CLOSE["atol"], name
    assert (expected(config | {"rope_theta": 1e3}, weights, tokens[0]) - wanted).abs().max() > 10 * CLOSE["atol"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_keep_the_dtype_of_the_files(tmp_path, kind, dtype):
    weights = drawn(CONFIGS[kind], dtype)
    model = load_pretrained(write(tmp_path / "hf", CONFIGS[kind], weights)).model
    assert {each.dtype for each in model.state_dict().values()} == {dtype}
    torch.testing.assert_close(model.head.weight.detach(), weights["lm_head.weight"], rtol=0, atol=0)
    with torch.no_grad():
        logits, state = model.step(some_tokens(20), model.init_state(1))
    assert logits.dtype == dtype and logits.isfinite().all()
    assert state.layers[0].memory.s.dtype == torch.promote_types(dtype, torch.float32)


def test_weights_of_several_dtypes_become_the_wider_one(tmp_path):
    weights = drawn(CONFIGS["brumby"], torch.bfloat16)
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    model = load_pretrained(write(tmp_path / "hf", CONFIGS["brumby"], weights)).model
    assert {each.dtype for each in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("pattern", [[], ["--pattern", "power"], ["--pattern", "power*2"]])
def test_convert_keeps_power_attention(tmp_path, source, pattern, capsys):
    folder, config, weights = source
    assert main(["convert", str(folder), "--out", str(tmp_path / "run"), *pattern]) == 0
    assert "layers 3 of power" in capsys.readouterr().out
    tokens = some_tokens()
    with torch.no_grad():
        logits = load_model(tmp_path / "run").model(tokens)[0]
    assert_close(logits.double(), expected(config, weights, tokens[0]), **CLOSE)


def greedy(config, weights, prompt, n):
    tokens = prompt.tolist()
    for _ in range(n):
        tokens.append(int(expected(config, weights, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def test_generate_and_export(tmp_path, source, capsys):
    folder, config, weights = source
    run = tmp_path / "run"
    assert main(["convert", str(folder), "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "to be", "--max-new-tokens", "12", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    # One token at a time from a state gives the tokens of the formulas, which see the whole text each time.
    tokenizer = BPETokenizer((folder / "tokenizer.json").read_text())
    prompt = tokenizer.encode("to be")
    tokens = greedy(config, weights, prompt, 12)
    assert tokenizer.decode(tokens) in text
    tokens = some_tokens()
    exported = to_transformers(run, tmp_path / "exported")
    back = from_transformers(exported, tmp_path / "back")
    import transformers

    with torch.no_grad():
        again = load_model(back).model(tokens)[0]
        there = transformers.AutoModelForCausalLM.from_pretrained(exported)(tokens).logits[0]
    wanted = expected(config, weights, tokens[0])
    assert_close(again.double(), wanted, **CLOSE)
    assert_close(there.double(), wanted, **CLOSE)


def answer(folder, prompt, n):
    """What `sympow serve` answers to a prompt, from the model that it loads of a folder."""
    served = load_served(str(folder), torch.device("cpu"))
    engine = Engine(served.model, served.tokenizer, slots=2)
    engine.start()
    ((tokens, _, _),) = ask(engine, Client(prompt, n))
    engine.close()
    return tokens


def test_the_same_greedy_tokens_everywhere(tmp_path, source, capsys):
    """In `serve` of the run and of the export, in transformers, and after `read`."""
    import transformers

    folder, config, weights = source
    run, text = tmp_path / "run", tmp_path / "text"
    assert main(["convert", str(folder), "--out", str(run)]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "exported")]) == 0
    text.write_text("to be or not to be")
    prompt = torch.from_numpy(BPETokenizer((folder / "tokenizer.json").read_text()).encode(text.read_text())).long()
    tokens = greedy(config, weights, prompt, 20)
    for each in (run, tmp_path / "exported"):
        assert answer(each, prompt, 20) == tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    made = model.generate(prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert made[0, len(prompt) :].tolist() == tokens
    assert main(["read", str(run), str(text), "--out", str(tmp_path / "context")]) == 0
    command = ["generate", str(run), "--context", str(tmp_path / "context"), "--max-new-tokens", "20"]
    capsys.readouterr()
    assert main([*command, "--temperature", "0"]) == 0
    after_reading = capsys.readouterr().out
    assert main(["generate", str(run), "--prompt-file", str(text), *command[-2:], "--temperature", "0"]) == 0
    assert capsys.readouterr().out == text.read_text() + after_reading


def test_read_with_weights_in_another_dtype(tmp_path, capsys):
    """As `generate` with that --dtype, which refuses the context of other weights."""
    folder = write(tmp_path / "hf", CONFIGS["brumby"], drawn(CONFIGS["brumby"], torch.bfloat16))
    run, text, context = (str(tmp_path / name) for name in ("run", "text", "context"))
    (tmp_path / "text").write_text("to be or not to be")
    assert main(["convert", str(folder), "--out", run]) == 0
    assert main(["read", run, text, "--out", context, "--weights-dtype", "float32"]) == 0
    command = ["--max-new-tokens", "20", "--temperature", "0"]
    capsys.readouterr()
    assert main(["generate", run, "--context", context, "--dtype", "float32", *command]) == 0
    found = capsys.readouterr().out
    assert main(["generate", run, "--prompt-file", text, "--dtype", "float32", *command]) == 0
    assert capsys.readouterr().out == "to be or not to be" + found
    assert main(["generate", run, "--context", context, *command]) == 2
    line = "is a context of another model: its weights differ, float32 there and bfloat16 here (see --weights-dtype of"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["generate", "hf", "--prompt", "a"], "is no run: its config.json is of a model of Hugging Face transformers"),
        (["export", "hf", "--out", "out"], "of which `sympow convert` makes a run"),
        (["read", "hf", "hf/config.json", "--out", "out"], "of which `sympow convert` makes a run"),
        (["evaluate", "hf"], "of which `sympow convert` makes a run"),
        (["distill", "hf", "--teacher", "hf", "--out", "out"], "of which `sympow convert` makes a run"),
        (["serve", "hf"], "got 'KIND', of which `sympow convert` makes a run"),
        (["passkey", "hf"], "transformers does not read KIND models, of which `sympow convert` makes a run"),
    ],
)
def test_commands_say_that_a_source_is_converted_first(tmp_path, source, words, line, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert line.replace("KIND", source[1]["model_type"]) in error and error.count("\n") == 1
    assert "trust_remote_code" not in error


def test_an_id_on_the_hub_is_read_as_a_folder(tmp_path, source):
    """Without warnings of transformers, which knows neither model. Its cache stands in for the Hub."""
    folder, config, weights = source
    there, commit = tmp_path / "hub" / "models--some--power", "0" * 40
    shutil.copytree(folder, there / "snapshots" / commit)
    (there / "snapshots" / commit / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text(commit)
    command = [sys.executable, "-m", "sympow", "convert", "some/power", "--out", str(tmp_path / "run")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    tokens, read = some_tokens(), load_model(tmp_path / "run")
    with torch.no_grad():
        assert_close(read.model(tokens)[0].double(), expected(config, weights, tokens[0]), **CLOSE)
    assert json.loads((tmp_path / "run" / "tokenizer.json").read_text()) == json.loads(
        (folder / "tokenizer.json").read_text()
    )


def test_weights_are_in_memory_once(tmp_path, source, monkeypatch):
    """Of a model that fills the memory, no second copy can be made: not while files are read, not in transformers."""
    from sympow.integrations.transformers import modeling
    from sympow.integrations.transformers.pretrained import power_models

    folder, config, weights = source
    place, read = power_models.place, []

    def watched(key, weight, own, of):
        assert all(each() is None for each in read), "another weight of the files is still in memory"
        place(key, weight, own, of)
        read.append(weakref.ref(weight))

    monkeypatch.setattr(power_models, "place", watched)
    assert main(["convert", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert len(read) == len(weights)
    exported = to_transformers(tmp_path / "run", tmp_path / "exported")

    def second(*args, **kwargs):
        raise AssertionError("a second model is made")

    monkeypatch.setattr(modeling, "LanguageModel", second)
    import transformers

    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(exported)(some_tokens()).logits[0]
    assert_close(logits.double(), expected(config, weights, some_tokens()[0]), **CLOSE)


REFUSED = {
    "brumby": [
        ({"rope_theta": None}, "has no rope_theta in its config.json"),
        ({"rope_theta": 0.5}, "has rope_theta = 0.5; expected a number greater than 1"),
        ({"rope_theta": [1]}, r"hf has rope_theta = \[1\]; expected a number greater than 1"),
        ({"rope_theta": {}}, "hf has rope_theta = {}; expected a number greater than 1"),
        ({"rope_theta": 10**400}, "hf has rope_theta = 1000.*; expected a number greater than 1, below 2"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 10**30}},
            "hf has a rotation with factor = 1000.*; expected a number below 2",
        ),
        ({"vocab_size": 10**30}, "hf has vocab_size = 1000.*; expected an integer of at least 1, below 2"),
        ({"head_dim": 10**30}, "hf has head_dim = 1000.*; expected an integer of at least 1, below 2"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "has several rope_theta: 10000.0, 1000000.0"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "scaled rotation of the type 'longrope'"),
        ({"use_exp": True}, "has use_exp = True; expected False"),
        ({"p": 4}, "has p = 4; expected 2"),
        ({"attention_bias": True}, "has attention_bias = True; expected False"),
        ({"use_sliding_window": True}, "has use_sliding_window = True; expected False"),
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu'; expected 'silu'"),
        ({"num_key_value_heads": None}, "has no num_key_value_heads in its config.json"),
        ({"num_key_value_heads": 5}, r"k_proj.weight has the shape \[16, 40\], expected \[40, 40\]"),
        ({"num_hidden_layers": 10**12}, "model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2}, "has the weight model.layers.2.*, which its config does not know"),
        ({"head_dim": 7}, "has heads of 7 channels; the rotation needs an even number"),
        ({"vocab_size": 259}, "the tokenizer is not that of the model|has 259 embeddings"),
        ({"quantization_config": {"quant_method": "gptq"}}, "are quantized"),
        ({"layer_types": ["sliding_attention"] * 3}, "another attention than full_attention"),
        ({"rms_norm_eps": 0}, "has rms_norm_eps = 0; expected a number between 0 and 1"),
    ],
    "powercoder": [
        ({"rope_theta": None}, "has no rope_theta in its config.json"),
        ({"use_bias": False}, "has use_bias = False; expected True"),
        ({"norm_epsilon": 1e-6}, "has norm_epsilon = 1e-06; expected 1e-05"),
        ({"hidden_act": "silu"}, "has hidden_act = 'silu'; expected 'gelu_pytorch_tanh'"),
        ({"sliding_window": 16}, "has sliding_window = 16; expected None"),
        ({"intermediate_size": 150}, "has intermediate_size = 150; the gpt2 body needs a multiple of 40"),
        ({"intermediate_size": 80}, r"mlp.c_fc.weight has the shape \[160, 40\], expected \[80, 40\]"),
    ],
}


@pytest.mark.parametrize(("kind", "changes", "line"), [(kind, *case) for kind in KINDS for case in REFUSED[kind]])
def test_fields_that_disagree_are_refused(tmp_path, capsys, kind, changes, line):
    config = CONFIGS[kind]
    folder = write(tmp_path / "hf", config, drawn(config))
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=line):
        load_pretrained(folder)
    assert main(["convert", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def gate_of_every_query_head(weights):
    gates = {name: each for name, each in weights.items() if ".g_proj." in name}
    return weights | {name: each.repeat_interleave(5, 0) for name, each in gates.items()}


def head_of(dtype):
    return lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"].to(dtype)}


def without(part):
    return lambda weights: {name: each for name, each in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (gate_of_every_query_head, r"self_attn.g_proj.weight has the shape \[10, 40\], expected \[2, 40\]"),
        (without("g_proj"), "self_attn.g_proj.weight is missing"),
        (without("lm_head"), "lm_head.weight is missing"),
        (lambda weights: weights | {"model.layers.0.other": torch.zeros(1)}, "has the weight model.layers.0.other"),
        (head_of(torch.int8), "its weight lm_head.weight is of I8, not F64, F32, F16, BF16"),
        (head_of(torch.float8_e4m3fn), "its weight lm_head.weight is of F8_E4M3"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_fit_are_refused(tmp_path, kind, change, line):
    config = CONFIGS[kind] | {"tie_word_embeddings": False}
    folder = write(tmp_path / "hf", config, change(drawn(config)))
    with pytest.raises(ValueError, match=line):
        load_pretrained(folder)


def test_files_that_are_missing_or_cut_are_refused(tmp_path):
    folder = write(tmp_path / "hf", CONFIGS["brumby"], drawn(CONFIGS["brumby"]))
    file = folder / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    index = folder / "model.safetensors.index.json"
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=rf"^{file} cannot be read: Error while"):
        load_pretrained(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"^{index} names the file {file.name}, which is missing$"):
        load_pretrained(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match=rf"^{index} is no JSON: "):
        load_pretrained(folder)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=rf"^{folder} has no weights in the format safetensors"):
        load_pretrained(folder)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    weights = drawn(CONFIGS["brumby"])
    weights["lm_head.weight"][3, 5] = math.nan
    folder = write(tmp_path / "hf", CONFIGS["brumby"], weights)
    with pytest.raises(ValueError, match=rf"^{folder}/{SHARDS[0]} cannot be read: its weight lm_head.weight holds"):
        load_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_not_the_embedding_to_which_it_is_tied_is_refused(tmp_path, kind):
    config = CONFIGS[kind] | {"tie_word_embeddings": True}
    weights = drawn(config, torch.bfloat16)
    with pytest.raises(ValueError, match=r"hf has tie_word_embeddings = True, and a lm_head\.weight that is not its"):
        load_pretrained(write(tmp_path / "hf", config, weights))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].float()
    assert load_pretrained(write(tmp_path / "same", config, weights)).model.head is None


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weight_in_two_shards(folder, weights, index):
    """The second, which is read last, has other values."""
    name = next(name for name, file in index.items() if file == SHARDS[0])
    second = load_file(folder / SHARDS[1]) | {name: weights[name] * 3}
    save_file(second, folder / SHARDS[1], metadata={"format": "pt"})


def names_of_the_other_shard(folder, weights, index):
    index |= {name: SHARDS[file == SHARDS[0]] for name, file in index.items()}


def unknown_name(folder, weights, index):
    index["model.layers.7.ghost"] = SHARDS[0]


def another_whole_file(folder, weights, index):
    save_file({name: each * 2 for name, each in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (weight_in_two_shards, f"hf has the weight lm_head.weight in two files, {SHARDS[0]} and {SHARDS[1]}$"),
        (names_of_the_other_shard, rf"index.json names {SHARDS[1]} as the file of .*, which is in {SHARDS[0]}$"),
        (unknown_name, r"index.json names .* as the file of model.layers.7.ghost, which is in none of its files$"),
        (
            another_whole_file,
            r"hf has model.safetensors and model.safetensors.index.json, of other files; expected one",
        ),
    ],
)
def test_shards_that_mislead_are_refused(tmp_path, monkeypatch, change, line):
    monkeypatch.setattr("sympow.integrations.transformers.pretrained.power_models.Undrawn", None)  # no model is made
    weights = drawn(CONFIGS["brumby"])
    folder = write(tmp_path / "hf", CONFIGS["brumby"], weights)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(folder, weights, index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=line) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--pattern", "power*2,window"], "the layers of the model have power attention, kept by the pattern power"),
        (["--pattern", "softmax"], "kept by the pattern power; got 'softmax'"),
        (["--p", "4"], "have power attention with p = 2, which is kept; got p = 4"),
        (["--unshare"], "have power attention, which is kept, as its key/value heads are"),
        (["--keep", "1", "--by", __file__], "have power attention, which is kept; --keep and --window need layers of"),
        (["--window", "64"], "have power attention, which is kept; --keep and --window need layers of"),
        (None, "hf has no tokenizer.json: a converted model"),
    ],
)
def test_what_cannot_be_done_is_refused_before_weights_are_read(tmp_path, source, monkeypatch, options, line, capsys):
    monkeypatch.setattr("sympow.integrations.transformers.pretrained.loading.load_power_model", None)
    if options is None:
        (source[0] / "tokenizer.json").unlink()
        options = []
    assert main(["convert", str(source[0]), "--out", str(tmp_path / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1


def test_a_single_file_and_a_tied_head(tmp_path):
    config = CONFIGS["powercoder"] | {"tie_word_embeddings": True}
    weights = without("lm_head")(drawn(config))
    weights["model.embed_tokens.weight"] *= 0.2  # which scales the logits too
    folder = write(tmp_path / "hf", config, weights)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors")
    assert set(load_file(folder / "model.safetensors")) == set(weights)
    model, tokens = load_pretrained(folder).model, some_tokens()
    with torch.no_grad():
        logits = model(tokens)[0].double()
    wanted = expected(config, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, tokens[0])
    assert model.head is None
    assert_close(logits, wanted, **CLOSE)


def test_body_without_a_norm_of_the_embedding():
    with pytest.raises(ValueError, match="embedding_norm must be true or false; got 1"):
        ModelConfig(9, 32, 2, 2, embedding_norm=1)
    with pytest.raises(ValueError, match="the llama body has no field 'embedding_norm'"):
        ModelConfig(9, 32, 2, 2, body="llama", embedding_norm=False)
    config = ModelConfig(9, 32, 2, 2, embedding_norm=False)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_runs_keep_the_dtype_of_the_source(tmp_path, capsys):
    """A run in bfloat16 is read in it, unless --dtype names another; export keeps it too."""
    folder = write(tmp_path / "hf", CONFIGS["brumby"], drawn(CONFIGS["brumby"], torch.bfloat16))
    run = tmp_path / "run"
    assert main(["convert", str(folder), "--out", str(run)]) == 0
    assert {each.dtype for each in load_model(run).model.state_dict().values()} == {torch.float32}
    for dtype, wanted in ((None, torch.bfloat16), (torch.float16, torch.float16), (torch.float64, torch.float64)):
        assert {each.dtype for each in load_model(run, dtype=dtype).model.state_dict().values()} == {wanted}
    for file in to_transformers(run, tmp_path / "exported").glob("*.safetensors"):
        assert {each.dtype for each in load_file(file).values()} == {torch.bfloat16}
    capsys.readouterr()
    texts = []
    for more in (["--dtype", "float32"], ["--dtype", "bfloat16"], []):
        command = ["generate", str(run), "--prompt", "to be", "--max-new-tokens", "40", "--temperature", "0", *more]
        assert main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[2] != texts[0]
    (tmp_path / "text").write_text("to be or not to be")
    assert main(["read", str(run), str(tmp_path / "text"), "--out", str(tmp_path / "context")]) == 0
    assert main(["generate", str(run), "--context", str(tmp_path / "context"), "--max-new-tokens", "3"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_and_distill_a_run_in_bfloat16(tmp_path, kind, capsys):
    folder = write(tmp_path / "hf", CONFIGS[kind], drawn(CONFIGS[kind], torch.bfloat16))
    texts, run = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    (texts / "a.txt").write_text("to be or not to be, that is. " * 2000)
    assert main(["convert", str(folder), "--out", str(run)]) == 0
    data = ["--data", "kind=text", "--data", f"path={texts}"]
    capsys.readouterr()
    means = []
    for dtype in ("float32", "bfloat16", "auto"):
        assert main(["evaluate", str(run), "--context", "64", "--rows", "2", "--dtype", dtype, *data]) == 0
        means.append(capsys.readouterr().out.splitlines()[-1])
    assert means[1] == means[2] != means[0]
    steps = ["training.steps=2", "training.context=32", "training.batch_size=2", "training.evaluation_batches=1",
             "training.warmup_steps=1", "distillation.layer_steps=0", "distillation.text_steps=1"]  # fmt: skip
    for teacher in (folder, run):
        command = ["distill", str(run), "--teacher", str(teacher), "--out", str(tmp_path / teacher.name / "student")]
        assert main([*command, "data.kind=text", f"data.path={texts}", "training.precision=float32", *steps]) == 0
