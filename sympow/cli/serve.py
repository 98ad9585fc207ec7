"""Serves a model over HTTP: `sympow serve`."""

from __future__ import annotations

import argparse

from sympow.cli.options import (
    DEVICE,
    DTYPES,
    STATE_DTYPES,
    WEIGHTS,
    AddCommand,
    Refuse,
    above_zero,
    add_number,
    add_path,
    add_trust_code,
    decimal,
    host,
    host_name,
    natural,
    port,
    positive,
)

_SERVE = """Serves a model to clients of OpenAI's interface: completions, chats (with a chat template in the folder) and
streams. Requests are answered in batches; a request's answer does not depend on the others. A prefix that a prompt
shares with an earlier prompt is not read again. SIGINT or SIGTERM lets running requests end and stops the server. The
command needs the extra `serve`; docs/guides/serving.md has examples."""


def add(command: AddCommand) -> None:
    """Adds the command to the parser."""
    serve = command("serve", "Serve a model over HTTP with OpenAI's interface.", _SERVE)
    add_path(serve, "folder", "DIR", "Serve this run, or this folder of `sympow export`.")
    serve.add_argument("--host", type=host, default="127.0.0.1", help="Listen at this address (default: 127.0.0.1).")
    add_number(serve, "--port", "Listen at this port; 0 takes a free one.", 8000, type=port)
    serve.add_argument("--allowed-host", metavar="NAME", type=host_name, action="append", default=[],
                       help="Answer requests for this host too; * means all; may be repeated "
                            "(default: only localhost, where other machines cannot reach the server).")  # fmt: skip
    serve.add_argument("--name", help="Show this name of the model to clients (default: the folder's name).")
    add_path(serve, "--api-keys", "FILE",
             "Accept the keys in this file, one on each line (default: those in $SYMPOW_API_KEYS, separated by "
             "commas; without any, every client is accepted).")  # fmt: skip
    for name, count, what in (("slots", 16, "Answer N requests at a time"),
                              ("max-prompt-tokens", 1_000_000, "Refuse prompts of more than N tokens"),
                              ("max-new-tokens", 4096, "Write at most N tokens of an answer")):  # fmt: skip
        serve.add_argument(f"--{name}", metavar="N", type=positive, default=count, help=f"{what} (default: {count:,}).")
    add_number(serve, "--prefill-chunk", "Read N tokens of a prompt at a time (default: 256; on a GPU 1,024).")
    add_number(serve, "--queue", "Let at most N requests wait.", 256, type=natural)
    for name, number, kind, what in (
        ("timeout", 600.0, above_zero, "End an answer after X seconds"),
        ("grace", 30.0, decimal, "Give running requests X seconds when the server ends"),
        ("cache-memory", 1.0, decimal, "Keep states of prompts in X GiB of memory"),
    ):
        add_number(serve, f"--{name}", f"{what}.", number, type=kind, metavar="X")
    add_path(serve, "--cache-dir", "DIR", "Keep states of prompts in this folder too (default: in memory only).")
    add_number(serve, "--cache-disk",
               "Keep X GiB of these states in --cache-dir (default: 10).", type=decimal, metavar="X")  # fmt: skip
    serve.add_argument("--dtype", choices=DTYPES, default="auto", help=WEIGHTS)
    serve.add_argument("--state-dtype", choices=STATE_DTYPES, default="float32",
                       help="Hold the sums of power attention in this dtype (default: float32). int8 takes a "
                            "quarter of their bytes, and rounds them.")  # fmt: skip
    serve.add_argument("--device", default="auto", help=DEVICE)
    add_trust_code(serve)
    serve.set_defaults(execute=run_serve, check=_check_disk)


def _check_disk(options: argparse.Namespace, refuse: Refuse) -> None:
    if options.cache_disk is not None and options.cache_dir is None:
        refuse("--cache-disk needs --cache-dir, the folder of the states on disk")


def run_serve(options: argparse.Namespace) -> None:
    """Runs `sympow serve`."""
    from sympow.cli import served_model

    served_model.run(options)
