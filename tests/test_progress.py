"""How far a task is: lines where stderr is no terminal, a bar where it is."""

import io
import re
import sys
import threading

import pytest

from sympow import progress
from sympow.progress import Forecast, Progress


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
        pytest.raises(ImportError, match=r"^a progress bar needs tqdm: pip install 'sympow\[train\]' \("),
        Progress("a", "b"),
    ):
        pass
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("a", "b"):  # lines need none
        pass


@pytest.mark.parametrize("stream", [Console, Log])
def test_what_takes_long_between_steps_is_shown(monkeypatch, stream):
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "LOOK_EVERY", 0.01)
    with Progress("training", "step", total=10, done=3) as task:
        task.advance(note="loss 1.2500")
        with task.phase("computing the held-out loss"):
            if isinstance(err, Log):
                for _ in range(2):  # the first line may have been written before
                    err.written.clear()
                    assert err.written.wait(10)
        assert "computing the held-out loss" in err.getvalue()
        task.advance(note="loss 1.2400")
    assert "loss 1.2400" in err.getvalue()


def test_the_rest_is_estimated_after_the_first_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def told(seconds: list[float], done: int, total: int, stages: list[int] | None = None) -> list[str | None]:
        forecast = Forecast(done, total)
        lines = []
        for i, each in enumerate(seconds, start=1):
            clock[0] += each
            lines.append(forecast.after(done + i, stages[i - 1] if stages else 0))
        return lines

    rest = "steps left, 5 s each, without evaluations and checkpoints"
    assert told([20, 5, 5, 5], 0, 1000) == [None, None, f"about 1:23:05 for the 997 {rest}", None]
    assert told([90, 5, 5], 10, 1000)[0] == "about 1 day, 0:43:30 for the 989 steps left, 90 s each, " + rest[22:]
    assert told([90, 5, 5], 10, 1000)[1:] == [None, None]
    assert told([1, 1, 1, 1], 0, 50) == [None] * 4  # less than a minute
    assert told([5, 5, 5], 0, 10**30)[2].startswith("about 999999999 days, ")
    lines = told([1] * 5 + [10] * 4, 0, 1000, [1] * 5 + [2] * 4)
    assert lines[2] and lines[7] == "about 2:45:20 for the 992 steps left, 10 s each, " + rest[22:]
    assert [i for i, line in enumerate(lines) if line] == [2, 7]
