"""Selection by tokens, by chance and by learned scores, and the filters that depend on the input."""

import math

import pytest
import torch

from sympow.data.mqar import RecallTask, generate
from sympow.layers import MIXERS, auxiliary_losses
from sympow.layers.repeats import distance_to_previous
from sympow.layers.zoology import selection as module
from sympow.layers.zoology.input_dependent_conv import cross_correlation
from sympow.layers.zoology.selection import TopKState, running_top_k, scattered
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.draws import normal


def selective(selection: str, **options) -> torch.nn.Module:
    mixer = MIXERS["selection"](16, 2, selection=selection, **options).double()
    mixer.reset_parameters(std=0.5, generator=torch.Generator().manual_seed(0))
    return mixer


def selected_rows(mixer: torch.nn.Module, y: torch.Tensor) -> torch.Tensor:
    return y.abs().sum(-1) > 0


def start(batch: int, k: int) -> TopKState:
    return TopKState(torch.full((batch, k), -torch.inf).double(), torch.zeros(batch, dtype=torch.int64), 0)


def test_distance_to_previous():
    tokens = torch.tensor([[5, 3, 5, 5, 9, 3], [1, 2, 3, 4, 5, 6]])
    assert distance_to_previous(tokens).tolist() == [[0, 0, 2, 1, 0, 4], [0] * 6]


@pytest.mark.parametrize("selection", ["random", "programmatic", "learned"])
def test_rows_that_do_not_ask_change_nothing(selection, monkeypatch):
    """A CUDA graph cannot read how many rows ask, and takes all: the same outputs and gradients."""
    mixer = selective(selection, top_k=2).eval()
    tokens = torch.randint(0, 9, (3, 24), generator=torch.Generator().manual_seed(1))
    ids = {"tokens": tokens} if mixer.reads_tokens else {}
    found = []
    for most in (module.most_rows, lambda selected: selected.shape[1]):
        monkeypatch.setattr(module, "most_rows", most)
        x = normal(3, 24, 16).requires_grad_()
        y = mixer(x, **ids)
        assert selected_rows(mixer, y).sum(1).max() < 24
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        found.append((y.detach(), gradient))
    for fewer, all_rows in zip(*found, strict=True):
        torch.testing.assert_close(fewer, all_rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "ties"])
def test_running_top_k_is_what_it_says(k, order):
    time = 150  # more than two blocks
    score = normal(2, time, seed=k)
    if order != "random":
        score = {"rising": score.sort(1).values, "falling": -score.sort(1).values, "ties": score.round()}[order]
    got, state = running_top_k(score, start(2, k))
    for row in range(2):
        taken = 0
        for t in range(time):
            among_largest = (score[row, :t] >= score[row, t]).sum() < k
            wanted = bool(among_largest and taken < math.ceil(k * (1 + math.log1p(t / k))))
            assert got[row, t] == wanted
            taken += wanted
        assert state.selected[row] == taken
    assert torch.equal(state.largest, score.topk(k, dim=1).values)
    # far fewer than half of the tokens, also of scores that rise, which all are among the largest so far
    assert int(got.sum(1).max()) <= math.ceil(k * (1 + math.log1p((time - 1) / k)))


def test_random_scores_are_without_order_and_of_the_position():
    score = scattered(0, 4000, torch.device("cpu"))
    assert torch.equal(score[70:90], scattered(70, 20, torch.device("cpu")))
    assert abs(score.mean() - 0.5) < 0.03 and abs(torch.corrcoef(torch.stack([score[1:], score[:-1]]))[0, 1]) < 0.06
    assert len(score.unique()) == 4000


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("time", [256, 1024, 2048, 8192])
@pytest.mark.parametrize("probability", [0.05, 0.24, 0.5])
def test_random_scores_select_as_many_tokens_as_they_should(time, probability, layer):
    """In the first tokens, which an evaluation reads: within four standard deviations of draws."""
    share = (scattered(0, time, torch.device("cpu"), layer) < probability).double().mean()
    assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / time)


