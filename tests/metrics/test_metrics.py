"""Laws of salientpp.metrics: each tool gets the numbers of ``loader.metrics()``, and none keeps the loader alive or breaks the training."""

from __future__ import annotations

import contextlib
import csv
import gc
import logging
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import distributed
import pytest
import torch
from graphs import random_data

import salientpp
import salientpp.metrics
from salientpp import NeighborLoader
from salientpp.lightning import FollowingLoader, LightningNodeData
from salientpp.loader.metrics import METRICS
from salientpp.metrics import instruments
from salientpp.metrics.exposition import prometheus
from salientpp.metrics.instruments import otel
from salientpp.metrics.line import progress
from salientpp.metrics.series import Reader, all_series, series_of

NUMBERS = {
    "epoch": 0.0, "rank": 3.0, "ranks": 4.0, "batches": 10.0, "seconds": 2.0, "wait.share": 0.25, "batches_per_second": 5.0,
    "stage.sample.seconds": 0.5, "stage.exchange_rows.seconds": 0.75, "rows.cache": 7.0, "bytes.cache": 70.0, "bytes.received": 25e6,
    "memory.graph": 4096.0, "ranks.slowest.stage.step": 1.5, "recent.wait.share": 0.04, "recent.batches_per_second": 1203.4, "recent.batches": 8.0,
}  # fmt: skip


class Fake:
    """Object with the numbers of a loader, which a test changes."""

    def __init__(self, **numbers: float) -> None:
        self.numbers = {**NUMBERS, **numbers}

    def metrics(self, all_ranks: bool = False, max_age: float = 1.0) -> dict[str, float]:
        return {**self.numbers, **({"ranks.slowest": 1.0} if all_ranks else {})}

    def stats(self) -> SimpleNamespace:
        stages = {key.split(".")[1]: number for key, number in self.numbers.items() if key.startswith("stage.")}
        return SimpleNamespace(
            batches=self.numbers["batches"], seconds=self.numbers["seconds"], seconds_by_stage=stages, rows_cache=7.0,
            bytes_received=self.numbers["bytes.received"], by_type={None: {"cache": 7.0}}, row_bytes={None: 10},
        )  # fmt: skip


class Broken(Fake):
    def metrics(self, all_ranks: bool = False, max_age: float = 1.0) -> dict[str, float]:
        raise RuntimeError("the loader is broken")


@pytest.fixture
def loader() -> NeighborLoader:
    """A loader that has given one epoch."""
    made = NeighborLoader(random_data(), [3, 2], random_data().train_mask, batch_size=16, num_workers=1)
    assert len(list(made)) == len(made)
    return made


# --- series -----------------------------------------------------------------------------------------------


def test_variable_parts_of_names_become_labels():
    for key, name, labels in (
        ("wait.share", "wait.share", ()),
        ("stage.sample.seconds", "stage.seconds", (("stage", "sample"),)),
        ("rows.cache", "rows", (("tier", "cache"),)),
        ("bytes.sent", "bytes.sent", ()),
        ("memory.graph", "memory", (("kind", "graph"),)),
        ("ranks.slowest.stage.draw", "ranks.slowest.stage", (("stage", "draw"),)),
        ("recent.wait.share", "recent.wait.share", ()),
    ):
        found = series_of(key)
        assert (found.name, found.labels) == (name, labels) and found.name in all_series()
    assert series_of("no.such.number") is None
    assert series_of("recent.batches").metric.kind == "gauge" and series_of("batches").metric.kind == "counter"


def test_every_number_of_a_loader_has_a_series(loader):
    found = loader.metrics(all_ranks=True)
    assert {series_of(key).name for key in found if key != "rank"} <= all_series().keys()
    assert len({(series_of(key).name, series_of(key).labels) for key in found}) == len(found)
    assert {name for name in all_series() if not name.startswith("recent.")} >= {
        key for key in METRICS if key.islower() and key != "rank"
    }


def test_counters_never_decrease_when_statistics_are_reset():
    fake = Fake()
    reader = Reader(fake)

    def batches() -> float:
        rank, values = reader.read()
        assert rank == 3
        return next(number for series, number in values if series.name == "batches")

    seen = []
    for number in (10, 12, 5, 9, 20, 1, 2):
        fake.numbers["batches"] = float(number)
        seen.append(batches())
    assert seen == [10, 12, 17, 21, 32, 33, 34]


