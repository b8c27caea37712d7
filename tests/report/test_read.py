"""Laws of reading records: whole lines count, and wrong files are refused with an error that says what to do."""

from __future__ import annotations

import json

import pytest
from traces import BEGIN, Times, made, write

from salientpp.report.read import read_run, spans_of
from salientpp.report.run_page import numbers_of, words

TWO = [Times(batches=12), Times(batches=12, transform=0.1)]


def test_epochs_and_spans_are_read_as_they_were_written(tmp_path):
    write(tmp_path, TWO, epochs=3)
    run = read_run(tmp_path)
    assert (run.ranks, run.loader, run.epochs, run.notes) == (2, 0, [0, 1, 2], ())
    number, logs = run.of_epoch()
    assert number == 2 and [(log.rank, log.host) for log in logs] == [(0, "node-0"), (1, "node-1")]
    for log, each in zip(logs, made(TWO, epoch=2, begin=BEGIN + 2001)):
        assert log.about == each.about and log.epochs[2].numbers == each.numbers
        spans = spans_of(log, 2)
        assert len(spans) == len(each.spans)
        for span in spans:
            (wanted,) = (s for s in each.spans if s[:3] == (span.name, span.track, span.batch))
            assert (span.start, span.seconds) == pytest.approx(wanted[3:], abs=2e-6)


def test_a_file_may_end_anywhere(tmp_path):
    """Every shorter file is read. Its whole epochs equal the same epochs of the whole file."""
    first, _ = write(tmp_path, [Times(batches=2), Times(batches=2)], epochs=2)
    whole, text = read_run(tmp_path).logs[0].epochs, first.read_bytes()
    begin = text.index(b"\n") + 1
    for end in [*range(begin, len(text), 97), *(i + 1 for i, byte in enumerate(text) if byte == 10)]:
        first.write_bytes(text[:end])
        run = read_run(tmp_path)
        for number, epoch in run.logs[0].epochs.items():
            if epoch.is_whole:
                assert epoch == whole[number]
            else:
                assert 0 < epoch.numbers["batches"] <= 2
                names = ("wait.seconds", "step.seconds", "stage.sample.seconds", "stage.assemble.seconds", "seconds")
                assert all(epoch.numbers[name] <= whole[number].numbers[name] + 1e-5 for name in names)


def test_an_unfinished_epoch_has_the_sums_of_its_spans(tmp_path):
    first, _ = write(tmp_path, TWO, epochs=1)
    whole = read_run(tmp_path).logs[0].epochs[0].numbers
    first.write_text("".join(first.read_text().splitlines(keepends=True)[:-1]))
    epoch = read_run(tmp_path).logs[0].epochs[0]
    assert not epoch.is_whole
    assert epoch.numbers == pytest.approx({name: whole[name] for name in epoch.numbers}, abs=2e-5)
    assert read_run(tmp_path).of_epoch()[0] == 0


def test_the_last_epoch_of_all_ranks_is_chosen(tmp_path):
    first, _ = write(tmp_path, TWO, epochs=3)
    lines = first.read_text().splitlines(keepends=True)
    ends = [place for place, line in enumerate(lines) if '"epoch"' in line]
    first.write_text("".join(lines[: ends[1] + 20]))  # rank 0 ends within epoch 2
    run = read_run(tmp_path)
    assert run.epochs == [0, 1, 2] and run.of_epoch()[0] == 1
    number, logs = run.of_epoch(2)
    assert number == 2 and [log.epochs[2].is_whole for log in logs] == [False, True]


def test_a_missing_rank_is_noted(tmp_path):
    _, second = write(tmp_path, TWO)
    second.unlink()
    run = read_run(tmp_path)
    assert [log.rank for log in run.logs] == [0] and run.ranks == 2
    assert run.notes == ("Records of rank 1 are missing: the directory may be on another host.",)


def test_the_latest_run_and_the_longest_loader_are_chosen(tmp_path):
    write(tmp_path, [Times(batches=30)] * 3, pid=90, begin=BEGIN - 1000)
    write(tmp_path, TWO)
    write(tmp_path, [Times(batches=3)] * 2, loader=1)
    run = read_run(tmp_path)
    assert (run.loader, run.others, run.ranks) == (0, [1], 2)
    assert {log.path.name.split("-")[2] for log in run.logs} == {"100"}
    assert "loader 1; --loader shows" in run.notes[0] and "3 files of earlier runs were left aside" in run.notes[1]
    assert read_run(tmp_path, loader=1).of_epoch()[1][0].epochs[0].numbers["batches"] == 3


