"""CUDA graphs under `generate` of transformers: the tokens and states that steps without graphs give."""

import copy

import pytest
import torch
from torch.testing import assert_close

from sympow.integrations.transformers import SympowCache
from sympow.integrations.transformers.folders import from_native
from tests.integrations.small import VOCAB, small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # of logits of order 1 in float32, whose sums differ in their order


def stepwise(model, tokens, *, mask=None, breaks=()):
    """Logits of every token given one by one; the cache is copied at `breaks`, which ends a graph."""
    cache, found = SympowCache(model.config), []
    for at in range(tokens.shape[1]):
        if at in breaks:
            cache = copy.deepcopy(cache)
        given = None if mask is None else mask[:, : at + 1]
        out = model(tokens[:, at : at + 1], attention_mask=given, past_key_values=cache)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, dim=1), cache


@torch.no_grad()
@pytest.mark.parametrize("case", ["power", "linear", "window", "llama", "retnet", "rwkv7 body"])
@pytest.mark.parametrize("breaks", [(), (9, 10, 17)])
def test_tokens_one_by_one_are_one_forward(case, breaks):
    model = from_native(small_model(case)).cuda()
    tokens = torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(3)).cuda()
    found, cache = stepwise(model, tokens, breaks=breaks)
    assert_close(found, model(tokens, use_cache=False).logits, **CLOSE)
    assert cache.get_seq_length() == 24
    more = torch.randint(VOCAB, (3, 5), generator=torch.Generator().manual_seed(4)).cuda()
    whole = model(torch.cat([tokens, more], dim=1), use_cache=False).logits
    assert_close(model(more, past_key_values=cache).logits, whole[:, 24:], **CLOSE)


@torch.no_grad()
def test_padding_keeps_rows_apart():
    model = from_native(small_model("power")).cuda()
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(3)).cuda()
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    found, _ = stepwise(model, tokens, mask=mask)
    alone = model(tokens[:1, 6:], use_cache=False).logits
    assert_close(found[:1, 6:], alone, **CLOSE)


@pytest.mark.parametrize("case", ["power", "grouped softmax", "recommended hybrid"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}])
def test_generate_gives_the_tokens_of_a_model_without_a_cache(case, options):
    model = from_native(small_model(case)).cuda()
    prompt = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(5)).cuda()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(model.generate(prompt, max_new_tokens=20, use_cache=use_cache, **{"do_sample": False} | options))
    assert torch.equal(*found)
