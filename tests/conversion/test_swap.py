"""The swap: what stays is the teacher's, what is new begins so that it changes nothing."""

import pytest
import torch
from torch.testing import assert_close

from sympow.conversion import parse_pattern, swap_mixers
from sympow.conversion.swap import keeps_layers, kind_of
from sympow.layers.power import PowerAttention
from sympow.layers.power_delta import PowerDeltaAttention
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.window import WindowAttention
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.ops import power_delta_rule

VOCAB = 41


def teacher(**options) -> LanguageModel:
    mixer = MixerConfig("softmax", {"bias": False, "out_bias": False, "rope_base": 5e4} | options)
    config = ModelConfig(VOCAB, 32, 6, 4, (mixer,), body="llama", n_kv_heads=2)
    made = LanguageModel(config, seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(drawn, alpha=parameter.shape[-1] ** -0.5)
    return made


TOKENS = torch.randint(VOCAB, (2, 23), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"qk_norm": True}], ids=["Llama", "Qwen2", "Qwen3"])
def test_windows_that_see_all_and_softmax_change_nothing(options):
    model = teacher(**options)
    for pattern in (("softmax",), ("window",), ("window", "softmax")):
        assert_close(swap_mixers(model, pattern, window=23)(TOKENS), model(TOKENS))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"qk_norm": True}], ids=["Llama", "Qwen2", "Qwen3"])
def test_a_power_layer_begins_as_the_plain_power_of_the_teachers_scores(options):
    """Gates open and scores without the constant: what remains is (q.k)^2 over its sum."""
    model = teacher(**options)
    student = swap_mixers(model, ("power",))
    x = torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for own, other in zip(student.blocks, model.blocks, strict=True):
        mixer = own.mixer
        assert isinstance(mixer, PowerAttention)
        mixer.gate.bias.fill_(50.0)
        if mixer.qkv_start is not None:
            mixer.qkv_start.zero_()
        if mixer.qkv.bias is not None:
            mixer.qkv.bias.copy_(torch.zeros(()) if other.mixer.qkv.bias is None else other.mixer.qkv.bias)
        q, k, v = (each.transpose(1, 2) for each in other.mixer.rotated_heads(x))
        weights = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).pow(2).tril()
        y = weights @ v.repeat_interleave(2, 1) / (weights.sum(-1, keepdim=True) + mixer.eps)
        assert_close(mixer(x), other.mixer.out(y.transpose(1, 2).flatten(2)))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"qk_norm": True, "rotary_fraction": 0.5}])
def test_a_gated_layer_begins_as_attention_without_positions(options):
    model = teacher(**options)
    student = swap_mixers(model, ("gated",), window=5)
    x = torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for own, other in zip(student.blocks, model.blocks, strict=True):
        mixer = own.mixer
        assert isinstance(mixer, SoftmaxAttention) and mixer.rotation == "none"
        assert mixer.gate.weight.count_nonzero() == 0
        assert_close(mixer.gate.bias, torch.tensor([5.0, 9.0], dtype=torch.float64))
        q, k, v = (each.transpose(1, 2) for each in other.mixer.heads(x))
        memory = mixer.gate.bias.sigmoid().log().repeat_interleave(2)[:, None, None]
        place = torch.arange(23)
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5 + memory * (place[:, None] - place)
        weights = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
        y = weights @ v.repeat_interleave(2, 1)
        assert_close(mixer(x), other.mixer.out(y.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_a_gated_layer_takes_the_place_of_any_other_and_its_own_parts_stay():
    scaled = teacher(rope_scaling={"rope_type": "linear", "factor": 4.0})
    student = swap_mixers(swap_mixers(scaled, "window", window=7), "gated,window*5")
    assert student.config.mixer(0) == MixerConfig(
        "softmax",
        {"bias": False, "out_bias": False, "gate": True, "gate_bias": (5.0, 9.0), "rotation": "none"},
    )
    student.blocks[0].mixer.gate.weight.fill_(0.25)
    again = swap_mixers(student, "gated")
    assert_close(again.blocks[0].mixer.gate.weight, student.blocks[0].mixer.gate.weight)
    assert again.blocks[1].mixer.gate.weight.count_nonzero() == 0
    power = swap_mixers(student, "power")
    assert power.blocks[0].mixer.rotation == "none"
    assert_close(power.blocks[0].mixer.gate.weight, student.blocks[0].mixer.gate.weight)
    state = student.init_state(2)
    for token in TOKENS.split(1, dim=1):
        logits, state = student.step(token, state)
    assert_close(logits, student(TOKENS)[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"qk_norm": True, "rotary_fraction": 0.5}])
def test_a_delta_layer_begins_as_the_delta_rule_on_the_teachers_heads_without_positions(options):
    model = teacher(**options)
    student = swap_mixers(model, ("delta",), window=5)
    x = torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for own, other in zip(student.blocks, model.blocks, strict=True):
        mixer = own.mixer
        assert isinstance(mixer, PowerDeltaAttention) and mixer.rotation == "none"
        assert_close(mixer.gate.bias, torch.tensor([8.0, 14.0], dtype=torch.float64))
        q, k, v = other.mixer.heads(x)
        if mixer.q_norm is None:  # the constant of the scores stands in one of eight channels
            q, k = (torch.cat([each[..., :-1], each[..., -1:] + (12 * 8**0.5) ** 0.5], -1) for each in (q, k))
        log_g = mixer.gate.bias.sigmoid().log().expand(2, 23, 2)
        beta = torch.tensor(-1.0).sigmoid().double().expand(2, 23, 2)
        y = power_delta_rule(q, k, v, beta, log_g, impl="reference").out
        assert_close(mixer(x), other.mixer.out(y.flatten(2)))


@torch.no_grad()
def test_a_delta_layer_decodes_and_keeps_a_gate_of_the_teacher():
    model = swap_mixers(teacher(), "gated")
    for block in model.blocks:
        block.mixer.gate.weight.fill_(0.25)
    student = swap_mixers(model, "delta,window", window=7)
    delta = student.blocks[0].mixer
    assert delta.gate_bias == (5.0, 9.0) and torch.equal(delta.gate.weight, model.blocks[0].mixer.gate.weight)
    state = student.init_state(2)
    for token in TOKENS.split(1, dim=1):
        logits, state = student.step(token, state)
    assert_close(logits, student(TOKENS)[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"qk_norm": True}, {"gate": True}], ids=str)
