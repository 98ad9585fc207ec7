"""Times decoding after short and long contexts: `python -m benchmarks.decoding --csv FILE`.

With `--device cuda` a step of the op is timed, see `decoding_gpu.py`; `decoding_models.py` times models there.
Otherwise whole models are timed: the same model with power attention, with and without its block, in the published
form without and with a gate and a learned rotation ([CST], appendix A.5), and with softmax attention. Before a model
is timed, a step is checked against the full forward at the shortest context. One token after each context is decoded
in every round, so that other load on the machine affects all contexts alike. Contexts up to WHOLE tokens are also
read in one forward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from benchmarks import decoding_gpu
from benchmarks.common.measure import keep, measured, options, synchronize
from sympow.layers.cache import KVCache
from sympow.models import LanguageModel, MixerConfig, ModelConfig, ModelState, preset
from sympow.models.slots import Slots
from sympow.recipes.scaling import CONFORMAL, PUBLISHED, UNGATED

PLAIN = {"short_convolution": 0, "head_norm": False, "output_gate": False, "rotary_fraction": 1.0}
MIXERS = {
    "power": MixerConfig("power"),
    "power, no block": MixerConfig("power", PLAIN),
    "power, published": MixerConfig("power", PUBLISHED | UNGATED),
    "power, published, gate and rotation": MixerConfig("power", PUBLISHED | CONFORMAL),
    "softmax": MixerConfig("softmax"),
}
VOCABULARY = 2048
CHUNK = 512
WARM_UP = 16  # tokens decoded before any is timed
CONTEXTS = (1024, 16_384, 32_768)  # tokens before the one that is timed
WHOLE = 16_384  # most tokens of a forward pass
ROUNDS = 5  # of forward passes
CHECKED = 3  # tokens of the check: a CUDA graph is made at the second step, and the third step only runs it


def error(model: LanguageModel, tokens: Tensor) -> float:
    """Returns the relative difference, in norm, between logits of single steps and those of the full forward.

    The steps read the last tokens one by one, as in the measurement."""
    _, state = read(model, tokens[:, :-CHECKED])
    step = stepping(model, state, tokens.shape[1] - CHECKED, CHECKED)
    found = torch.stack([step(token).clone() for token in tokens[:, -CHECKED:].split(1, dim=1)], 1)
    expected = model(tokens)[:, -CHECKED:]
    return ((found - expected).norm() / expected.norm()).item()


def read(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, ModelState]:
    """Returns the logits after all tokens and the state, read in chunks."""
    state = model.init_state(tokens.shape[0])
    for chunk in tokens.split(CHUNK, dim=1):
        logits, state = model.step(chunk, state)
    return logits, state


def state_after(model: LanguageModel, context: int) -> ModelState:
    """Returns a state that has seen `context` random tokens.

    Key/value caches get random keys and values instead: the time to read them does not depend on these, and the time to
    compute them grows with the square of the context.
    """
    gen = torch.Generator().manual_seed(0)
    layers = []
    for layer in model.init_state(1).layers:
        if not isinstance(layer, KVCache):
            text = torch.randint(model.config.vocab_size, (1, context), generator=gen)
            return read(model, text.to(device_of(model)))[1]
        k, v = (torch.randn(*x.shape[:2], context, x.shape[3], generator=gen).to(x) for x in (layer.k, layer.v))
        layers.append(layer.extend(k, v))
    return ModelState(layers)


def device_of(model: LanguageModel) -> torch.device:
    """Returns the device of the weights."""
    return next(model.parameters()).device


def stepping(model: LanguageModel, state: ModelState, read: int, tokens: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that reads a token [1, 1] after `read` others, as `generate` does, for up to `tokens` calls.

    If possible, it uses a CUDA graph. It returns the logits [1, vocab_size], which its next call may overwrite.
    """
    slots = Slots.with_graphs(model, state, read, read + tokens)

    def step(token: Tensor) -> Tensor:
        nonlocal state
        if slots is not None:
            return slots.step(token[:, 0])
        logits, state = model.step(token, state)
        return logits

    return step


