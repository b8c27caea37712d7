"""Laws of damaged records: an error names the file and the field, and no value is taken that cannot be."""

from __future__ import annotations

import json
import re

import pytest
from traces import Times, write

from salientpp.report.read import read_run, spans_of
from salientpp.report.run_page import numbers_of

TWO = [Times(batches=12), Times(batches=12, transform=0.1)]


def damaged(folder, change, line=0, rank=1):
    """Writes records, of which one line has a damaged value."""
    path = write(folder, TWO)[rank]
    lines = path.read_text().splitlines(keepends=True)
    record = json.loads(lines[line])
    change(record)
    lines[line] = json.dumps(record) + "\n"
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", "2"), ("ranks", 2.5), ("ranks", -1), ("ranks", 100_001), ("ranks", 10**30), ("ranks", [2]),
        ("links", 5), ("links", [3]), ("links", [[0, 1]]), ("links", [[0, 1, "fast"]]), ("links", [[0, None, 1e9]]), ("links", {"0": 1}),
        ("cache_forecast", 7), ("cache_forecast", [[1]]), ("cache_forecast", [["a", "b"]]), ("cache_forecast", [1, 2]),
        ("batches_by_rank", "12"), ("batches_by_rank", [None]), ("row_bytes", [512]), ("row_bytes", {"": "wide"}),
        ("num_workers", "many"), ("num_workers", -1), ("cores", "all"), ("depth", [10]), ("own_rows", 1e400), ("options", [1]),
        ("class", json.loads("[" * 200 + "]" * 200)),
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused(tmp_path, field, value):
    path = damaged(tmp_path, lambda record: record["context"].__setitem__(field, value))
    with pytest.raises(ValueError, match=rf"{path.name}: expected .* in '{field}', got .*; remove the file, or train"):
        read_run(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("seconds", -3), ("stage.sample.seconds", -0.5), ("batches", 10**400)])
def test_a_damaged_number_of_an_epoch_is_refused(tmp_path, field, value):
    path = damaged(tmp_path, lambda record: record["context"].__setitem__(field, value), line=-1)
    with pytest.raises(ValueError, match=rf"{path.name}: expected a number of 0 or more in '{field}', got "):
        read_run(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("value", -5.0), ("value", 1e300), ("step", -1), ("time_us", -1)])
def test_a_damaged_span_is_refused(tmp_path, field, value):
    path = damaged(tmp_path, lambda record: record.__setitem__(field, value), line=3, rank=0)
    log = read_run(tmp_path).logs[0]
    with pytest.raises(ValueError, match=rf"{path.name}: expected .* in '{field}', got {re.escape(repr(value))}"):
        spans_of(log, 0)


@pytest.mark.parametrize("name", ["9" * 16, "9" * 5000])
def test_an_epoch_of_a_huge_number_is_refused(tmp_path, name):
    path = damaged(tmp_path, lambda record: record.__setitem__("event_name", name), line=-1)
    with pytest.raises(ValueError, match=rf"{path.name}: expected the number of an epoch in 'event_name', got '9+"):
        read_run(tmp_path)


def test_lists_inside_each_other_are_no_record(tmp_path):
    _, second = write(tmp_path, TWO)
    second.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(ValueError, match=f"{second.name}: expected a record of a loader on each line, got"):
        read_run(tmp_path)


def test_a_rank_beyond_the_ranks_of_the_run_is_noted(tmp_path):
    _, second = write(tmp_path, TWO)
    second.rename(second.with_name(second.name.replace("global_rank_1", "global_rank_7")))
    run = read_run(tmp_path)
    assert [log.rank for log in run.logs] == [0, 7]
    assert run.notes == (
        "Records of rank 1 are missing: the directory may be on another host.",
        "There are records of rank 7, though the run says that it had 2 ranks.",
    )
    assert numbers_of(run)["verdict"]["sentences"]


def test_few_of_many_missing_ranks_are_listed(tmp_path):
    first, second = write(tmp_path, TWO)
    second.unlink()
    first.write_text(first.read_text().replace('"ranks": 2', '"ranks": 90000'))
    assert read_run(tmp_path).notes[0].startswith("Records of ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 89,989 more are")


def test_numbers_of_rounding_and_of_no_time_make_a_verdict(tmp_path):
    """Differences of times may be a little below 0, and an epoch may take no time."""
    for path in write(tmp_path, TWO, epochs=1):
        lines = path.read_text().splitlines(keepends=True)
        record = json.loads(lines[-1])
        record["context"] = dict.fromkeys(record["context"], 0.0) | {"batches": 12, "peers.seconds": -1e-9}
        path.write_text(lines[0] + json.dumps(record) + "\n")
    assert numbers_of(read_run(tmp_path))["verdict"]["sentences"]
