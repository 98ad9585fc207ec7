"""The command line. A file of this folder has a group of commands: their options, and the functions that run them.

The files import what a command needs when it runs, because `sympow --help` should not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb

from sympow import __version__
from sympow.cli import convert, corpora, generate, measure, mqar, serve, train
from sympow.cli.options import Parser, check_outputs, tell

GROUPS = (train, measure, generate, serve, convert, mqar, corpora)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, 2 after an error, which is printed in one line, or 130 after Ctrl-C.

    Ctrl-C during the import of torch ends the process by the signal.

    If a signal stopped a run after a checkpoint was saved, the exit code is 128 + the signal's number, as in a shell.
    """
    try:
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="surrogateescape")  # for names of files that are not UTF-8
        options = parse(arguments)
        with whole_import():
            from sympow.layers import trust_code

        with trust_code(getattr(options, "trust_code", False)):
            code = options.execute(options)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError, OverflowError) as error:
        if options.traceback:
            raise
        tell(_one_line(error))
        return 2


@contextmanager
def whole_import() -> Iterator[None]:
    """Lets Ctrl-C end the process at once.

    An interrupted import of torch leaves half of NumPy, and the command would go on with it.
    """
    in_main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def parser() -> argparse.ArgumentParser:
    """Returns the commands and their options."""
    common = Parser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    top = Parser(prog="sympow", description="Power attention: train, evaluate and sample language models.")
    version = f"%(prog)s {__version__}"
    top.add_argument("--version", action="version", version=version, help="Print the version and exit.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, description: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=description, parents=[common])
        made.set_defaults(refuse=made.error)
        return made

    for group in GROUPS:
        group.add(command)
    return top


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments of a command line; None: those of this process.

    Positional arguments may follow options, which argparse alone would refuse. Raises SystemExit for arguments that are
    not valid, after one line on stderr.
    """
    top = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow, and the process ends with the answer
        import argcomplete

        argcomplete.autocomplete(top)
    arguments = sys.argv[1:] if arguments is None else arguments
    for word in takewhile(lambda word: word != "--", arguments):
        if word.startswith("-") and word.endswith("=--"):  # for which argparse gives an empty list
            top.error(f"argument {word.removesuffix('=--')}: expected a value, got '--'")
    options, more = top.parse_known_args(arguments)
    if more and ("rest" not in options or any(word.startswith("-") for word in more)):
        options.refuse(f"unrecognized arguments: {' '.join(more)}")
    if more:
        getattr(options, options.rest).extend(more)
    check_outputs(options, options.refuse)
    if "check" in options:
        options.check(options, options.refuse)
    return options


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, MemoryError | RuntimeError):
        from sympow.ops.memory import allocation_error

        if (line := allocation_error(error)) is not None:
            return line
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    text = str(error).strip()
    if not _is_own(error):  # other packages add lines with details
        text = text.split("\n")[0]
    return text or type(error).__name__


def _is_own(error: BaseException) -> bool:
    """Tells whether this package raised an error. Its messages are one line, unless a name in them has a line end."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and Path(frames[-1].f_code.co_filename).is_relative_to(Path(__file__).parents[1])
