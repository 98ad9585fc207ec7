"""What each command does with its parsed options; each returns an exit code, or None for 0."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

import torch

from sympow.cli.runs import load_run, train_run
from sympow.data import StreamDecoder
from sympow.models import LanguageModel, ModelState, stream
from sympow.recipes import load_recipe
from sympow.training import override
from sympow.training.loop import resolve_device


def train(options: argparse.Namespace) -> int | None:
    """`sympow train`."""
    config = override(load_recipe(options.recipe), options.overrides)
    folder = Path(options.out or f"runs/{config.name}")
    result = train_run(config, folder, quiet=options.quiet, restart=options.restart)
    if result.stopped_by:
        print(
            f"stopped by {result.stopped_by} at step {result.step} of {result.steps}, checkpoint saved; "
            "the same command continues"
        )
        return 128 + signal.Signals[result.stopped_by]
    if result.loss is None:
        print(f"{folder} has finished already, at step {result.step} of {result.steps}")
    else:
        print(f"finished at step {result.step} of {result.steps}, loss {result.loss:.4f}: {folder}")
    return None


def generate(options: argparse.Namespace) -> None:
    """`sympow generate`."""
    run = load_run(options.run, resolve_device(options.device))
    if run.tokenizer is None:
        raise ValueError(f"the data of {options.run} were tokens without a tokenizer: no text can be generated")
    prompt = options.prompt if options.prompt is not None else _read_text(options.prompt_file)
    if not prompt:
        raise ValueError("the prompt is empty; a model continues a text of at least one token")
    tokens = torch.from_numpy(run.tokenizer.encode(prompt).astype("int64"))[None]
    decoder = StreamDecoder(run.tokenizer)
    sizes = _state_sizes(run.model)
    started = time.perf_counter()
    drawn = stream(
        run.model,
        tokens,
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    print(prompt, end="", flush=True)
    first, count = started, 0
    for token in drawn:
        text = decoder.push([int(token)])
        if count == 0:
            first = time.perf_counter()
        count += 1
        print(text, end="", flush=True)
    ended = time.perf_counter()
    print(decoder.finish())
    speed = f", {(count - 1) / (ended - first):,.1f} tokens/s" if count > 1 else ""
    print(
        f"state {sizes[-1]:,} bytes ({human_bytes(sizes[-1])}), "
        f"prefill of {tokens.shape[1]:,} tokens {first - started:.3f} s{speed}",
        file=sys.stderr,
    )


def _state_sizes(model: LanguageModel) -> list[int]:
    """A list that will hold the bytes of the last state the model gave: `stream` passes on the tokens only."""
    step, sizes = model.step, [0]

    def measured_step(tokens: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, ModelState]:
        logits, state = step(tokens, state)
        sizes[0] = state.nbytes
        return logits, state

    model.step = measured_step  # type: ignore[method-assign]
    return sizes


def human_bytes(count: int) -> str:
    """A number of bytes in decimal units, three digits at most: 39 MB."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while count >= 999.5 * 1000**power and power < len(units) - 1:
        power += 1
    return f"{count / 1000**power:.3g} {units[power]}"


def _read_text(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {file} is not UTF-8 text: {error.reason}") from None
