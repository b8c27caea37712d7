"""Numbers of ``loader.metrics()`` and lines of span files: they equal what happened, on one rank and on several."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from forked_python import python
from graphs import random_data

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.counters import EpochTimes, Work
from salientpp.engine.spans import VARIABLE, SpanFile
from salientpp.loader.metrics import METRICS, RECENT, metric_of, numbers_of

FANOUTS = [4, 3]


def loader_of(data: Any = None, **options: Any) -> NeighborLoader:
    given = {"batch_size": 16, "shuffle": True, "seed": 0, **options}
    return NeighborLoader(random_data(200, 1500) if data is None else data, FANOUTS, **given)


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The lines of a rank's files, in the order in which the files were made."""
    paths = sorted(folder.glob(f"loader.global_rank_{rank}.*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_every_number_is_described_and_every_description_is_used():
    loader = loader_of()
    list(loader)
    found = loader.metrics(all_ranks=True)
    assert {metric_of(name)[0] for name in found} == set(METRICS)
    assert all(isinstance(number, (int, float)) for number in found.values())
    with pytest.raises(KeyError):
        metric_of("stage.seconds")


def test_numbers_of_an_epoch_add_up_and_begin_again():
    loader = loader_of(num_workers=1)
    assert loader.metrics(max_age=0)["batches"] == 0
    for _ in range(2):  # the second epoch does not contain the first
        for _ in loader:
            time.sleep(0.002)
        found = loader.metrics()
        assert found["batches"] == len(loader) == 13 and found["seeds"] == 200
        assert found["seconds"] == pytest.approx(found["wait.seconds"] + found["step.seconds"])
        assert found["step.p50"] >= 0.002 and found["step.seconds"] >= 12 * 0.002
        assert found["wait.p50"] <= found["wait.p95"] <= found["wait.p99"] <= found["wait.seconds"]
        assert found["batches_per_second"] == pytest.approx(13 / found["seconds"])
        assert found["work.draw.seconds"] > 0 and found["work.gather.seconds"] > 0
    assert found["epoch"] == 1
    total = loader.stats()
    assert total.batches == 26 and total.rows_host > found["rows.host"] > 0
    assert found["bytes.host"] == found["rows.host"] * total.row_bytes[None]


def test_recent_numbers_are_of_the_last_hundred_batches(monkeypatch: pytest.MonkeyPatch):
    loader, now = loader_of(batch_size=1), 0.0
    waits = iter([0.0] * 100 + [0.02] * 100)

    def slow(batch: Any) -> Any:
        nonlocal now
        now += next(waits)
        return batch

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    loader.transform = slow
    list(loader)
    found = loader.metrics()
    assert found["batches"] == 200 and found[f"{RECENT}batches"] == 100
    assert found[f"{RECENT}wait.p50"] == pytest.approx(0.02) and found["wait.p50"] == 0


def test_a_percentile_is_a_number_of_the_sorted_ones():
    times = EpochTimes(0)
    for i in range(100):
        times.log.extend((i, i + (i + 1) / 1000, 1))
    delivered, last, _ = times.read(10)
    found = numbers_of(delivered, last)
    assert [found[f"wait.p{p}"] for p in (50, 95, 99)] == pytest.approx([0.050, 0.095, 0.099])


def test_an_epoch_without_end_keeps_only_its_last_times():
    times = EpochTimes(0)
    for i in range(10_000):
        times.log.extend((i, i + 0.5, 2))
        times.settle(i)
        assert len(times.log) < 3 * 2 * 4096
    assert times.delivered == (10_000, 20_000, 5000, 9999 * 0.5)
    times.reset()
    assert times.delivered == (0, 0, 0, 0)
    for i in range(5000):
        times.log.extend((i, i + 0.5, 2))
    total, last, recent = times.read(100)
    assert total == (5000, 10_000, 2500, 4999 * 0.5) and len(last.waits) == 4096 and {*last.steps} == {0.5}
    assert last.total == (4096, 8192, 2048, 4095 * 0.5) and recent.total == (100, 200, 50, 99 * 0.5)


def test_numbers_within_their_age_are_returned_again_and_cannot_be_changed():
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    found = loader.metrics(max_age=1000)
    for change in (
        lambda: found.__setitem__("batches", -1), lambda: found.update(loss=1.0), lambda: found.pop("batches"), found.clear,
        lambda: found.setdefault("loss", 1.0), found.popitem, lambda: found.__delitem__("batches"), lambda: found.__ior__({"loss": 1.0}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"so it cannot be changed; change a copy, dict\(loader\.metrics\(\)\)"):
            change()
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found.copy(), {**found}):
        assert type(other) is dict and other == found
    assert json.loads(json.dumps(found)) == found and "loss" in found | {"loss": 1.0}
    next(batches)
    assert loader.metrics(max_age=1000)["batches"] == 1
    assert loader.metrics(max_age=0)["batches"] == 2


def test_numbers_begin_again_after_reset_and_stay_in_a_copy():
    loader = loader_of()
    list(loader)
    other = copy.copy(loader)
    assert other.metrics() == loader.metrics() and other.metrics()["batches"] == 13
    loader.reset_stats()
    assert loader.metrics()["batches"] == 0 and loader.metrics()["rows.host"] == 0
    list(loader)
    assert loader.metrics()["batches"] == 13


def test_a_reset_within_an_epoch_forgets_its_earlier_batches():
    loader = loader_of()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    loader.reset_stats()
    assert loader.metrics()["batches"] == loader.stats().batches == loader.stats().seeds == 0
    next(batches)
    time.sleep(0.01)
    assert len(list(batches)) == 7
    found, stats = loader.metrics(), loader.stats()
    assert found["batches"] == found[f"{RECENT}batches"] == stats.batches == 8 and found["seeds"] == stats.seeds == 120
    assert found["wait.seconds"] == stats.seconds_waiting and 0.01 <= found["step.seconds"] == stats.seconds_in_steps


def test_statistics_count_iterators_in_turns_and_iterators_that_are_dropped():
    loader = loader_of()
    one, other = iter(loader), iter(loader)
    for _ in range(3):
        next(one), next(other)
    assert loader.stats().batches == 6
    del one
    assert loader.stats().batches == 6
    assert len(list(other)) == 10 and loader.stats().batches == 16
    assert copy.deepcopy(loader).stats() == copy.copy(loader).stats() == loader.stats()


def test_a_batch_whose_transform_closes_the_epoch_is_counted():
    def close(batch: Any) -> Any:
        if loader.metrics(max_age=0)["batches"] == 2:
            batches.close()
        return batch

    loader = loader_of(transform=close)
    batches = iter(loader)
    assert len(list(batches)) == loader.stats().batches == loader.metrics()["batches"] == 3


def test_the_time_of_a_slow_sampler_is_told():
    class Slow(torch.utils.data.SequentialSampler):
        def __iter__(self) -> Any:
            for index in range(200):
                time.sleep(0.0005)
                yield index

    loader = loader_of(shuffle=False, sampler=Slow(range(200)))
    list(loader)
    assert 0.1 <= loader.metrics()["work.seeds.seconds"] <= loader.metrics()["wait.seconds"]


def test_batches_by_hand_count_the_gathering_of_rows_and_a_copy_knows_its_epoch():
    class Mine(NeighborLoader):
        def filter_fn(self, out: Any) -> Any:
            return super().filter_fn(out)

    loader = Mine(random_data(200, 1500), FANOUTS, batch_size=16, seed=0)
    list(loader), list(loader)
    assert loader.metrics()["work.gather.seconds"] > 0
    other = copy.deepcopy(loader)
    other.reset_stats()
    assert other.metrics()["epoch"] == 1
    loader.stats().row_bytes.clear()
    assert loader.stats().row_bytes


def test_an_epoch_left_early_keeps_its_numbers():
    loader = loader_of()
    for i, _ in enumerate(loader):
        if i == 4:
            break
    first = loader.metrics()
    assert first["batches"] == 5
    assert loader.metrics(max_age=0) == first


def test_the_transform_is_counted_by_itself():
    def slow(batch: Any) -> Any:
        time.sleep(0.003)
        return batch

    loader = loader_of(transform=slow)
    list(loader)
    found = loader.metrics()
    assert 13 * 0.003 <= found["transform.seconds"] <= found["stage.assemble.seconds"] <= found["wait.seconds"]


def test_spans_of_an_epoch_are_lines_with_known_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = [batch.n_id for batch in loader_of()]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "traces"))
    loader = loader_of(num_workers=2, transform=lambda batch: batch)
    for batch, n_id in zip(loader, expected, strict=True):
        assert torch.equal(batch.n_id, n_id)
    lines = lines_of(tmp_path / "new" / "traces")
    first, *spans, last = lines
    assert (first["log_type_name"], last["log_type_name"], last["event_name"]) == ("loader", "epoch", "0")
    assert first["context"]["cores"] >= 1 and not first["context"]["reads_files"]
    assert first["context"]["options"] == {"seed": 0} and first["context"]["batches_by_rank"] == [13]
    own = {name: number for name, number in loader.metrics().items() if not name.startswith(RECENT)}
    assert last["context"] == pytest.approx(own, rel=1e-6, abs=1e-3)
    trained = [span["step"] for span in spans if span["log_type_name"] == "train_end"]
    assert trained == [*range(12)], "the last step ends after the epoch"
    spans = [span for span in spans if span["log_type_name"] != "train_end"]
    by_name = {name: [span for span in spans if span["log_type_name"] == f"{name}_end"] for name in
               ("sample", "gather_host_rows", "assemble", "next", "transform", "draw")}  # fmt: skip
    assert {name: sorted(span["step"] for span in of) for name, of in by_name.items()} == dict.fromkeys(
        by_name, [*range(13)]
    )
    assert sum(map(len, by_name.values())) == len(spans)
    assert sum(span["value"] for span in by_name["next"]) / 1e3 == pytest.approx(own["wait.seconds"], rel=1e-3)
    assert {span["task_name"] for span in by_name["draw"]} <= {"salientpp-sample_0", "salientpp-sample_1"}
    assert {span["task_name"] for span in by_name["next"]} == {"main"}
    ends = [span["time_us"] for span in by_name["next"]]
    assert ends == sorted(ends) and ends[-1] <= time.time() * 1e6