@pytest.mark.parametrize("pattern", ["power", "delta", "window,delta"])
def test_heads_of_their_own_begin_as_those_that_were_shared(pattern, options):
    model = teacher(**options)
    shared, unshared = (swap_mixers(model, pattern, window=9, unshare=unshare) for unshare in (False, True))
    for block in (*shared.blocks, *unshared.blocks):
        if not isinstance(block.mixer, WindowAttention):
            block.mixer.gate.bias.fill_(3.0)  # at first the gates of the heads differ
    counts = [block.mixer.n_kv_heads for block in unshared.blocks]
    assert counts == [4 if kind != "window" else 2 for kind in pattern.split(",")] * (6 // len(pattern.split(",")))
    assert_close(unshared(TOKENS), shared(TOKENS))
    again = LanguageModel(ModelConfig.from_dict(unshared.config.to_dict()), seed=0).double()
    again.load_state_dict(unshared.state_dict())
    assert_close(again(TOKENS), shared(TOKENS))


def test_heads_are_unshared_only_where_layers_are_made():
    for pattern in ("window", "softmax", ("gated", "softmax"), "window*6,delta"):  # of six layers
        with pytest.raises(ValueError, match="heads are unshared in power and delta layers; the pattern has none: "):
            swap_mixers(teacher(), pattern, unshare=True)
    with pytest.raises(ValueError, match="the pattern has none: softmax"):
        keeps_layers(teacher().config, ("softmax",), unshare=True)
    power = ModelConfig(VOCAB, 32, 1, 4, body="llama")
    assert keeps_layers(power, ("power",))
    with pytest.raises(ValueError, match="have power attention, which is kept, as its key/value heads are"):
        keeps_layers(power, ("power",), unshare=True)


def test_patterns():
    assert parse_pattern("power") == ("power",)
    assert parse_pattern("power*2, softmax,window*1") == ("power", "power", "softmax", "window")
    model = swap_mixers(teacher(), parse_pattern("power*2,softmax"), window=5)
    names = [model.config.mixer(layer).name for layer in range(6)]
    assert names == ["power", "power", "softmax"] * 2
    for text in ("linear", "power*0", "power*x", "", "power,,softmax"):
        with pytest.raises(ValueError, match=r"a pattern is made of power, window, softmax"):
            parse_pattern(text)


@pytest.mark.parametrize("pattern", ["linear", ("linear",), (), ["power", "x"]])
def test_an_unknown_pattern_is_refused(pattern):
    with pytest.raises(ValueError, match=r"a pattern is made of power, window, softmax"):
        swap_mixers(teacher(), pattern)


def test_every_kind_is_told():
    model = swap_mixers(teacher(), "power,delta,window,softmax,gated,power")
    assert [kind_of(mixer) for mixer in model.config.mixers] == [
        "power", "delta", "window", "softmax", "gated", "power",
    ]  # fmt: skip
    assert kind_of(MixerConfig("hyena")) == "hyena"


def test_a_pattern_can_be_a_text():
    by_text, by_kinds = (swap_mixers(teacher(), each) for each in ("power*2,softmax", ("power", "power", "softmax")))
    assert by_text.config == by_kinds.config


def test_parts_that_the_teacher_has_keep_their_weights():
    model = teacher(short_convolution=3, head_norm=True, output_gate=True, gate=True, gate_bias=(2.0, 3.0))
    weights, swapped = model.state_dict(), swap_mixers(model, ("power",))
    kept = {name: weight for name, weight in swapped.state_dict().items() if name in weights}
    parts = ("mixer.convolution.weight", "mixer.head_norm.weight", "mixer.output_gate.weight", "mixer.gate.weight")
    for part in parts:
        assert sum(name.endswith(part) for name in kept) == 6
    assert all(torch.equal(weight, weights[name]) for name, weight in kept.items() if "qkv.bias" not in name)
    assert swapped.config.mixers[0].options["gate_bias"] == [2.0, 3.0]


def test_other_models_are_refused():
    power = LanguageModel(ModelConfig(VOCAB, 32, 1, 4, body="llama"), seed=0)
    with pytest.raises(ValueError, match="has the llama body and softmax attention; got llama, power"):
        swap_mixers(power)
    gpt2 = LanguageModel(ModelConfig(VOCAB, 32, 1, 4, (MixerConfig("softmax"),)), seed=0)
    with pytest.raises(ValueError, match="got gpt2, softmax"):
        swap_mixers(gpt2)


def test_the_student_shares_no_memory():
    model = teacher()
    student = swap_mixers(model, ("softmax",))
    with torch.no_grad():
        student.embedding.weight.zero_()
    assert model.embedding.weight.abs().min() > 0
