"""Laws of threads that compute a few items ahead of their caller."""

from __future__ import annotations

import gc
import threading

import pytest

from salientpp.processes import in_order


def test_results_come_in_the_order_of_the_items():
    assert list(in_order(lambda i: i * i, range(100), "squares")) == [i * i for i in range(100)]


def test_threads_compute_only_a_few_items_ahead():
    taken = []

    def items():
        for i in range(10_000):
            taken.append(i)
            yield i

    results = in_order(lambda i: i, items(), "few")
    assert next(results) == 0 and len(taken) < 1000


def test_an_error_reaches_the_caller_at_its_item():
    results = in_order(lambda i: 1 // (2 - i), range(10), "divide")
    assert next(results) == 0 and next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("by", ["close", "garbage collector"])
def test_a_caller_that_stops_early_waits_for_no_thread(by):
    """The garbage collector may run in a starting thread, while `threading` holds locks that threads need to end."""
    go_on = threading.Event()

    def stop():
        results = in_order(lambda i: i == 0 or go_on.wait(), range(100), "slow")
        assert next(results) is True
        if by == "close":
            results.close()
        else:
            cycle = [results]
            cycle.append(cycle)
            del results, cycle
            gc.collect()

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    stopping.join(60)
    try:
        assert not stopping.is_alive()
    finally:
        go_on.set()
