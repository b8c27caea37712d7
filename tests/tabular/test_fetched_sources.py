"""Laws of sources at addresses: they are converted as files on this host are, nothing is fetched twice, and a file that has changed is noticed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_python import python
from table_packages import package

from salientpp import Progress, addresses, cli
from salientpp.datasets import convert, load_dataset

pa, parquet = package("pyarrow"), package("pyarrow.parquet")
fsspec = package("fsspec")

ROOT = Path(__file__).parents[2]

N, E = 300, 2000


class Steps(Progress):
    """Keeps the addresses of the files that are fetched. Raises KeyboardInterrupt at the step ``stop``."""

    def __init__(self, stop: str = "nothing") -> None:
        self.fetched: list[str] = []
        self._stop = stop

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        if step.startswith(self._stop):
            raise KeyboardInterrupt
        if step.startswith("fetching "):
            self.fetched.append(step.rpartition("/")[2])


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """Files of edges and of vertices, and a folder of arrays."""
    root = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    edges = random.integers(0, N, (2, E))
    for number in range(3):
        np.save(root / f"e-{number}.npy", edges[:, number * 700 : (number + 1) * 700])
    np.savetxt(root / "e.txt.gz", edges.T, fmt="%d")
    x = random.normal(size=(N, 8)).astype(np.float32)
    np.save(root / "x.npy", x)
    nodes = pa.table({"y": random.integers(0, 4, N), "train": random.random(N) < 0.5})
    parquet.write_table(nodes, root / "nodes.parquet")
    for folder in ("paper", "author", "author__writes__paper"):
        (root / "folder" / folder).mkdir(parents=True)
    (root / "folder" / "num_nodes.json").write_text(json.dumps({"author": N}))
    np.save(root / "folder" / "paper" / "x.npy", x)
    np.save(root / "folder" / "author__writes__paper" / "edge_index.npy", edges)
    return root


@pytest.fixture(params=["s3", "memory"])
def at(request, local):
    """Returns a function that gives the address of a file whose path it is given."""
    if request.param == "s3":
        store = request.getfixturevalue("bucket")
        store.put_folder("g", local)
        return lambda path: store.at(f"shop/g/{path}")
    fsspec.filesystem("memory").put(f"{local}/", "/g/", recursive=True)
    return lambda path: f"memory://g/{path}"


def arrays_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*.npy")}


@pytest.mark.parametrize(
    "source",
    ["edges:{e-*.npy},x={x.npy},nodes={nodes.parquet}", "edges:{e.txt.gz},x={x.npy}", "npy:{folder}", "npy:{folder/}"],
)
def test_a_source_at_addresses_is_converted_as_files_are(local, at, tmp_path, source):
    def named(place) -> str:
        return "".join(
            place(part) if is_place else part
            for is_place, part in ((bool(i % 2), part) for i, part in enumerate(source.replace("}", "{").split("{")))
        )

    steps = Steps()
    here = convert(named(lambda path: str(local / path)), tmp_path / "here", memory="4GB")
    there = convert(named(at), tmp_path / "there", memory="4GB", progress=steps)
    assert arrays_of(there) == arrays_of(here) and steps.fetched
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"], "the fetched files are removed"
    about = json.loads((there / "manifest.json").read_text())
    assert "://" in about["source"] and "?" not in about["source"]
    assert load_dataset(f"converted:{there}") is not None


def test_files_on_this_host_and_at_addresses_may_be_mixed(local, at, tmp_path):
    here = convert(f"edges:{local}/e-*.npy,x={local}/x.npy", tmp_path / "here")
    there = convert(f"edges:file://{local}/e-*.npy,x={at('x.npy')}", tmp_path / "there")
    assert arrays_of(there) == arrays_of(here)


@pytest.mark.parametrize("stop", ["fetching", "sorting"])
def test_a_stopped_conversion_goes_on_and_fetches_nothing_twice(local, at, tmp_path, stop):
    source = f"edges:{at('e-*.npy')},x={at('x.npy')}"
    place = at("e-2.npy").partition("?")[0]
    steps = Steps(f"fetching {place}" if stop == "fetching" else stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "graph", progress=steps)
    expected = ["e-0.npy", "e-1.npy"] if stop == "fetching" else ["e-0.npy", "e-1.npy", "e-2.npy", "x.npy"]
    assert steps.fetched == expected and (tmp_path / ".graph.staged").exists()
    rest = Steps()
    graph = convert(source, tmp_path / "graph", progress=rest)
    assert steps.fetched + rest.fetched == ["e-0.npy", "e-1.npy", "e-2.npy", "x.npy"]
    here = convert(f"edges:{local}/e-*.npy,x={local}/x.npy", tmp_path / "here")
    assert arrays_of(graph) == arrays_of(here) and not (tmp_path / ".graph.staged").exists()


def test_a_file_goes_on_where_it_was_stopped(local, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "PIECE", 1000)
    bucket.put_folder("g", local)
    source = f"edges:{local}/e-*.npy,x={bucket.at('shop/g/x.npy')}"
    bucket.proxy.breaks = "x.npy"
    with pytest.raises(
        OSError, match=r"x=s3://shop/g/x.npy: s3://shop/g/x.npy cannot be read \(.*; check the connection"
    ):
        convert(source, tmp_path / "graph")
    begun = tmp_path / ".graph.staged" / "fetched" / "files"
    assert bucket.proxy.broken
    bucket.proxy.breaks = ""

    class Stopped(Progress):
        def reach(self, done: int) -> None:
            if done == 5000:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "graph", progress=Stopped())
    assert [path.stat().st_size for path in begun.rglob("*.part")] == [5000]
    reached: list[int] = []

    class Kept(Progress):
        def reach(self, done: int) -> None:
            if self.step.startswith("fetching") or not self.step:
                reached.append(done)

        def begin(self, step: str, total: int = 0, unit: str = "") -> None:
            self.step = step

    graph = convert(source, tmp_path / "graph", progress=Kept())
    assert reached[0] == 6000 and reached[-1] == (local / "x.npy").stat().st_size
    here = convert(f"edges:{local}/e-*.npy,x={local}/x.npy", tmp_path / "here")
    assert arrays_of(graph) == arrays_of(here)


def test_a_file_that_changed_between_two_runs_is_noticed_and_fetched_again(local, bucket, tmp_path):
    bucket.put_folder("g", local)
    source = f"edges:{bucket.at('shop/g/e-*.npy')},x={bucket.at('shop/g/x.npy')}"
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "graph", progress=Steps("sorting"))
    x = np.load(local / "x.npy")
    np.save(tmp_path / "x.npy", -x)  # of the same size
    bucket.put("g/x.npy", tmp_path / "x.npy")
    with pytest.raises(
        ValueError, match="was begun by another conversion: the source files have other names, sizes or times"
    ):
        convert(source, tmp_path / "graph")
    steps = Steps()
    graph = convert(source, tmp_path / "graph", overwrite=True, progress=steps)
    assert steps.fetched == [], "the run before has fetched the new file"
    assert np.array_equal(np.load(graph / "n0.x.npy"), -x)


def test_a_file_that_changes_while_it_is_fetched_is_refused(local, bucket, tmp_path):
    bucket.put_folder("g", local)
    np.save(tmp_path / "x.npy", -np.load(local / "x.npy"))

    class Changing(Progress):
        def reach(self, done: int) -> None:
            bucket.put("g/x.npy", tmp_path / "x.npy")

    source = f"edges:{local}/e-*.npy,x={bucket.at('shop/g/x.npy')}"
    with pytest.raises(ValueError, match=r"s3://shop/g/x.npy changed while it was read: its .* run the command again"):
        convert(source, tmp_path / "graph", progress=Changing())
    assert np.array_equal(np.load(convert(source, tmp_path / "graph") / "n0.x.npy"), -np.load(local / "x.npy"))


def test_mistakes_name_the_address_and_no_secret(local, bucket, tmp_path, capsys, monkeypatch):
    bucket.put_folder("g", local)
    secret = f"s3://user:secret@shop/g/none.npy{bucket.query}"
    for source in (f"edges:{secret}", f"npy:{secret}", f"pyg:{secret}"):
        with pytest.raises(FileNotFoundError, match=r"s3://shop/g/none.npy: no such file or folder") as caught:
            convert(source, tmp_path / "graph")
        assert "secret" not in str(caught.value)
    with pytest.raises(
        FileNotFoundError, match=r"no file matches s3://shop/g/f\*.npy; the folder s3://shop/g has e-0.npy"
    ):
        convert(f"edges:{bucket.at('shop/g/f*.npy')}", tmp_path / "graph")
    with pytest.raises(
        ValueError, match="must be converted first, with `salientpp convert edges:s3://shop/g/none.npy gr"
    ) as caught:
        load_dataset(f"edges:{secret}")
    assert "secret" not in str(caught.value)
    bucket.proxy.forbids = "x.npy"
    assert cli.main(["convert", f"edges:{local}/e-*.npy,x={bucket.at('shop/g/x.npy')}", str(tmp_path / "graph")]) == 2
    assert "no permission to read s3://shop/g/x.npy" in capsys.readouterr().err
    bucket.proxy.forbids = ""
    assert not list(tmp_path.iterdir()), "no hidden folder stays before the first file"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match=r"need 0.0 MB more on the disk of .*, which has only 0.0 MB left; make room"):
        convert(f"edges:{bucket.at('shop/g/e-*.npy')}", tmp_path / "graph")


def test_a_result_that_exists_is_refused_before_anything_is_fetched(local, at, tmp_path):
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "mine").touch()
    steps = Steps()
    with pytest.raises(ValueError, match="graph exists and is not empty"):
        convert(f"edges:{at('e-*.npy')}", tmp_path / "graph", progress=steps)
    assert steps.fetched == []


@pytest.mark.parametrize("path", ["a/../../../x.npy", "../x.npy", "./x.npy"])
def test_a_name_that_leads_out_of_the_folder_is_refused(local, tmp_path, path):
    fsspec.filesystem("memory").pipe(f"/odd/{path}", (local / "x.npy").read_bytes())
    with pytest.raises(ValueError, match="has an empty name or dots in its path"):
        convert("npy:memory://odd", tmp_path / "graph")
    fsspec.filesystem("memory").rm("/odd", recursive=True)
    assert not list(tmp_path.rglob("x.npy"))


def test_a_description_of_tables_at_an_address_is_refused_without_its_secrets(tmp_path):
    with pytest.raises(ValueError, match="must be a file of this host, got s3://b/g.toml; download it") as caught:
        convert("tables:s3://user:secret@b/g.toml", tmp_path / "graph")
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'edges:s3://b/e.npy: s3://b/e.npy needs the "pyarrow" package'):
        convert("edges:s3://b/e.npy", tmp_path / "graph")


def test_edges_of_a_web_server_are_converted(local, bucket, tmp_path):
    package("aiohttp")
    bucket.put("g/e.txt.gz", local / "e.txt.gz")
    bucket.client.put_object_acl(Bucket="shop", Key="g/e.txt.gz", ACL="public-read")
    there = convert(f"edges:http://{bucket.proxy.address}/shop/g/e.txt.gz?token=secret", tmp_path / "there")
    assert arrays_of(there) == arrays_of(convert(f"edges:{local}/e.txt.gz", tmp_path / "here"))
    assert "secret" not in (there / "manifest.json").read_text()


@contextlib.contextmanager
def plain_server(files: dict[str, bytes], sent: dict[str, str]) -> Iterator[str]:
    """Runs a web server that sends files only from their beginning, with the headers ``sent``. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            body = files[self.path]
            for header in sent.items():
                self.send_header(*header)
            if "Transfer-Encoding" not in sent:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Stopping(Progress):
    """Raises KeyboardInterrupt when the first bytes of a file are fetched. Keeps what was reached."""

    def __init__(self) -> None:
        self.reached: list[int] = []

    def reach(self, done: int) -> None:
        self.reached.append(done)
        raise KeyboardInterrupt