def test_a_rank_that_is_missing_in_the_latest_run_is_not_taken_from_an_earlier_one(tmp_path):
    write(tmp_path, TWO, pid=90, begin=BEGIN - 5000)
    _, second = write(tmp_path, TWO)
    second.unlink()
    run = read_run(tmp_path)
    assert [(log.rank, log.started) for log in run.logs] == [(0, BEGIN)]
    assert [note.split()[0] for note in run.notes] == ["2", "Records"]


def test_an_empty_file_is_noted_and_others_are_ignored(tmp_path):
    first, second = write(tmp_path, TWO)
    second.write_text(second.read_text()[:50])
    (tmp_path / "trainer.jsonl").write_text("not a record\n")
    assert f"{second.name} has no whole line." in read_run(tmp_path).notes
    first.write_text("")
    with pytest.raises(ValueError, match="expected records, got 2 files without a whole line; train again with"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hello\n", r"expected a record of a loader on each line, got 'hello'; remove the file, or train again"),
        ("[1]\n", r"expected a record of a loader on each line, got '\[1\]'"),
        ("\0\xff\n", "expected a record of a loader on each line"),
        ("{}\n", "expected a record of a loader on each line, got '{}'"),
        ('{"log_type_name": "loader", "time_us": 1, "context": []}\n', "expected a record of a loader on each line"),
        ('{"log_type_name": "loader", "time_us": "1"}\n', "expected a record of a loader on each line"),
        (
            json.dumps({"log_type": "instant", "log_type_name": "epoch", "time_us": 1}) + "\n",
            "expected a description of a loader on line 1, got 'epoch'; remove the file",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, error):
    _, second = write(tmp_path, TWO)
    second.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{second.name}: {error}"):
        read_run(tmp_path)


def test_a_loader_that_was_never_iterated_has_no_epoch(tmp_path):
    first, second = write(tmp_path, TWO)
    for path in (first, second):
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="expected at least one epoch of loader 0, got none; iterate the loader"):
        read_run(tmp_path).of_epoch()
    write(tmp_path, TWO)
    first.write_text(first.read_text().splitlines(keepends=True)[0])
    run = read_run(tmp_path)
    assert run.of_epoch()[0] == 1 and [log.rank for log in run.of_epoch()[1]] == [1]
    assert "Rank 0 has no records of epoch 1." in numbers_of(run)["notes"]


def test_a_damaged_span_is_refused_where_it_is_read(tmp_path):
    first, _ = write(tmp_path, TWO)
    lines = first.read_text().splitlines(keepends=True)
    lines[5] = "x" * 100 + "\n"
    first.write_text("".join(lines))
    log = read_run(tmp_path).logs[0]
    with pytest.raises(ValueError, match=r"got 'x{60}'"):
        spans_of(log, 0)
    assert spans_of(log, 1)


def test_a_folder_without_records_is_refused(tmp_path):
    for folder, text in ((tmp_path, "expected files loader.global_rank_"), (tmp_path / "no", "got no directory")):
        with pytest.raises(ValueError, match=f"{text}.*SALIENTPP_TRACE_DIR=DIR in the environment of every rank"):
            read_run(folder)
    write(tmp_path, TWO)
    with pytest.raises(ValueError, match="expected one of the loaders 0, got 7; choose another --loader"):
        read_run(tmp_path, 7)
    with pytest.raises(ValueError, match="expected epoch 0 or 1 of loader 0, got 5; choose another --epoch"):
        read_run(tmp_path).of_epoch(5)


def changed(path, change):
    """Writes the lines of a file again, each as ``change`` returns it; without a line for which it returns None."""
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records if record is not None))


