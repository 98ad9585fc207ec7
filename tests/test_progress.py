"""How far a task is: lines where stderr is no terminal, a bar where it is."""

import io
import re
import sys
import threading

import pytest

from sympow import progress
from sympow.progress import Progress


class Console(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log(io.StringIO):
    """No terminal; tells when a line has come."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def shown(monkeypatch):
    """shown(stream, **options) counts 3 + 1 of 10 steps, and gives what came."""

    def show(stream: io.StringIO, **options) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("training", "step", total=10, done=3, **options) as task:
            task.advance(note="loss 1.2500")
            task.say("a line")
        return stream.getvalue()

    return show


def test_a_terminal_has_a_bar(shown):
    on_console = shown(Console())
    assert "training" in on_console and "4/10" in on_console and "loss 1.2500" in on_console
    assert "a line\n" in on_console


def test_another_stream_has_lines_when_they_are_due(shown, monkeypatch):
    assert shown(io.StringIO()) == "a line\n"
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    due = r"training: 4 of 10 steps, loss 1\.2500, 0:00:\d\d\n"
    assert re.fullmatch(f"{due}a line\n({due})?", shown(io.StringIO()))


def test_quiet_says_nothing(shown, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    assert shown(Console(), quiet=True) == shown(io.StringIO(), quiet=True) == ""


@pytest.mark.parametrize("unit", [None, "row"])
def test_a_line_comes_in_the_middle_of_a_step(unit, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "LOOK_EVERY", 0.001)
    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    with Progress("reading", unit):
        assert log.written.wait(60)
    text = log.getvalue()
    assert re.fullmatch(rf"(reading: {'0 rows, ' if unit else ''}0:00:\d\d\n)+", text)
    assert log.getvalue() == text, "a line after the end"


def test_a_task_without_units_has_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Console())
    with Progress("fetching"):
        pass
    assert sys.stderr.getvalue() == ""


def test_a_closed_stream_does_not_stop_the_work(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed)
    with Progress("reading", "row") as task:
        closed.close()
        task.advance()
        task.advance()
    assert task.done == 2


def test_a_bar_without_tqdm_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Console())
    with (
        pytest.raises(ImportError, match=r"^a progress bar needs tqdm: pip install 'sympow\[train\]'$"),
        Progress("a", "b"),
    ):
        pass
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("a", "b"):  # lines need none
        pass