def test_short_batches_are_written_less_often(tmp_path: Path):
    spans, now = SpanFile(tmp_path, 0), time.perf_counter()
    spans.add("next", 0, now, now)  # dropped: no line says yet whose spans these are
    spans.note("loader", {})
    for index in range(200_000):  # batches of a microsecond
        now += 1e-6
        spans.add("next", index, now - 1e-6, now)
    assert spans.every > 16
    written = [line["step"] for line in lines_of(tmp_path)[1:]]
    assert written[:1000] == [*range(1000)] and len(written) < 50_000
    assert all(later - earlier in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) for earlier, later in pairwise(written))


def test_each_loader_copy_and_forked_process_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    loader = loader_of()
    for each in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader_of(random_data(60, 300))))):
        list(each)
    files = [*tmp_path.iterdir()]
    assert len(files) == 3
    kinds = [[json.loads(line)["log_type_name"] for line in path.read_text().splitlines()] for path in files]
    assert all(of[0] == "loader" and of[-1] == "epoch" and of.count("loader") == 1 for of in kinds)


def _interrupted(folder: str) -> str:
    return f"""
import os, sys
os.environ[{VARIABLE!r}] = {folder!r}
from salientpp import NeighborLoader
from salientpp.testing.graphs import random_data
batches = iter(NeighborLoader(random_data(200, 1500), [4, 3], batch_size=16, seed=0))
next(batches), next(batches)
if os.fork() == 0:
    list(batches)  # the child has no description of its loader, so it writes nothing
    os._exit(0)
os.wait()
raise SystemExit(1)
"""