@torch.no_grad()
def measure(name: str, config: ModelConfig, contexts: Sequence[int], tokens: int, device: str = "cpu") -> list[dict]:
    """Returns a row for each context, the shortest first."""
    model = LanguageModel(config, seed=0).to(device).eval()
    gen = torch.Generator().manual_seed(1)
    drawn = torch.randint(config.vocab_size, (1, min(contexts)), generator=gen).to(device)
    wrong = error(model, drawn)
    # A few roundings; float32 sums over T tokens round as the square root of T.
    bound = 4 * min(contexts) ** 0.5 * torch.finfo(torch.float32).eps
    if not wrong <= bound:
        raise RuntimeError(f"{name}: a step errs by {wrong:.1e} where {bound:.1e} is allowed; not timed")
    states = {context: state_after(model, context) for context in sorted(contexts)}
    held = {context: state.nbytes for context, state in states.items()}
    steps = {context: stepping(model, state, context, WARM_UP + tokens) for context, state in states.items()}
    times: dict[int, list[float]] = {context: [] for context in states}
    for token in torch.randint(config.vocab_size, (WARM_UP + tokens, 1, 1), generator=gen):
        for context in states:
            start = time.perf_counter()
            steps[context](token.to(device))
            synchronize(device)
            times[context].append((time.perf_counter() - start) * 1e3)
    ms = {context: statistics.median(each[WARM_UP:]) for context, each in times.items()}
    whole = {context: forward_ms(model, context) for context in states if context <= WHOLE}
    return [
        {"mixer": name, "options": config.mixers[0].options, "device": device, "dtype": "float32"}
        | {
            "d_model": config.d_model,
            "layers": config.n_layers,
            "heads": config.n_heads,
            "vocabulary": config.vocab_size,
        }
        | {"context": context, "tokens": tokens, "ms_per_token": round(ms[context], 4), "state_bytes": held[context]}
        | {"forward_ms": whole.get(context)}
        | {"ratio": round(ms[context] / ms[min(contexts)], 3), "err": float(f"{wrong:.2e}")}
        | measured(device)
        for context in states
    ]


@torch.no_grad()
def forward_ms(model: LanguageModel, context: int) -> float:
    """Returns the milliseconds in which a model reads `context` tokens in one pass, the median of some rounds."""
    text = torch.zeros(1, context, dtype=torch.int64, device=device_of(model))
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        model(text)
        synchronize(text.device.type)
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times[1:]), 2)


def main() -> None:
    parser = options("benchmarks.decoding", __doc__)
    parser.add_argument("--preset", default="tiny", help="shape of the models (default: tiny)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"(default: {VOCABULARY})")
    told = " ".join(map(str, CONTEXTS))
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help=f"(default: {told})")
    parser.add_argument("--tokens", type=int, default=400, help="decoded after each context (default: 400)")
    args = parser.parse_args()
    if args.device == "cuda":
        keep(args.csv, map(decoding_gpu.measure, decoding_gpu.CASES), decoding_gpu.line)
        return
    torch.set_num_threads(args.threads)
    print(f"{'mixer':>35} {'context':>8} {'ms/token':>9} {'ratio':>6} {'state bytes':>12} {'err':>8}")
    found = (measure(name, preset(args.preset, args.vocabulary, mixer), args.contexts, args.tokens, args.device)
             for name, mixer in MIXERS.items())  # fmt: skip
    keep(args.csv, chain.from_iterable(found), line)


def line(row: dict) -> str:
    """Returns a row as text to print."""
    timing = f"{row['ms_per_token']:>9.3f} {row['ratio']:>6.2f}"
    return f"{row['mixer']:>35} {row['context']:>8} {timing} {row['state_bytes']:>12,} {row['err']:>8.1e}"


if __name__ == "__main__":
    main()