@pytest.mark.parametrize("sent", [{"ETag": "one"}, {}], ids=["with a version", "without a version"])
def test_a_web_server_without_ranges_sends_large_files_and_versions_are_not_mixed(tmp_path, sent):
    package("aiohttp")
    edges = np.random.default_rng(0).integers(0, N, (2, 1_200_000))  # more than PIECE, and than fsspec reads at once
    np.save(tmp_path / "e.npy", edges)
    np.save(tmp_path / "new.npy", edges[:, ::-1])
    files = {"/e.npy": (tmp_path / "e.npy").read_bytes()}
    with plain_server(files, sent) as address:
        stopping = Stopping()
        with pytest.raises(KeyboardInterrupt):
            convert(f"edges:{address}/e.npy", tmp_path / "there", progress=stopping)
        if not sent:
            files["/e.npy"] = (tmp_path / "new.npy").read_bytes()
        there = convert(f"edges:{address}/e.npy", tmp_path / "there")
    here = convert(f"edges:{tmp_path}/{'e' if sent else 'new'}.npy", tmp_path / "here")
    assert stopping.reached[0] < len(files["/e.npy"]) and arrays_of(there) == arrays_of(here)


def test_a_web_server_that_tells_no_size_is_refused(tmp_path):
    package("aiohttp")
    with (
        plain_server({"/e.npy": b""}, {"Transfer-Encoding": "chunked"}) as address,
        pytest.raises(ValueError, match=r"does not tell the size of http://127.0.0.1:\d+/e.npy; download it, and name"),
    ):
        convert(f"edges:{address}/e.npy", tmp_path / "there")