def test_a_script_that_ends_within_an_epoch_leaves_the_spans_until_then(tmp_path: Path):
    done = subprocess.run([python(), "-c", _interrupted(str(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["log_type_name"] == "next_end"] == [0, 1]


def test_a_profile_within_traced_epochs_changes_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "spans"))
    loader = loader_of()
    with loader.profile(tmp_path / "trace.json"):
        list(loader)
    list(loader)
    names = [line["log_type_name"] for line in lines_of(tmp_path / "spans")]
    assert names.count("sample_end") == 26 and names.count("epoch") == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "sample" for event in events) == 13


def test_a_folder_that_cannot_be_made_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "inside"))
    with pytest.raises(ValueError, match=r"SALIENTPP_TRACE_DIR must be a folder .*inside.*unset the variable"):
        loader_of()


def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    opened = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        return opened(Path("/dev/full") if path.parent == tmp_path else path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    loader = loader_of()
    with pytest.warns(UserWarning, match="spans are no longer written to .*No space left"):
        assert len(list(loader)) == 13
    assert len(list(loader)) == 13  # without a second warning, which would be an error here


def _compare(rank: int, root: str, folder: str, slow: int) -> dict[str, float]:
    import os

    os.environ[VARIABLE] = folder

    def transform(batch: Any) -> Any:
        time.sleep(0.2 * (rank == slow))
        return batch

    part = salientpp.load(root)
    loader = NeighborLoader(
        part, FANOUTS, "train", batch_size=4, shuffle=True, seed=0, ranks_per_host=1, transform=transform
    )
    for _ in loader:
        pass
    return loader.metrics(all_ranks=True)


def test_ranks_agree_on_the_slowest_and_write_what_they_measured_together(tmp_path: Path):
    salientpp.partition(random_data(300, 2400), 3, tmp_path / "parts", FANOUTS, 4)
    found = distributed.run(_compare, 3, str(tmp_path / "parts"), str(tmp_path / "traces"), 1)
    for rank, of_rank in enumerate(found):
        assert of_rank["rank"] == rank and of_rank["ranks"] == 3
        assert of_rank["ranks.slowest"] == 1 and of_rank["ranks.slowest.stage.transform"] >= 0.2
        assert (of_rank["peers.seconds"] > 0) and of_rank["rows.remote"] > 0
        assert of_rank["ranks.slowest.seconds"] == found[1]["seconds"] - found[1]["peers.seconds"]
    assert found[0]["peers.seconds"] > found[1]["peers.seconds"], "the others wait for the slow rank"
    for rank in range(3):
        first, *spans, last = lines_of(tmp_path / "traces", rank)
        context = first["context"]
        assert sorted(link[:2] for link in context["links"]) == [[a, b] for a in range(3) for b in range(3) if a != b]
        assert all(rate > 0 for _, _, rate in context["links"])
        sizes, rows = zip(*context["cache_forecast"])
        assert sizes[0] == 0 and list(sizes) == sorted(set(sizes)) and list(rows) == sorted(rows, reverse=True)
        assert rows[-1] == pytest.approx(0, abs=1e-6) and context["reads_files"]
        assert last["context"]["rows.remote"] == found[rank]["rows.remote"]
        names = {span["log_type_name"] for span in spans}
        assert {"peers_end", "gather_end", "exchange_rows_end", "next_end", "transform_end"} <= names


def _only_one_traces(rank: int, root: str, folder: str) -> int:
    import os

    if rank == 0:
        os.environ[VARIABLE] = folder
    part = salientpp.load(root)
    loader = NeighborLoader(part, FANOUTS, "train", batch_size=4, seed=0, ranks_per_host=1)
    return sum(1 for _ in loader)


def test_a_rank_may_trace_alone(tmp_path: Path):
    salientpp.partition(random_data(120, 900, train_fraction=0.5), 2, tmp_path / "parts", FANOUTS, 4)
    found = distributed.run(_only_one_traces, 2, str(tmp_path / "parts"), str(tmp_path / "traces"))
    assert all(found)
    assert lines_of(tmp_path / "traces")[0]["context"]["links"] == [] and not lines_of(tmp_path / "traces", 1)


def test_a_traced_loader_can_be_pickled_after_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    loader = loader_of()
    list(loader)
    other = pickle.loads(pickle.dumps(loader))
    assert other.metrics() == loader.metrics() and len(list(other)) == 13


def test_drawing_takes_no_negative_time_if_hooks_make_batches():
    class Hooked(NeighborLoader):
        def filter_fn(self, out: Any) -> Any:
            return super().filter_fn(out)

    loader = Hooked(random_data(200, 1500), FANOUTS, batch_size=16, seed=0)
    list(loader)
    loader([0, 1, 2])
    assert min(loader.stats().seconds_of_work.values()) >= 0


def test_a_new_loader_has_numbers_at_any_age_and_none_of_its_construction():
    loader = loader_of()
    found = loader.metrics(max_age=math.inf)
    assert found["batches"] == 0 and found["peers.seconds"] == 0 and found["ranks"] == 1


def test_numbers_go_on_after_a_reset_within_an_epoch():
    loader = loader_of()
    for i, _ in enumerate(loader):
        if i == 3:
            loader.reset_stats()
    found = loader.metrics()
    assert found["batches"] == 13 - 4 and found["seeds"] == 200 - 4 * 16 and found["rows.host"] > 0
    assert loader.stats().batches == 9 and loader.stats().seeds == 136


def test_totals_of_all_epochs_add_up():
    loader = loader_of()
    seconds = seeds = 0.0
    for _ in range(3):
        list(loader)
        seconds, seeds = seconds + loader.metrics()["seconds"], seeds + loader.metrics()["seeds"]
    assert loader.stats().seconds == pytest.approx(seconds) and loader.stats().seeds == seeds == 600


def test_an_epoch_ends_in_the_file_when_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    loader = loader_of()
    kept = []
    for _ in range(3):
        kept.append(batches := iter(loader))
        next(batches), next(batches)
    kept.clear()
    del batches
    ends = [line for line in lines_of(tmp_path) if line["log_type_name"] == "epoch"]
    assert [(line["event_name"], line["context"]["batches"]) for line in ends] == [("0", 2), ("1", 2), ("2", 2)]


def test_profiles_within_profiles_record_traced_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "spans"))
    loader = loader_of()
    with loader.profile(tmp_path / "outer.json"), loader.profile(tmp_path / "inner.json"):
        list(loader)
    numbers = [len(json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]) for name in ("outer", "inner")]
    assert numbers[0] == numbers[1] > 13
    assert sum(line["log_type_name"] == "sample_end" for line in lines_of(tmp_path / "spans")) == 13


