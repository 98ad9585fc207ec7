"""Prints text that models generate, for `sympow generate` and `sympow demo`."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection

import torch

from sympow.cli.result_files import standard_input
from sympow.cli.run_checks import check_tokenizers, text_tokenizer
from sympow.data import StreamDecoder, encode_text
from sympow.files import read_utf8
from sympow.models import Context, Drafts, ModelDrafts, stream
from sympow.models.generation import StreamOptions
from sympow.ops.cost import counted, format_bytes
from sympow.training import Run, load


def write_text(
    run: Run,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    context: Context | None = None,
    drafts: Drafts | None = None,
    ends: Collection[int] = (),
) -> None:
    """Prints the prompt and its continuation while it is drawn, then the state's size and the speed on stderr.

    The continuation stops before the first token that is in `ends`.
    """
    tokenizer = text_tokenizer(run.tokenizer, run.config.name)
    if not prompt and (context is None or not context.tokens):
        raise ValueError("the prompt is empty; a model continues a text of at least one token")
    begins = context is None or not context.tokens
    ids = encode_text(tokenizer, prompt) if begins else tokenizer.encode(prompt)
    tokens = torch.from_numpy(ids.astype("int64"))[None]
    decoder = StreamDecoder(tokenizer)
    started = time.perf_counter()
    options: StreamOptions = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options |= {"context": context, "drafts": drafts, "vocab_size": tokenizer.vocab_size}
    drawn = stream(run.model, tokens, max_new_tokens, **options)
    print(prompt, end="", flush=True)
    for count, last in enumerate(drawn):
        token = int(last.token)
        if count == 0:
            first = time.perf_counter()
        if token in ends:
            break
        print(decoder.push([token]), end="", flush=True)
    ended = time.perf_counter()
    print(decoder.finish())
    speed = f", {count / (ended - first):,.1f} tokens/s" if count else ""
    if drafts is not None:
        speed += f", {drafts.accepted:,} of {drafts.proposed:,} draft tokens accepted"
    print(
        f"state {last.state.nbytes:,} bytes ({format_bytes(last.state.nbytes)}), "
        f"prefill of {counted(tokens.shape[1], 'token')} {first - started:.3f} s{speed}",
        file=sys.stderr,
    )


def draft_model(path: str | None, run: Run) -> ModelDrafts | None:
    """Loads the draft model of a run, on the device of the run; None without a path."""
    if path is None:
        return None
    draft = load(path, run.model.embedding.weight.device, None)
    check_tokenizers({"the run": run.tokenizer, f"the draft model {path}": draft.tokenizer})
    return ModelDrafts(draft.model)


def text_of(file: str) -> str:
    """Reads a prompt from a file, or from stdin for "-". Raises ValueError for text that is not UTF-8."""
    if file == "-":
        with standard_input() as text:
            return text.read()
    return read_utf8(file)


def argument_text(text: str, option: str) -> str:
    """Returns a text of the command line. Raises ValueError if its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{option} is not UTF-8 text") from None
    return text
