"""Every mixer, under every option set, keeps the contract of `sympow.layers.Mixer` (float64 where exact)."""

import math
from itertools import pairwise

import pytest
import torch

from sympow.layers import MIXERS, AttentionMixer, Mixer, power
from sympow.layers.state_file import serialize
from tests.layers.contract import (
    CASES,
    D_MODEL,
    HEADS,
    NOT_CAUSAL,
    OPTIONS,
    STEPPED,
    TIGHT,
    T,
    in_steps,
    make,
    run,
    sees_itself_only,
    sequence,
    tokens_of,
)


@pytest.mark.parametrize("case", CASES)
def test_an_empty_batch(case):
    mixer, x = make(case), sequence(batch=0).requires_grad_()
    y = run(mixer, x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    if mixer.causal:
        with torch.no_grad():
            assert in_steps(mixer, x, [T - 1, 1]).shape == x.shape


def test_every_mixer_is_covered():
    assert set(OPTIONS) == set(MIXERS)
    assert [name for name, mixer in MIXERS.items() if not mixer.causal] == NOT_CAUSAL


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_a_mixer_that_looks_ahead_says_that_it_cannot_step(name):
    mixer = make((name, {}))
    for call in (lambda: mixer.init_state(1), lambda: mixer.step(sequence(), None), lambda: mixer.state_size(9)):
        with pytest.raises(NotImplementedError, match="has no step form: its filter depends on the whole sequence"):
            call()


@pytest.mark.parametrize("case", CASES)
def test_shape_and_dtype(case):
    mixer = make(case)
    for batch, time in ((2, T), (1, 1), (3, 2)):
        y = run(mixer, sequence(batch, time))
        assert y.shape == (batch, time, D_MODEL) and y.dtype == torch.float64 and y.isfinite().all()
    for dtype in (torch.float32, torch.bfloat16):
        y = run(mixer.to(dtype), sequence().to(dtype))
        assert y.dtype == dtype and y.isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_gradient_reaches_input_and_every_parameter(case):
    mixer = make(case)
    x = sequence().requires_grad_()
    run(mixer, x).square().sum().backward()
    gradients = {"x": x.grad} | {name: parameter.grad for name, parameter in mixer.named_parameters()}
    if isinstance(mixer, AttentionMixer):
        sizes = [HEADS * mixer.head_dim, mixer.n_kv_heads * mixer.head_dim, mixer.n_kv_heads * mixer.value_dim]
        q, k, v = gradients["qkv.weight"].split(sizes)
        gradients["v"] = v
        if not sees_itself_only(case):  # the weight of a single token is 1 whatever q and k are
            gradients |= {"q": q, "k": k}
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.isfinite().all(), name
        assert gradient.abs().sum() > 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_inputs_and_weights_of_the_half_precision_that_is_not_autocasts(case, dtype):
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    for weights in (dtype, torch.float32):
        mixer, x = make(case).to(weights), sequence(1, 12).to(dtype)
        with torch.autocast("cpu", dtype=other):
            for packed in ({}, {"cu_seqlens": torch.tensor([0, 5, 12])}):
                y = run(mixer, x, **packed)
                assert y.shape == x.shape and y.isfinite().all()
            if mixer.causal:
                with torch.no_grad():
                    assert in_steps(mixer, x, [5, 1, 6]).isfinite().all()
                    state = mixer.init_state(1)
                    for piece in x.split([5, 1, 6], dim=1):
                        y, after = mixer.try_step(piece, state, **mixer.extras(tokens_of(piece)))
                        state = after(piece.shape[1])
                        assert y.isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_second_derivatives_are_right_or_refused(case):
    """Against differences of gradients, of float64: a step of 1e-6 leaves an error of about 1e-9 of their norm."""
    mixer, x = make(case), sequence(1, 9).requires_grad_()
    leaves = [x, *mixer.parameters()]
    gen = torch.Generator().manual_seed(3)
    weight, *moves = (torch.randn(each.shape, generator=gen, dtype=torch.float64) for each in (x, *leaves))

    def gradients(**options):
        loss = (run(mixer, x) * weight).sum()  # a linear loss: the incoming gradient has no graph
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, **options)

    try:
        along = sum((grad * move).sum() for grad, move in zip(gradients(create_graph=True), moves, strict=True))
        found = torch.autograd.grad(along, leaves, allow_unused=True, materialize_grads=True)
    except RuntimeError as refusal:
        assert any(words in str(refusal) for words in ("cannot be differentiated again", "is not implemented"))
        return
    near = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for leaf, move in zip(leaves, moves, strict=True):
                leaf += step * move
        near.append(gradients())
    expected = [(after - before) / 2e-6 for after, before in zip(*near, strict=True)]
    error = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True))
    assert error**0.5 <= 1e-6 * sum(b.square().sum() for b in expected) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_causal(case):
    mixer = make(case)
    x = sequence()
    y = run(mixer, x)
    seen = []
    for t in (0, 17, T - 1):
        changed = x.clone()
        changed[:, t:] = sequence(time=T - t, seed=2)
        other = run(mixer, changed)
        if mixer.causal:
            torch.testing.assert_close(other[:, :t], y[:, :t], rtol=0, atol=1e-12)
        elif t == 17 and case != ("programmatic_conv", {"matching": True}):  # looks back alone, yet has no step form
            assert (other[:, :t] - y[:, :t]).abs().max() > 1e-3  # marked as what it is
        seen.append((other[:, t] - y[:, t]).abs().max() > 1e-3)
    assert any(seen) if case[0] == "selection" else all(seen)  # a token that is not selected is 0 before and after