def test_the_seconds_of_threads_that_have_ended_are_kept_together():
    work = Work({"draw": 1.0})
    for _ in range(50):
        thread = threading.Thread(target=work.add, args=("draw", 0.5))
        thread.start()
        thread.join()
    work.add("gather", 0.25)
    for each in (work, pickle.loads(pickle.dumps(work))):
        assert each.seconds == {"draw": 26.0, "gather": 0.25}
    work.reset()
    assert work.seconds.get("draw", 0) == 0


def _without_seeds(rank: int, root: str, folder: str) -> float:
    import os

    os.environ[VARIABLE] = folder
    part = salientpp.load(root)
    own = part.book.range_of(rank)
    seeds = torch.arange(*own)[: 0 if rank == 1 else 20]
    loader = NeighborLoader(part, FANOUTS, seeds, batch_size=4, seed=0, ranks_per_host=1)
    for _ in range(2):
        list(loader)
    return loader.metrics()["batches"]


def test_a_rank_without_seeds_writes_its_epochs_too(tmp_path: Path):
    salientpp.partition(random_data(120, 900), 2, tmp_path / "parts", FANOUTS, 4)
    assert distributed.run(_without_seeds, 2, str(tmp_path / "parts"), str(tmp_path / "traces")) == [5, 0]
    for rank in range(2):
        ends = [line["event_name"] for line in lines_of(tmp_path / "traces", rank) if line["log_type_name"] == "epoch"]
        assert ends == ["0", "1"]