#: Converts a source of addresses, and copies a directory from one, with a limit on the size of files, and then without. A limit takes the place of a disk.
_FULL_DISK = """
import resource, sys
from pathlib import Path
import fsspec, numpy as np, torch
import salientpp
from salientpp.datasets import convert
from torch_geometric.data import Data

folder = Path(sys.argv[1])
edges = np.random.default_rng(0).integers(0, 5000, (2, 40_000))
np.save(folder / "e.npy", edges)
fsspec.filesystem("memory").put(str(folder / "e.npy"), "/g/e.npy")
data = Data(edge_index=torch.from_numpy(edges), x=torch.zeros(5000, 30), train_mask=torch.ones(5000, dtype=torch.bool))
address = salientpp.upload(salientpp.partition(data, 1, folder / "parts", [3], 8).root, "memory://g")
tries = (
    lambda: convert("edges:memory://g/e.npy", folder / "graph", memory="4GB"),
    lambda: salientpp.copy_to_disk(address, folder / "disk", parts=[0]),
)
for again, result in zip(tries, (folder / "graph", folder / "disk" / "parts")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    try:
        again()
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(error)
    else:
        raise SystemExit("a file fits")
    assert not (result / "manifest.json").exists()
    again()
salientpp.load(folder / "disk" / "parts", verify="full")
"""


def test_a_full_disk_is_an_error_and_the_next_run_goes_on(tmp_path):
    run = subprocess.run([python(), "-c", _FULL_DISK, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    converted, copied = run.stdout.splitlines()
    assert ".graph.staged/fetched/files" in converted and "cannot be written (File too large)" in converted
    assert "Then repeat the same command" in converted
    assert "memory://g/parts cannot be copied to" in copied and "File too large" in copied
