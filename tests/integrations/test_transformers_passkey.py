"""Passkey recall of models in transformers: what they continue by their likeliest tokens."""

import pytest
import torch
import transformers

from sympow.evaluation import passkey
from sympow.integrations.transformers.folders import from_native
from tests.integrations.small import VOCAB, small_model


@pytest.mark.parametrize("case", ["power", "hybrid", "llama"])
def test_a_model_of_sympow_continues_as_its_native_form(case, tokens):
    model = small_model(case)
    assert torch.equal(passkey.transformers(from_native(model))(tokens, 4), passkey.native(model)(tokens, 4))


def test_a_text_longer_than_the_learned_positions_is_refused(tokens):
    sizes = {"n_positions": 22, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes))
    assert passkey.transformers(model)(tokens, 2).shape == (len(tokens), 2)
    with pytest.raises(ValueError, match="the model cannot read a text of 24 tokens with its answer: index out of"):
        passkey.transformers(model)(tokens, 3)


def test_a_model_of_transformers_does_not_stop_at_the_end_of_a_text(tokens):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes)).eval()
    first = model(tokens).logits[:, -1].argmax(-1)
    assert torch.equal(passkey.transformers(model)(tokens, 3)[:, 0], first)
    model.generation_config.eos_token_id = int(first[0])
    made = passkey.transformers(model)(tokens, 3)
    assert made.shape == (len(tokens), 3) and not (made == first[0]).any()
