"""QLoRA: a converted model of SmolLM2's body in 4 bits trains adapters, which are saved, loaded and merged."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import sympow.integrations.transformers  # noqa: F401
from sympow.conversion.swap import swap_mixers
from sympow.integrations.transformers.folders import from_native
from sympow.integrations.transformers.pretrained import load_pretrained

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
TOKENS = torch.arange(48).remainder(7)[None].repeat(2, 1)
TARGETS = ["qkv", "out", "mlp_in", "mlp_out"]
# SmolLM2-135M in small: grouped heads of 64 channels, a tied head, a rotation of base 100,000.
SMOL = {
    "vocab_size": 128,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("smol")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOL)).save_pretrained(path / "llama")
    from_native(swap_mixers(load_pretrained(path / "llama").model)).save_pretrained(path / "power")
    return path


def load(folder, bits):
    kind = {4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 8: {"load_in_8bit": True}}[bits]
    config = BitsAndBytesConfig(**kind)
    return AutoModelForCausalLM.from_pretrained(folder / "power", quantization_config=config, dtype=torch.float32)


def test_adapters_of_a_model_in_4_bits(folder):
    plain = AutoModelForCausalLM.from_pretrained(folder / "power")
    model = load(folder, 4)
    assert 3 * sum(x.nbytes for x in model.parameters()) < 2 * sum(x.nbytes for x in plain.parameters())
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=TARGETS))
    model.train()  # in evaluation bitsandbytes computes products on a CPU in bfloat16
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1  # 4.99 to 3.53 nats
    model.save_pretrained(folder / "adapter")
    expected = model(TOKENS).logits.detach()
    loaded = peft.PeftModel.from_pretrained(load(folder, 4), folder / "adapter", is_trainable=True).train()
    torch.testing.assert_close(loaded(TOKENS).logits.detach(), expected)
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(load(folder, 4), folder / "adapter").eval()
        assert (loaded(TOKENS).logits - expected).norm() < 0.1 * expected.norm()
        assert loaded.generate(input_ids=TOKENS[:, :9], max_new_tokens=3, do_sample=False).shape == (2, 12)
        # Merged weights are rounded to 4 bits again in a quantized model, and exact in one that is not quantized.
        exact = peft.PeftModel.from_pretrained(plain, folder / "adapter").eval()
        adapted = exact(TOKENS).logits
        merged = exact.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS).logits, adapted, rtol=1e-4, atol=1e-4)
        assert not any("lora" in name for name, _ in merged.named_parameters())
        rounded = loaded.merge_and_unload()(TOKENS).logits
        assert (rounded - expected).norm() < 0.5 * expected.norm()


def test_logits_of_8_bits_are_near(folder):
    plain = AutoModelForCausalLM.from_pretrained(folder / "power").eval()
    with torch.no_grad():
        expected, found = plain(TOKENS).logits, load(folder, 8).eval()(TOKENS).logits
    assert (found - expected).norm() < 0.1 * expected.norm()
