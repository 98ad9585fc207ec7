"""How calls are timed."""

import time

from benchmarks.measure import milliseconds


def test_calls_take_turns_in_changing_order_and_keep_their_own_times():
    taken: list[int] = []

    def call(i: int) -> None:
        taken.append(i)
        time.sleep(0.002 * (1 + i))

    times = milliseconds([lambda i=i: call(i) for i in range(3)], "cpu", rounds=6, least=0)
    assert times == sorted(times) and times[0] >= 2 and times[2] >= 6
    rounds = [tuple(taken[i : i + 3]) for i in range(6, len(taken), 3)]  # after warming up and counting repeats
    assert len(rounds) == 6 and len(set(rounds)) > 1 and all(sorted(order) == [0, 1, 2] for order in rounds)
