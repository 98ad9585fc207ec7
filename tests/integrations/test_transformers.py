"""Models of sympow in transformers: the native numbers, whatever is padded, cached, cut or reordered."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments

from sympow.integrations.transformers import (
    SympowCache,
    SympowConfig,
    SympowForCausalLM,
    SympowModel,
    register,
    to_native,
)
from sympow.integrations.transformers.folders import from_native
from sympow.integrations.transformers.stepping import ModelSteps
from sympow.models import LanguageModel, MixerConfig
from sympow.models.slots import Slots
from sympow.training import TrainingConfig, make_optimizer
from sympow.training.optimizer import muon_weights
from tests.integrations.small import VOCAB, small_config, small_model

# What is promised of logits in float32; those of these models are of order 1.
CLOSE = {"rtol": 0, "atol": 1e-5}


def hybrid():
    return from_native(small_model("hybrid"))


def left_padded(tokens, lengths=(21, 16, 21, 1)):
    """A mask, and the tokens with others of no vocabulary in the places that are left out."""
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return mask, tokens.masked_fill(mask == 0, VOCAB + 5)


@torch.no_grad()
def test_logits_are_those_of_the_native_model(native, tokens):
    model = from_native(native)
    expected = native(tokens)
    assert expected.abs().max() > 0.1
    assert_close(model(tokens, use_cache=False).logits, expected, **CLOSE)
    out = model(tokens)
    assert_close(out.logits, expected, **CLOSE)
    assert out.past_key_values.get_seq_length() == 21 and out.past_key_values.nbytes > 0
    assert_close(model(tokens, logits_to_keep=1).logits, expected[:, -1:], **CLOSE)
    assert_close(model(tokens, logits_to_keep=torch.tensor([3, 5])).logits, expected[:, [3, 5]], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(7, 7, 7), (1,) * 21, (20, 1), (3, 1, 17)])
def test_any_chunks_of_a_prompt_are_one_forward(native, tokens, cuts):
    model, cache, parts = from_native(native), None, []
    for chunk in tokens.split(cuts, dim=1):
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), native(tokens), **CLOSE)


LENGTHS = ((7, 1, 1, 12), (21,), (1, 20), (9, 12))  # of the documents in each row


def restarting():
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def each_document_alone(native, tokens, lengths=LENGTHS):
    rows = []
    for row, parts in zip(tokens, lengths, strict=True):
        rows.append(torch.cat([native(document[None])[0] for document in row.split(parts)]))
    return torch.stack(rows)


@torch.no_grad()
def test_documents_do_not_see_each_other_where_positions_start_again(native, tokens):
    model, expected = from_native(native), each_document_alone(native, tokens)
    out = model(tokens, position_ids=restarting())  # as Trainer evaluates
    assert_close(out.logits, expected, **CLOSE)
    assert out.past_key_values is None
    with pytest.raises(ValueError, match=r"packed documents \(position_ids that start again\) are computed without a"):
        model(tokens, position_ids=restarting(), use_cache=True)
    with pytest.raises(ValueError, match="packed documents"):
        model(tokens, position_ids=restarting(), past_key_values=SympowCache(model.config))


@torch.no_grad()
@pytest.mark.parametrize("form", ["offset", "seq_idx", "embeddings", "mask of ones", "one row for all"])
def test_other_forms_of_positions_that_start_again(form, tokens):
    native, model, lengths = small_model("hybrid"), hybrid(), LENGTHS
    given = {"input_ids": tokens, "position_ids": restarting()}
    if form == "offset":
        given["position_ids"] += 3
    elif form == "seq_idx":
        numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
        given = {"input_ids": tokens, "seq_idx": torch.stack(numbers).int()}
    elif form == "embeddings":
        given = {"inputs_embeds": model.model.embedding(tokens), "position_ids": restarting()}
    elif form == "mask of ones":
        given["attention_mask"] = torch.ones_like(tokens)
    else:
        lengths = (LENGTHS[0],) * len(tokens)
        given["position_ids"] = restarting()[:1]
    for use_cache in (None, False):
        out = model(**given, use_cache=use_cache)
        assert_close(out.logits, each_document_alone(native, tokens, lengths), **CLOSE)


@torch.no_grad()
def test_positions_that_start_again_in_padded_rows(native, tokens):
    """Padding at any place, whose positions do not count."""
    model, mask = from_native(native), torch.zeros_like(tokens)
    mask[0, 5:] = mask[1, :15] = 1
    mask[2, 2:9] = mask[2, 12:20] = 1
    mask[3] = 1
    positions = torch.where(mask.bool(), torch.arange(21), 1)
    kept = [list(row.nonzero()[:, 0]) for row in mask]
    lengths = ((4, 12), (1, 1, 13), (7, 8), (20, 1))
    for row, (places, parts) in enumerate(zip(kept, lengths, strict=True)):
        positions[row, places] = torch.cat([torch.arange(length) for length in parts])
    given = tokens.masked_fill(mask == 0, VOCAB + 5)
    logits = model(given, attention_mask=mask, position_ids=positions).logits
    for row, (places, parts) in enumerate(zip(kept, lengths, strict=True)):
        expected = [native(document[None])[0] for document in tokens[row, places].split(parts)]
        assert_close(logits[row, places], torch.cat(expected), **CLOSE)


@torch.no_grad()
def test_positions_that_do_not_start_again_change_nothing(native, tokens):
    """Those that `generate` passes: of left padding, and of tokens after a cache."""
    model = from_native(native)
    mask, given = left_padded(tokens)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    for use_cache in (False, True):
        out = model(given, attention_mask=mask, position_ids=positions, use_cache=use_cache)
        assert_close(out.logits, model(given, attention_mask=mask, use_cache=use_cache).logits, **CLOSE)
    first = model(tokens[:, :9], position_ids=torch.arange(9)[None])
    for later in (torch.arange(9, 21)[None], torch.arange(12)[None].expand(4, 12)):
        cache = copy.deepcopy(first.past_key_values)
        out = model(tokens[:, 9:], position_ids=later, past_key_values=cache)
        assert_close(out.logits, native(tokens)[:, 9:], **CLOSE)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([[0, 1, 3, 4]]), "position_ids must count up by 1 within a document"),
        (torch.arange(3)[None], r"position_ids must be \[B = 1, T = 4\]; got \[1, 3\]"),
        (torch.arange(4), r"position_ids must be \[B = 1, T = 4\]; got \[4\]"),
        (torch.arange(4).expand(3, 1, 4), r"position_ids must be \[B = 1, T = 4\]; got \[3, 1, 4\]"),
    ],
)
def test_positions_that_cannot_be_read_are_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        hybrid()(torch.arange(4)[None], position_ids=positions)


@pytest.mark.parametrize("mask", [[[1, 1, 2, 2]], [[0.0, 0.0, -1e9, 0.0]], [[1, 0.5, 1, 1]]])
def test_masks_of_other_kinds_are_refused(mask):
    with pytest.raises(ValueError, match="attention_mask must hold 0 and 1"):
        hybrid()(torch.arange(4)[None], attention_mask=torch.tensor(mask))


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_position_ids": False,
                         "return_seq_idx": True}, {"position_ids_start": 2}])  # fmt: skip
def test_the_collator_that_flattens_packs_documents(options):
    """In evaluation as well as in training, with the gradients of documents alone."""
    model, documents = hybrid(), [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8]]
    collated = transformers.DataCollatorWithFlattening(**options)([{"input_ids": each} for each in documents])
    alone = [model(torch.tensor([each]), use_cache=False).logits[0] for each in documents]
    loss = torch.nn.functional.cross_entropy(
        torch.cat([logits[:-1] for logits in alone]), torch.tensor([each for part in documents for each in part[1:]])
    )
    expected = torch.autograd.grad(loss, model.lm_head.weight)[0]
    for training in (False, True):
        out = model.train(training)(**collated)
        assert_close(out.logits[0], torch.cat(alone), **CLOSE)
        assert_close(out.loss, loss, **CLOSE)
        assert_close(torch.autograd.grad(out.loss, model.lm_head.weight)[0], expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_padded_rows_are_each_alone(native, tokens, use_cache):
    model = from_native(native)
    mask, given = left_padded(tokens)
    out = model(given, attention_mask=mask, use_cache=use_cache)
    for row, length in enumerate(mask.sum(1).tolist()):
        assert_close(out.logits[row, -length:], native(tokens[row : row + 1, -length:])[0], **CLOSE)
    if use_cache:  # and on from there, also by chunks
        after = torch.randint(VOCAB, (4, 5), generator=torch.Generator().manual_seed(5))
        longer = torch.cat([mask, torch.ones(4, 5)], 1)
        first = model(after[:, :3], attention_mask=longer[:, :-2], past_key_values=out.past_key_values).logits
        last = model(after[:, 3:], attention_mask=longer, past_key_values=out.past_key_values).logits
        for row, length in enumerate(mask.sum(1).tolist()):
            alone = torch.cat([tokens[row, -length:], after[row]])[None]
            assert_close(torch.cat([first, last], 1)[row], native(alone)[0, -5:], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_holes_in_a_mask_leave_no_trace(native, tokens, use_cache):
    model = from_native(native)
    mask = torch.rand(4, 21, generator=torch.Generator().manual_seed(7)) < 0.7
    mask[3] = False  # a row of padding alone
    cache, parts = None, []
    for start, stop in ((0, 6), (6, 21)) if use_cache else ((0, 21),):
        out = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=use_cache)
        cache = out.past_key_values
        parts.append(out.logits)
    logits = torch.cat(parts, 1)
    for row in range(3):
        assert_close(logits[row, mask[row]], native(tokens[row, mask[row]][None])[0], **CLOSE)


@torch.no_grad()
def test_rows_padded_on_the_right_are_each_alone(tokens):
    for case in ("hybrid", "rwkv7 body"):
        native = small_model(case)
        mask = left_padded(tokens)[0].flip(1)
        logits = from_native(native)(tokens, attention_mask=mask, use_cache=False).logits
        for row, length in enumerate(mask.sum(1).tolist()):
            assert_close(logits[row, :length], native(tokens[row : row + 1, :length])[0], **CLOSE)


@torch.no_grad()
def test_states_of_constant_size_go_on_as_one_batch(tokens):
    mask, given = left_padded(tokens)
    joined = from_native(small_model("power"))(given, attention_mask=mask).past_key_values
    assert joined.groups == [[0, 1, 2, 3]]
    apart = from_native(small_model("softmax"))(given, attention_mask=mask).past_key_values
    assert sorted(apart.groups) == [[0, 2], [1], [3]]
    assert apart.batch_size == joined.batch_size == 4


@torch.no_grad()
def test_a_cache_is_reordered_selected_repeated_and_reset(native, tokens):
    model = from_native(native)
    mask, given = left_padded(tokens)
    next_tokens = torch.tensor([[1], [2], [3], [4]])

    def logits_of(cache, rows):
        longer = torch.cat([mask, torch.ones(4, 1)], 1)[rows]
        return model(next_tokens[rows], attention_mask=longer, past_key_values=cache).logits

    cache = model(given, attention_mask=mask).past_key_values
    expected = logits_of(copy.deepcopy(cache), [0, 1, 2, 3])
    moved = copy.deepcopy(cache)
    moved.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert_close(logits_of(moved, [3, 3, 0, 1]), expected[[3, 3, 0, 1]], **CLOSE)
    fewer = copy.deepcopy(cache)
    fewer.batch_select_indices(torch.tensor([1, 3]))
    assert_close(logits_of(fewer, [1, 3]), expected[[1, 3]], **CLOSE)
    cache.batch_repeat_interleave(2)
    assert_close(logits_of(cache, [0, 0, 1, 1, 2, 2, 3, 3]), expected.repeat_interleave(2, 0), **CLOSE)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1


@pytest.mark.parametrize("case", ["power", "grouped softmax", "recommended hybrid"])
@torch.no_grad()
def test_generate_in_slots(case, tokens, monkeypatch):
    """As on a GPU. Slots know from `generate` how many tokens they hold. What is read later is read without them."""
    model, made = from_native(small_model(case)), []

    def holding(*given):
        made.append(Slots.holding(*given))
        return made[-1]

    def logits_in_slots(model, tokens, mask, cache, keep):
        return cache.stepped(tokens, ModelSteps(model)) if tokens.shape[1:] == (1,) and cache is not None else None

    expected = model.generate(tokens[:, :9], max_new_tokens=12, do_sample=False, use_cache=False)
    monkeypatch.setattr(Slots, "with_graphs", holding)
    monkeypatch.setattr("sympow.integrations.transformers.modeling.logits_by_graph", logits_in_slots)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(tokens[:, :9], **options)
    assert torch.equal(found.sequences, expected)
    assert len(made) == 1 and made[0] is not None
    again = model.generate(found.sequences, past_key_values=found.past_key_values, **options)  # a chat goes on
    expected = model.generate(expected, max_new_tokens=12, do_sample=False, use_cache=False)
    assert torch.equal(again.sequences, expected) and made[-1] is not None
    cache, whole = again.past_key_values, expected
    for _ in range(3):
        logits = model(whole[:, -1:], past_key_values=cache).logits
        assert_close(logits[:, -1], model(whole, use_cache=False).logits[:, -1], **CLOSE)
        whole = torch.cat([whole, logits[:, -1:].argmax(-1)], dim=1)
    again = model.generate(whole, past_key_values=cache, **options).sequences
    assert torch.equal(again, model.generate(whole, max_new_tokens=12, do_sample=False, use_cache=False))
    assert made[-1] is not None
    made.clear()
    model.generate(tokens[:, :9], num_beams=2, max_new_tokens=12)
    assert case == "power" or not any(made)  # beams change places, so slots with room would be made at every token


@pytest.mark.parametrize("case", ["power", "softmax", "hybrid", "rwkv7 body", "hyena", "llama"])
@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}, {"prefill_chunk_size": 4}],
    ids=["greedy", "beams", "sampling", "chunks"],
)
def test_generate(case, options, tokens):
    """The same tokens with a cache as without one, and of padded rows as of each alone."""
    model = from_native(small_model(case))
    mask, given = left_padded(tokens, (21, 16, 21, 9))
    given = given.masked_fill(mask == 0, 0)
    settings = {"max_new_tokens": 7, "pad_token_id": 0} | options

    def run(rows, masks, **more):
        torch.manual_seed(4)
        return model.generate(rows, attention_mask=masks, **settings | more)

    cached = run(given, mask)
    if "prefill_chunk_size" not in options:
        assert torch.equal(cached, run(given, mask, use_cache=False))
    if not options.get("do_sample"):
        for row, length in enumerate(mask.sum(1).tolist()):
            alone = run(tokens[row : row + 1, -length:], torch.ones(1, length, dtype=torch.long))
            assert torch.equal(alone[0], cached[row, -length - 7 :])
    if options == {"do_sample": False}:
        after = tokens[:1]
        for _ in range(7):
            after = torch.cat([after, small_model(case)(after)[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(after[0], cached[0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_hands_on_a_mask_without_a_cache_alone(tokens, use_cache):
    """To look at a mask on a GPU the host would wait, in every step."""
    model = from_native(small_model("power"))
    mask, given = left_padded(tokens)
    masked = []
    model.register_forward_pre_hook(
        lambda _, args, named: masked.append(named.get("attention_mask") is not None), with_kwargs=True
    )
    model.generate(given, attention_mask=mask, max_new_tokens=3, pad_token_id=0, use_cache=use_cache)
    assert masked == [True, not use_cache, not use_cache]


def test_generate_goes_on_from_a_given_cache(tokens):
    model = hybrid()
    cache = SympowCache(model.config)
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(tokens, past_key_values=cache, **settings)
    assert first.past_key_values is cache and cache.get_seq_length() == 25
    more = torch.cat([first.sequences, tokens[:, :3]], 1)
    second = model.generate(more, past_key_values=cache, **settings)
    assert torch.equal(second.sequences, model.generate(more, **settings).sequences)


@torch.no_grad()
def test_a_mask_that_takes_tokens_of_a_cache_back_is_refused(tokens):
    """A row that ends early reads padding in `generate`, which a mask of the next turn would leave out."""
    model = hybrid()
    written = model.generate(tokens, max_new_tokens=5, do_sample=False)[:, 21:]
    ends = int(written[0, 0])  # not the first token of another row
    assert (written[1:, 0] != ends).any()
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": ends}
    first = model.generate(tokens, eos_token_id=ends, **options)
    mask = torch.ones_like(first.sequences)
    mask[0, 22:] = 0
    more, longer = torch.cat([first.sequences, tokens[:, :3]], 1), torch.cat([mask, torch.ones(4, 3)], 1)
    count = first.past_key_values.get_seq_length()
    message = "past_key_values has read token 22 of row 0, and attention_mask leaves it out"
    for rows in (slice(None), [0, 1]):
        cache = copy.deepcopy(first.past_key_values)
        cache.batch_select_indices(torch.arange(4)[rows])
        assert not cache.takes_a_token(longer[rows][:, : count + 1])
        with pytest.raises(ValueError, match=message):
            model.generate(more[rows], attention_mask=longer[rows], past_key_values=cache, **options)
        with pytest.raises(ValueError, match=message):
            model(more[rows][:, count:], attention_mask=longer[rows], past_key_values=cache)
    first.past_key_values.batch_select_indices(torch.tensor([1, 2, 3]))
    assert first.past_key_values.takes_a_token(longer[1:, : count + 1])
    assert first.past_key_values.takes_a_token(torch.ones(3, 1))
    model(more[1:, count:], attention_mask=longer[1:], past_key_values=first.past_key_values)


@torch.no_grad()
def test_a_mask_that_leaves_out_other_tokens_is_refused(tokens):
    """Also if they are as many."""
    model, mask = hybrid(), torch.ones_like(tokens)
    mask[1, :2] = 0
    read = model(tokens, attention_mask=mask, use_cache=True).past_key_values
    new, ones = tokens[:, :2], torch.ones(4, 2, dtype=mask.dtype)
    for before, place in ((mask.flip(1), "19 of row 1"), (mask.flip(0), "0 of row 2"), (0 * mask, "0 of row 0")):
        with pytest.raises(ValueError, match=f"^past_key_values has read token {place}, and attention_mask leaves it"):
            model(new, attention_mask=torch.cat([before, ones], 1), past_key_values=copy.deepcopy(read))
    same = torch.cat([mask, ones], 1)
    whole = model(torch.cat([tokens, new], 1), attention_mask=same, use_cache=False).logits[:, -2:]
    assert_close(model(new, attention_mask=same, past_key_values=copy.deepcopy(read)).logits, whole, **CLOSE)
    whole_rows = copy.deepcopy(read)
    whole_rows.batch_select_indices(torch.tensor([0, 2]))
    assert not whole_rows.padded and whole_rows.takes_a_token(torch.ones(2, 1))
    read.batch_select_indices(torch.tensor([1, 1, 0]))
    model(new[[1, 1, 0]], attention_mask=same[[1, 1, 0]], past_key_values=copy.deepcopy(read))
    with pytest.raises(ValueError, match="read token 0 of row 2"):
        model(new[:3], attention_mask=same[[1, 1, 1]], past_key_values=read)


@torch.no_grad()
def test_a_padded_cache_continues_without_a_mask(tokens):
    """transformers then makes a mask of ones, which takes no token back."""
    model, mask = hybrid(), torch.ones_like(tokens)
    mask[0, :2] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(tokens, attention_mask=mask, **options)
    more = torch.cat([first.sequences, tokens[:, :3]], 1)
    longer = torch.cat([mask, torch.ones(4, 6, dtype=mask.dtype)], 1)
    second = model.generate(more, past_key_values=copy.deepcopy(first.past_key_values), **options)
    whole = model.generate(more, attention_mask=longer, **options)
    assert torch.equal(second.sequences, whole.sequences)
    assert not first.past_key_values.takes_a_token(torch.ones(4, 1))


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_batch_without_rows(use_cache, tokens):
    model, cache = hybrid(), None
    for part in tokens[:0].split(9, dim=1):
        out = model(part, past_key_values=cache, use_cache=use_cache)
        assert out.logits.shape == (0, part.shape[1], VOCAB)
        cache = out.past_key_values


@pytest.mark.parametrize("columns", [21, 20])
def test_generate_refuses_an_input_without_a_new_token(columns, tokens):
    """transformers would read the whole input once more, or nothing."""
    model = hybrid()
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match=f"has read 21 tokens, and the input with them has {columns}: give at least"):
        model.generate(tokens[:, :columns], past_key_values=cache, max_new_tokens=2)


def test_generate_refuses_to_read_a_cache_again_in_chunks(tokens):
    model = hybrid()
    cache = model(tokens[:, :9]).past_key_values
    with pytest.raises(ValueError, match="prefill_chunk_size would read the tokens of past_key_values again"):
        model.generate(tokens, past_key_values=cache, prefill_chunk_size=4, max_new_tokens=2)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_generate_refuses_padding_on_the_right(options, tokens):
    """The first token would follow a token that was not read."""
    with pytest.raises(ValueError, match=r"leaves out the last token of a row.*: pad on the left"):
        hybrid().generate(tokens, attention_mask=left_padded(tokens)[0].flip(1), max_new_tokens=2, **options)


@torch.no_grad()
def test_the_cache_has_the_name_of_either_version(tokens):
    """transformers 5.24 calls it `cache`, older versions `past_key_values`; no name is silently ignored."""
    model = from_native(small_model("power"))
    expected = model(tokens).logits[:, 9:]
    for name in ("cache", "past_key_values"):
        cache = SympowCache(model.config)
        for given in (tokens[:, :9], tokens[:, 9:]):
            out = model(given, use_cache=True, **{name: cache})
        assert_close(out.logits, expected, **CLOSE)
        assert out.past_key_values is cache
    with pytest.raises(ValueError, match="two names of one argument"):
        model(tokens, cache=cache, past_key_values=cache)


@torch.no_grad()
def test_save_and_load_bit_for_bit(native, tokens, tmp_path):
    model = from_native(native)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SympowForCausalLM) and loaded.config.model_config == native.config
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    back = to_native(loaded).state_dict()
    assert back.keys() == native.state_dict().keys()
    assert all(torch.equal(back[name], weight) for name, weight in native.state_dict().items())
    body = AutoModel.from_pretrained(tmp_path)
    assert isinstance(body, SympowModel)
    assert torch.equal(body(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_shards_and_other_dtypes(tokens, tmp_path):
    for case in ("hybrid", "untied"):
        model = from_native(small_model(case))
        model.save_pretrained(tmp_path / case, max_shard_size="20KB")
        assert len(list((tmp_path / case).glob("*.safetensors"))) > 2
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / case)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
        tied = loaded.lm_head.weight is loaded.model.embedding.weight
        assert tied == model.config.tie_word_embeddings == (case != "untied")
        half = AutoModelForCausalLM.from_pretrained(tmp_path / case, dtype=torch.bfloat16)
        assert half(tokens).logits.dtype == torch.bfloat16


def test_new_weights_are_those_of_the_native_model(tokens, tmp_path):
    for case in ("power", "rwkv7 body", "llama"):
        config = small_config(case)
        torch.manual_seed(6)
        model = AutoModelForCausalLM.from_config(SympowConfig(model=config))
        torch.manual_seed(6)
        native = LanguageModel(config).state_dict()
        made = to_native(model).state_dict()
        assert all(torch.equal(made[name], weight) for name, weight in native.items())
    head = SympowForCausalLM(SympowConfig(model=small_config("untied"))).lm_head.weight
    assert 0.018 < head.std() < 0.022


def test_weights_that_a_folder_lacks_are_drawn_and_the_others_kept(tmp_path):
    model = from_native(small_model("power"))
    state = model.state_dict()
    del state["model.layers.1.block.mixer.gate.bias"]
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert_close(loaded.pop("model.layers.1.block.mixer.gate.bias"), torch.linspace(1, 8, 4))
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.items())


@torch.no_grad()
def test_older_folders_hold_the_start_of_scores_in_their_biases(tmp_path):
    model = from_native(small_model("power"))
    state = model.state_dict()
    for name in [name for name in state if name.endswith("qkv_start")]:
        bias = name.replace("qkv_start", "qkv.bias")
        state[bias] = state[bias] + state.pop(name)
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(20)[None] % VOCAB
    assert len(state) < len(model.state_dict()) and torch.equal(loaded(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_the_start_of_scores_survives_a_host_that_draws_linear_weights_anew():
    def host(module):
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)

    model = from_native(LanguageModel(small_config("power"), seed=0))
    tokens = torch.arange(20)[None] % VOCAB
    before = model(tokens).logits
    assert torch.equal(model.apply(host)(tokens).logits, before)


def test_config_goes_round(tmp_path):
    config = SympowConfig(model=small_config("hybrid"), eos_token_id=3)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, SympowConfig) and loaded.to_diff_dict().items() >= config.to_diff_dict().items()
    assert (loaded.vocab_size, loaded.hidden_size, loaded.num_hidden_layers) == (VOCAB, 32, 3)
    assert SympowConfig(model=small_config(), vocab_size=99).model_config.vocab_size == 99
    assert not SympowConfig(model=small_config(), tie_word_embeddings=False).model_config.tie_embeddings
    assert SympowConfig().model_config.vocab_size == 256
    register()
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1; got 0"):
        SympowConfig(model=small_config().to_dict() | {"vocab_size": 0})


@pytest.mark.parametrize("case", ["hybrid", "rwkv7 body", "untied"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_loss_and_gradients(case, reentrant, tokens):
    """Of the native model; and with gradient checkpointing."""
    native = small_model(case)
    model = from_native(native).train()
    loss = model(tokens, labels=tokens).loss
    expected = native.token_losses(tokens[:, :-1], tokens[:, 1:]).mean()
    assert_close(loss, expected)
    expected.backward()
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert_close(model.model.embedding.weight.grad, native.embedding.weight.grad, rtol=1e-3, atol=1e-6)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = model(tokens, labels=tokens)
    again.loss.backward()
    assert again.past_key_values is None and torch.equal(again.loss, loss)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)


def test_gradients_of_padded_rows(tokens):
    """Those of the rows alone."""
    native = small_model("hybrid")
    model = from_native(native).train()
    mask, given = left_padded(tokens, (21, 16, 21, 9))
    labels = tokens.masked_fill(mask == 0, -100)
    model(given, attention_mask=mask, labels=labels).loss.backward()
    rows = [tokens[row : row + 1, -length:] for row, length in enumerate(mask.sum(1))]
    alone = [native.token_losses(row[:, :-1], row[:, 1:]) for row in rows]
    torch.cat(alone, 1).mean().backward()
    expected = {name: parameter.grad for name, parameter in native.named_parameters()}
    gate = model.model.layers[0].block.mixer.gate.weight.grad
    assert_close(gate, expected["blocks.0.mixer.gate.weight"], rtol=1e-4, atol=1e-6)
    assert_close(model.model.embedding.weight.grad, expected["embedding.weight"], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_loss_of_packed_documents_is_that_of_each_alone(tokens):
    model = hybrid()
    ends = (0, 5, 21)
    alone = [model(tokens[:1, a:b], labels=tokens[:1, a:b]).loss * (b - a - 1) for a, b in pairwise(ends)]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    numbers = torch.cat([torch.full((b - a,), n) for n, (a, b) in enumerate(pairwise(ends))])[None]
    for packed in ({"position_ids": positions}, {"seq_idx": numbers}, {"cu_seq_lens_q": torch.tensor(ends)}):
        loss = model(tokens[:1], labels=tokens[:1], use_cache=False, **packed).loss
        assert_close(loss, sum(alone) / (21 - 2))


@torch.no_grad()
def test_packed_documents(tokens):
    native = small_model("hybrid")
    bounds = torch.tensor([0, 5, 21])
    out = from_native(native)(tokens[:1], cu_seq_lens_q=bounds, use_cache=False).logits
    assert_close(out, native(tokens[:1], cu_seqlens=bounds), **CLOSE)


@torch.no_grad()
def test_hidden_states_and_embeddings_as_input(tokens):
    model = hybrid()
    mask, given = left_padded(tokens)
    for use_cache in (False, True):
        out = model(given, attention_mask=mask, use_cache=use_cache, output_hidden_states=True)
        assert len(out.hidden_states) == 4
        assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(tokens).logits)
    assert len(model(tokens, return_dict=False)) == 2


def test_vocabulary_is_resized(tokens):
    model = hybrid()
    model.resize_token_embeddings(VOCAB + 3)
    assert model.config.model_config.vocab_size == VOCAB + 3
    assert model(tokens + 3).logits.shape[-1] == VOCAB + 3
    assert to_native(model)(tokens + 3).shape[-1] == VOCAB + 3


def test_forward_compiles_as_one_graph(tokens):
    model = hybrid()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits, **CLOSE)


def test_trainer(tmp_path):
    """The loss falls, and a folder of the Trainer loads."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    model = SympowForCausalLM(SympowConfig(model=small_config("power")))
    row = torch.arange(16) % 7
    data = [{"input_ids": row, "labels": row}] * 8
    arguments = TrainingArguments(
        str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, save_steps=12, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert torch.equal(loaded.model.embedding.weight, model.model.embedding.weight)


@pytest.mark.parametrize("adapted", [False, True])
def test_label_smoothing_of_the_trainer_is_on_the_next_token(tmp_path, tokens, adapted):
    """As for a Llama with the same logits, also under an adapter."""
    pytest.importorskip("accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    model = hybrid().eval()
    logits = model(tokens).logits.detach()
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"], r=2, task_type="CAUSAL_LM"))
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=logits.shape[-1], hidden_size=16, intermediate_size=16,
                                         num_hidden_layers=1, num_attention_heads=2))  # fmt: skip
    llama.forward = lambda **inputs: {"logits": logits}
    labels = tokens.clone()
    labels[0, :4] = -100
    losses = [
        Trainer(each, arguments).compute_loss(each, {"input_ids": tokens, "labels": labels.clone()})
        for each in (model, llama)
    ]
    assert_close(losses[0], losses[1], **CLOSE)