@pytest.mark.parametrize("case", STEPPED)
def test_steps_are_the_sequence(case):
    mixer = make(case)
    x = sequence()
    y = run(mixer, x)
    with torch.no_grad():
        for lengths in ([1] * T, [20, 1, 1, 15], [1, 36], [T]):
            torch.testing.assert_close(in_steps(mixer, x, lengths), y, **TIGHT)


@pytest.mark.parametrize("case", STEPPED)
def test_any_cut_is_the_sequence(case):
    mixer = make(case)
    for cuts, batch in (([7, 1, 12, 2, 3, 9, 15, 4], 3), ([2, 14, 8, 1, 1, 5], 1)):
        x = sequence(batch, sum(cuts))
        with torch.no_grad():
            torch.testing.assert_close(in_steps(mixer, x, cuts), run(mixer, x), **TIGHT)


@torch.no_grad()
def tried(mixer: Mixer, state, x: torch.Tensor, kept: int):
    """A copy of the state after the tokens of x that are kept."""
    return mixer.try_step(x, state.clone(), **mixer.extras(tokens_of(x)))[1](kept)


def contents(state) -> dict[str, torch.Tensor]:
    """What a state holds, without spare room."""
    return serialize(state).tensors


@pytest.mark.parametrize("case", STEPPED)
@torch.no_grad()
def test_tokens_that_are_taken_back_leave_no_trace(case):
    """The state is exactly that of other tokens behind those that are kept, and exactly that before if none is.

    How many tokens were read before and how many are kept are independent: each number occurs, not each pair.
    """
    mixer, x, other = make(case).float(), sequence().float(), sequence(seed=2).float()
    for read, numbers in ((20, (0, 4, 9)), (0, (0, 1))):
        state = mixer.init_state(2)
        if read:
            _, state = mixer.step(x[:, :read], state, **mixer.extras(tokens_of(x[:, :read])))
        before = contents(state.clone())
        for kept in numbers:
            now = torch.cat([x[:, read : read + kept], other[:, kept:9]], dim=1)
            whole = x[:, read : read + 9].contiguous()  # as `now` is: products of other layouts round otherwise
            first, second = (tried(mixer, state, each, kept) for each in (whole, now))
            held = contents(first)
            expected = before if kept == 0 else contents(second)
            assert held.keys() == expected.keys() and all(torch.equal(held[n], x) for n, x in expected.items())
            rest = x[:, read + kept : read + kept + 1]
            (a, _), (b, _) = (mixer.step(rest, each, **mixer.extras(tokens_of(rest))) for each in (first, second))
            assert torch.equal(a, b)


