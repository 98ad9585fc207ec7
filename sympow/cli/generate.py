"""Continues texts, and keeps what was read: `sympow generate` and `sympow read`."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from sympow.cli.options import (
    DEVICE,
    DTYPES,
    RUN,
    STATE_DTYPES,
    WEIGHTS,
    AddCommand,
    Refuse,
    add_number,
    add_path,
    add_trust_code,
    decimal,
    natural,
    share,
)

_GENERATE = """Reads a prompt in chunks and continues it token by token from the model's state. The text goes to
standard output, the state's size and the speed go to standard error. With --context the prompt follows the text that
`sympow read` has read. With --speculate or --draft the model reads several proposed tokens in one step, as long as
this saves time. It rejects proposed tokens that it would not have drawn itself, so the text is the same."""

_READ = """Reads a text in chunks and writes the state of every layer into a context file. `sympow generate --context`
can continue from this file any number of times. Memory does not grow with the text, except for key/value caches of the
model. Every half minute, and after Ctrl-C, the state so far is saved in FILE.part. The same command then continues
from FILE.part, and removes it at the end."""


def add(command: AddCommand) -> None:
    """Adds the commands to the parser."""
    generate = command("generate", "Continue a text.", _GENERATE)
    add_path(generate, "run", "RUN", RUN)
    add_path(generate, "--context", "FILE", "Continue from this file, which `sympow read` wrote.")
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="Continue this text. It is optional with --context.")
    add_path(prompt, "--prompt-file", "FILE", "Read the prompt from this file; - means standard input.")
    add_number(generate, "--max-new-tokens", "Write at most N tokens.", 256)
    add_number(generate, "--temperature",
               "Draw at this temperature; 0 always takes the likeliest token.", 1.0,
               type=decimal, metavar="X")  # fmt: skip
    add_number(generate, "--top-k", "Draw from the K likeliest tokens (default: from all).", metavar="K")
    add_number(generate, "--top-p",
               "Draw from the fewest tokens whose probabilities add up to P (default: from all).",
               type=share, metavar="P")  # fmt: skip
    add_number(generate, "--seed", "Draw the tokens from this seed.", 0, type=natural)
    drafts = generate.add_mutually_exclusive_group()
    drafts.add_argument("--speculate", action="store_true",
                        help="Propose tokens by prompt lookup: the text is the same, with fewer steps.")  # fmt: skip
    add_path(drafts, "--draft", "RUN",
             "Propose tokens with the smaller model of this run, which has the same tokenizer.")  # fmt: skip
    generate.add_argument("--dtype", choices=DTYPES, default="auto", help=WEIGHTS)
    generate.add_argument("--device", default="auto", help=DEVICE)
    add_trust_code(generate)
    generate.set_defaults(execute=run_generate, check=_check_prompt)

    read = command("read", "Read a text and write the state after it into a context file.", _READ)
    add_path(read, "run", "RUN", RUN)
    add_path(read, "text", "TEXT", "Read this file; - means standard input.")
    add_path(read, "--out", "FILE", "Write this context file.", required=True)
    add_path(read, "--context", "FILE", "Continue from this context file.")
    read.add_argument("--dtype", choices=STATE_DTYPES, default="float32", type=_dtype_of_states,
                      help="Store states in this dtype; float32 is exact (default: float32).")  # fmt: skip
    read.add_argument("--weights-dtype", choices=DTYPES, default="auto", help=WEIGHTS)
    add_number(read, "--chunk", "Read N tokens in each step.", 1024)
    read.add_argument("--device", default="auto", help=DEVICE)
    read.add_argument("--quiet", action="store_true", help="Print the last line only, without progress.")
    add_trust_code(read)
    read.set_defaults(execute=run_read)


def _dtype_of_states(text: str) -> str:
    if text in DTYPES and text not in STATE_DTYPES:
        raise argparse.ArgumentTypeError(f"states are stored in {', '.join(STATE_DTYPES)}, not in {text}; "
                                         "--weights-dtype is the dtype of weights")  # fmt: skip
    return text


def _check_prompt(options: argparse.Namespace, refuse: Refuse) -> None:
    if {options.context, options.prompt, options.prompt_file} == {None}:
        refuse("one of the arguments --prompt --prompt-file --context is required")


def run_generate(options: argparse.Namespace) -> None:
    """Runs `sympow generate`."""
    from sympow.cli.generated_text import argument_text, draft_model, text_of, write_text
    from sympow.cli.run_checks import dtype_of
    from sympow.data.tokenizer_files import end_tokens
    from sympow.models import NgramDrafts, load_context
    from sympow.training import load
    from sympow.training.devices import resolve_device
    from sympow.training.run_folder import folder_of

    prompt = argument_text(options.prompt or "", "--prompt")
    if options.prompt_file is not None:
        prompt = text_of(options.prompt_file)
    run = load(options.run, resolve_device(options.device), dtype_of(options.dtype))
    context = None if options.context is None else load_context(options.context, run.model)
    write_text(
        run,
        prompt,
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        context=context,
        drafts=NgramDrafts() if options.speculate else draft_model(options.draft, run),
        ends=() if run.tokenizer is None else end_tokens(folder_of(options.run), run.tokenizer),
    )


def run_read(options: argparse.Namespace) -> int | None:
    """Runs `sympow read`."""
    from sympow.cli.context_reading import check_out, read_text
    from sympow.cli.result_files import check_writable
    from sympow.cli.run_checks import dtype_of
    from sympow.ops.cost import counted, format_bytes
    from sympow.training import load
    from sympow.training.devices import resolve_device

    out = Path(options.out)
    check_out(out, options.text, options.context)
    check_writable(options.out, replaced=True)
    run = load(options.run, resolve_device(options.device), dtype_of(options.weights_dtype))
    done = read_text(
        run, options.text, out, before=options.context, dtype=options.dtype, chunk=options.chunk, quiet=options.quiet
    )
    if done.stopped_by:
        print(f"stopped by {done.stopped_by} after {counted(done.tokens, 'token')}; the same command continues")
        return 128 + signal.Signals[done.stopped_by]
    size = out.stat().st_size
    what = f"{counted(done.tokens, 'token')}, {size:,} bytes ({format_bytes(size)}), {options.dtype}"
    print(f"{out}: {what}{', read before' if done.already else ''}")
    return None
