"""Generation: by state as by full forward, reproducible, filtered as asked."""

import math

import numpy as np
import pytest
import torch

from sympow.models import LanguageModel, MixerConfig, ModelConfig, generate, stream
from sympow.models.generation import sample
from tests.draws import make_every_token_matter

VOCAB = 31
MIXERS = {
    "power": (MixerConfig("power"),),
    "p=3": (MixerConfig("power", {"p": 3, "head_dim": 4}),),
    "softmax": (MixerConfig("softmax"),),
    "hybrid": (MixerConfig("linear", {"feature_map": "elu+1"}), MixerConfig("window", {"window": 6})),
}


def model(mixers=MIXERS["power"]) -> LanguageModel:
    return make_every_token_matter(LanguageModel(ModelConfig(VOCAB, 24, 2, 2, mixers), seed=0).double())


def prompt(batch: int = 2, time: int = 13) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mixers", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("prefill_chunk", [1, 5, 1024])
def test_greedy_by_state_is_greedy_by_forward(mixers, prefill_chunk):
    built, x = model(mixers), prompt()
    result = generate(built, x, 25, temperature=0, prefill_chunk=prefill_chunk)
    with torch.no_grad():
        for _ in range(25):
            x = torch.cat([x, built(x)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(result.tokens, x[:, -25:])
    assert len(result.tokens.unique()) >= 3  # not a fixed point, which anything would agree with


def test_seed_decides_the_tokens_and_nothing_else_is_touched():
    built, x = model(), prompt()
    before = torch.get_rng_state()
    a, b, c = (generate(built, x, 20, temperature=2.0, seed=seed).tokens for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_gives_what_generate_gives_and_leaves_gradients_on():
    options = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 3}
    built, streamed, inside = model(MIXERS["softmax"]), [], []
    built.final_norm.register_forward_hook(lambda *_: inside.append(torch.is_grad_enabled()))
    for drawn in stream(built, prompt(), 12, **options):
        assert torch.is_grad_enabled()
        assert drawn.state.nbytes == 2 * 8 * built.state_size(13 + len(streamed))
        streamed.append(drawn.token)
    assert len(inside) == 12 and not any(inside)
    whole = generate(built, prompt(), 12, **options)
    assert torch.equal(torch.stack(streamed, dim=1), whole.tokens)
    assert drawn.state.nbytes == whole.state_nbytes


def test_result_says_what_it_cost():
    built = model()
    result = generate(built, prompt(), 10)
    assert result.tokens.shape == (2, 10) and result.tokens.dtype == torch.int64
    assert result.prefill_seconds > 0 and result.decode_seconds > 0
    assert result.tokens_per_second == pytest.approx(2 * 9 / result.decode_seconds)
    assert result.state_nbytes == 2 * 8 * built.state_size(13 + 9)
    assert math.isnan(generate(built, prompt(), 1).tokens_per_second)


def test_state_does_not_grow():
    built = model()
    assert generate(built, prompt(), 2).state_nbytes == generate(built, prompt(time=200), 50).state_nbytes


def test_sample_draws_from_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)
    for temperature in (1.0, 0.5):
        drawn = sample(logits, temperature=temperature, generator=torch.Generator().manual_seed(0))
        expected = (logits[0] / temperature).softmax(-1)
        torch.testing.assert_close(drawn.bincount() / 20_000, expected, rtol=0, atol=0.015)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 5.0}, {"top_k": 60}])
