"""The first signal asks, the second acts."""

import os
import signal
import sys
import threading

import pytest

from sympow.training.interrupt import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_to_stop(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert {each: signal.getsignal(each) for each in before} == before


@pytest.mark.parametrize("patient", [False, True])
def test_the_first_signal_is_answered_at_once(capfd, monkeypatch, patient):
    """In the middle of the step, on stderr itself, as the signal may have interrupted a write to its buffer."""
    with StopRequest(patient=patient, doing="stopping after this step"):
        os.kill(os.getpid(), signal.SIGINT)
        again = "" if patient else "; again to stop now"
        assert capfd.readouterr().err == f"\nstopping after this step{again}\n"
    monkeypatch.setattr(sys, "stderr", None)
    with StopRequest(doing="stopping after this step") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT


def test_second_ctrl_c_stops_at_once():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_sigterm_that_is_sent_twice_is_one_request(monkeypatch):
    """`timeout` sends the signal to the process and to its group, which it is in. Before, the second one killed it."""
    now = [0.0]
    monkeypatch.setattr("sympow.training.interrupt.time.monotonic", lambda: now[0])
    taken = []
    before = signal.signal(signal.SIGTERM, lambda *_: taken.append(now[0]))
    try:
        with StopRequest() as stop:
            for now[0] in (0.0, 0.1, 5.0):
                os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == [5.0]


def test_patience_outlasts_a_second_signal():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(patient=True) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_nothing_changes():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((stop.signal, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
