"""Compares `generate` of transformers with that of sympow: `python -m benchmarks.hf_generate --device cuda --csv
FILE`.

Both have the same weights and decode greedily; the tokens must be equal in float32. A rate is that of the whole call,
the best of three rounds. A model of transformers without any computation measures the cost of the loop of transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks.common.measure import keep, measured, options
from sympow.integrations.transformers import SympowConfig
from sympow.integrations.transformers.folders import from_native
from sympow.models import LanguageModel, generate, preset

PROMPT = 128  # tokens


class Nothing(PreTrainedModel, GenerationMixin):
    """Gives the same logits for every token, without a cache."""

    config_class = SympowConfig

    def __init__(self, config: SympowConfig):
        super().__init__(config)
        self.logits = torch.nn.Parameter(torch.arange(float(config.vocab_size)))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        """Returns logits [B, 1, vocab_size]."""
        return CausalLMOutputWithPast(logits=self.logits.expand(input_ids.shape[0], 1, -1))


def measure(
    name: str, vocab_size: int, device: torch.device, batch: int, new: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns one row."""
    native = LanguageModel(preset(name, vocab_size), seed=0).to(device, dtype).eval()
    model = from_native(native).to(device, dtype)
    nothing = Nothing(model.config).to(device)
    prompt = torch.randint(vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sympow": lambda: generate(native, prompt, new, temperature=0).tokens,
        "transformers": lambda: model.generate(prompt, **asked)[:, PROMPT:].cpu(),
        "loop": lambda: nothing.generate(prompt, use_cache=False, **asked)[:, PROMPT:].cpu(),
    }
    tokens, best = {}, dict.fromkeys(calls, 0.0)
    for turn in range(4):  # the first one warms up
        for each, call in calls.items():
            began = time.perf_counter()
            tokens[each] = call()
            rate = batch * new / (time.perf_counter() - began)
            best[each] = max(best[each], rate) if turn else 0.0
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
        "new_tokens": new,
        "tokens_per_second": best["transformers"],
        "tokens_per_second_sympow": best["sympow"],
        "tokens_per_second_of_the_loop_alone": best["loop"],
        "equal": torch.equal(tokens["sympow"], tokens["transformers"]),
    }


def main() -> None:
    """Prints the rows, and writes them to a file."""
    parser = options("benchmarks.hf_generate", __doc__ or "")
    parser.add_argument("--preset", default="small", help="shape of the model (default: small)")
    parser.add_argument("--vocab-size", type=int, default=50257, help="(default: 50257)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="rows (default: 1 32)")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each row (default: 256)")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    about, device = measured(chosen.device), torch.device(chosen.device)
    dtypes = (torch.float32, torch.bfloat16) if chosen.device == "cuda" else (torch.float32,)
    keep(chosen.csv, (measure(chosen.preset, chosen.vocab_size, device, batch, chosen.new_tokens, dtype) | about
                      for dtype in dtypes for batch in chosen.batches))  # fmt: skip


if __name__ == "__main__":
    main()
