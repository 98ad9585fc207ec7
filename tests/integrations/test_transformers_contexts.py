"""Context files of models in transformers: the same files as those of native models, and the same continuation."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from sympow.integrations.transformers import SympowCache, load_context, save_context
from sympow.integrations.transformers.folders import from_native
from sympow.models import Context, ContextError, generate
from sympow.models import load_context as load_native
from sympow.models import save_context as save_native
from tests.integrations.small import CASES, VOCAB, small_model


@torch.no_grad()
def read(model, tokens, cache=None):
    return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


@pytest.fixture
def rows(tokens):
    return tokens[:2]


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_that_of_the_native_model(case, rows, tmp_path):
    """Byte for byte, whoever writes it; and either reads on behind it as if it had never been written."""
    native = small_model(case)
    model = from_native(native)
    out = read(model, rows)
    save_context(tmp_path / "ours.ctx", model, out.past_key_values, rows, out.logits[:, -1])
    context = Context.begin(native, 2).read(native, rows)
    save_native(tmp_path / "native.ctx", native, context)
    assert (tmp_path / "ours.ctx").read_bytes() == (tmp_path / "native.ctx").read_bytes()

    whole = generate(native, rows[:, 16:], 9, temperature=0, context=context)
    for name in ("ours.ctx", "native.ctx"):
        again = generate(native, rows[:, 16:], 9, temperature=0, context=load_native(tmp_path / name, native))
        assert torch.equal(again.tokens, whole.tokens)
        loaded = load_context(tmp_path / name, model)
        assert loaded.tokens == 21 and torch.equal(loaded.logits, out.logits[:, -1])
        first = read(model, rows[:, 16:], loaded.cache).logits
        assert torch.equal(first, read(model, rows[:, 16:], copy.deepcopy(out.past_key_values)).logits)


def test_generate_continues_a_context(rows, tmp_path):
    native = small_model("hybrid")
    model = from_native(native)
    model.save_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    context = Context.begin(native, 2).read(native, rows)
    save_native(tmp_path / "x.ctx", native, context)
    expected = generate(native, rows[:, :3], 8, temperature=0, context=context).tokens
    loaded = load_context(tmp_path / "x.ctx", model)
    kept = copy.deepcopy(loaded.cache)
    for cache in (loaded.cache, kept):
        written = model.generate(rows[:, :3], past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(written, torch.cat([rows[:, :3], expected], dim=1))


def test_a_context_that_was_read_on_is_the_whole(rows, tmp_path):
    """The hash is that of all tokens, those before the file included."""
    model = from_native(small_model("hybrid"))
    out = read(model, rows[:, :9])
    save_context(tmp_path / "a.ctx", model, out.past_key_values, rows[:, :9], out.logits[:, -1])
    cache = load_context(tmp_path / "a.ctx", model).cache
    out = read(model, rows[:, 9:14], cache)
    out = read(model, rows[:, 14:], cache)
    save_context(tmp_path / "b.ctx", model, cache, rows[:, 9:], out.logits[:, -1])
    native = small_model("hybrid")
    loaded, whole = load_native(tmp_path / "b.ctx", native), Context.begin(native, 2).read(native, rows)
    assert (loaded.tokens, loaded.digest) == (21, whole.digest)
    assert_close(loaded.logits, whole.logits)
    cache.reset()
    assert cache.before == SympowCache(3).before


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_files_are_smaller(dtype, rows, tmp_path):
    model = from_native(small_model())
    out = read(model, rows)
    for name in ("float32", dtype):
        save_context(tmp_path / name, model, out.past_key_values, rows, out.logits[:, -1], dtype=name)
    assert (tmp_path / dtype).stat().st_size < (tmp_path / "float32").stat().st_size
    near = read(model, rows, load_context(tmp_path / dtype, model).cache).logits
    assert_close(near, read(model, rows, load_context(tmp_path / "float32", model).cache).logits, rtol=0, atol=0.1)


def test_what_does_not_fit_is_refused(rows, tmp_path):
    model = from_native(small_model("hybrid"))
    out = read(model, rows)
    cache, logits = out.past_key_values, out.logits[:, -1]
    with pytest.raises(TypeError, match="cache must be a SympowCache, which use_cache=True returns; got NoneType"):
        save_context(tmp_path / "x.ctx", model, None, rows, rows)
    with pytest.raises(ValueError, match=r"input_ids must be what the cache has read, \[2, 21\]; got \[2, 20\]"):
        save_context(tmp_path / "x.ctx", model, cache, rows[:, 1:], logits)
    with pytest.raises(ValueError, match=rf"logits must be those of the next token, \[2, {VOCAB}\]; got \[2, 21, "):
        save_context(tmp_path / "x.ctx", model, cache, rows, out.logits.repeat(1, 21, 1))
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    padded = model(rows, attention_mask=mask, use_cache=True).past_key_values
    joined = from_native(small_model())(rows, attention_mask=mask, use_cache=True).past_key_values
    assert joined.groups == [[0, 1]]  # states of constant size are one group all the same
    for each in (padded, joined, SympowCache(3)):
        with pytest.raises(ValueError, match="rows that have read the same number of tokens, without padding"):
            save_context(tmp_path / "x.ctx", model, each, rows, logits)
    save_context(tmp_path / "x.ctx", model, cache, rows, logits)
    with pytest.raises(ContextError, match="is a context of another model: its config differs"):
        load_context(tmp_path / "x.ctx", from_native(small_model()))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(ContextError, match="is a context of another model: its weights differ"):
        load_context(tmp_path / "x.ctx", model)
