"""Speculative decoding: the tokens are those without drafts, whatever the drafts."""

import random
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from sympow.layers import power
from sympow.models import (
    Context,
    Drafts,
    LanguageModel,
    MixerConfig,
    ModelConfig,
    ModelDrafts,
    NgramDrafts,
    generate,
    speculation,
    stream,
)
from sympow.models.speculation import Pace
from tests.draws import disturb

VOCAB = 31
BLOCK = {"short_convolution": 3, "head_norm": True, "output_gate": True}
HYBRID = (
    MixerConfig("power", {"rotation": "data"}),
    MixerConfig("window", {"window": 5, **BLOCK}),
    MixerConfig("softmax", {"gate": True}),
)
CASES = {
    "power": {"mixers": (MixerConfig("power"),)},
    "hybrid": {"mixers": HYBRID, "n_layers": 3},
    "delta": {"mixers": (MixerConfig("power_delta"), MixerConfig("hybrid_heads", {"window": 5}))},
    "linear": {"mixers": (MixerConfig("linear", {"feature_map": "elu+1"}), MixerConfig("retnet"))},
    "rwkv7 body": {"mixers": (MixerConfig("power"), MixerConfig("softmax")), "body": "rwkv7"},
    "rwkv7": {"mixers": (MixerConfig("rwkv7"),), "body": "rwkv7"},
    "others": {"mixers": (MixerConfig("hyena", {"max_length": 9}), MixerConfig("blocked_window", {"window": 5}))},
}


def model(case: str = "power", seed: int = 0, vocab: int = VOCAB, n_layers: int = 2) -> LanguageModel:
    """Untrained, but with weights so large that every token matters to the next; they enlarge roundings: float64."""
    options = {"n_layers": n_layers, "tie_embeddings": False, **CASES[case]}
    return disturb(LanguageModel(ModelConfig(vocab, 16, n_heads=2, **options), seed=seed).double().eval(), 0.3, seed)


def prompt(time: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (1, time), generator=torch.Generator().manual_seed(seed))


class Knowing(Drafts):
    """Drafts tokens known beforehand, some of them wrong, and a random number of them."""

    def __init__(self, prompt: torch.Tensor, tokens: torch.Tensor, seed: int = 0):
        self.known = [*prompt[0].tolist(), *tokens[0].tolist()]
        self.draw = random.Random(seed)
        self.read = 0

    def propose(self, new: Sequence[int], most: int) -> list[int]:
        self.read += len(new)
        draft = self.known[self.read : self.read + self.draw.randint(0, most)]
        return [(token + 1) % VOCAB if self.draw.random() < 0.2 else token for token in draft]


@pytest.fixture
def eager(monkeypatch):
    """Drafts at every step: how many does not depend on time."""
    monkeypatch.setattr(Pace, "length", lambda self: 7)


def test_60_prompts_give_the_tokens_without_drafts(eager):
    built, proposed, accepted, kinds = model(n_layers=1).float(), 0, 0, set()
    for seed in range(60):
        x = prompt(6, seed).repeat(1, 2)
        drafts = NgramDrafts(3, 1)
        expected = generate(built, x, 8, temperature=0).tokens
        assert torch.equal(generate(built, x, 8, temperature=0, drafts=drafts).tokens, expected)
        proposed, accepted = proposed + drafts.proposed, accepted + drafts.accepted
        kinds |= set(expected[0].tolist())
    assert 0.05 * proposed < accepted < 0.95 * proposed and len(kinds) > VOCAB // 2


