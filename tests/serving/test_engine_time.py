"""Where the time of the engine goes: every second belongs to one part."""

import pytest

from sympow.serving.engine_time import PARTS, EngineTime


def test_time_inside_a_part_does_not_count_for_the_part_around_it(monkeypatch):
    times = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    monkeypatch.setattr("sympow.serving.engine_time.time.perf_counter", lambda: next(times))
    work = EngineTime()
    with work.during("read"), work.during("wait"):  # from 11 to 25, from 13 to 17
        pass
    assert work.seconds == dict.fromkeys(PARTS, 0.0) | {"idle": 1.0, "read": 2.0 + 8.0, "wait": 4.0}


def test_a_part_ends_with_an_error():
    work = EngineTime()
    with pytest.raises(KeyError), work.during("step"):
        raise KeyError
    with work.during("answer"):
        pass
    before = work.seconds["step"]
    with work.during("read"):
        pass
    assert work.seconds["step"] == before
