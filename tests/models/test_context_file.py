"""Context files: continuing from one is as if the model had never stopped; what is not one is refused."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.context_damage import READ, corruptions, kill_writers, small_model, spoil
from sympow.layers import power
from sympow.layers.state_file import deserialize, serialize
from sympow.models import (
    Context,
    ContextError,
    LanguageModel,
    MixerConfig,
    ModelConfig,
    generate,
    load_context,
    save_context,
)
from sympow.models.context import NO_TOKENS, extended_digest
from sympow.models.context_file import read_header
from sympow.ops import DecodingState, PowerState
from tests.draws import disturb

VOCAB = 61
RANDOM = MixerConfig("selection", {"selection": "random", "probability": 0.5})
REPEATS = MixerConfig("selection", {"selection": "programmatic"})
CASES = {
    "power": ("gpt2", [MixerConfig("power")]),
    "power-data": ("llama", [MixerConfig("power", {"rotation": "data", "n_kv_heads": 1})]),
    "delta": ("llama", [MixerConfig("power_delta"), MixerConfig("hybrid_heads", {"window": 7})]),
    "hybrid": ("gpt2", [MixerConfig("power"), MixerConfig("softmax"), MixerConfig("window", {"window": 7})]),
    "window-not-full": ("gpt2", [MixerConfig("power"), MixerConfig("window", {"window": 100})]),
    "gated-softmax": ("llama", [MixerConfig("softmax", {"gate": True, "short_convolution": 4})]),
    "gated-window": ("llama", [MixerConfig("window", {"window": 30, "gate": True, "short_convolution": 4})]),
    "rwkv7": ("rwkv7", [MixerConfig("rwkv7")]),
    "rwkv7-body": ("rwkv7", [MixerConfig("power"), MixerConfig("softmax")]),
    "rwkv4": ("rwkv7", [MixerConfig("rwkv4")]),
    "linear": ("gpt2", [MixerConfig("linear", {"feature_map": "elu+1"}), MixerConfig("retnet")]),
    "selection": ("gpt2", [RANDOM, REPEATS]),
    "blocked": ("gpt2", [MixerConfig("blocked_window", {"window": 8})]),
    "convolutions": ("gpt2", [MixerConfig("hyena", {"max_length": 9}), MixerConfig("base_conv", {"max_length": 64})]),
    "state-space": ("gpt2", [MixerConfig("h3", {"state_dim": 8}), MixerConfig("liquid_s4", {"state_dim": 8})]),
}
CONSTANT = ["power", "power-data", "rwkv7", "rwkv4", "linear", "state-space"]


def model(case: str = "power", seed: int = 0) -> LanguageModel:
    """Untrained, but with weights so large that every token matters to the next."""
    body, mixers = CASES[case]
    shape = {"mlp_ratio": 2} if body != "llama" else {"mlp_hidden": 48}
    config = ModelConfig(VOCAB, 32, max(2, len(mixers)), 2, tuple(mixers), body=body, tie_embeddings=False, **shape)
    return disturb(LanguageModel(config, seed=seed).eval(), 0.2, seed)


def tokens(time: int = 43, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(built: LanguageModel, context: Context, prompt: torch.Tensor, count: int = 12):
    """Tokens and logits of every step, behind the context, which is used up."""
    state, logits = context.state, context.logits
    if prompt.shape[1]:
        logits, state = built.step(prompt, state)
    seen = [logits]
    for _ in range(count):
        logits, state = built.step(logits.argmax(-1)[:, None], state)
        seen.append(logits)
    return torch.stack(seen, 1)


@pytest.fixture(params=[False, True], ids=["no-tail", "tail"])
def tail(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(power, "keeps_tail", lambda *_: True)
    return request.param


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [5, 1], ids=["chunk", "token"])
def test_continuing_from_a_file_is_never_having_stopped(case, last, tmp_path):
    built, x = model(case), tokens(rows=2)
    context = Context.begin(built, 2).read(built, x[:, :-last], chunk=16).read(built, x[:, -last:])
    save_context(tmp_path / "x.ctx", built, context)
    expected = greedy(built, context, tokens(3, 2, seed=2))
    loaded = load_context(tmp_path / "x.ctx", built)
    assert loaded.tokens == 43 and loaded.digest == context.digest
    assert torch.equal(greedy(built, loaded, tokens(3, 2, seed=2)), expected)
    assert len(expected.argmax(-1).unique()) >= 3  # not a fixed point, which anything would agree with


@pytest.mark.parametrize("case", ["power", "power-data", "hybrid", "rwkv7-body"])
@pytest.mark.parametrize("more", [0, 4, 8])
def test_a_tail_goes_on_where_it_stood(case, more, tail, tmp_path):
    """Token by token, so that tails are empty, half full and full."""
    built, x = model(case), tokens(20 + more)
    context = Context.begin(built).read(built, x[:, :20]).read(built, x[:, 20:], chunk=1)
    kinds = {type(memory) for memory in memories(context)}
    assert kinds == {DecodingState if tail else PowerState}
    save_context(tmp_path / "x.ctx", built, context)
    expected = greedy(built, context, tokens(0))
    assert torch.equal(greedy(built, load_context(tmp_path / "x.ctx", built), tokens(0)), expected)


def memories(context: Context):
    for layer in context.state.layers:
        inner = getattr(layer, "mixer", layer)
        inner = getattr(inner, "behind", inner)
        if hasattr(inner, "memory") and not isinstance(inner.memory, torch.Tensor):
            yield inner.memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_tail_fits_a_model_without_one_and_back(dtype, monkeypatch, tmp_path):
    built, x = model(), tokens(20)
    plain = Context.begin(built).read(built, x)
    expected = greedy(built, plain.clone(), tokens(0), 3)
    save_context(tmp_path / "plain.ctx", built, plain, dtype=dtype)
    monkeypatch.setattr(power, "keeps_tail", lambda *_: True)
    with_tail = Context.begin(built).read(built, x[:, :17]).read(built, x[:, 17:], chunk=1)
    save_context(tmp_path / "tail.ctx", built, with_tail, dtype=dtype)
    loaded = load_context(tmp_path / "plain.ctx", built)
    assert all(isinstance(memory, DecodingState) for memory in memories(loaded))
    # float32: roundings alone. Half a step of int8 is 1/254 of a row's largest, and rows add up.
    tolerance = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}[dtype] * expected.abs().max()
    assert (greedy(built, loaded, tokens(0), 3) - expected).abs().max() < tolerance
    monkeypatch.undo()
    loaded = load_context(tmp_path / "tail.ctx", built)
    assert all(isinstance(memory, PowerState) for memory in memories(loaded))
    assert (greedy(built, loaded, tokens(0), 3) - expected).abs().max() < tolerance


def test_loading_twice_gives_independent_states(tmp_path):
    built = model("hybrid")
    save_context(tmp_path / "x.ctx", built, Context.begin(built).read(built, tokens()))
    first, second = (load_context(tmp_path / "x.ctx", built) for _ in range(2))
    a = greedy(built, first, tokens(5, seed=3))
    b = greedy(built, second, tokens(5, seed=4))
    assert not torch.equal(a, b)
    assert torch.equal(greedy(built, load_context(tmp_path / "x.ctx", built), tokens(5, seed=4)), b)


def test_arguments_in_another_order_are_refused(tmp_path):
    built = model("hybrid")
    context = Context.begin(built).read(built, tokens())
    with pytest.raises(TypeError, match=r"^save_context takes path, model and context; got LanguageModel as path$"):
        save_context(built, tmp_path / "x.ctx", context)
    with pytest.raises(TypeError, match=r"^load_context takes path and model; got LanguageModel as path$"):
        load_context(built, tmp_path / "x.ctx")


@pytest.mark.parametrize("prompt", [0, 5])
def test_generate_continues_a_context_and_leaves_it(prompt, tmp_path):
    built, x = model("hybrid"), tokens(40)
    cut = x.shape[1] - prompt
    save_context(tmp_path / "x.ctx", built, Context.begin(built).read(built, x[:, :cut]))
    context = load_context(tmp_path / "x.ctx", built)
    whole = greedy(built, Context.begin(built).read(built, x[:, :cut]), x[:, cut:], 9).argmax(-1)
    for _ in range(2):
        assert torch.equal(generate(built, x[:, cut:], 10, temperature=0, context=context).tokens, whole)
    with pytest.raises(ValueError, match="the context has 1 row; got a prompt of 2"):
        generate(built, tokens(4, 2), 1, context=context)
    with pytest.raises(ValueError, match="at least one token"):
        generate(built, tokens(0), 1, context=Context.begin(built))


@pytest.mark.parametrize("case", CONSTANT)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_size_does_not_depend_on_the_tokens(case, dtype, tmp_path):
    built, sizes = model(case), set()
    context = Context.begin(built)
    for count in (9, 1, 90, 1000):
        context = context.read(built, tokens(count))
        save_context(tmp_path / "x.ctx", built, context, dtype=dtype)
        sizes.add((tmp_path / "x.ctx").stat().st_size)
    assert len(sizes) == 1


def test_caches_are_cut_to_the_tokens_held(tmp_path):
    built = model("hybrid")
    context = Context.begin(built).read(built, tokens(33))
    save_context(tmp_path / "x.ctx", built, context)
    from safetensors import safe_open

    with safe_open(tmp_path / "x.ctx", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert shapes["state.layers.1.k"] == [1, 2, 33, 16] and context.state.layers[1].k.shape[2] > 33
    assert shapes["state.layers.2.v"] == [1, 2, 7, 16]


def test_int8_is_small_and_near(tmp_path):
    built, x, size = model("rwkv7-body"), tokens(), {}
    expected = greedy(built, Context.begin(built).read(built, x), tokens(0), 3)
    for dtype in ("float32", "bfloat16", "int8"):
        save_context(tmp_path / dtype, built, Context.begin(built).read(built, x), dtype=dtype)
        size[dtype] = (tmp_path / dtype).stat().st_size
        near = greedy(built, load_context(tmp_path / dtype, built), tokens(0), 3)
        assert (near - expected).abs().max() < 0.1 * expected.abs().max()
        assert torch.equal(near, expected) == (dtype == "float32")
    assert size["int8"] < 0.75 * size["bfloat16"] and size["bfloat16"] < 0.75 * size["float32"]


@pytest.mark.parametrize("chunk", [1, 7, 43, 1000])
def test_the_digest_does_not_depend_on_chunks(chunk):
    x, digest = tokens(rows=2), NO_TOKENS
    for piece in x.split(chunk, dim=1):
        digest = extended_digest(digest, piece)
    assert digest == extended_digest(NO_TOKENS, x) != extended_digest(NO_TOKENS, x.flip(1))
    built = model()
    assert Context.begin(built, 2).read(built, x, chunk=chunk).digest == digest


def test_tokens_of_other_rows_are_refused():
    built, x = model(), tokens(rows=2)
    for given in (x[:1], x[0]):
        with pytest.raises(ValueError, match=r"tokens must be \[B = 2, T\], as the rows read before; got "):
            Context.begin(built, 2).read(built, given)


def test_the_same_context_is_the_same_file(tmp_path):
    built = model("hybrid")
    for name in "ab":
        save_context(tmp_path / name, built, Context.begin(built).read(built, tokens()))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_model_is_refused(tmp_path):
    built = model()
    save_context(tmp_path / "x.ctx", built, Context.begin(built).read(built, tokens()))
    with pytest.raises(ContextError, match=r"x.ctx is a context of another model: its weights differ$"):
        load_context(tmp_path / "x.ctx", model(seed=1))
    with pytest.raises(ContextError, match=r"x.ctx is a context of another model: its config differs$"):
        load_context(tmp_path / "x.ctx", model("hybrid"))
    with torch.no_grad():
        built.final_norm.weight[3] += 1e-6
    with pytest.raises(ContextError, match="its weights differ"):
        load_context(tmp_path / "x.ctx", built)


def test_a_context_that_could_not_be_loaded_is_not_written(tmp_path):
    """Or what was read would be lost without a word."""
    built, file = model(), tmp_path / "x.ctx"
    whole = Context.begin(built).read(built, tokens())
    begun = replace(Context.begin(built), state=built.init_state(1, dtype=torch.bfloat16))
    for context, message in (
        (Context.begin(model("hybrid")).read(model("hybrid"), tokens()), "expected .*, got "),
        (begun.read(built, tokens()), "expected a tensor of torch.float32, got torch.bfloat16$"),
        (Context.begin(built, rows=0), "expected at least one row; got 0$"),
        (replace(whole, logits=whole.logits[:, 1:]), r"expected logits \[1, 61\] of the next token, got .* \[1, 60\]$"),
    ):
        with pytest.raises(ContextError, match=f"cannot write the context {file}: {message}"):
            save_context(file, built, context)
        assert not list(tmp_path.iterdir())


def test_a_lack_of_memory_is_no_wrong_context(tmp_path, monkeypatch):
    built = model()
    context = Context.begin(built).read(built, tokens())

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(built, "init_state", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        save_context(tmp_path / "x.ctx", built, context)


def test_fifty_spoilt_files_are_refused(tmp_path):
    built, file = model(), tmp_path / "x.ctx"
    save_context(file, built, Context.begin(built).read(built, tokens(READ)))
    whole = file.read_bytes()
    spoilt = corruptions(whole)
    assert len(spoilt) == 50 and whole not in spoilt.values()
    for content in spoilt.values():
        file.write_bytes(content)
        with pytest.raises(ContextError) as caught:
            load_context(file, built)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    file.write_bytes(whole)
    load_context(file, built)
    assert spoil(file)["refused"] == 50


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    built = model()
    with pytest.raises(FileNotFoundError, match="no context file at"):
        load_context(tmp_path / "x.ctx", built)
    save_file({"weight": torch.ones(3)}, tmp_path / "x.ctx")
    with pytest.raises(ContextError, match=r"x\.ctx is not a context file of sympow: it has no checksum"):
        load_context(tmp_path / "x.ctx", built)
    with pytest.raises(ContextError, match=r"cannot write the context .*/nowhere/x\.ctx: "):
        save_context(tmp_path / "nowhere" / "x.ctx", built, Context.begin(built))
    with pytest.raises(ValueError, match="one of float32, bfloat16, int8; got 'int4'"):
        save_context(tmp_path / "x.ctx", built, Context.begin(built), dtype="int4")


def test_another_version_is_refused(monkeypatch, tmp_path):
    built = model()
    monkeypatch.setattr("sympow.models.context_file.VERSION", 2)
    save_context(tmp_path / "x.ctx", built, Context.begin(built))
    monkeypatch.undo()
    with pytest.raises(ContextError, match=r"^\S+x\.ctx has version 2 of the format; this one reads 1"):
        load_context(tmp_path / "x.ctx", built)


def at(*path, value):
    """A change of what a header says: the value at a path."""

    def change(content):
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


def tail_of(capacity):
    return DecodingState.from_state(PowerState.zeros(1, 2, 16, 16), capacity=capacity)


LAYER = ("tree", "fields", "layers", "list", 0)
MEMORY = (*LAYER, "fields", "behind", "fields")
CACHE = ("tree", "fields", "layers", "list", 1, "fields")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            at("rows", value=10**12),
            r"expected logits \[1000000000000, 61\] of the next token, got torch.float32 \[1, 61",
        ),
        (at("rows", value=-1), "expected rows of tokens; got -1 rows of 43 tokens"),
        (at("rows", value=True), "got True rows"),
        (at("tokens", value="-3"), "got 1 rows of -3 tokens"),
        (at("digest", value="x"), "expected a dtype and a digest; got 'float32' and 'x'"),
        (at("dtype", value=[1]), r"got \[1\] and"),
        (at("tree", value=None), "expected a state of 3 layers, got NoneType"),
        (at("tree", "fields", "layers", value=None), "expected a state of 3 layers, got ModelState"),
        (at(*LAYER, value=None), "does not hold the states of this model"),
        (at(*LAYER, value={"tensor": "logits", "dtype": "float32"}), "does not hold the states of this model"),
        (at(*MEMORY, "memory", "fields", "p", value={"int": "9" * 14}), "a PowerState of p=99999999999999"),
        (at(*MEMORY, "memory", "fields", "p", value={"tensor": "logits", "dtype": "float32"}), "does not hold"),
        (at(*MEMORY, "position", value={"int": "-1"}), "expected a number of tokens, got int: -1"),
        (at(*MEMORY, "position", value={"int": "42"}), "must have position = 43, the tokens read; got 42"),
        (at("tokens", value="44"), "must have position = 44, the tokens read; got 43"),
        (at(*MEMORY, "position", value={"list": []}), "expected a number of tokens, got list"),
        (at(*MEMORY, "position", value={"int": "1" * 30}), "expected a number of tokens, got int: 1111111"),
        (
            at(*LAYER, "fields", "past", "dtype", value="float16"),
            "expected a tensor of torch.float32, got torch.float16",
        ),
        (at(*CACHE, "k", value={"tensor": "logits", "dtype": "float32"}), "expected a cache of 43 tokens"),
        (
            at(*CACHE, "length", value={"int": "9" * 14}),
            r"expected a cache of 99999999999999 tokens, .*; got \[1, 2, 43",
        ),
        (at(*CACHE, "length", value={"int": "1"}), "expected a cache of 1 tokens"),
        (at(*CACHE, "length", value=True), "expected a cache of True tokens"),
        (at(*CACHE, "limit", value={"int": "-5"}), "holds at most -5"),
        (at(*CACHE, "k", "dtype", value="int64"), "expected a tensor of torch.float32, got torch.int64"),
        (at(*CACHE, "k", "tensor", value="w"), r"x\.ctx does not hold .*expected a tensor .* used once; got 'w'$"),
        (
            at(*LAYER, value={"list": [{"tensor": "logits", "dtype": "float32"}] * 2}),
            "expected a tensor of the file that is used once; got 'logits'$",
        ),
        (at(*CACHE, "k", "scale", value="logits"), r"expected a scale for each row .* 43, 16\]; got \[1, 61\]$"),
    ],
)
def test_states_of_other_sizes_are_refused(change, message, tmp_path, monkeypatch):
    """Whoever writes a file can write its checksum too."""
    built, file, dumps = model("hybrid"), tmp_path / "x.ctx", json.dumps

    def changed(content, **options):
        if "tree" in content:
            change(content)
        return dumps(content, **options)

    monkeypatch.setattr("sympow.models.context_file.json.dumps", changed)
    save_context(file, built, Context.begin(built).read(built, tokens()))
    monkeypatch.undo()
    with pytest.raises(ContextError, match=message) as caught:
        load_context(file, built)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (PowerState.zeros(1, 2, 8, 8, p=3), r"expected sums of \[p, .* = \[2, 16, .*; got \[3, 8, 2, 120, 8\]$"),
        (tail_of(capacity=1000), "expected a tail of at most 4 tokens without slots; got 1000, none$"),
        (tail_of(capacity=4).at(torch.zeros(9, dtype=torch.int32)), r"without slots; got 4, \[9\]$"),
    ],
    ids=["sums", "tail", "slots"],
)
def test_memory_that_grows_when_a_tail_is_folded_is_refused(memory, message, tmp_path, monkeypatch):
    """A tail of C tokens takes C x D numbers, and slots take a state each."""
    built, file = model(), tmp_path / "x.ctx"
    context = Context.begin(built).read(built, tokens())
    other, layer = context.clone(), context.state.layers[0]
    other.state.layers[0] = replace(layer, behind=replace(layer.behind, memory=memory))
    with pytest.raises(ContextError, match=message):
        save_context(file, built, other)
    monkeypatch.setattr("sympow.models.context_file.serialize", lambda _, dtype: serialize(other.state, dtype))
    save_context(file, built, context)
    with pytest.raises(ContextError, match=message):
        load_context(file, built)


@pytest.mark.parametrize("case", CASES)
def test_a_number_of_tokens_that_the_states_deny_is_refused(case, tmp_path, monkeypatch):
    """The states of some mixers do not count tokens."""
    built, file = model(case), tmp_path / "x.ctx"
    context = Context.begin(built).read(built, tokens())
    wrong = replace(context, tokens=44)
    if case in ("power-data", "rwkv7", "rwkv4", "state-space"):
        save_context(file, built, wrong)
        assert load_context(file, built).tokens == 44
        return
    with pytest.raises(ContextError, match=r"= 44, the tokens read; got 43$"):
        save_context(file, built, wrong)
    monkeypatch.setattr("sympow.models.context_file.serialize", lambda _, dtype: serialize(other.state, dtype))
    other = Context.begin(built).read(built, tokens(44))
    save_context(file, built, context)
    with pytest.raises(ContextError, match=r"= 43, the tokens read; got 44$"):
        load_context(file, built)


def test_without_safetensors_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    built = model()
    with pytest.raises(ImportError, match=r"^context files need safetensors: pip install 'sympow\[train\]' \("):
        save_context(tmp_path / "x.ctx", built, Context.begin(built))


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    row = kill_writers(tmp_path / "x.ctx", 20)
    assert row["whole_files"] == row["kills"] == 20
    built = small_model()
    save_context(tmp_path / "x.ctx", built, Context.begin(built))
    assert [file.name for file in tmp_path.iterdir()] == ["x.ctx"]  # what killed writers left is gone


def test_the_header_tells_what_is_held(tmp_path):
    built = model()
    context = Context.begin(built, 3).read(built, tokens(9, 3))
    save_context(tmp_path / "x.ctx", built, context, dtype="int8")
    header = read_header(tmp_path / "x.ctx")
    assert (header.tokens, header.rows, header.dtype, header.digest) == (9, 3, "int8", context.digest)
    assert json.loads(json.dumps(header.tree)) == header.tree


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", torch.bfloat16), ("int8", torch.int8)])
@pytest.mark.parametrize("case", ["gated-softmax", "gated-window"])
def test_of_a_gated_cache_only_keys_are_exact(case, dtype, stored):
    """They contain sums of gates. The values are rounded as those of other caches."""
    made = model(case)
    with torch.no_grad():
        _, state = made.step(torch.arange(40)[None] % VOCAB, made.init_state(1))
    packed = serialize(state, dtype)
    keys = {name: tensor.dtype for name, tensor in packed.tensors.items() if name.endswith("cache.k")}
    values = {name: tensor.dtype for name, tensor in packed.tensors.items() if name.endswith("cache.v")}
    assert len(keys) == len(values) == 2
    assert {*keys.values()} == {torch.float32} and {*values.values()} == {stored}
    rounded = deserialize(packed, "cpu")
    with torch.no_grad():
        expected, found = (made.step(torch.tensor([[3]]), each)[0] for each in (state, rounded))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
