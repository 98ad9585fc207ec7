"""The llama body with softmax attention is the decoder of Llama, Qwen2, Qwen3 and SmolLM: a decoder in the layout of
their published weights, written out here, gives the same logits."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sympow.models import LanguageModel, MixerConfig, ModelConfig

VOCAB, LAYERS = 41, 3


@dataclass(frozen=True)
class Decoder:
    """The sizes of a published decoder, by the names of their configs."""

    hidden_size: int = 24
    intermediate_size: int = 40
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 6
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        """Random weights by their published names."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, around: float = 0.0) -> Tensor:
            return around + torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

        d, hidden, k = self.hidden_size, self.intermediate_size, self.head_dim
        drawn = {"model.embed_tokens.weight": draw(VOCAB, d), "model.norm.weight": draw(d, around=1.0)}
        if not self.tie_word_embeddings:
            drawn["lm_head.weight"] = draw(VOCAB, d)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            heads = {"q": self.num_attention_heads, "k": self.num_key_value_heads, "v": self.num_key_value_heads}
            for name, count in heads.items():
                drawn[f"{at}self_attn.{name}_proj.weight"] = 2 * draw(count * k, d)
                if self.qkv_bias:
                    drawn[f"{at}self_attn.{name}_proj.bias"] = draw(count * k)
                if self.qk_norm and name != "v":
                    drawn[f"{at}self_attn.{name}_norm.weight"] = draw(k, around=1.0)
            drawn[f"{at}self_attn.o_proj.weight"] = draw(d, self.num_attention_heads * k)
            drawn[f"{at}mlp.gate_proj.weight"] = 2 * draw(hidden, d)
            drawn[f"{at}mlp.up_proj.weight"] = draw(hidden, d)
            drawn[f"{at}mlp.down_proj.weight"] = draw(d, hidden)
            for name in ("input_layernorm", "post_attention_layernorm"):
                drawn[f"{at}{name}.weight"] = draw(d, around=1.0)
        return drawn


DECODERS = {
    "Llama": Decoder(rope_theta=500_000.0, rms_norm_eps=1e-5),
    "SmolLM": Decoder(num_attention_heads=3, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True),
    "Qwen2": Decoder(rope_theta=1_000_000.0, qkv_bias=True, tie_word_embeddings=True),
    "Qwen3": Decoder(rope_theta=1_000_000.0, qk_norm=True, head_dim=10, rms_norm_eps=1e-3),
}


def published_logits(decoder: Decoder, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The decoder's formulas: rotation of halves, softmax over all scores, every key/value head repeated."""
    heads, kv_heads, k = decoder.num_attention_heads, decoder.num_key_value_heads, decoder.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + decoder.rms_norm_eps))

    def project(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    time = tokens.shape[1]
    frequencies = decoder.rope_theta ** (-torch.arange(0, k, 2, dtype=torch.float64) / k)
    angles = torch.arange(time, dtype=torch.float64)[:, None] * torch.cat([frequencies, frequencies])

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    future = torch.ones(time, time, dtype=torch.bool).triu(1)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = norm(x, weights[f"{at}input_layernorm.weight"])
        q, key, v = (
            project(y, f"{at}self_attn.{name}_proj").unflatten(-1, (count, k)).transpose(1, 2)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if decoder.qk_norm:
            q, key = (norm(z, weights[f"{at}self_attn.{n}_norm.weight"]) for z, n in ((q, "q"), (key, "k")))
        q, key = rotated(q), rotated(key)
        key, v = (z.repeat_interleave(heads // kv_heads, dim=1) for z in (key, v))
        scores = (q @ key.mT / k**0.5).masked_fill(future, -torch.inf).softmax(-1)
        x = x + project((scores @ v).transpose(1, 2).flatten(2), f"{at}self_attn.o_proj")
        y = norm(x, weights[f"{at}post_attention_layernorm.weight"])
        gate = project(y, f"{at}mlp.gate_proj")
        x = x + project(gate * torch.sigmoid(gate) * project(y, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
    x = norm(x, weights["model.norm.weight"])
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def in_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads whose halves turn together, in the order in which neighbours do."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def converted(decoder: Decoder, weights: dict[str, Tensor]) -> LanguageModel:
    """The same model of this package, with rows of queries and keys permuted."""
    options = {
        "head_dim": decoder.head_dim,
        "rope_base": decoder.rope_theta,
        "bias": decoder.qkv_bias,
        "out_bias": False,
        "qk_norm": decoder.qk_norm,
        "qk_norm_eps": decoder.rms_norm_eps,
    }
    config = ModelConfig(
        VOCAB, decoder.hidden_size, LAYERS, decoder.num_attention_heads, (MixerConfig("softmax", options),),
        body="llama", n_kv_heads=decoder.num_key_value_heads, mlp_hidden=decoder.intermediate_size,
        norm_eps=decoder.rms_norm_eps, tie_embeddings=decoder.tie_word_embeddings,
    )  # fmt: skip
    ours = {"embedding.weight": weights["model.embed_tokens.weight"], "final_norm.weight": weights["model.norm.weight"]}
    if not decoder.tie_word_embeddings:
        ours["head.weight"] = weights["lm_head.weight"]
    k = decoder.head_dim
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}.", f"blocks.{layer}."
        for kind in ("weight", "bias")[: 1 + decoder.qkv_bias]:
            q, key, v = (weights[f"{at}self_attn.{name}_proj.{kind}"] for name in "qkv")
            ours[f"{to}mixer.qkv.{kind}"] = torch.cat([in_pairs(q, k), in_pairs(key, k), v])
        if decoder.qk_norm:
            for name in "qk":
                ours[f"{to}mixer.{name}_norm.weight"] = in_pairs(weights[f"{at}self_attn.{name}_norm.weight"], k)
        ours[f"{to}mixer.out.weight"] = weights[f"{at}self_attn.o_proj.weight"]
        ours[f"{to}mixer_norm.weight"] = weights[f"{at}input_layernorm.weight"]
        ours[f"{to}mlp_norm.weight"] = weights[f"{at}post_attention_layernorm.weight"]
        ours[f"{to}mlp_in.weight"] = torch.cat([weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        ours[f"{to}mlp_out.weight"] = weights[f"{at}mlp.down_proj.weight"]
    built = LanguageModel(config, seed=0).double()
    built.load_state_dict(ours)
    return built


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@torch.no_grad()
def test_logits_are_those_of_the_published_decoder(decoder):
    weights = decoder.weights()
    tokens = torch.randint(VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
    expected, built = published_logits(decoder, weights, tokens), converted(decoder, weights)
    assert expected.std() > 0.3
    torch.testing.assert_close(built(tokens), expected, rtol=0, atol=1e-10)
    state, logits = built.init_state(2), []
    for piece in tokens.split([7, 1, 1, 10], dim=1):
        last, state = built.step(piece, state)
        logits.append(last)
    torch.testing.assert_close(torch.stack(logits, 1), expected[:, [6, 7, 8, 18]], rtol=0, atol=1e-10)