@pytest.mark.parametrize("case", [case for case in STEPPED if case.values[0][0] in ("power", "linear")])
def test_what_is_kept_of_a_tail_is_the_sequence(case, monkeypatch):
    monkeypatch.setattr(power, "keeps_tail", lambda *_: True)
    test_what_is_kept_is_the_sequence(case)


@pytest.mark.parametrize("case", STEPPED)
@torch.no_grad()
def test_what_is_kept_is_the_sequence(case):
    mixer, x = make(case), sequence()
    state, outs, read = mixer.init_state(2), [], 0
    for count, kept in ((1, 1), (3, 2), (9, 9), (2, 0), (9, 3), (1, 0), (4, 4), (3, 1), (18, 15)):
        piece = x[:, read : read + count]
        y, after = mixer.try_step(piece, state, **mixer.extras(tokens_of(piece)))
        state, read = after(kept), read + kept
        outs.append(y[:, :kept])
    torch.testing.assert_close(torch.cat(outs, dim=1), run(mixer, x)[:, :read], **TIGHT)
    rest = x[:, read:]
    y, _ = mixer.step(rest, state, **mixer.extras(tokens_of(rest)))
    torch.testing.assert_close(y, run(mixer, x)[:, read:], **TIGHT)


@pytest.mark.parametrize("case", STEPPED)
def test_gradients_flow_through_steps(case):
    mixer = make(case)
    x = sequence().requires_grad_()
    parameters = [x, *mixer.parameters()]
    whole = torch.autograd.grad(run(mixer, x).square().sum(), parameters)
    cut = torch.autograd.grad(in_steps(mixer, x, [3, 1, 1, 12, 20]).square().sum(), parameters)
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_each_alone(case):
    mixer = make(case)
    x = sequence(1)
    bounds = [0, 5, 5, 6, 30, T]
    packed = run(mixer, x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = torch.cat([run(mixer, x[:, a:b]) for a, b in pairwise(bounds) if a < b], dim=1)
    torch.testing.assert_close(packed, alone, **TIGHT)
    assert (packed - run(mixer, x)).abs().max() > 1e-6 or sees_itself_only(case)


@pytest.mark.parametrize("case", STEPPED)
@torch.no_grad()
def test_state_is_as_large_as_it_says(case):
    mixer = make(case)
    batch = 2
    for lengths in ([0, *[1] * 20], [18, 1, 1], [300, 21]):
        state, read = mixer.init_state(batch), 0
        for piece in sequence(batch, sum(lengths)).split(lengths, dim=1):
            if piece.shape[1]:
                _, state = mixer.step(piece, state, **mixer.extras(tokens_of(piece)))
            read += piece.shape[1]
            tensors = list(state.tensors())
            assert sum(tensor.numel() for tensor in tensors) == batch * mixer.state_size(read)
            # What counts is what is kept alive: a view keeps all of what it views.
            storages = {s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, tensors)}
            assert state.nbytes == sum(storages.values())


@pytest.mark.parametrize("case", STEPPED)
@torch.no_grad()
def test_state_in_lower_precision(case):
    mixer, x = make(case).float(), sequence().float()
    y, state, outs = run(mixer, x), mixer.init_state(2, dtype=torch.bfloat16), []
    for piece in x.split([20] + [1] * 17, dim=1):
        out, state = mixer.step(piece, state, **mixer.extras(tokens_of(piece)))
        outs.append(out)
    stepped = torch.cat(outs, dim=1)
    assert stepped.dtype == torch.float32
    assert (stepped - y).square().mean().sqrt() < 0.03 * y.square().mean().sqrt()


