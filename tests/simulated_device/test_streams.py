"""Laws of the simulated device: a missing wait, a missing record, a late read and a forbidden synchronisation show; correct code is correct in every order."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.simulated_device import DeviceFault, seed
from tests.simulated_device.memory import usage

pytestmark = pytest.mark.simulated
ORDERS = range(30)


def in_some_order(function) -> bool:
    """Returns True if ``function(seed)`` is True for some order and False for some order."""
    return len({function(number) for number in ORDERS}) == 2


# --- waits --------------------------------------------------------------------------------------------------


def made_on(side, device, size=8) -> torch.Tensor:
    with torch.simulated.stream(side):
        return torch.ones(size, device=device) * 3


@pytest.mark.parametrize("wait", ["event", "stream"])
def test_a_wait_gives_the_right_value_in_every_order(device, wait):
    for number in ORDERS:
        seed(number)
        side, current = torch.simulated.Stream(), torch.simulated.current_stream()
        value = made_on(side, device)
        if wait == "event":
            current.wait_event(side.record_event())
        else:
            current.wait_stream(side)
        assert (value + 1).tolist() == [4] * 8


def test_a_missing_wait_gives_poison_in_some_order(device):
    def is_right(number: int) -> bool:
        seed(number)
        torch.simulated.current_stream()
        return (made_on(torch.simulated.Stream(), device) + 1).tolist() == [4] * 8

    assert not is_right(0)
    assert in_some_order(is_right)


def test_an_event_covers_only_what_was_queued_before_it(device):
    side = torch.simulated.Stream()
    event = side.record_event()
    value = made_on(side, device)
    torch.simulated.current_stream().wait_event(event)
    assert (value + 1).isnan().all().item()
    assert event.query() and not side.query()
    side.synchronize()
    assert side.query() and value.tolist() == [3] * 8


def test_an_index_of_poison_is_an_error_at_the_next_synchronisation(device):
    side = torch.simulated.Stream()
    with torch.simulated.stream(side):
        index = torch.zeros(4, dtype=torch.int64, device=device)
    taken = torch.arange(8, device=device).index_select(0, index)
    with pytest.raises(DeviceFault, match="index out of range"):
        taken.cpu()


# --- memory -------------------------------------------------------------------------------------------------


def read_after_free(device, number: int, records: bool) -> bool:
    """Frees memory of one stream while another reads it. Returns True if the value that was read is right."""
    seed(number)
    torch.simulated.current_stream()
    side = torch.simulated.Stream()
    value = torch.ones(8, device=device) * 3
    side.wait_stream(torch.simulated.current_stream())
    with torch.simulated.stream(side):
        read = value + 1
    if records:
        value.record_stream(side)
    del value
    torch.zeros(1, device=device).tolist()  # the memory's own stream goes on
    torch.simulated.current_stream().wait_stream(side)
    return read.tolist() == [4] * 8


def test_a_recorded_tensor_may_be_freed_while_another_stream_reads_it(device):
    assert all(read_after_free(device, number, records=True) for number in ORDERS)


def test_memory_that_is_freed_without_a_record_is_overwritten(device):
    assert in_some_order(lambda number: read_after_free(device, number, records=False))


def test_new_memory_may_still_be_written_by_its_former_owner(device):
    def is_right(number: int) -> bool:
        seed(number)
        torch.simulated.current_stream()
        side = torch.simulated.Stream()
        value = torch.empty(8, device=device)
        with torch.simulated.stream(side):  # the side stream does not wait for the stream that allocated the memory
            value.fill_(3)
        side.synchronize()
        return value.tolist() == [3] * 8

    assert in_some_order(is_right)


def test_a_view_keeps_the_memory_of_its_base(device):
    base = torch.arange(6, device=device)
    view = base.view(2, 3)[1]
    del base
    assert torch.zeros(1, device=device).tolist() == [0] and view.tolist() == [3, 4, 5]


def test_memory_is_counted(device):
    before = torch.simulated.memory_allocated()
    torch.simulated.reset_peak_memory_stats()
    value = torch.zeros(1000, device=device)
    assert torch.simulated.memory_allocated() == before + 4000
    del value
    assert torch.simulated.memory_allocated() == before and torch.simulated.max_memory_allocated() >= before + 4000
    assert usage.peak >= usage.now


# --- the host's memory --------------------------------------------------------------------------------------


def test_pinned_memory_is_read_when_the_copy_is_executed(device):
    rows = torch.arange(4).pin_memory()
    there = rows.to(device, non_blocking=True)
    rows.zero_()  # too early
    assert there.tolist() == [0] * 4


def test_other_memory_is_read_at_once(device):
    rows = torch.arange(4)
    there = rows.to(device, non_blocking=True)
    rows.zero_()
    assert there.tolist() == [0, 1, 2, 3]


def test_pinned_memory_that_is_freed_stays_until_it_is_copied(device):
    there = torch.arange(4).pin_memory().to(device, non_blocking=True)
    torch.empty(4, dtype=torch.int64, pin_memory=True)
    assert there.tolist() == [0, 1, 2, 3]


def test_a_copy_to_pinned_memory_is_poison_until_the_host_waits(device):
    there = torch.arange(4.0, device=device)
    here = there.to("cpu", non_blocking=True)
    into = torch.zeros(4, pin_memory=True).pin_memory()
    into.copy_(there, non_blocking=True)
    assert here.isnan().all() and into.isnan().all()
    torch.simulated.current_stream().synchronize()
    assert here.tolist() == into.tolist() == [0, 1, 2, 3]


def test_pinned_memory_is_recognised(device):
    rows = torch.empty((5, 3), pin_memory=True)
    assert rows.is_pinned() and rows[2:].is_pinned() and rows.isnan().all()
    assert rows.pin_memory() is rows and torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned() and not rows.clone().is_pinned()


def test_the_device_reads_pinned_memory_in_place_but_no_other(device):
    rows, index = torch.arange(6).pin_memory(), torch.tensor([5, 0], device=device)
    taken = rows.index_select(0, index)
    assert taken.device == device and taken.tolist() == [5, 0]
    with pytest.raises(RuntimeError, match="same device"):
        torch.arange(6).index_select(0, index)


@pytest.mark.parametrize("is_copied", [False, True])
def test_only_a_copy_keeps_pinned_memory_that_is_read_in_place(device, is_copied):
    side, rows = torch.simulated.Stream(), torch.arange(4).pin_memory()
    with torch.simulated.stream(side):
        taken = rows.index_select(0, torch.arange(4, device=device))
        if is_copied:
            rows[:1].to(device, non_blocking=True)
    del rows
    torch.zeros(1, device=device).tolist()
    side.synchronize()
    assert (taken.tolist() == [0, 1, 2, 3]) == is_copied


# --- synchronisation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.cpu(), lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.nonzero(), lambda x: x[x > 1],
        lambda x: bool(x.any()), lambda x: torch.equal(x, x), lambda x: x.unique(), lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.simulated.synchronize(), lambda x: torch.simulated.current_stream().synchronize(),
    ],
)  # fmt: skip
def test_a_forbidden_synchronisation_is_an_error(device, waits):
    x = torch.arange(4.0).pin_memory().to(device, non_blocking=True)
    torch.simulated.set_sync_debug_mode("error")
    x.mul_(2).index_select(0, torch.zeros(1, dtype=torch.int64, device=device))  # these do not wait
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            waits(x)
    finally:
        torch.simulated.set_sync_debug_mode("default")
    waits(x)


# --- threads and orders -------------------------------------------------------------------------------------


def test_each_thread_has_its_own_current_stream(device):
    side, found = torch.simulated.Stream(), []
    with torch.simulated.stream(side):
        thread = threading.Thread(target=lambda: found.append(torch.simulated.current_stream()))
        thread.start()
        thread.join()
        assert torch.simulated.current_stream() is side
    assert found == [torch.simulated.default_stream()]


def test_several_threads_may_queue(device):
    sums = {}

    def work(number: int) -> None:
        with torch.simulated.stream(torch.simulated.Stream()):
            total = torch.zeros(1, device=device)
            for i in range(100):
                total += torch.full((1,), float(i), device=device)
            sums[number] = total.item()

    for order in range(6):
        seed(order)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == dict.fromkeys(range(4), 4950.0)
        sums.clear()


def test_a_seed_gives_the_same_order_each_time(device):
    def outcome(number: int) -> list[bool]:
        seed(number)
        torch.simulated.current_stream()
        streams = [torch.simulated.Stream() for _ in range(4)]
        values = [made_on(stream, device) + 1 for stream in streams for _ in range(5)]
        return [value.isnan().any().item() for value in values]

    outcomes = [outcome(number) for number in ORDERS]
    assert outcomes == [outcome(number) for number in ORDERS]
    assert len({tuple(each) for each in outcomes}) > 1
