"""Sequences of different lengths in one batch: each as if it were alone, through any order of coming and going."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sympow.layers.state import narrowed
from sympow.layers.state_file import serialize
from sympow.models import Context, LanguageModel, MixerConfig, ModelConfig, generate, stream
from sympow.models.slots import Slots, slot_bytes
from sympow.models.step_graphs import capturing, rounded
from sympow.ops import DecodingState
from sympow.ops.memory import Memory
from tests.integrations.small import CASES, VOCAB, small_model

LENGTHS, NEW = (3, 17, 8, 30), 9
GROWING = ["softmax", "grouped softmax", "gated softmax", "hybrid", "recommended hybrid"]  # with caches of all tokens


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (1, length), generator=generator) for length in LENGTHS]


MOST = max(LENGTHS) + NEW - 1  # tokens read of a sequence


def check_rows(model, most=None):
    """Two slots, four sequences: the second two come when others have ended, in rows that are used again."""
    alone = [generate(model, prompt, NEW, temperature=0).tokens[0].tolist() for prompt in prompts()]
    slots, waiting, rows = Slots(model, 2, most), list(enumerate(prompts())), []
    assert most is None or slots.as_one_batch
    drawn = {i: [] for i in range(len(LENGTHS))}
    while waiting or rows:
        if waiting and slots.count < 2:
            i, prompt = waiting.pop(0)
            context = Context.begin(model).read(model, prompt)
            drawn[i].append(int(context.logits.argmax()))
            assert slots.put(context.state, context.tokens) == len(rows)
            rows.append(i)
        tokens = torch.tensor([drawn[i][-1] for i in rows])
        for i, token in zip(rows, slots.step(tokens).argmax(-1).tolist(), strict=True):
            drawn[i].append(token)
        for row in reversed(range(len(rows))):
            if len(drawn[rows[row]]) == NEW:
                slots.release(row)
                rows[row] = rows[-1]
                rows.pop()
    assert list(drawn.values()) == alone


def test_a_compiled_step_reads_rows_of_any_length():
    """The graph does not know their lengths."""
    model = small_model("softmax")

    def stepped(step):
        slots = Slots(SimpleNamespace(step=step, init_state=model.init_state, embedding=model.embedding), 2, MOST)
        for prompt in prompts()[:2]:
            slots.put(Context.begin(model).read(model, prompt).state, len(prompt))
        return slots.step(torch.tensor([1, 2]))

    compiled = torch.compile(model.step, fullgraph=True, backend="eager")
    assert torch.allclose(stepped(compiled), stepped(model.step), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_each_row_is_as_alone(case):
    check_rows(small_model(case))


@pytest.fixture(params=[True, False], ids=["", "whole room"])
def reads_rows(request, monkeypatch):
    """As on a CPU, and as on a GPU, which reads the whole room of a cache."""
    for module in ("layers.softmax", "models.slots"):
        monkeypatch.setattr(f"sympow.{module}.reads_rows", lambda device: request.param)
    return request.param


@pytest.mark.parametrize("case", GROWING)
def test_each_row_of_caches_with_room_is_as_alone(case, reads_rows):
    """The longest sequence fills its room."""
    check_rows(small_model(case), MOST)
    with pytest.raises(RuntimeError, match=f"room for sequences of {MOST - 1} tokens; got one of {MOST}"):
        check_rows(small_model(case), MOST - 1)


@pytest.mark.parametrize("case", GROWING)
@torch.no_grad()
def test_a_row_that_is_not_finite_leaves_nothing_behind(case, reads_rows):
    """It ends, and another sequence moves into its row, or is put there."""
    model = small_model(case)
    contexts = [Context.begin(model).read(model, prompt) for prompt in (prompts()[3], prompts()[1], prompts()[0])]
    broken = contexts[0].state.mapped(lambda x: x * torch.nan if x.is_floating_point() else x)
    slots = Slots(model, 2, MOST)
    for state, tokens in ((broken, 30), (contexts[1].state, 17)):
        slots.put(state, tokens)
    slots.release(0)
    assert alike(slots.take(0), contexts[1].state)
    slots.put(broken, 30)
    slots.release(1)
    slots.put(contexts[2].state, 3)
    expected = [model.step(torch.tensor([[token]]), contexts[i].state.clone())[0] for token, i in ((4, 1), (5, 2))]
    torch.testing.assert_close(slots.step(torch.tensor([4, 5])), torch.cat(expected))


def test_the_bytes_of_slots_are_planned(monkeypatch):
    """Those of windows and of the room of caches too. Slots are refused before they are allocated."""
    for case, most in (("power", None), ("window", None), ("grouped softmax", 1000), ("recommended hybrid", 1000)):
        model = small_model(case)
        assert 0 <= 3 * slot_bytes(model, most) - Slots(model, 3, most).nbytes <= 3 * 40  # of counters
    needed = 3 * slot_bytes(model, most)
    for free in (needed - 1, needed):
        monkeypatch.setattr("sympow.ops.memory.memory_of", lambda device, free=free: Memory(free, free))
        with pytest.raises(ValueError, match="a state for 3 slots needs") if free < needed else nullcontext():
            Slots(model, 3, most)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_slots_with_narrow_sums(dtype):
    """Each row is as alone, and slots have the planned bytes. A wide state is narrowed when it is put."""
    model = small_model("power")
    slots, wide = Slots(model, 2, state_dtype=dtype), Slots(model, 2)
    assert 0 <= 2 * slot_bytes(model, None, dtype) - slots.nbytes <= 2 * 40 and slots.nbytes < 0.8 * wide.nbytes
    contexts = [Context.begin(model).read(model, prompt) for prompt in prompts()[:2]]
    alone = [narrowed(context.state.clone(), dtype) for context in contexts]
    for context in contexts:
        slots.put(context.state, context.tokens)
    for token in ([1, 2], [3, 4], [5, 6]):
        expected = []
        for row in range(2):
            logits, alone[row] = model.step(torch.tensor([[token[row]]]), alone[row])
            expected.append(logits)
        torch.testing.assert_close(slots.step(torch.tensor(token)), torch.cat(expected))
    sums = [x for layer in slots.take(1).layers for x in vars(layer.behind).values() if isinstance(x, DecodingState)]
    assert sums and all(x.s.dtype == dtype for x in sums)


def test_narrow_sums_need_power_attention():
    with pytest.raises(
        ValueError, match=r"^a state dtype of torch\.int8 needs sums of power attention; this model has none$"
    ):
        Slots(small_model("window"), 2, state_dtype=torch.int8)


@pytest.mark.parametrize("case", ["power", "rwkv7 body", "elu"])
def test_rows_with_tails(case, monkeypatch):
    """As on a GPU, where tails are as full as their rows are long."""
    monkeypatch.setattr("sympow.layers.power.prefers_tail", lambda device, dtype: True)
    model = small_model(case)
    assert any("DecodingState" in repr(layer) for layer in model.init_state(1).layers)
    check_rows(model)
    slots = Slots(model, 3)
    contexts = [Context.begin(model).read(model, prompt) for prompt in prompts()[:3]]
    for context in contexts:
        slots.put(context.state, context.tokens)
    slots.release(0)  # the last row becomes the first
    taken = slots.take(0)
    assert all(map(torch.equal, taken.tensors(), contexts[2].state.tensors()))
    assert slots.put(contexts[0].state, contexts[0].tokens) == 2
    tokens = torch.tensor([1, 2, 3])
    expected = [model.step(token[None, None], contexts[i].state)[0] for token, i in zip(tokens, (2, 1, 0), strict=True)]
    torch.testing.assert_close(slots.step(tokens), torch.cat(expected))


@pytest.mark.parametrize("case", ["power", "hybrid", "rwkv7 body", "data-dependent rotation"])
def test_a_row_taken_continues_as_it_would_have(case):
    model = small_model(case)
    slots = Slots(model, 3)
    for prompt in prompts()[:3]:
        slots.put(Context.begin(model).read(model, prompt).state, prompt.shape[1])
    slots.step(torch.tensor([1, 2, 3]))
    taken = slots.take(1)
    with torch.no_grad():
        logits, _ = model.step(torch.tensor([[4]]), taken)
    expected = slots.step(torch.tensor([5, 4, 6]))[1]
    torch.testing.assert_close(logits[0], expected)


def test_what_a_slot_was_made_of_is_not_changed():
    model = small_model("hybrid")
    context = Context.begin(model).read(model, prompts()[1])
    before = [tensor.clone() for tensor in context.state.tensors()]
    slots = Slots(model, 2)
    slots.put(context.state, context.tokens)
    for token in range(9):
        slots.step(torch.tensor([token]))
    # Bytes, as the spare room of a cache is not initialized: it may hold NaN, which equals nothing.
    bytes_before, bytes_after = ([x.view(torch.uint8) for x in each] for each in (before, context.state.tensors()))
    assert all(map(torch.equal, bytes_before, bytes_after))


@pytest.mark.parametrize("case", ["power", "rwkv7 body of windows", "rwkv7 body"])
def test_rows_of_equal_length_are_put_at_once_and_given_as_one_state(case):
    model = small_model(case)
    prompt = torch.cat([prompts()[1][:, :7], prompts()[3][:, :7]])
    read = Context.begin(model, 2).read(model, prompt)
    slots = Slots(model, 3)
    assert slots.as_one_batch and slots.put(read.state, 7) == 0 and slots.count == 2
    with torch.no_grad():
        expected, state = model.step(torch.tensor([[1], [2]]), Context.begin(model, 2).read(model, prompt).state)
        torch.testing.assert_close(slots.step(torch.tensor([1, 2])), expected)
        expected, _ = model.step(torch.tensor([[3], [4]]), state)
        actual, _ = model.step(torch.tensor([[3], [4]]), slots.equal().clone())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", ["power", "rwkv7 body"])
def test_a_state_that_slots_take_over_is_in_memory_once(case, monkeypatch):
    """As in `generate` on a GPU, where states have tails. A batch of Brumby-14B fills a GPU with its states alone."""
    monkeypatch.setattr("sympow.layers.power.prefers_tail", lambda device, dtype: True)
    model = small_model(case)
    prompt = torch.cat([prompts()[1][:, :7], prompts()[3][:, :7]])
    begun = Context.begin(model, 2)
    first = [layer.s for layer in decoding_states(begun.state)]
    context = begun.read(model, prompt, chunk=4)
    assert [layer.s.data_ptr() for layer in decoding_states(context.state)] == [s.data_ptr() for s in first]
    free = Memory(first[0].nbytes, first[0].nbytes)  # less than all sums, which need no memory
    monkeypatch.setattr("sympow.models.slots.memory_of", lambda device: free)
    slots = Slots.holding(model, context.state, 7)
    assert slots.count == slots.capacity == 2
    other = Context.begin(model, 2).read(model, prompt).state
    with torch.no_grad():
        for token in range(9):
            expected, other = model.step(torch.tensor([[token], [token + 1]]), other)
            torch.testing.assert_close(slots.step(torch.tensor([token, token + 1])), expected)
    held = decoding_states(slots.equal())
    assert [layer.s.data_ptr() for layer in held] == [s.data_ptr() for s in first] and first
    slots.release(0)
    with torch.no_grad():
        expected, _ = model.step(torch.tensor([[3]]), slots.equal().clone())
        torch.testing.assert_close(slots.step(torch.tensor([3])), expected)
        of_two, _ = model.step(torch.tensor([[0], [3]]), other)
    torch.testing.assert_close(expected, of_two[1:])


def decoding_states(value):
    if isinstance(value, DecodingState):
        return [value]
    items = value if isinstance(value, list) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [each for item in items for each in decoding_states(item)]


def alike(state, other):
    """Tells whether states have the same form and the same numbers but for rounding. Spare room does not count."""
    (mine, tree), (its, other_tree) = (vars(serialize(each)).values() for each in (state, other))
    sizes = [[tensor.shape for tensor in each.tensors()] for each in (state, other)]
    return tree == other_tree and sizes[0] == sizes[1] and all(map(torch.allclose, mine.values(), its.values()))


@pytest.mark.parametrize("case", GROWING)
@pytest.mark.parametrize(("read", "most"), [(7, 16), (7, 31), (14, 17), (1, 2)])
@torch.no_grad()
def test_caches_of_all_tokens_are_one_batch_where_the_greatest_length_is_known(case, read, most):
    """Until they are full. The state of all rows has the form that `step` gives, and goes on."""
    model = small_model(case).double()
    prompt = torch.cat([prompt[:, :read] for prompt in prompts() if prompt.shape[1] >= read])
    state = Context.begin(model, len(prompt)).read(model, prompt, chunk=5).state
    before = state.clone()
    slots = Slots.holding(model, state, read, most)
    for token in range(read, most):
        tokens = torch.arange(len(prompt)) + token
        expected, state = model.step(tokens[:, None], state)
        torch.testing.assert_close(slots.step(tokens), expected)
        assert alike(slots.equal(), state)
    with pytest.raises(
        RuntimeError, match=f"these slots have room for sequences of {most} tokens; got one of {most + 1}"
    ):
        slots.step(tokens)
    taken = slots.equal()
    logits, after = model.step(tokens[:, None], taken.clone())
    expected, state = model.step(tokens[:, None], state)
    torch.testing.assert_close(logits, expected)
    assert alike(after, state)
    assert Slots.holding(model, before, read) is None


@pytest.mark.parametrize("case", GROWING)
@torch.no_grad()
def test_rows_of_caches_with_room_may_differ_in_length(case):
    """A row is freed, and used again by a longer and by a shorter sequence."""
    model, most = small_model(case).double(), 20
    contexts = [Context.begin(model).read(model, prompt) for prompt in prompts()]
    first = Context.begin(model, 2).read(model, prompts()[2].expand(2, -1)).state
    alone = [contexts[2].state, contexts[2].state.clone()]
    slots = Slots.holding(model, first, 8, most)
    for row, length in ((1, 0), (0, 1)):
        slots.release(row)
        alone = [*alone[:row], *alone[row + 1 :], contexts[length].state.clone()]
        assert slots.put(contexts[length].state, contexts[length].tokens) == 1
        for token in (5, 9, 4):
            logits = slots.step(torch.tensor([token, token + 1]))
            for i in range(2):
                expected, alone[i] = model.step(torch.tensor([[token + i]]), alone[i])
                torch.testing.assert_close(logits[i : i + 1], expected)
    assert all(alike(slots.take(row), state) for row, state in enumerate(alone))
    slots.release(1)
    with pytest.raises(RuntimeError, match="room for sequences of 20 tokens; got one of 30"):
        slots.put(contexts[3].state, 30)


@pytest.mark.parametrize("case", GROWING)
@pytest.mark.parametrize("new", [16, 40])
def test_generate_in_slots_is_generate_step_by_step(case, new, monkeypatch):
    """As on a GPU. The state after every token is the same, too, and the context that was continued is unchanged."""
    model, room = small_model(case).double(), []
    context = Context.begin(model).read(model, prompts()[1])
    before = context.clone()

    def drawn():
        given = {"temperature": 1.5, "context": context, "prefill_chunk": 3}
        return [(int(each.token), each.state.clone()) for each in stream(model, prompts()[2], new, **given)]

    expected = drawn()

    def holding(model, state, tokens, most):
        room.append((tokens, most))
        return Slots.holding(model, state, tokens, most)

    monkeypatch.setattr(Slots, "with_graphs", holding)
    found = drawn()
    assert room == [(25, 25 + new - 1)]
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert all(alike(own, other) for (_, own), (_, other) in zip(found, expected, strict=True))
    assert alike(context.state, before.state)


def test_no_slots_are_made_for_which_there_is_no_memory(monkeypatch):
    model = small_model("softmax")
    state = Context.begin(model).read(model, prompts()[0]).state
    assert Slots.holding(model, state, LENGTHS[0], 2**62) is None
    copied = Slots.holding(model, state, LENGTHS[0], 1000).nbytes - 2 * 8  # without the lengths of two layers
    needed = copied * 5 // 4  # a step needs memory, too
    for free in (needed - 1, needed):
        monkeypatch.setattr("sympow.models.slots.memory_of", lambda device, free=free: Memory(free, free))
        assert (Slots.holding(model, state, LENGTHS[0], 1000) is None) == (free < needed)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("selection", {"selection": "learned", "top_k": 3}),
        ("blocked_window", {"window": 40}),
        ("long_convolution", {"max_length": 40}),
    ],
)
def test_what_is_stepped_row_by_row_keeps_its_form(mixer, options):
    """Slots do not take it over, and give it no room before it needs that."""
    model = LanguageModel(ModelConfig(VOCAB, 32, 2, 4, (MixerConfig(mixer, options),)), seed=1)
    state = Context.begin(model).read(model, prompts()[0]).state
    assert Slots.holding(model, state, LENGTHS[0], 30) is None
    slots = Slots(model, 1)
    slots.put(state, LENGTHS[0])
    assert alike(slots.take(0), state)


def test_rows_that_are_no_batch():
    model = small_model("power")
    slots = Slots(model, 3)
    for prompt in prompts()[:2]:
        slots.put(Context.begin(model).read(model, prompt).state, prompt.shape[1])
    with pytest.raises(RuntimeError, match="only rows of equal length"):
        slots.equal()
    hybrid = small_model("hybrid")
    slots = Slots(hybrid, 2)
    assert not slots.as_one_batch
    with pytest.raises(RuntimeError, match="the caches of several sequences cannot be put"):
        slots.put(hybrid.init_state(2), 0)
    with pytest.raises(RuntimeError, match="2 of 2 slots are free; got 3 sequences"):
        slots.put(hybrid.init_state(3), 0)


def test_slots_of_constant_states_are_allocated_once():
    model = small_model("power")
    slots = Slots(model, 2)
    size = slots.nbytes
    slots.put(Context.begin(model).read(model, prompts()[3]).state, LENGTHS[3])
    slots.step(torch.tensor([1]))
    assert slots.nbytes == size


def test_refusals():
    model = small_model("power")
    for capacity in (0, 1.5):
        with pytest.raises(ValueError, match="capacity of slots must be an integer of at least 1"):
            Slots(model, capacity)
    for most in (0, 2.5, "8"):
        with pytest.raises(ValueError, match="the tokens of a slot must be an integer of at least 1; got "):
            Slots(model, 2, most)
    slots = Slots(model, 1)
    slots.put(model.init_state(1), 0)
    with pytest.raises(RuntimeError, match="0 of 1 slots are free; got 1 sequences"):
        slots.put(model.init_state(1), 0)
    with pytest.raises(IndexError, match="1 rows are in use, from 0 on; got 1"):
        slots.release(1)


def test_numbers_of_rows_that_share_a_graph():
    assert [rounded(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 64]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("case", ["power", "rwkv7 body of windows", "rwkv7 body", "data-dependent rotation"])
def test_graphs_step_as_the_model_does(case):
    """Rows come and go between the steps: three, two, then three again; a tail is folded more than once."""
    model = small_model(case).cuda()
    slots, alone = Slots(model, 4), []
    for prompt in (prompt.cuda() for prompt in prompts()[:3]):
        alone.append(Context.begin(model).read(model, prompt).state)
        slots.put(Context.begin(model).read(model, prompt).state, prompt.shape[1])
    drawn = torch.randint(VOCAB, (150, 3), generator=torch.Generator().manual_seed(3)).cuda()
    for step, tokens in enumerate(drawn):
        if step == 70:
            slots.release(1)  # the last row moves here
            alone[1] = alone.pop()
        if step == 100:
            slots.put(Context.begin(model).read(model, prompts()[0].cuda()).state, LENGTHS[0])
            alone.append(Context.begin(model).read(model, prompts()[0].cuda()).state)
        logits = slots.step(tokens[: slots.count])
        for row in range(slots.count):
            with torch.no_grad():
                expected, alone[row] = model.step(tokens[None, row : row + 1], alone[row])
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("case", ["power", "rwkv7 body of windows", "rwkv7 body", "data-dependent rotation", *GROWING])
@torch.no_grad()
def test_graphs_on_a_state_that_was_taken_over(case):
    """As in `generate`; a tail is folded more than once, and caches of all tokens reach their greatest length."""
    model = small_model(case).cuda()
    prompt = torch.cat([prompts()[1][:, :7], prompts()[3][:, :7]]).cuda()
    state = Context.begin(model, 2).read(model, prompt, chunk=4).state
    slots = Slots.with_graphs(model, Context.begin(model, 2).read(model, prompt, chunk=4).state, 7, 157)
    for tokens in torch.randint(VOCAB, (150, 2), generator=torch.Generator().manual_seed(3)).cuda():
        expected, state = model.step(tokens[:, None], state)
        torch.testing.assert_close(slots.step(tokens), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("case", ["grouped softmax", "gated softmax"])
def test_generate_by_graphs_is_generate_step_by_step(case, monkeypatch):
    model, prompt = small_model(case).double().cuda(), prompts()[1].expand(2, -1).cuda()
    made, with_graphs = [], Slots.with_graphs
    monkeypatch.setattr(Slots, "with_graphs", lambda *given: made.append(with_graphs(*given)) or made[-1])
    found = generate(model, prompt, 40)
    assert made[0] is not None
    monkeypatch.setattr(Slots, "with_graphs", lambda *given: None)
    expected = generate(model, prompt, 40)
    assert torch.equal(found.tokens, expected.tokens) and found.state_nbytes == expected.state_nbytes


def test_the_spare_room_of_a_window_does_not_count():
    """It is not written before it is needed, and a weight of 0 does not hide what is not finite."""
    model = small_model("window")
    context = Context.begin(model).read(model, prompts()[0])
    for layer in context.state.layers:
        assert layer.k.shape[2] > layer.length == 3
        layer.k[:, :, 3:], layer.v[:, :, 3:] = torch.nan, torch.nan
    slots = Slots(model, 1)
    slots.put(context.state, 3)
    assert slots.step(torch.tensor([1])).isfinite().all()


class Cycle:
    """Garbage that only the collector frees, as a graph of a model that is no longer used."""

    def __init__(self):
        self.me = self


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_for_a_capture_or_meanwhile(monkeypatch, enabled):
    """With many packages loaded, a collection takes as long as many steps."""
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    was = gc.isenabled()
    gc.disable()
    before = weakref.ref(Cycle())
    if enabled:
        gc.enable()
    try:
        with pytest.raises(RuntimeError, match="in the block"), capturing(None, pool=1):
            assert not gc.isenabled() and (enabled or before() is not None)  # enabled, it may run before the block
            raise RuntimeError("in the block")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