def test_tokens_that_the_tokenizer_lacks_are_not_drawn(options):
    built = model()
    with torch.no_grad():
        built.embedding.weight[5:] += 1  # with a tied head these are likely
    assert generate(built, prompt() % 5, 20, **options).tokens.max() >= 5
    assert generate(built, prompt() % 5, 20, vocab_size=5, **options).tokens.max() < 5


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_p": 1e-46}, {3}),  # 0 in float32
        ({"top_k": 2**70}, {0, 1, 2, 3}),
        # top_p is of what top_k left: 0.5 and 0.3 are 0.625 and 0.375 of it
        ({"top_k": 2, "top_p": 0.6}, {3}),
        ({"temperature": 0}, {3}),
        ({"temperature": 1e-42}, {3}),
        ({"temperature": 1e-38}, {3}),
    ],
)
def test_sample_keeps_the_likeliest(options, kept):
    logits = torch.tensor([0.0625, 0.25, 0.1875, 0.5]).log().expand(2000, 4)
    drawn = sample(logits, generator=torch.Generator().manual_seed(0), **options)
    assert set(drawn.tolist()) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1; got 0"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1; got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be an integer of at least 1; got 0"),
        ({"top_k": 0}, "top_k must be an integer of at least 1; got 0"),
        ({"top_k": 1.5}, "top_k must be an integer of at least 1; got 1.5"),
        ({"top_k": "5"}, "top_k must be an integer of at least 1; got '5'"),
        ({"top_k": True}, "top_k must be an integer of at least 1; got True"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1; got 0.0"),
        ({"top_p": 1.1}, "top_p must be a number above 0 and at most 1; got 1.1"),
        ({"top_p": math.nan}, "top_p must be a number above 0 and at most 1; got nan"),
        ({"top_p": "0.9"}, "top_p must be a number above 0 and at most 1; got '0.9'"),
        ({"temperature": -1}, "temperature must be a finite number of at least 0; got -1"),
        ({"temperature": math.nan}, "temperature must be a finite number of at least 0; got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0; got inf"),
        ({"temperature": "0.8"}, "temperature must be a finite number of at least 0; got '0.8'"),
        ({"temperature": None}, "temperature must be a finite number of at least 0; got None"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2\*\*63 - 1; got -1"),
        ({"seed": 2**63}, r"seed must be an integer from 0 to 2\*\*63 - 1; got 9223372036854775808"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, r"prompt must be \[B, T\], of at least one token"),
        ({"prompt": torch.full((1, 2), VOCAB)}, "vocabulary of 31 tokens; got 31"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    arguments = {"prompt": prompt(), "max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        generate(model(), **arguments)
    with pytest.raises(ValueError, match=message):
        steps = stream(model(), **arguments)
        if "vocabulary" in message:  # the only thing not known before the model reads
            next(steps)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_that_computes_nan_is_refused(temperature):
    """The likeliest token would be the first one of the vocabulary."""
    built = model()
    torch.nn.init.constant_(built.final_norm.weight, math.nan)
    with pytest.raises(ValueError, match="logits after the prompt are not finite: the model's weights"):
        generate(built, prompt(), 3, temperature=temperature)


def test_a_prompt_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"prompt must be a torch.Tensor, int64 \[B, T\]; got list"):
        generate(model(), [1, 2], 3)


def test_numbers_of_numpy_are_numbers():
    options = [{"temperature": kind(0.5), "top_p": kind(0.5)} for kind in (float, np.float32, np.float64)]
    first, *others = (generate(model(), prompt(), 4, **each).tokens for each in options)
    assert all(torch.equal(first, other) for other in others)


def test_the_path_of_a_context_is_refused():
    with pytest.raises(TypeError, match="context must be a Context, such as load_context returns; got str"):
        generate(model(), prompt(), 3, context="text.context")


@pytest.mark.parametrize("function", [generate, stream])
def test_unknown_options_are_refused(function):
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'temprature'"):
        function(model(), prompt(), 3, temprature=1.0)


def test_rounding_of_nearly_equal_logits_changes_no_draw():
    def draws(first: int, second: int) -> list[int]:
        logits = torch.zeros(1, 20)
        logits[0, first], logits[0, second] = 2.0, 2.0 - 1e-6
        return [sample(logits, generator=torch.Generator().manual_seed(seed)).item() for seed in range(50)]

    assert draws(3, 7) == draws(7, 3) and {3, 7} <= set(draws(3, 7))