@pytest.mark.parametrize("case", CASES)
def test_weights_save_and_load(case, tmp_path):
    mixer, other = make(case), make(case, seed=1)
    x = sequence()
    assert not torch.equal(run(mixer, x), run(other, x))
    torch.save(mixer.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(run(mixer, x), run(other, x))
    assert set(mixer.state_dict()) == dict([*mixer.named_parameters(), *mixer.named_buffers()]).keys()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error")
def test_bfloat16_autocast_is_close_to_float32(case):
    mixer = make(case).float()
    x = sequence(time=70).float()
    y = run(mixer, x)
    with torch.autocast("cpu", torch.bfloat16):
        half = run(mixer, x)
        with torch.no_grad():
            stepped = in_steps(mixer, x, [40] + [1] * 30) if mixer.causal else half
    half.float().sum().backward()
    # Without first tokens: what these see is one score over its own size, and near zero roundings choose its sign.
    scale = y[:, 1:].square().mean().sqrt()
    for close in (half, stepped):
        assert (close.float() - y)[:, 1:].square().mean().sqrt() < 0.03 * scale


@pytest.mark.parametrize("case", CASES)
def test_same_seed_same_weights(case):
    mixer = make(case)
    draws = []
    for seed in (0, 0, 1):
        mixer.reset_parameters(generator=torch.Generator().manual_seed(seed))
        draws.append(torch.cat([parameter.flatten() for parameter in mixer.parameters()]).clone())
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if issubclass(mixer, AttentionMixer)])
@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (5, {}, "d_model must be a multiple of n_heads, or head_dim given; got d_model=24, n_heads=5"),
        (4, {"n_kv_heads": 3}, "n_heads must be a positive multiple of n_kv_heads"),
        (0, {}, "n_heads must be a positive multiple"),
        (4, {"value_dim": 0}, "head_dim and value_dim must be positive; got head_dim=6, value_dim=0"),
        (4, {"rotation": "spiral"}, "rotation is one of .*; got 'spiral'"),
        (4, {"frequencies": "odd"}, "frequency rule is one of standard, conformal; got 'odd'"),
        (4, {"frequencies": "conformal"}, "max_length"),
        (4, {"max_length": 100}, "max_length"),
        (4, {"head_dim": 5}, "key_dim must be even; got 5"),
        (4, {"rotary_fraction": 0}, "rotary_fraction must be above 0 and at most 1; got 0"),
        (4, {"rotary_fraction": 1.5}, "rotary_fraction must be above 0 and at most 1; got 1.5"),
        (4, {"short_convolution": -1}, "short_convolution is a number of taps, 0 for none; got -1"),
        (4, {"qk_norm": True, "qk_norm_eps": -1}, "qk_norm_eps must be positive and finite; got -1"),
        (4, {"short_convolution": True}, "short_convolution is a number of taps, 0 for none; got True"),
    ],
)
def test_bad_options_are_refused(name, heads, options, message):
    with pytest.raises(ValueError, match=message):
        MIXERS[name](D_MODEL, heads, **OPTIONS[name][0] | options)


@pytest.mark.parametrize("flag", ["gate", "qk_norm", "bias", "out_bias", "head_norm", "output_gate"])
def test_flags_are_bools(flag):
    for name in ("softmax", "power", "power_delta", "window"):
        with pytest.raises(TypeError, match=f"^{flag} must be True or False; got 'no'$"):
            MIXERS[name](D_MODEL, 4, **OPTIONS[name][0] | {flag: "no"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("selection", {"selection": "learned", "whole_row": 0.5}),
        ("hyena", {"max_length": 9, "multi_head": -1}),
        ("base_conv", {"max_length": 9, "residual": 0.5}),
        ("programmatic_conv", {"matching": 2.0}),
    ],
)
def test_other_flags_are_bools(name, options):
    flag, value = list(options.items())[-1]
    with pytest.raises(TypeError, match=f"^{flag} must be True or False; got {value}$"):
        MIXERS[name](D_MODEL, 4, **options)


