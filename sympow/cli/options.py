"""Options that several commands share, the parser of all commands, and the types of values."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

RUN = "Use the model in this run's folder, or in this checkpoint."
SCORED = "Use the model in this run's folder, checkpoint, or folder of Hugging Face transformers."
TRUST_CODE = "Import mixers that a config names by import path, which runs their code (default: refuse)."
DTYPES = ("auto", "float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16", "int8")
WEIGHTS = "Compute with weights in this dtype; auto is the dtype of the checkpoint (default: auto)."
DEVICE = "Compute on this device: auto, cpu, cuda, ...; auto is a GPU if there is one (default: auto)."

# What a command's check of its options calls with the reason why they are refused.
Refuse = Callable[[str], NoReturn]

Arguments = argparse._ActionsContainer  # a parser, or a group of its options

_LONGEST = 2000  # characters of an error
WAIT = timedelta(seconds=10)  # for torchrun's store, which lives longer than the processes


class AddCommand(Protocol):
    """Makes the parser of a command. Its defaults are `execute`, and may be `rest`, `check` and `recipes`.

    `execute` does the work, for the parsed options, and returns an exit code or None for 0. `rest` names the list that
    positional arguments after options belong to. `check` looks at the options before anything is imported.
    """

    def __call__(self, name: str, help: str, description: str) -> argparse.ArgumentParser:
        """Adds the command with its line in the list of all and with the text above its own help."""


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Adds --trust-code to a command that reads configs of runs."""
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)


def add_path(parser: Arguments, name: str, metavar: str, help: str, **more: Any) -> None:
    """Adds an option or an argument that is a path; `more` goes to argparse."""
    parser.add_argument(name, metavar=metavar, type=path, help=help, **more)


def add_number(parser: Arguments, name: str, help: str, default: float | None = None, **more: Any) -> None:
    """Adds an option that is a number, an integer of at least 1 unless `more`, which goes to argparse, says otherwise.

    Its help names the default, if there is one.
    """
    told = help if default is None else f"{help[:-1]} (default: {default:g})."
    how: dict[str, Any] = {"metavar": "N", "type": positive} | more
    parser.add_argument(name, default=default, help=told, **how)


def add_fields(parser: Arguments, name: str, help: str) -> None:
    """Adds assignments key=value: an option that may be repeated, or the last positional arguments."""
    how: Any = {"action": "append"} if name.startswith("-") else {"nargs": "*"}
    parser.add_argument(name, metavar="key=value", default=[], help=help, **how)


def check_outputs(options: argparse.Namespace, refuse: Refuse) -> None:
    """Refuses two options that name one file, in which only one of two results would be left."""
    named: dict[str, str] = {}
    for name in ("out", "csv", "plot", "html"):
        file = getattr(options, name, None)
        if file is not None and (other := named.setdefault(os.path.realpath(file), name)) != name:
            refuse(f"--{other} and --{name} name one file: {file}")


class Distinct(argparse.Action):
    """Stores the values of an option, and refuses a value that is given twice, which would be measured twice."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, values: Any, name: str | None = None
    ) -> None:
        """Stores the values. Raises argparse.ArgumentError, from which the parser makes its error."""
        for value in values:
            if values.count(value) > 1:
                raise argparse.ArgumentError(self, f"{value} is given twice")
        setattr(options, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Parses arguments, and prints errors in one line.

    A command may have the default `recipes`: the types that its recipes return. Then its help ends with a list of them.
    """

    def format_help(self) -> str:
        """Returns the help, with the recipes of the command."""
        returned = self.get_default("recipes")
        return super().format_help() + (_recipe_list(returned) if returned else "")

    def error(self, message: str) -> NoReturn:
        """Prints the message in one line, and ends the program with exit code 2."""
        refuse(f"{message} (see {self.prog} --help)")


class ListRecipes(argparse.Action):
    """Prints the recipes of a command and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Prints the list, and ends the program."""
        sys.stdout.write(_recipe_list(parser.get_default("recipes")).lstrip())
        parser.exit()


def _recipe_list(returned: Sequence[str]) -> str:
    from sympow.recipes import describe_recipes

    recipes = describe_recipes(*returned)
    column = max(map(len, recipes)) + 4
    width = max(shutil.get_terminal_size().columns - 2, column + 20)
    lines = [
        textwrap.fill(line, width, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column)
        for name, line in recipes.items()
    ]
    return "\n".join(["", "recipes:", *lines, ""])


def positive(text: str) -> int:
    """Returns an integer of at least 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """Returns an integer of at least 0."""
    return _integer(text, 0)


def port(text: str) -> int:
    """Returns the number of a port, or 0."""
    return _integer(text, 0, 1 << 16, "65,536")


def _integer(text: str, least: int, limit: int = 1 << 63, said: str = "2**63") -> int:
    try:
        number = int(text)
    except ValueError:  # also for more digits than Python reads
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {_short(text)}") from None
    if not least <= number < limit:
        expected = f"at least {least}" if number < least else f"below {said}"
        raise argparse.ArgumentTypeError(f"must be {expected}, got {_short(text, shown=str)}")
    return number


def decimal(text: str) -> float:
    """Returns a finite number of at least 0."""
    return _decimal(text, "a finite number of at least 0", lambda found: found >= 0)


def above_zero(text: str) -> float:
    """Returns a finite number above 0."""
    return _decimal(text, "a finite number above 0", lambda found: found > 0)


def share(text: str) -> float:
    """Returns a number above 0 and at most 1."""
    return _decimal(text, "a number above 0 and at most 1", lambda found: 0 < found <= 1)


def _decimal(text: str, expected: str, accepts: Callable[[float], bool]) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or not accepts(found):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {_short(text)}")
    return found


def _short(text: str, shown: Callable[[str], str] = repr) -> str:
    return shown(text) if len(text) <= 60 else f"{shown(text[:60])}..."


def path(text: str) -> str:
    """Returns the path. Refuses an empty path, such as an unset shell variable, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path cannot be empty")
    return text


def host(text: str) -> str:
    """Returns an address to listen at. Refuses an empty one, which would mean every address of this machine."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an address cannot be empty; 0.0.0.0 means all of this machine")
    return text


def host_name(text: str) -> str:
    """Returns a name or an address of a host, without a scheme and a port, or * for all."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        if not re.fullmatch(r"[^\[\]:@/\s]+", text):
            raise argparse.ArgumentTypeError(
                f"expected a name without scheme and port, such as example.org, got {text!r}"
            ) from None
    return text


def refuse(line: str) -> NoReturn:
    """Prints an error in one line, and ends the program with exit code 2."""
    tell(line)
    raise SystemExit(2)


def tell(line: str) -> None:
    """Prints an error. Of the processes that torchrun started, the first one prints it."""
    line = escaped(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")
    several = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("WORLD_SIZE", "1") != "1"
    if several and not is_first(line):
        return
    print(f"sympow: error: {line}", file=sys.stderr)


def escaped(text: str) -> str:
    """Returns a text with line ends, and all other characters that are not printable, as Python writes them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def is_first(line: str) -> bool:
    """Tells whether no other rank of this start has asked about the same line.

    Without torchrun, and if its store does not answer, every rank is the first.
    """
    from torch.distributed import TCPStore

    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=WAIT)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"sympow/{start}/{hashlib.sha256(line.encode()).hexdigest()}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True