def test_a_reader_works_in_a_child_that_is_forked_while_it_reads():
    fake, entered, go_on = Fake(), threading.Event(), threading.Event()
    read, reader = fake.metrics, Reader(fake)

    def slow() -> dict[str, float]:
        entered.set()
        assert go_on.wait(distributed.HANG)
        return read()

    fake.metrics = slow
    thread = threading.Thread(target=reader.read)
    thread.start()
    assert entered.wait(distributed.HANG)

    def in_child() -> bool:
        fake.metrics = read
        return reader.read()[0] == 3

    assert holds_in_child(in_child)
    go_on.set()
    thread.join()


def holds_in_child(condition: Callable[[], bool]) -> bool:
    """True if a condition holds in a forked child, which is killed if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(0 if condition() else 1)
        except BaseException:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_totals_are_exact_however_rarely_they_are_read(tmp_path):
    distributed.run(_check_totals, 2, str(salientpp.partition(random_data(), 2, tmp_path / "d", [3, 2], 16).root))


def _check_totals(rank: int, root: str) -> None:
    made = NeighborLoader(salientpp.load(root), [3, 2], "train", batch_size=16, num_workers=1, ranks_per_host=1)
    reader = Reader(made)

    def read() -> dict[str, float]:
        return {
            ".".join([series.name, *(word for _, word in series.labels)]): number for series, number in reader.read()[1]
        }

    before, rows, batches = read(), 0, 0
    sums = dict.fromkeys(("seeds", "seconds", "step.seconds", "wait.seconds"), 0.0)
    assert before["batches"] == before["rows.host"] == 0
    for epoch in range(5):
        for batch in made:
            rows, batches = rows + batch.num_nodes, batches + 1
        of_epoch = made.metrics(max_age=0.0)
        sums = {name: number + of_epoch[name] for name, number in sums.items()}
        if epoch == 3:
            read()
    for _ in range(2):
        found = read()
        assert found["batches"] == batches and sum(found[f"rows.{tier}"] for tier in ("host", "remote")) == rows
        assert {name: found[name] for name in sums} == pytest.approx(sums) and sums["seeds"] > 0
        assert found["bytes.received"] >= found["bytes.remote"] > 0 and found["stage.seconds.sample"] > 0
        assert all(number >= before[name] for name, number in found.items() if series_kind(name) == "counter")
        before = found
        made.reset_stats()


def series_kind(name: str) -> str:
    return next(metric.kind for own, metric in all_series().items() if name == own or name.startswith(f"{own}."))


# --- OpenTelemetry ----------------------------------------------------------------------------------------


def observed(*loaders: object) -> dict:
    """The observations of loaders "0", "1" and so on: name -> {attributes: value}, and name -> (unit, text, kind of data)."""
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    provider = metrics.MeterProvider([reader])
    for number, loader in enumerate(loaders):
        otel(loader, provider.get_meter("test"), name=str(number))

    def read() -> dict:
        data = reader.get_metrics_data()
        return {
            metric.name: (
                {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points},
                metric.unit,
                metric.description,
                type(metric.data).__name__,
            )
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    return {"read": read, "provider": provider}


def test_instruments_observe_the_numbers():
    fake = Fake()
    found = observed(fake)["read"]()
    own = (("salientpp.loader", "0"), ("salientpp.rank", 3))
    assert found["salientpp.loader.batches"] == ({own: 10.0}, "{batch}", METRICS["batches"].text, "Sum")
    assert found["salientpp.loader.wait.share"] == ({own: 0.25}, "1", METRICS["wait.share"].text, "Gauge")
    stages = {(*own, ("salientpp.stage", "sample")): 0.5, (*own, ("salientpp.stage", "exchange_rows")): 0.75}
    assert found["salientpp.loader.stage.seconds"][:2] == (stages, "s")
    assert found["salientpp.loader.memory"][:2] == ({(("salientpp.kind", "graph"), *own): 4096.0}, "By")
    assert found["salientpp.loader.recent.batches"][3] == "Gauge"
    assert sum(len(points) for points, *_ in found.values()) == len(NUMBERS) - 1  # without rank


def test_loaders_of_one_meter_are_told_apart(caplog):
    first, second = Fake(), Fake(batches=20.0)
    with caplog.at_level(logging.WARNING):
        both = observed(first, second)
    assert not caplog.records
    found = both["read"]()["salientpp.loader.batches"][0]
    rank = ("salientpp.rank", 3)
    assert found == {(("salientpp.loader", "0"), rank): 10.0, (("salientpp.loader", "1"), rank): 20.0}
    later = Fake(batches=30.0)
    otel(later, both["provider"].get_meter("test"), name="1")
    without_names = Fake(batches=40.0), Fake(batches=50.0)
    for each in without_names:
        otel(each, both["provider"].get_meter("test"))
    assert sorted(both["read"]()["salientpp.loader.batches"][0].values()) == [10, 30, 40, 50]


def test_a_loader_that_is_gone_or_broken_breaks_no_exporter(caplog):
    fake = Fake()
    broken = Broken()
    both = observed(fake, broken)
    with caplog.at_level(logging.WARNING):
        own = (("salientpp.loader", "0"), ("salientpp.rank", 3))
        assert both["read"]()["salientpp.loader.batches"][0] == {own: 10.0}
    assert "the loader is broken" in caplog.text
    there = weakref.ref(fake)
    del fake
    gc.collect()
    assert there() is None and both["read"]() == {}


def test_an_export_has_numbers_of_one_moment():
    class Running(Fake):
        """Loader whose numbers change whenever they are read."""

        def stats(self) -> SimpleNamespace:
            for name in ("batches", "seconds"):
                self.numbers[name] += 1.0
            return super().stats()

    both = Running(batches=0.0, seconds=0.0), Running(batches=0.0, seconds=0.0)
    exporter = observed(*both)
    for number in (1.0, 2.0, 3.0):
        found = exporter["read"]()
        for name in ("batches", "seconds"):
            assert [*found[f"salientpp.loader.{name}"][0].values()] == [number] * 2


def test_numbers_of_an_earlier_export_are_not_kept_for_other_instruments(monkeypatch):
    pytest.importorskip("opentelemetry.metrics")
    reader = Reader(fake := Fake())
    readings = instruments._Readings({reader.name: reader})
    assert readings.of("batches")[0].value == 10.0
    fake.numbers["seconds"] = 4.0
    assert readings.of("seconds")[0].value == 2.0
    monkeypatch.setattr(instruments, "MAX_AGE", -1.0)
    assert readings.of("recent.batches")[0].value == 8.0 and readings.of("seconds")[0].value == 4.0


def test_the_global_meter_provider_is_the_default(monkeypatch):
    api = pytest.importorskip("opentelemetry.metrics")
    made = []

    class Meter:
        def create_observable_gauge(self, name: str, **options: object) -> None:
            made.append(name)

        create_observable_counter = create_observable_gauge

    monkeypatch.setattr(api, "get_meter", lambda name, version: Meter())
    instruments._global_meter.cache_clear()
    for _ in range(2):
        otel(Fake())
    instruments._global_meter.cache_clear()
    assert sorted(made) == sorted(f"salientpp.loader.{name}" for name in all_series())
    assert all(re.fullmatch(r"[a-z][a-z0-9_.]{0,254}", name) for name in made)


def test_a_real_loader_is_observed(loader):
    found = observed(loader)["read"]()
    own = (("salientpp.loader", "0"), ("salientpp.rank", 0))
    assert found["salientpp.loader.batches"][0] == {own: len(loader)}
    (graph,) = [
        value
        for attributes, value in found["salientpp.loader.memory"][0].items()
        if ("salientpp.kind", "graph") in attributes
    ]
    assert graph == loader.memory_used()["graph"] > 0


# --- Prometheus -------------------------------------------------------------------------------------------

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*=\"(?:[^\"\\\n]|\\[\\\"n])*\",?)*)\} (\S+)")


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name and labels. Each name must have one HELP line, one TYPE line and then all its samples."""
    assert text.endswith("\n") or not text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    lines = iter(text.splitlines())
    current = kind = ""
    for line in lines:
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in found and len(line.split(" ", 3)) == 4
            found[current] = {}
            words = next(lines).split(" ")
            assert words[:3] == ["#", "TYPE", current] and words[3] in ("counter", "gauge") and len(words) == 4
            kind = words[3]
            assert current.endswith("_total") == (kind == "counter")
            continue
        name, labels, number = SAMPLE.fullmatch(line).groups()
        key = tuple(sorted(labels.split(",")))
        assert name == current and key not in found[name]
        found[name][key] = float(number)
        assert kind == "gauge" or found[name][key] >= 0
    assert all(found.values())
    return found