WRONG_FORMS = (
    ({"chunk_size": 0}, "chunk_size must be an integer >= 1, or None; got 0"),
    ({"chunk_size": True}, "chunk_size must be an integer >= 1, or None; got True"),
    ({"impl": "nope"}, "impl is one of auto, eager, triton, reference; got 'nope'"),
)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("power", {"p": 3, "normalize": True}, "normalize=True needs an even p"),
        ("power", {"p": 0}, "p must be an integer >= 1; got 0"),
        ("power", {"p": 2.0}, "p must be an integer >= 1; got 2.0"),
        ("power", {"gate_bias": [1.0]}, "gate_bias is two numbers"),
        ("power", {"gate_bias": [math.inf, 1.0]}, "gate_bias must be finite, and at most 1e\\+30 in size; got"),
        ("power_delta", {"gate_bias": [1.0, -1e300]}, "gate_bias must be finite, and at most 1e\\+30 in size"),
        ("power_delta", {"beta_bias": 1e300}, "beta_bias must be finite, and at most 1e\\+30 in size; got 1e\\+300"),
        ("power", {"initial_score": -1.0}, "initial_score must be finite and not negative; got -1.0"),
        ("power", {"initial_score": math.inf}, "initial_score must be finite and not negative; got inf"),
        ("power", {"position_rate": 0.0}, "position_rate must be positive and finite; got 0.0"),
        ("power", {"eps": 0.0}, "eps must be at least 1.2e-38, which float32 can hold, and finite; got 0.0"),
        ("power", {"eps": math.nan}, "eps must be at least 1.2e-38, which float32 can hold, and finite; got nan"),
        ("softmax", {"gate": True, "gate_bias": [1.0]}, "gate_bias is two numbers"),
        ("softmax", {"rotation": "data"}, "rotation is one of fixed, none; got 'data'"),
        ("linear", {"feature_map": "relu"}, "feature_map is one of identity, elu\\+1, taylor; got 'relu'"),
        ("window", {"window": 0}, "window must be an integer of at least 1; got 0"),
        ("long_convolution", {"max_length": 0}, "max_length must be an integer of at least 1; got 0"),
        ("base_conv", {"max_length": 8, "filter": "fft"}, "filter is one of implicit, relu, explicit; got 'fft'"),
        ("base_conv", {"max_length": 8, "order": 0}, "order must be an integer of at least 1; got 0"),
        ("hyena", {"max_length": 8, "decays": (0.3,)}, "decays are two positive shares of the filter, fast and slow"),
        ("hyena", {"max_length": 8, "recurrences": 0}, "recurrences must be an integer of at least 1; got 0"),
        ("hyena", {"max_length": 8, "recurrences": 2, "multi_head": True}, "multi_head has one recurrence; got"),
        ("hyena", {"max_length": 8, "frequency": 0}, "frequency must be positive and finite; got 0"),
        ("h3", {"head_dim": 5}, "d_model must be a multiple of head_dim; got d_model=24, head_dim=5"),
        ("h3", {"state_dim": 7}, "state_dim must be an even integer of at least 2; got 7"),
        ("selection", {"selection": "best"}, "selection is one of random, programmatic, learned; got 'best'"),
        ("selection", {"selection": "random", "top_k": 0}, "top_k must be an integer of at least 1; got 0"),
        ("selection", {"selection": "random", "probability": 0}, "probability must be above 0 and at most 1; got 0"),
        ("selection", {"selection": "random", "probability": 2}, "probability must be above 0 and at most 1; got 2"),
        (
            "selection",
            {"selection": "random", "whole_row": True},
            "whole_row is an option of learned selection; got selection 'random'",
        ),
        ("selection", {"selection": "learned", "noise": -1}, "noise must be finite and at least 0; got -1"),
        ("selection", {"selection": "learned", "noise": math.nan}, "noise must be finite and at least 0; got nan"),
        ("autocorrelation_conv", {"top_k": 0}, "top_k must be an integer of at least 1; got 0"),
        ("autocorrelation_conv", {"filler": 0}, "filler needs matching: without it inputs are correlated as they are"),
        ("rwkv4", {"depth": 2}, "depth lies between 0 and 1; got 2"),
        ("rwkv4", {"shift_depth": -1}, "shift_depth lies between 0 and 1; got -1"),
        ("rwkv7", {"depth": -1}, "depth lies between 0 and 1; got -1"),
        ("rwkv7", {"impl": "fast"}, "impl is one of auto, plain, fla; got 'fast'"),
        ("blocked_window", {"window": 0}, "window must be an integer of at least 1; got 0"),
        ("retnet", {"head_norm": True}, "RetNet has an output of its own: no head_norm and no output_gate"),
        ("selection", {"selection": "random", "output_gate": True}, "SelectiveAttention has an output of its own"),
        ("short_convolution", {"width": 0}, "width must be an integer of at least 1; got 0"),
        ("short_convolution", {"options": {"p": 2}}, "options are those of the mixer behind, and there is none"),
        ("short_convolution", {"mixer": "powr"}, "a mixer is one of power, .*; got 'powr'"),
        ("short_convolution", {"mixer": "power", "options": {"q": 2}}, "the power mixer has no option 'q'"),
        ("short_convolution", {"mixer": "gla", "options": {"q": 2}}, "the gla mixer has no option 'q'; it has none"),
        *((name, *wrong) for name in ("power", "linear", "retnet") for wrong in WRONG_FORMS),
    ],
)
def test_bad_options_of_one_mixer_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        MIXERS[name](D_MODEL, HEADS, **options)


