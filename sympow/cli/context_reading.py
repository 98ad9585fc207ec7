"""`sympow read`: reads a text in chunks into a context file, and continues after an interruption."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch

from sympow.cli.result_files import standard_input
from sympow.cli.run_checks import text_tokenizer
from sympow.data import Tokenizer, encode_stream
from sympow.files import naming
from sympow.models import Context, ContextError, load_context, save_context
from sympow.models.context import extended_digest
from sympow.models.context_file import ContextHeader, fingerprint, is_context_file, read_header
from sympow.ops.cost import counted
from sympow.progress import Progress
from sympow.training import Run
from sympow.training.interrupt import StopRequest

SAVE_EVERY = 30.0  # seconds of reading between two partial files


class Reading(NamedTuple):
    """Holds what `read_text` has done.

    Attributes:
        tokens: the number of tokens in the context.
        stopped_by: the name of the signal that stopped the reading, or None.
        already: whether the file existed before.
    """

    tokens: int
    stopped_by: str | None
    already: bool = False


def check_out(out: Path, text: str, before: str | None) -> None:
    """Raises FileExistsError if `out` exists and is no file that `read_text` may replace; arguments as there."""
    allowed = "--out names a new file, or a context file"
    if not out.exists():
        return
    if not out.is_file():
        raise FileExistsError(f"{out} is no regular file: {allowed}")
    if text != "-" and out.samefile(text):
        raise FileExistsError(f"{out} is the text itself: {allowed}")
    if before is not None and out.resolve() == Path(before).resolve():
        raise FileExistsError(f"{out} is the --context of this reading: --out names another file")
    if out.stat().st_size and not is_context_file(out):
        raise FileExistsError(f"{out} is no context file: {allowed}")


def read_text(
    run: Run,
    text: str,
    out: Path,
    *,
    before: str | None = None,
    dtype: str = "float32",
    chunk: int = 1024,
    quiet: bool = False,
) -> Reading:
    """Reads a text file, or standard input as "-", into the context file `out`.

    From time to time the context so far is written, without rounding, to a second file beside `out`. An interrupted
    reading therefore produces the same file as an uninterrupted one. If `out` already contains the context of this
    text, it is not changed.

    Args:
        run: the model that reads.
        text: the path of the text, or "-".
        out: the context file to write.
        before: a context file from which the reading starts; None: start without context.
        dtype: as for `save_context`.
        chunk: as for `Context.read`.
        quiet: show no progress.

    Raises ValueError for a text that is empty or not UTF-8, OSError if the text cannot be read, and the errors of
    `load_context` and `save_context`.
    """
    tokenizer = text_tokenizer(run.tokenizer, run.config.name)
    part = out.with_name(f"{out.name}.part")
    start = Context.begin(run.model) if before is None else load_context(before, run.model)
    with _opened(text) as file, Progress("reading", "token", done=start.tokens, quiet=quiet) as progress:
        pieces = _Pieces(_encoded(tokenizer, file, begins=not start.tokens))
        finished = _header(out, run, dtype)
        if finished is not None:
            taken = _taken(pieces, start, finished)
            more = pieces.take(1)
            if taken is not None and not len(more):
                part.unlink(missing_ok=True)
                return Reading(finished.tokens, None, already=True)
            pieces.put_back(more)
            if taken is not None:
                pieces.put_back(taken)
        partial = _load_partial(part, run, start, progress)
        if partial is not None:
            if _taken(pieces, start, partial) is not None:
                progress.say(f"going on after {counted(partial.tokens, 'token')}, from {part}")
                progress.advance(partial.tokens - start.tokens)
                start = partial
            else:
                progress.say(f"{part} is of another text: reading from the beginning")
        context, stopped = _read(run, pieces, start, part, chunk, progress)
    if stopped is not None:
        return Reading(context.tokens, stopped)
    if not context.tokens:
        raise ValueError(f"{text} is empty: a context holds at least one token")
    save_context(out, run.model, context, dtype=dtype)
    part.unlink(missing_ok=True)
    return Reading(context.tokens, None)


def _encoded(tokenizer: Tokenizer, file: TextIO, begins: bool) -> Iterator[np.ndarray]:
    """Yields the tokens of a file; with `begins`, behind the tokens that begin a text, unless the file is empty."""
    start = np.array(tokenizer.start if begins else (), dtype=np.int64)
    for tokens in encode_stream(tokenizer, file):
        if len(start) and tokens[: len(start)].tolist() != start.tolist():
            yield start
        start = start[:0]
        yield tokens


def _read(
    run: Run, pieces: _Pieces, context: Context, part: Path, chunk: int, progress: Progress
) -> tuple[Context, str | None]:
    """Reads all pieces. If a signal arrives, saves the context in `part`, stops, and returns the signal's name."""
    saved = time.monotonic()
    with StopRequest(doing="stopping after this chunk") as stop:
        while len(piece := pieces.take(chunk)):
            context = context.read(run.model, _batch(piece), chunk=chunk)
            progress.advance(len(piece))
            if stop.signal or time.monotonic() - saved >= SAVE_EVERY:
                save_context(part, run.model, context)
                saved = time.monotonic()
            if stop.signal:
                return context, stop.signal.name
    return context, None


def _load_partial(part: Path, run: Run, start: Context, progress: Progress) -> Context | None:
    """Returns the context of an interrupted reading if this reading can continue from it, otherwise None."""
    if not part.exists():
        return None
    try:
        partial = load_context(part, run.model)
    except ContextError as error:
        progress.say(f"{error}: reading from the beginning")
        return None
    return partial if partial.tokens > start.tokens else None


def _header(out: Path, run: Run, dtype: str) -> ContextHeader | None:
    """Returns the header of `out` if it is a context file of this model in this dtype, otherwise None."""
    try:
        header = read_header(out)
    except (FileNotFoundError, ContextError):
        return None
    return header if (header.dtype, header.config, header.weights) == (dtype, *fingerprint(run.model)) else None


def _taken(pieces: _Pieces, start: Context, wanted: Context | ContextHeader) -> np.ndarray | None:
    """Takes the tokens between two contexts if the pieces start with them. Otherwise takes nothing and returns None."""
    tokens = pieces.take(max(0, wanted.tokens - start.tokens))
    own = (start.tokens + len(tokens), extended_digest(start.digest, _batch(tokens)))
    if own == (wanted.tokens, wanted.digest):
        return tokens
    pieces.put_back(tokens)
    return None


class _Pieces:
    """Cuts a stream of arrays of tokens into pieces of any length."""

    def __init__(self, arrays: Iterator[np.ndarray]):
        self._arrays = arrays
        self._held: list[np.ndarray] = []

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` tokens. Fewer are returned at the end of the stream, and none after it."""
        while sum(map(len, self._held)) < count and (array := next(self._arrays, None)) is not None:
            self._held.append(array)
        joined = np.concatenate(self._held) if self._held else np.empty(0, np.uint8)
        self._held = [joined[count:]] if len(joined) > count else []
        return joined[:count]

    def put_back(self, tokens: np.ndarray) -> None:
        """Puts tokens that were taken back to the front of the stream."""
        self._held = [tokens, *self._held]


def _batch(tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(tokens.astype("int64"))[None]


@contextmanager
def _opened(text: str) -> Iterator[TextIO]:
    if text == "-":
        with standard_input() as file:
            yield file
        return
    try:
        with naming(text, reading=True), open(text, encoding="utf-8", newline="") as file:
            yield file  # with its line ends, as training reads texts
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not UTF-8 text: {error.reason}") from None