def fetched(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=distributed.HANG) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_endpoint_gives_the_numbers_as_text():
    fake, own = Fake(), ('loader="train"', 'rank="3"')
    with prometheus(fake, port=0, name="train") as exposition:
        status, kind, text = fetched(exposition.port)
        assert status == 200 and kind == "text/plain; version=0.0.4; charset=utf-8" and text == exposition.text()
        found = parsed(text)
        assert found["salientpp_loader_batches_total"] == {own: 10.0}
        assert found["salientpp_loader_stage_seconds_total"][(*own, 'stage="exchange_rows"')] == 0.75
        assert found["salientpp_loader_memory_bytes"] == {('kind="graph"', *own): 4096.0}
        assert found["salientpp_loader_bytes_total"] == {(*own, 'tier="cache"'): 70.0}
        assert found["salientpp_loader_recent_wait_share"] == {own: 0.04}
        fake.numbers |= {"epoch": 1.0, "batches": 2.0, "wait.share": math.nan, "seconds": math.inf}
        found = parsed(fetched(exposition.port)[2])
        assert found["salientpp_loader_batches_total"] == {own: 12.0}
        assert math.isnan(found["salientpp_loader_wait_share"][own])
        assert found["salientpp_loader_seconds_total"] == {own: math.inf}
        assert fetched(exposition.port, "/other")[0] == 404
        del fake
        gc.collect()
        assert fetched(exposition.port)[::2] == (200, "")
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetched(exposition.port)
    exposition.close()