@pytest.mark.parametrize("case", STEPPED)
def test_a_state_that_no_step_continues_is_refused(case):
    with pytest.raises(TypeError, match=r"the dtype of a state must be a floating-point type; got torch.int32"):
        make(case).init_state(2, dtype=torch.int32)
    with pytest.raises(
        TypeError, match=r"^a state of torch.float64 continues weights of torch.float64; got weights of"
    ):
        make(case).float().init_state(2, dtype=torch.float64)


@pytest.mark.parametrize("case", STEPPED)
def test_a_state_of_no_number_of_sequences_is_refused(case):
    mixer = make(case)
    for batch in (-1, 1.5, True, None, "2"):
        with pytest.raises((TypeError, ValueError), match=f"^batch_size must be .*; got {batch!r}$"):
            mixer.init_state(batch)


@torch.no_grad()
def test_a_step_is_exported_for_any_number_of_sequences():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = MIXERS["power"](32, 2)

        def forward(self, x):
            return self.mixer.step(x, self.mixer.init_state(x.shape[0]))[0]

    step, x = Step().eval(), torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(0))
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(step, (x[:3],), dynamic_shapes=sizes, strict=False)
    assert torch.equal(exported.module()(x), step(x))


@pytest.mark.parametrize("case", STEPPED)
@torch.no_grad()
def test_only_as_many_tokens_as_were_tried_can_be_kept(case):
    """A slice would make a state of -1 and of 5 tokens."""
    mixer, x = make(case), sequence(time=4)
    _, after = mixer.try_step(x, mixer.init_state(2), **mixer.extras(tokens_of(x)))
    for kept in (-1, 5, 1.0, True):
        with pytest.raises((TypeError, ValueError), match=f"tokens that (are kept|were tried) .*; got {kept}$"):
            after(kept)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    mixer = make(case)
    for bad in (sequence()[..., :-1], sequence()[0], sequence()[:, :0]):
        with pytest.raises(ValueError, match=r"x must be \[B, T >= 1, 24\]; got"):
            run(mixer, bad)
        if mixer.causal:
            with pytest.raises(ValueError, match=r"x must be"):
                in_steps(mixer, bad, [bad.shape[1]])
    weights = next(mixer.parameters()).dtype
    for dtype in {torch.float32, torch.float64, torch.int64} - {weights}:
        with pytest.raises(TypeError, match=f"the dtype of the weights, {weights}, or autocast be on; got {dtype}"):
            run(mixer, sequence().to(dtype))
    with pytest.raises(ValueError, match="x must be on the device of the weights, cpu; got meta"):
        run(mixer, sequence().to("meta"))
    for batch, bounds in ((2, [0, T]), (1, [0, 5]), (1, [0, 9, 5, T]), (1, [0.0, T]), (1, [[0, T]])):
        with pytest.raises((ValueError, TypeError), match="cu_seqlens"):
            run(mixer, sequence(batch), cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize("case", STEPPED)
def test_a_state_of_another_batch_is_refused(case):
    """Also of a batch that torch would broadcast."""
    mixer = make(case)
    for batch, held in ((3, 2), (1, 3), (3, 1)):
        x, state = sequence(batch)[:, :1], mixer.init_state(held)
        with pytest.raises(ValueError, match=f"as many sequences as the input, {batch}; got a state of {held}"):
            mixer.step(x, state, **mixer.extras(tokens_of(x)))
    with pytest.raises(TypeError, match="state must be what init_state or an earlier step returned; got NoneType"):
        mixer.step(x, None, **mixer.extras(tokens_of(x)))


@pytest.fixture(scope="module")
def states():
    """A state of two sequences of each kind, which no test may change."""
    return {type(state): state for state in (make(other.values[0]).init_state(2) for other in STEPPED)}


@pytest.mark.parametrize("case", STEPPED)
def test_a_state_of_another_mixer_is_refused(case, states):
    mixer, x = make(case), sequence(2)[:, :1]
    own = type(mixer.init_state(2))
    for kind, state in states.items():
        if kind is not own:
            message = rf"state must be that of this mixer, {own.__name__}\b.*; got {kind.__name__}\b"
            for step in (mixer.step, mixer.try_step):
                with torch.no_grad(), pytest.raises(TypeError, match=message):
                    step(x, state, **mixer.extras(tokens_of(x)))


def test_a_state_of_another_mixer_behind_a_convolution_is_refused():
    power, softmax = (MIXERS[name](D_MODEL, HEADS, short_convolution=4) for name in ("power", "softmax"))
    message = "mixer, with behind of PowerAttentionState; got KVCache$"
    with pytest.raises(TypeError, match=message):
        power.step(sequence(2).to(power.qkv.weight), softmax.init_state(2))


OTHER_OPTIONS = {
    "taps": ("power", {"short_convolution": 2}, {}),
    "features": ("linear", {"feature_map": "elu+1"}, {}),
    "positions": ("power", {"rotation": "data"}, {}),
    "window": ("window", {"window": 4}, {"window": 2}),
    "block": ("blocked_window", {"window": 4}, {"window": 2}),
    "filter": ("long_convolution", {"max_length": 8}, {"max_length": 4}),
    "top k": ("selection", {"selection": "learned", "top_k": 3}, {"selection": "learned", "top_k": 4}),
    "head": ("softmax", {"head_dim": 4}, {"head_dim": 8}),
    "groups": ("power", {"n_kv_heads": 2}, {}),
    "size": ("h3", {"state_dim": 4}, {"state_dim": 8}),
}


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_a_state_of_other_options_is_refused(name):
    mixer, *sets = OTHER_OPTIONS[name]
    own, other = (make((mixer, options)) for options in sets)
    x = sequence(2)[:, :5]
    for layer, state in ((own, other.init_state(2)), (own, other.step(x, other.init_state(2))[1])):
        for step in (layer.step, layer.try_step):
            with torch.no_grad(), pytest.raises(ValueError, match=r"state|K="):
                step(x[:, :1], state, **layer.extras(tokens_of(x[:, :1])))


@pytest.mark.parametrize("case", STEPPED)
def test_rows_of_different_lengths_step_by_several_tokens(case):
    mixer, x = make(case), sequence(2)
    with torch.no_grad():
        begun = mixer.step(x[:, :9], mixer.init_state(2), **mixer.extras(tokens_of(x[:, :9])))[1]
        whole = begun.with_all_room(14)
        if not whole.rows_may_differ:
            pytest.skip("rows of this mixer are equally long")
        state = whole.counting(torch.tensor([9, 9]))
        y, state = mixer.step(x[:, 9:12], state, **mixer.extras(tokens_of(x[:, 9:12])))
        z, _ = mixer.step(x[:, 12:14], state, **mixer.extras(tokens_of(x[:, 12:14])))
    torch.testing.assert_close(torch.cat([y, z], dim=1), run(mixer, x)[:, 9:14], **TIGHT)


def test_an_array_is_refused():
    """Its device is called "cpu", as that of the weights."""
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor; got ndarray"):
        MIXERS["power"](D_MODEL, HEADS)(sequence().numpy())


def test_unknown_options_are_refused():
    for name, mixer in MIXERS.items():
        with pytest.raises(TypeError, match="unexpected keyword argument 'wings'"):
            mixer(D_MODEL, HEADS, wings=2, **OPTIONS[name][0])
        assert {option for options in OPTIONS[name] for option in options} <= set(mixer.option_names())
        if issubclass(mixer, AttentionMixer):
            assert {"n_kv_heads", "rotation", "bias"} <= set(mixer.option_names())
        assert not {"self", "d_model", "n_heads", "heads"} & set(mixer.option_names())