def drawn(rows: int, time: int, probability: float, training: bool) -> torch.Tensor:
    """Returns which tokens random selection takes, bool [rows, time]: those whose output is not 0."""
    mixer = MIXERS["selection"](2, 1, selection="random", probability=probability, rotation="none").train(training)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return selected_rows(mixer, mixer(torch.ones(rows, time, 2)))


@pytest.mark.parametrize(("rows", "time", "training"), [(64, 1024, True), (1, 8192, False)])
@pytest.mark.parametrize("probability", [0.05, 0.25])
def test_random_selection_is_bernoulli_at_every_place(rows, time, training, probability):
    """Five standard deviations of the share of an eighth of all rows are allowed."""
    density = drawn(rows, time, probability, training).double().reshape(rows, 8, -1).mean((0, 2))
    deviation = math.sqrt(probability * (1 - probability) / (rows * time / 8))
    assert (density - probability).abs().max() < 5 * deviation, density


@pytest.mark.parametrize("training", [True, False])
def test_random_selection_of_two_layers_is_independent(training):
    """An evaluation lets two layers read as many tokens as training does: both take a token with p * p."""
    config = ModelConfig(16, 8, n_layers=3, n_heads=1, mixers=(MixerConfig("selection", {"selection": "random"}),))
    taken = []
    for block in LanguageModel(config, seed=0).train(training).blocks:
        with torch.no_grad():
            taken.append(selected_rows(block.mixer, block.mixer(torch.ones(1, 8192, 8))))
    for first, second in ((0, 1), (1, 2), (0, 2)):
        both = (taken[first] & taken[second]).double().mean()
        assert abs(both - 1 / 16) < 5 * math.sqrt(15 / 256 / 8192)


def test_random_selection_takes_each_token_alone():
    """Rows and neighbours are drawn independently: taken with the probability, whatever was taken before."""
    selected = drawn(64, 1024, 0.5, training=True)
    for first, second in ((selected[:, 1:], selected[:, :-1]), (selected[1:], selected[:-1])):
        both = (first & second).double().mean()
        assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / first.numel())


@pytest.mark.parametrize("selection", ["random", "learned"])
def test_training_draws_and_stays_causal(selection):
    mixer, x = selective(selection, top_k=3, noise=2.0).train(), normal(2, 40, 16)
    with torch.random.fork_rng():
        outs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append(mixer(x))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(selected_rows(mixer, outs[0]), selected_rows(mixer, outs[2]))
        changed = torch.cat([x[:, :20], normal(2, 20, 16, seed=1)], dim=1)
        torch.manual_seed(0)
        assert torch.equal(selected_rows(mixer, mixer(changed))[:, :20], selected_rows(mixer, outs[0])[:, :20])
        torch.manual_seed(0)
        torch.testing.assert_close(mixer(changed)[:, :20], outs[0][:, :20])


def test_the_largest_scores_of_a_whole_row_are_selected_as_in_the_source():
    mixer, x = selective("learned", top_k=5, whole_row=True).eval(), normal(3, 40, 16)
    score = torch.sigmoid(mixer.score(x))[..., 0]
    assert torch.equal(selected_rows(mixer, mixer(x)), score >= score.topk(5, dim=1).values[:, -1:])
    assert torch.equal(selected_rows(mixer, mixer(x[:, :3])), torch.ones(3, 3).bool())  # all of a shorter row
    assert not mixer.causal
    for call in (lambda: mixer.init_state(1), lambda: mixer.state_size(9)):
        with pytest.raises(NotImplementedError, match="selection with whole_row has no step form"):
            call()


def test_selected_rows_are_softmax_attention_and_others_zero():
    mixer, x = selective("programmatic"), normal(2, 12, 16)
    tokens = torch.tensor([[1, 2, 1, 3, 2, 4, 4, 5, 6, 7, 8, 1], list(range(12))])
    softmax = MIXERS["softmax"](16, 2).double()
    softmax.load_state_dict(mixer.state_dict())
    y = mixer(x, tokens=tokens)
    repeats = torch.tensor([[0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1], [0] * 12])
    torch.testing.assert_close(y, softmax(x) * repeats[..., None])