def _leaves_early(rank: int, root: str, folder: str) -> int:
    import os
    import warnings

    if rank == 0:
        os.environ[VARIABLE] = folder
    loader = NeighborLoader(salientpp.load(root), FANOUTS, "train", batch_size=4, seed=0, ranks_per_host=1)
    batches, given = iter(loader), 0
    next(batches)
    if rank == 0:  # its file cannot be written any more, and warnings are errors
        shutil.rmtree(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches.close()  # type: ignore[attr-defined]
        return 0
    for _ in batches:
        given += 1
    return given


def test_a_rank_that_cannot_write_its_spans_still_answers_the_others(tmp_path: Path):
    salientpp.partition(random_data(120, 900, train_fraction=0.5), 2, tmp_path / "parts", FANOUTS, 4)
    _, given = distributed.run(_leaves_early, 2, str(tmp_path / "parts"), str(tmp_path / "traces"))
    assert given > 3


def test_a_forked_child_records_its_own_epochs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    if (pid := os.fork()) == 0:
        list(loader)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    list(batches)
    for path in tmp_path.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        own = f"-{pid}-" in path.name
        assert lines[0]["log_type_name"] == "loader"
        assert [line["event_name"] for line in lines if line["log_type_name"] == "epoch"] == ["1" if own else "0"]


def test_a_reset_finds_the_epoch_that_was_begun_last():
    loader = loader_of()
    loader.set_epoch(5)
    kept = iter(loader)
    list(kept)
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches)
    loader.reset_stats()
    next(batches), next(batches)
    found = loader.metrics()
    assert (found["epoch"], found["batches"]) == (0, 2) == (0, loader.stats().batches)