@pytest.mark.parametrize("tail", [False, True], ids=["no-tail", "tail"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_any_drafts_give_the_tokens_without(case, temperature, tail, eager, monkeypatch):
    if tail:
        monkeypatch.setattr(power, "keeps_tail", lambda *_: True)
    built, options = model(case), {"temperature": temperature, "top_p": 0.9, "seed": 3}
    x = prompt(seed=1)
    expected = generate(built, x, 30, **options).tokens
    drafts = Knowing(x, expected, 1)
    assert torch.equal(generate(built, x, 30, **options, drafts=drafts).tokens, expected)
    assert 0 < drafts.accepted < drafts.proposed


@pytest.mark.parametrize("count", [1, 2, 5])
def test_as_many_tokens_as_asked_for(count, eager):
    built = model()
    expected = generate(built, prompt(), count, temperature=0).tokens
    drawn = list(stream(built, prompt(), count, temperature=0, drafts=Knowing(prompt(), expected.repeat(1, 9))))
    assert [each.token.item() for each in drawn] == expected[0].tolist()
    assert drawn[-1].state.nbytes == built.init_state(1).nbytes


def test_behind_a_context(eager):
    built, x = model("hybrid"), prompt(40)
    context = Context.begin(built).read(built, x)
    expected = generate(built, x[:, :0], 20, temperature=0, context=context).tokens
    for _ in range(2):
        drafts = Knowing(x[:, :0], expected)
        assert torch.equal(
            generate(built, x[:, :0], 20, temperature=0, context=context, drafts=drafts).tokens, expected
        )
        assert drafts.accepted


def test_ngrams():
    drafts = NgramDrafts(longest=3, shortest=2)
    drafts.begin(model())
    assert drafts.propose([1, 2, 3, 4, 9, 2, 3, 5, 7], 4) == []
    assert drafts.propose([2, 3], 2) == [5, 7]  # behind the last time that 2, 3 occurred
    assert drafts.propose([4], 1) == [9]  # behind 2, 3, 4, which is longer than 3, 4
    assert drafts.propose([8, 8, 8], 0) == [] and drafts.propose([], 5) == [8] * 5  # a period goes on
    assert drafts.propose([6, 7, 6, 7, 6], 5) == [7, 6, 7, 6, 7]
    drafts.begin(model())
    assert drafts.propose([2, 3], 4) == []
    with pytest.raises(ValueError, match=r"1 <= shortest <= longest is expected; got shortest=4, longest=3"):
        NgramDrafts(longest=3, shortest=4)


def test_a_model_that_drafts_for_itself_is_always_right(eager):
    built = model()
    drafts = ModelDrafts(built)
    expected = generate(built, prompt(1100), 20, temperature=0).tokens
    for _ in range(2):  # from the beginning each time
        assert torch.equal(generate(built, prompt(1100), 20, temperature=0, drafts=drafts).tokens, expected)
        assert drafts.accepted == drafts.proposed > 10
    other = ModelDrafts(model(seed=1))
    assert torch.equal(generate(built, prompt(1100), 20, temperature=0, drafts=other).tokens, expected)
    assert other.accepted < other.proposed


def test_drafts_stop_where_they_cost_time_and_come_back_where_they_save_it():
    pace, lengths = Pace(), []
    assert pace.length() == 0  # as long as nobody knows how long a step takes
    pace.stepped(1.0)

    def drafted(steps: int, accepted: float) -> int:
        """Steps with drafts of `steps`, if a step with them takes twice as long."""
        count = 0
        for _ in range(steps):
            length = pace.length()
            lengths.append(length)
            if length:
                pace.tried(2.0, length, int(accepted * length))
                count += 1
            else:
                pace.stepped(1.0)
        return count

    assert drafted(500, accepted=0) < 0.05 * 500
    assert drafted(500, accepted=1) > 400 and pace.length() == 16
    assert drafted(500, accepted=0) < 0.06 * 500
    assert pace.length() in (0, 3)
    pace.tried(1000.0, 3, 3)  # a kernel was compiled: that counts, but not for ever
    assert drafted(500, accepted=1) > 300


def test_only_a_part_of_what_was_tried_can_be_kept():
    built = model()
    _, after = built.try_step(prompt(3), built.init_state(1))
    with pytest.raises(ValueError, match="of 3 tokens that were tried 0 to all can be kept; got 4"):
        after(4)
    for bad, error, reason in ((1.5, TypeError, "an integer"), (True, TypeError, "an integer"), (-1, ValueError, "at")):
        with pytest.raises(error, match=f"^the number of tokens that are kept must be {reason}.*; got {bad}$"):
            after(bad)


def test_what_is_tried_has_no_gradients():
    built = model()
    assert not built.try_step(prompt(3), built.init_state(1))[0].requires_grad


def test_what_does_not_fit_is_refused():
    built, x = model(), prompt()
    with pytest.raises(ValueError, match="drafts are of a single row; got a prompt of 2"):
        stream(built, x.repeat(2, 1), 3, drafts=NgramDrafts())
    with pytest.raises(ValueError, match="a draft model has the vocabulary of the model, 31 tokens; got 32"):
        stream(built, x, 3, drafts=ModelDrafts(model(vocab=32)))
    for drafts in ("ngrams", NgramDrafts):
        with pytest.raises(TypeError, match=rf"must be an object of Drafts, such as NgramDrafts\(\); got {drafts!r}$"):
            stream(built, x, 3, drafts=drafts)
    with pytest.raises(TypeError, match="a draft model must be a LanguageModel; got NoneType"):
        ModelDrafts(None)
    with pytest.raises(TypeError, match=r"longest must be an integer; got 2.5"):
        NgramDrafts(2.5)


class TooMany(Drafts):
    """Drafts the tokens that follow, and more of them than are asked for."""

    def __init__(self, text: list[int]):
        self.text, self.read = text, 0

    def propose(self, new: Sequence[int], most: int) -> list[int]:
        self.read += len(new)
        return self.text[self.read : self.read + most + 1]


def test_more_drafts_than_asked_for_are_refused(eager):
    """The text would be longer than asked for, and never end."""
    built, x = model(), prompt()
    text = [*x[0].tolist(), *generate(built, x, 40, temperature=0).tokens[0].tolist()]
    with pytest.raises(ValueError, match=r"TooMany.propose must return at most \d+ tokens; got \d+$"):
        list(islice(stream(built, x, 12, temperature=0, drafts=TooMany(text)), 30))


def test_time_is_what_stops_drafts(monkeypatch):
    """With a clock for which drafts are slow, hardly any are made; with one for which they are free, many."""
    built, x = model(), prompt(6).repeat(1, 4)
    expected = generate(built, x, 120, temperature=0).tokens
    counts = []
    for seconds in (5.0, 1.0):
        clock = [0.0]

        class Slow(Knowing):
            def propose(self, new, most, seconds=seconds, clock=clock):
                draft = super().propose(new, most)
                clock[0] += seconds if draft else 1.0
                return draft

        monkeypatch.setattr(speculation, "perf_counter", lambda clock=clock: clock[0])
        drafts = Slow(x, expected)
        assert torch.equal(generate(built, x, 120, temperature=0, drafts=drafts).tokens, expected)
        counts.append(drafts.proposed)
    assert counts[0] < 40 < counts[1]