def test_two_loaders_of_a_process_have_different_series():
    fakes = Fake(), Fake()
    first, second = (parsed(prometheus(fake, path="loader.prom").text()) for fake in fakes)
    assert first.keys() == second.keys() and all(first[name].keys().isdisjoint(second[name]) for name in first)


def test_values_of_labels_are_escaped():
    fake = Fake()
    text = prometheus(fake, path="loader.prom", name='a\\b "c"\nd').text()
    assert r'salientpp_loader_batches_total{rank="3",loader="a\\b \"c\"\nd"} 10.0' in text.splitlines()
    assert parsed(text)


def test_a_forked_child_has_no_endpoint_and_leaves_the_port_to_its_parent():
    fake = Fake()
    exposition = prometheus(fake, port=0)
    descriptor = exposition._server.fileno()

    def in_child() -> bool:
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            return False
        exposition.close()
        return exposition.port is None and "salientpp_loader_batches_total" in exposition.text()

    assert holds_in_child(in_child)
    assert fetched(exposition.port)[0] == 200
    exposition.close()


def test_a_client_that_goes_away_prints_nothing(capfd):
    fake = Fake()
    with prometheus(fake, port=0) as exposition:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", exposition.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets it
        assert fetched(exposition.port)[0] == 200
        deadline = time.monotonic() + distributed.HANG
        while any("process_request_thread" in thread.name for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "Traceback" not in capfd.readouterr().err


def test_a_real_loader_is_served_while_it_works():
    data = random_data(4000, 30000)
    made = NeighborLoader(data, [5, 5], data.train_mask, batch_size=4, num_workers=2)
    exposition = prometheus(made, port=0, name="a")
    texts, done = [], threading.Event()

    def ask() -> None:
        while not done.is_set() or len(texts) < 3:
            texts.append(fetched(exposition.port)[2])

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(2):
        assert sum(1 for _ in made) == len(made)
    done.set()
    thread.join()
    exposition.close()
    totals = [
        parsed(text).get("salientpp_loader_batches_total", {}).get(('loader="a"', 'rank="0"'), 0) for text in texts
    ]
    assert totals == sorted(totals) and totals[-1] <= 2 * len(made)


def test_a_busy_port_and_wrong_arguments_are_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 cannot be used .*pass another port for each rank"):
            prometheus(Fake(), port=port)
    with pytest.raises(ValueError, match="needs port= for an HTTP endpoint, or path= for a file"):
        prometheus(Fake())
    for port in (70000, -1, "9400", 9400.5, True):
        with pytest.raises(ValueError, match=f"port must be an integer from 0 to 65535, got {port!r}"):
            prometheus(Fake(), port=port)
    with pytest.raises(ValueError, match=r"path must end in \.prom"):
        prometheus(Fake(), path=tmp_path / "x.txt")


def test_an_error_of_the_loader_is_an_answer():
    broken = Broken()
    with prometheus(broken, port=0) as exposition:
        status, _, text = fetched(exposition.port)
        assert status == 500 and text == "the loader gave no numbers (RuntimeError: the loader is broken)\n"


def test_a_file_is_written_whole(tmp_path):
    fake, own = Fake(), ('loader="train"', 'rank="3"')
    exposition = prometheus(fake, path=tmp_path / "loader.prom", name="train")
    assert exposition.port is None and not list(tmp_path.iterdir())
    for number in (10.0, 11.0):
        fake.numbers["batches"] = number
        exposition.write()
        found = parsed((tmp_path / "loader.prom").read_text())
        assert found["salientpp_loader_batches_total"] == {own: number}
    assert os.listdir(tmp_path) == ["loader.prom"]
    fake.metrics = Broken().metrics
    with pytest.raises(RuntimeError, match="broken"):
        exposition.write()
    assert parsed((tmp_path / "loader.prom").read_text()) == found and os.listdir(tmp_path) == ["loader.prom"]
    with (
        prometheus(fake, port=0, host="::1" if socket.has_ipv6 else "") as other,
        pytest.raises(ValueError, match="pass path="),
    ):
        other.write()


# --- the line ---------------------------------------------------------------------------------------------


def test_the_line_names_rate_waiting_traffic_and_the_slowest_stage():
    assert progress(Fake()) == "1,203 batches/s · waiting 4 % · 12.5 MB/s · slowest: exchange_rows"
    alone = Fake(**{"bytes.received": 0.0, "recent.batches_per_second": 2.345, "recent.wait.share": 0.5})
    assert progress(alone) == "2.35 batches/s · waiting 50 % · slowest: exchange_rows"
    assert progress(Fake(**{"recent.batches_per_second": 0.0})) == "no batch yet"


def test_the_line_of_a_real_loader(loader):
    assert re.fullmatch(r"[\d,.]+ batches/s · waiting \d+ % · slowest: \w+", progress(loader))


# --- Lightning --------------------------------------------------------------------------------------------


class Logger:
    group_separator = "/"

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.seen.append((step, metrics))


def trainer_of(loaders: object, is_zero: bool = True) -> SimpleNamespace:
    return SimpleNamespace(train_dataloader=loaders, loggers=[Logger()], is_global_zero=is_zero, global_step=0)


def passes(callback: object, trainer: SimpleNamespace, batches: int) -> list[tuple[int, dict[str, float]]]:
    for number in range(batches):
        trainer.global_step = number + 1
        callback.on_train_batch_end(trainer, None, None, None, number)
    callback.on_train_epoch_end(trainer, None)
    return trainer.loggers[0].seen


@pytest.fixture
def callback() -> Iterator[type]:
    pytest.importorskip("lightning", reason="needs Lightning: pip install salientpp[lightning]")
    yield salientpp.metrics.LightningCallback


def following() -> FollowingLoader:
    return FollowingLoader(Fake(), None)


def test_the_callback_logs_every_few_batches_and_at_the_end_of_an_epoch(callback):
    seen = passes(callback(every=3), trainer_of(following()), 7)
    assert [step for step, _ in seen] == [3, 6, 7]
    assert seen[0][1] == {f"loader/{name}": number for name, number in NUMBERS.items()}
    (last,) = passes(callback(every=9, names=["recent.*", "ranks.*"], all_ranks=True), trainer_of(following()), 3)
    assert last[1].keys() == {
        f"loader/{key}" for key in [*NUMBERS, "ranks.slowest"] if key.startswith(("recent.", "ranks."))
    }
    assert passes(callback(every=1, all_ranks=True), trainer_of(following(), is_zero=False), 3) == []


def test_several_loaders_have_their_place_in_the_names(callback):
    loaders = {"a": following(), "b": [following(), object()], "c": SimpleNamespace(metrics=lambda: {"batches": 1.0})}
    (last,) = passes(callback(names=["batches"]), trainer_of(loaders), 2)
    assert last[1] == {"loader/a.batches": 10.0, "loader/b.0.batches": 10.0}
    (last,) = passes(callback(names=["batches"]), trainer_of(SimpleNamespace(iterables=[following()])), 2)
    assert last[1] == {"loader/0.batches": 10.0}
    assert passes(callback(), trainer_of(iter(())), 2) == []


def test_a_wrong_interval_is_refused(callback):
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        callback(every=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("as_module", [True, False])
def test_a_trainer_logs_to_csv(callback, tmp_path, as_module):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch, index):
            return self.layer(batch.x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-9)

    data = random_data()
    options = {"num_neighbors": [3, 2], "batch_size": 16, "num_workers": 1}
    given = (
        LightningNodeData(data, **options)
        if as_module
        else NeighborLoader(data, input_nodes=data.train_mask, **options)
    )
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=logger, callbacks=[callback(every=2)], enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), **({"datamodule": given} if as_module else {"train_dataloaders": given}))
    with open(os.path.join(logger.log_dir, "metrics.csv")) as file:
        rows = list(csv.DictReader(file))
    batches = -(-int(data.train_mask.sum()) // 16)
    assert [int(row["step"]) for row in rows][-1] == 2 * batches
    assert float(rows[-1]["loader/epoch"]) == 1.0 and float(rows[-1]["loader/batches"]) == batches
    assert float(rows[-1]["loader/stage.sample.seconds"]) > 0 and 0 <= float(rows[-1]["loader/wait.share"]) <= 1


def _compare(rank: int, root: str) -> list:
    made = NeighborLoader(salientpp.load(root), [3, 2], "train", batch_size=16, uneven="wrap")
    trainer = trainer_of(made, is_zero=rank == 0)
    callback = salientpp.metrics.LightningCallback(every=100, names=["ranks*"], all_ranks=True)
    for number, _ in enumerate(made):
        callback.on_train_batch_end(trainer, None, None, None, number)
    callback.on_train_epoch_end(trainer, None)
    assert " MB/s · " in progress(made)
    return trainer.loggers[0].seen


def test_ranks_are_compared_at_the_end_of_an_epoch(callback, tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "parts", [3, 2], 16, method="random")
    (of_zero, of_one) = distributed.run(_compare, 2, str(tmp_path / "parts"))
    assert of_one == [] and of_zero[0][1]["loader/ranks"] == 2.0
    assert of_zero[0][1]["loader/ranks.slowest"] in (0, 1) and any("slowest.stage." in name for name in of_zero[0][1])


# --- imports ----------------------------------------------------------------------------------------------


def test_tools_are_imported_when_they_are_used():
    program = """
import sys, salientpp, salientpp.metrics
assert dir(salientpp.metrics)
from salientpp.metrics import progress
heavy = {"opentelemetry", "lightning", "pytorch_lightning"}
assert not heavy & sys.modules.keys() and "salientpp.metrics.exposition" not in sys.modules
for name in heavy:
    sys.modules[name] = None
for make, text in ((lambda: salientpp.metrics.otel(None), "otel needs opentelemetry-api"), (lambda: salientpp.metrics.LightningCallback(), "needs Lightning")):
    try:
        make()
    except ModuleNotFoundError as error:
        assert text in str(error) and "pip install 'salientpp[" in str(error), error
    else:
        raise SystemExit(text)
try:
    salientpp.metrics.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=distributed.HANG)
    assert done.returncode == 0, done.stderr
