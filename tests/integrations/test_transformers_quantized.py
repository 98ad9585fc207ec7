"""QLoRA: a converted model of SmolLM2's body in 4 bits trains adapters, which are saved, loaded and merged."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import sympow.integrations.transformers  # noqa: F401
from sympow.conversion.swap import swap_mixers
from sympow.integrations.transformers.folders import from_native
from sympow.integrations.transformers.pretrained import load_pretrained

peft = pytest.importorskip("peft")
dequantize_4bit = pytest.importorskip("bitsandbytes").functional.dequantize_4bit
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


BLOCK = 64  # elements that share a scale, the largest of them
# Of that scale: half of the widest gap between two of the 16 levels of nf4, from -1 to -0.6962, rounded up.
WIDEST = 0.16


def dense(layer):
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


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
        # Merged weights are exact in a model that is not quantized, and rounded to 4 bits again in one that is.
        exact = peft.PeftModel.from_pretrained(plain, folder / "adapter").eval()
        adapted = exact(TOKENS).logits
        merged = exact.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS).logits, adapted, rtol=1e-4, atol=1e-4)
        assert not any("lora" in name for name, _ in merged.named_parameters())
        layers = {name.removeprefix("base_model.model."): layer for name, layer in loaded.named_modules()}
        adapted_weights = {
            name: dense(layer.base_layer) + layer.get_delta_weight("default")
            for name, layer in layers.items()
            if name.split(".")[-1] in TARGETS
        }
        rounded = loaded.merge_and_unload()
        assert len(adapted_weights) == 4 * SMOL["num_hidden_layers"]
        for name, weight in adapted_weights.items():
            blocks = weight.flatten().unflatten(0, (-1, BLOCK))
            error = (dense(rounded.get_submodule(name)).flatten().view_as(blocks) - blocks).abs().amax(1)
            assert (error <= WIDEST * blocks.abs().amax(1)).all() and error.max() > 0
        assert rounded(TOKENS).logits.isfinite().all()


def test_logits_of_8_bits_are_near(folder):
    plain = AutoModelForCausalLM.from_pretrained(folder / "power").eval()
    with torch.no_grad():
        expected, found = plain(TOKENS).logits, load(folder, 8).eval()(TOKENS).logits
    assert (found - expected).norm() < 0.1 * expected.norm()