def test_trainer_with_muon(tmp_path):
    """The matrices are found within the model of transformers; a resumed run equals a whole one bit for bit."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    rows = [{"input_ids": row, "labels": row} for row in (torch.arange(16) + torch.arange(24)[:, None]) % 7]

    def trained(folder: str, resumed: str | None = None) -> tuple[SympowForCausalLM, list[float]]:
        model = SympowForCausalLM(SympowConfig(model=replace(small_config("llama"), d_model=64)))
        model.load_state_dict(start)
        optimizer = make_optimizer(model, TrainingConfig(optimizer="muon", learning_rate=1e-2))
        assert len(optimizer.param_groups[0]["params"]) == 5 * model.config.model_config.n_layers
        arguments = TrainingArguments(
            str(tmp_path / folder), max_steps=8, per_device_train_batch_size=4, logging_steps=1, report_to=[],
            use_cpu=True, save_steps=4, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resumed)
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    start = SympowForCausalLM(SympowConfig(model=replace(small_config("llama"), d_model=64))).state_dict()
    whole, losses = trained("whole")
    resumed, _ = trained("resumed", str(tmp_path / "whole" / "checkpoint-4"))
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_the_matrices_of_adapters_are_not_those_of_muon():
    peft = pytest.importorskip("peft")
    model = SympowForCausalLM(SympowConfig(model=replace(small_config("llama"), d_model=64)))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"], r=64, task_type="CAUSAL_LM"))
    assert muon_weights(adapted) == []
    adapted.requires_grad_(True)
    names = {parameter: name for name, parameter in adapted.named_parameters()}
    assert not any("lora" in names[weight] or "qkv" in names[weight] for weight, _ in muon_weights(adapted))


def test_lora(tokens):
    peft = pytest.importorskip("peft")
    model = hybrid()
    before = model(tokens).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "out"], r=2, task_type="CAUSAL_LM"))
    assert_close(adapted(tokens).logits, before, **CLOSE)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert len(trained) == 12 and all("lora" in name for name in trained)
    assert adapted.generate(input_ids=tokens, max_new_tokens=2).shape == (4, 23)


def test_device_map(tmp_path, tokens):
    hybrid().save_pretrained(tmp_path)
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(model(tokens).logits, hybrid()(tokens).logits)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"past_key_values": DynamicCache()}, TypeError, "must be a SympowCache, which generate makes; got Dyn"),
        ({"past_key_values": SympowCache(5)}, TypeError, "past_key_values is of 5 blocks; the model has 3"),
        ({"past_key_values": SympowCache(3), "use_cache": False}, ValueError, "the states would be lost"),
        ({"inputs_embeds": torch.zeros(4, 21, 32)}, ValueError, "give one of input_ids and inputs_embeds"),
        ({"attention_mask": torch.ones(4, 20)}, ValueError, r"must be \[B = 4, at least T = 21\]; got \[4, 20\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 21])}, ValueError, "computed without a cache"),
        ({"logits_to_keep": -1}, ValueError, "logits_to_keep must be at least 0; got -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, error, match, tokens):
    with pytest.raises(error, match=match):
        hybrid()(tokens, **given)


def test_inputs_of_another_number_of_axes_are_refused(tokens):
    with pytest.raises(ValueError, match=r"input_ids must be \[B, T\]; got \[21\]"):
        hybrid()(tokens[0])
    with pytest.raises(ValueError, match=r"inputs_embeds must be \[B, T, d\]; got \[4, 21\]"):
        hybrid()(inputs_embeds=torch.zeros(4, 21))


def test_a_cache_of_another_batch_and_taking_tokens_back_are_refused(tokens):
    model = hybrid()
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 4 rows; the batch has 2"):
        model(tokens[:2], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot forget its last tokens"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="a cache of their own; got cache_implementation='static'"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(TypeError, match="past_key_values must be a SympowCache, which generate makes; got StaticCache"):
        model(tokens, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(NotImplementedError, match="keeps keys and values, and no states: use sympow serve, or vLLM"):
        model.generate_batch(tokens.tolist(), max_new_tokens=2)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(tokens[:1], max_new_tokens=2, assistant_model=hybrid())


@torch.no_grad()
def test_mixers_that_look_ahead_are_computed_without_a_cache(tokens):
    native = LanguageModel(replace(small_config(), mixers=(MixerConfig("programmatic_conv"),)), seed=1)
    model = from_native(native)
    mask = left_padded(tokens)[0]
    for padded in (mask, mask.flip(1)):
        logits = model(tokens, attention_mask=padded, use_cache=False).logits
        for row in range(4):
            at = padded[row].bool()
            assert_close(logits[row, at], native(tokens[row, at][None])[0], **CLOSE)


@pytest.mark.parametrize("name", ["n_layers", "d_model", "mixers", "tie_embeddings"])
def test_fields_of_the_model_outside_of_it_are_refused(name):
    """transformers would keep them, and the model would be another one than was asked for."""
    with pytest.raises(ValueError, match=rf"^{name} is a field of the model, as in SympowConfig\(model=.*outside$"):
        SympowConfig(**{name: 2})


def test_transformers_is_new_enough():
    assert tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 17)