def test_blocks_of_selected_rows_are_the_whole(monkeypatch):
    mixer, x = selective("random", probability=0.5).eval(), normal(2, 40, 16)
    y = mixer(x)
    monkeypatch.setattr("sympow.layers.zoology.selection.MASK_ELEMENTS", 3 * 2 * 40)
    torch.testing.assert_close(mixer(x), y)


def test_auxiliary_loss_is_the_hinge_of_the_mean_score():
    mixer, x = selective("learned", top_k=4).train(), normal(2, 40, 16)
    with torch.no_grad():
        mixer.score.bias.fill_(3.0)
    mean = torch.sigmoid(mixer.score(x)).mean((1, 2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mixer(x)  # outside, none is computed
        with auxiliary_losses() as losses:
            mixer(x)
        torch.testing.assert_close(sum(losses), (mean - 4 / 40).mean())
        sum(losses).backward()
        assert mixer.score.bias.grad > 0 and mixer.qkv.weight.grad is None
        with torch.no_grad():
            mixer.score.bias.fill_(-30.0)
        with auxiliary_losses() as losses:
            mixer(x)
        assert len(losses) == 1 and losses[0] == 0
        with auxiliary_losses() as losses:
            mixer.eval()(x)
        assert losses == []


def test_tokens_are_asked_for_and_checked():
    mixer, x = selective("programmatic"), normal(1, 4, 16)
    with pytest.raises(ValueError, match="this mixer needs the tokens that x stands for"):
        mixer(x)
    with pytest.raises(ValueError, match=r"tokens must be int64 \[1, 4\]; got torch.int64 \[1, 3\]"):
        mixer(x, tokens=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens must be int64 \[1, 4\]; got torch.int32 \[1, 4\]"):
        MIXERS["programmatic_conv"](16, 2).double()(x, tokens=torch.zeros(1, 4, dtype=torch.int32))


def moved_by(x, lags):
    """The sum of x [B, T, d] moved by each of the lags."""
    return sum(torch.cat([torch.zeros(x.shape[0], lag, x.shape[2]), x[:, : x.shape[1] - lag]], dim=1) for lag in lags)


@pytest.mark.parametrize(("filler", "lags"), [(None, (0, 1, 2)), (0, (1, 2))], ids=["all tokens", "without filler"])
def test_programmatic_filter_marks_what_follows_an_earlier_occurrence(filler, lags):
    mixer, x = MIXERS["programmatic_conv"](3, 1, filler=filler).double(), normal(1, 9, 3)
    tokens = torch.tensor([[1, 2, 1, 3, 2, 1, 4, 0, 0]])  # distances 2, 3, 3, and 1 of filler
    torch.testing.assert_close(mixer(x, tokens=tokens), mixer.projection(x) * (moved_by(x, lags) + mixer.bias))


@pytest.mark.parametrize("filler", [-1, True, "0"])
def test_filler_is_the_id_of_a_token(filler):
    with pytest.raises(ValueError, match="filler must be the id of a token, an integer of at least 0, or None; got "):
        MIXERS["programmatic_conv"](3, 1, filler=filler)


WALSH = torch.ones(1, 1, dtype=torch.float64)
for _ in range(6):
    WALSH = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), WALSH)  # w_a * w_b = w_{a xor b}


@pytest.mark.parametrize("fill", ["zero", "random"])
def test_programmatic_filter_solves_recall_by_construction(fill):
    """Keys have the Walsh functions 1 to 6, values the multiples of 8, so that no product of keys is a value.

    BaseConv binds a value to the key before it; the filter adds up bindings, and the query's key unbinds its own.
    """
    task = RecallTask(length=64, pairs=4, vocab_size=14, filler=fill)
    rows = generate(task, 500, seed=0)
    tokens = torch.from_numpy(rows.tokens).long()
    code = torch.zeros(14, 128, dtype=torch.float64)
    code[1:7, :64], code[7:, 64:] = WALSH[1:7], WALSH[8::8]
    bind = MIXERS["base_conv"](128, 1, max_length=2, filter="explicit").double()
    recall = MIXERS["programmatic_conv"](128, 1, filler=0).double()
    with torch.no_grad():
        for mixer in (bind, recall):
            mixer.projection.weight.zero_(), mixer.projection.bias.zero_(), mixer.bias.zero_()
        bind.filter.weight.copy_(torch.tensor([[0.0], [1.0]]))  # the token before
        bind.projection.weight[:64, 64:] = torch.eye(64)  # gated by the value that stands here
        recall.projection.weight[:64, :64] = torch.eye(64)
        x = code[tokens]
        x = x + bind(x)
        logits = recall(x, tokens=tokens)[..., :64] @ WALSH[8::8].T
    places, labels = (torch.from_numpy(array).long() for array in rows.queries())
    asked = logits.gather(1, places[..., None].expand(-1, -1, 7))
    torch.testing.assert_close(asked, 64.0 * torch.nn.functional.one_hot(labels - 7, 7).double())


@pytest.mark.parametrize("filler", [None, 0])
def test_matching_programmatic_filter_shows_each_token_what_followed_its_last_occurrence(filler):
    mixer, x = MIXERS["programmatic_conv"](3, 1, matching=True, filler=filler).double(), normal(1, 9, 3)
    tokens = torch.tensor([[1, 2, 1, 3, 2, 1, 4, 0, 0]])
    seen = torch.zeros_like(x)
    for token, source in ((2, 1), (4, 2), (5, 3), *([(8, 8)] if filler is None else [])):
        seen[:, token] = x[:, source]
    torch.testing.assert_close(mixer(x, tokens=tokens), mixer.projection(x) * (seen + mixer.bias))


def test_cross_correlation_is_its_sum_and_finds_a_period():
    q, k = normal(2, 20, 3), normal(2, 20, 3, seed=1)
    expected = torch.stack([(q[:, lag:] * k[:, : 20 - lag]).sum((1, 2)) for lag in range(20)], dim=1)
    torch.testing.assert_close(cross_correlation(q, k), expected)
    mixer = MIXERS["autocorrelation_conv"](3, 1, top_k=1).double()
    x = normal(1, 6, 3).repeat(1, 5, 1)
    torch.testing.assert_close(mixer(x), mixer.projection(x) * (moved_by(x, (6,)) + mixer.bias))


@pytest.mark.parametrize("filler", [None, 0])
def test_matching_autocorrelation_is_attention_to_its_lags(filler):
    time, d = 14, 5
    mixer = MIXERS["autocorrelation_conv"](d, 1, top_k=3, matching=True, filler=filler).double()
    mixer.reset_parameters(generator=torch.Generator().manual_seed(1))
    x, tokens = normal(2, time, d), torch.randint(3, (2, time), generator=torch.Generator().manual_seed(0))
    asks = torch.ones(2, time, 1) if filler is None else (tokens != filler)[..., None].double()
    q, k = mixer.query(x) * asks, moved_by(mixer.key(x) * asks, (1,))
    scores = q @ k.transpose(1, 2) / math.sqrt(d)
    lag = torch.arange(time)[:, None] - torch.arange(time)
    total = torch.stack([scores[:, lag == one].sum(1) for one in range(1, time)], dim=1)
    chosen = torch.zeros(2, time, dtype=torch.bool).scatter_(1, total.topk(3, dim=1).indices + 1, True)
    allowed = chosen[:, lag.clamp(min=0)] & (lag > 0)
    weights = scores.masked_fill(~allowed, -1e300).softmax(-1) * allowed
    options = {} if filler is None else {"tokens": tokens}
    y = mixer(x, **options)
    torch.testing.assert_close(y, mixer.projection(x) * (weights @ x + mixer.bias))
    y.square().sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in (mixer.query.weight, mixer.key.weight))
    assert mixer(x[:, :1], **{name: ids[:, :1] for name, ids in options.items()}).shape == (2, 1, d)


def test_selected_rows_of_the_meta_device_are_all():
    mixer = MIXERS["selection"](16, 2, selection="learned").to("meta")
    assert mixer(torch.empty(2, 40, 16, device="meta")).shape == (2, 40, 16)
    assert module.most_rows(torch.zeros(2, 40, dtype=torch.bool, device="meta")) == 40