@pytest.mark.parametrize("every", [(1,), (4,), (1, 2, 8)])
def test_batches_that_were_not_recorded_count_in_an_unfinished_epoch(tmp_path, every):
    """A loader with short batches records one of some batches, and changes their distance while the epoch runs."""
    first, _ = write(tmp_path, [Times(batches=96, transform=0.05)] * 2, epochs=1)
    whole = read_run(tmp_path).logs[0].epochs[0].numbers

    def thinned(record):
        step = record["step"]
        is_left_out = record["log_type"] == "event" and step % every[step * len(every) // 96]
        return None if is_left_out or record["log_type_name"] == "epoch" else record

    changed(first, thinned)
    epoch = read_run(tmp_path).logs[0].epochs[0]
    last = 96 - every[-1]  # the last recorded batch
    assert not epoch.is_whole and epoch.numbers["batches"] == last + 1
    for name in ("seconds", "wait.seconds", "step.seconds", "transform.seconds", "stage.sample.seconds"):
        assert epoch.numbers[name] == pytest.approx(whole[name] * (last + 1) / 96, rel=0.02), name
    (note,) = [note for note in numbers_of(read_run(tmp_path))["notes"] if "not finished" in note]
    assert note.endswith("About one batch in 4 was recorded, and counts as 4.") == (every == (4,))


def test_an_epoch_that_was_left_early_is_not_taken_for_a_whole_one(tmp_path):
    paths = write(tmp_path, TWO, epochs=3)

    def left(record):
        if record["event_name"] == "2":
            record["context"]["batches"] = 5
        return record

    changed(paths[0], left)
    run = read_run(tmp_path)
    assert run.of_epoch()[0] == 1 and [log.epochs[2].is_left_early for log in run.logs] == [True, False]
    assert numbers_of(run)["notes"] == ["Epochs that were left early are not explained: 2."]
    of_two = numbers_of(run, 2)
    assert of_two["notes"] == ["Epoch 2 was left before its last batch on rank 0."]
    assert not any(finding["cause"] == "uneven" for finding in of_two["verdict"]["findings"])


def test_an_epoch_that_began_in_its_middle_was_not_left_early(tmp_path):
    for path in write(tmp_path, TWO, epochs=1):

        def resumed(record):
            if record["log_type_name"] == "epoch":
                record["context"]["batches"] = 5
            return None if record["log_type"] == "event" and record["step"] < 7 else record

        changed(path, resumed)
    assert not any(log.epochs[0].is_left_early for log in read_run(tmp_path).logs)


def test_short_epochs_are_explained_together(tmp_path):
    write(tmp_path, [Times(batches=7, transform=0.3), Times(batches=7)], epochs=4)
    numbers = numbers_of(read_run(tmp_path))
    assert (numbers["epoch"], numbers["pooled"]) == (3, [1, 2, 3])
    assert numbers["verdict"]["sentences"][0].startswith("Rank 0 is the slowest: its `transform` takes 0.3 s of 0.3")
    assert numbers["ranks"][0]["batches"] == 7 and sum(numbers["ranks"][0]["parts"].values()) == pytest.approx(
        numbers["ranks"][0]["seconds"]
    )
    assert (
        "An epoch has few batches, so numbers are means over epochs 1 to 3. The timeline shows epoch 3."
        in numbers["notes"]
    )
    assert words(numbers)[1].startswith("Mean of epochs 1 to 3 of loader 0: 2 ranks, ")
    one = numbers_of(read_run(tmp_path), 3)
    assert one["pooled"] == [3] and "is probably `transform`" in one["verdict"]["sentences"][0]


def test_two_short_epochs_are_not_enough(tmp_path):
    write(tmp_path, [Times(batches=7)] * 2, epochs=2)  # the first also reads files
    numbers = numbers_of(read_run(tmp_path))
    assert numbers["pooled"] == [1] and "too short for a sure answer" in numbers["verdict"]["sentences"][0]
    write(tmp_path, [Times(batches=40)] * 2, epochs=3)
    assert numbers_of(read_run(tmp_path))["pooled"] == [2]


def test_ranks_of_two_runs_soon_after_each_other_are_not_mixed(tmp_path):
    """The second run begins while the first may still have ended by the clock of another host, and only rank 0 wrote records here."""
    write(tmp_path, TWO, epochs=1, pid=90, begin=BEGIN - 30)
    _, second = write(tmp_path, TWO, epochs=1)
    assert len(read_run(tmp_path).logs) == 2
    second.unlink()
    run = read_run(tmp_path)
    assert [(log.rank, log.started) for log in run.logs] == [(0, BEGIN)]
    assert run.notes[0] == "2 files of earlier runs were left aside; use one directory for each run."
    next(tmp_path.glob("*global_rank_1.*")).unlink()
    assert read_run(tmp_path).notes[0] == "1 file of an earlier run was left aside; use one directory for each run."
