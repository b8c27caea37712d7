"""Laws of dataset directories at addresses: a copy there is complete or absent, ranks load from it, and a stopped copy goes on in both directions."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import distributed
import pytest
import torch
from graphs import random_data
from table_packages import package

import salientpp
from salientpp import NeighborLoader, Progress, cli, copy_to_disk, upload
from salientpp.store.directory import copy_source
from salientpp.store.directory import upload as uploading
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.manifest import manifest_checksum

package("pyarrow")
fsspec = package("fsspec")

NUM_PARTS = 2


class Steps(Progress):
    """Keeps the names of the files that are copied."""

    def __init__(self) -> None:
        self.copied: list[str] = []

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        self.copied.append(step.split()[1].rstrip(","))


def partitioned(seed: int, root: Path) -> Path:
    return salientpp.partition(random_data(seed=seed), NUM_PARTS, root, [5, 3], 8, method="random").root


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory) -> Path:
    return partitioned(0, tmp_path_factory.mktemp("remote") / "parts")


@pytest.fixture(autouse=True)
def own_disk(tmp_path, monkeypatch) -> Path:
    """Folder of temporary files for copies that `load` makes."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture(params=["s3", "memory"])
def folder(request) -> str:
    """Address of an empty folder."""
    if request.param == "s3":
        return request.getfixturevalue("bucket").at("shop/graphs")
    files = fsspec.filesystem("memory")
    if files.exists("/graphs"):
        files.rm("/graphs", recursive=True)
    return "memory://graphs"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def names_in(manifest: Path) -> list[str]:
    return list(json.loads(manifest.read_text())["files"])


# --- both directions --------------------------------------------------------------------------------------


def test_a_directory_is_the_same_after_a_copy_to_an_address_and_back(dataset_dir, folder, tmp_path):
    steps = Steps()
    address = upload(dataset_dir, folder, progress=steps)
    assert steps.copied == names_in(dataset_dir / "manifest.json")
    there = copy_source.RemoteDirectory(address)
    assert sorted(there.sizes()) == sorted(files_of(dataset_dir)), "no other file is left there"
    copy = copy_to_disk(address, tmp_path / "disk", parts=range(NUM_PARTS))
    assert copy == tmp_path / "disk" / "parts"
    assert files_of(copy).pop("parts.json") == b'{"parts": [0, 1]}\n'
    assert {name: data for name, data in files_of(copy).items() if name != "parts.json"} == files_of(dataset_dir)


def test_load_copies_what_a_process_reads_and_keeps_it(dataset_dir, folder, own_disk):
    address = upload(dataset_dir, folder)
    part = salientpp.load(address, part_id=1, verify="full")
    assert own_disk in part.root.parents and part.fingerprint == salientpp.load(dataset_dir, part_id=1).fingerprint
    assert not (part.root / "part-00000").exists()
    before = {path: path.stat().st_mtime_ns for path in part.root.rglob("*.npy")}
    again = salientpp.load(address, part_id=1)
    assert again.root == part.root and {path: path.stat().st_mtime_ns for path in part.root.rglob("*.npy")} == before
    assert salientpp.load(address).num_parts == NUM_PARTS and (part.root / "part-00000").exists()
    assert (own_disk / f"salientpp-{os.geteuid()}").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_was_written_again_gets_a_new_copy(dataset_dir, tmp_path):
    files = fsspec.filesystem("memory")
    folder = "memory://anew"
    old = salientpp.load(upload(dataset_dir, folder), part_id=0)
    files.rm("/anew", recursive=True)
    other = partitioned(1, tmp_path / "other" / "parts")
    new = salientpp.load(upload(other, folder), part_id=0)
    assert new.root != old.root and new.fingerprint != old.fingerprint
    assert torch.equal(
        salientpp.load(old.root, part_id=0, verify="full").original_id(torch.arange(3)),
        old.original_id(torch.arange(3)),
    )


def _rewritten(root: Path, copy: Path) -> Path:
    """Returns a directory of the same contents with another manifest: its batch size is 9."""
    shutil.copytree(root, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["workload"]["batch_size"] = 9
    del manifest["checksum"]
    (copy / "manifest.json").write_text(json.dumps({**manifest, "checksum": manifest_checksum(manifest)}))
    return copy


def test_another_manifest_of_equal_contents_is_copied_too(dataset_dir, folder, tmp_path):
    old = salientpp.load(upload(dataset_dir, folder), part_id=0)
    other = _rewritten(dataset_dir, tmp_path / "other" / "parts")
    steps = Steps()
    new = salientpp.load(upload(other, folder, progress=steps), part_id=0)
    assert new.fingerprint == old.fingerprint and steps.copied == []
    assert new.manifest["workload"]["batch_size"] == 9
    assert salientpp.load(old.root, part_id=0).manifest["workload"]["batch_size"] == 8, "an open copy stays"


def test_a_directory_that_is_replaced_while_it_is_copied_is_mixed_with_nothing(dataset_dir, tmp_path, monkeypatch):
    files, other = fsspec.filesystem("memory"), partitioned(1, tmp_path / "other" / "parts")
    address = upload(dataset_dir, "memory://replaced")
    whole = copy_source.RemoteDirectory.manifest

    def replaced(self):
        found = whole(self)
        monkeypatch.setattr(copy_source.RemoteDirectory, "manifest", whole)
        files.rm("/replaced", recursive=True)
        upload(other, "memory://replaced")
        return found

    monkeypatch.setattr(copy_source.RemoteDirectory, "manifest", replaced)
    with pytest.raises(DatasetError, match="does not match .*; if another directory was copied there meanwhile, run"):
        salientpp.load(address, part_id=0)
    assert salientpp.load(address, part_id=0).fingerprint == salientpp.load(other, part_id=0).fingerprint
    files.rm("/replaced", recursive=True)
    upload(dataset_dir, "memory://replaced")
    assert salientpp.load(address, part_id=0).fingerprint == salientpp.load(dataset_dir, part_id=0).fingerprint


@pytest.mark.parametrize(
    "removed", [["parts.json"], ["parts.json", "manifest.json"], ["manifest.json"], ["indices.npy"]]
)
def test_files_that_a_cleaner_of_temporary_files_removed_are_copied_again(dataset_dir, removed):
    address = upload(dataset_dir, "memory://cleaned")
    copy = salientpp.load(address, part_id=0).root
    for name in removed:
        (copy / name).unlink()
    assert salientpp.load(address, part_id=0, verify="full").root == copy
    assert salientpp.load(address, part_id=1, verify="full").root == copy


def test_listings_that_a_file_system_keeps_are_not_used_again(dataset_dir, tmp_path, monkeypatch):
    files, kept = fsspec.filesystem("memory"), {}
    info = type(files).info

    def keeping(self, path, **options):
        if path not in kept:
            kept[path] = info(self, path, **options)
        return kept[path]

    other = salientpp.partition(random_data(seed=1, num_vertices=50), 1, tmp_path / "parts", [5, 3], 8).root
    for root in (dataset_dir, other):
        files.put(f"{root}/", "/listed/", recursive=True)
        with monkeypatch.context() as patch:
            patch.setattr(type(files), "info", keeping)
            patch.setattr(type(files), "invalidate_cache", lambda self, path=None: kept.clear())
            there = copy_source.RemoteDirectory("memory://listed")
            found = there.system.get_file_info(there.path_of("original_id.npy"))
        assert found.size == (root / "original_id.npy").stat().st_size


def test_a_part_that_does_not_exist_is_refused_as_in_a_directory_of_this_host(dataset_dir):
    for place in (dataset_dir, upload(dataset_dir, "memory://parts")):
        with pytest.raises(ValueError, match=r"part_id must be in \[0, 2\), got 7"):
            salientpp.load(place, part_id=7)


def _load(rank, address, root, disk):
    tempfile.tempdir = str(disk)
    fetched, read = [], copy_source.RemoteDirectory.read

    def noted(self, name, target, begin):
        fetched.append(name)
        read(self, name, target, begin)

    copy_source.RemoteDirectory.read = noted
    batches = []
    for place in (root, address):
        part = salientpp.load(place)
        loader = NeighborLoader(part, [5, 3], "train", batch_size=8, shuffle=True, seed=3)
        batches.append([[batch.n_id.tolist(), batch.x.tolist()] for batch in loader])
    return batches[0] == batches[1] and len(batches[0]) > 0, str(part.root), fetched


def test_ranks_of_a_host_load_one_copy_from_an_address(dataset_dir, bucket, own_disk):
    address = upload(dataset_dir, bucket.at("shop/graphs"))
    results = distributed.run(_load, NUM_PARTS, address, dataset_dir, own_disk)
    assert [is_same for is_same, _, _ in results] == NUM_PARTS * [True] and len({root for _, root, _ in results}) == 1
    assert json.loads((Path(results[0][1]) / "parts.json").read_text()) == {"parts": [0, 1]}
    fetched = [name for _, _, names in results for name in names]
    assert "indices.npy" in fetched and len(fetched) == len(set(fetched)), "each file is fetched by one rank"


def test_the_command_copies_in_both_directions_and_prints_no_secret(dataset_dir, bucket, tmp_path, capsys):
    folder = bucket.at("user:secret@shop/graphs").replace("user:secret@shop", "shop")
    address = f"s3://user:secret@shop/graphs{bucket.query}"
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", address]) == 0
    out, err = capsys.readouterr()
    assert out == "s3://shop/graphs/parts\n" and "copying part-00000" in err and "secret" not in out + err
    source = address.replace("graphs", "graphs/parts")
    assert cli.main(["copy-to-disk", source, "--to", str(tmp_path / "disk"), "--part", "1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'disk' / 'parts'}\n"
    assert cli.main(["copy-to-disk", source, "--to", str(tmp_path / "disk")]) == 2
    assert "s3://shop/graphs/parts has 2 parts, and this process is not a rank" in capsys.readouterr().err
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", folder, "--part", "1"]) == 2
    assert "--part is not for a copy at an address" in capsys.readouterr().err


# --- stopped copies ---------------------------------------------------------------------------------------


def test_a_stopped_upload_is_no_directory_and_goes_on(dataset_dir, folder, tmp_path, monkeypatch):
    whole, written = uploading._write, []

    def stopped(target, name, source):
        written.append(name)
        if len(written) == 5:
            source.read = None
            raise KeyboardInterrupt
        whole(target, name, source)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(uploading, "_write", stopped)
        upload(dataset_dir, folder)
    address = f"{folder.partition('?')[0]}/parts{''.join(folder.partition('?')[1:])}"
    with pytest.raises(DatasetError, match=r"graphs/parts is not a dataset directory: it has no manifest.json"):
        salientpp.load(address, part_id=0)
    other = partitioned(1, tmp_path / "other" / "parts")
    with pytest.raises(DatasetError, match="graphs/parts is an incomplete copy of other contents"):
        upload(other, folder)
    steps = Steps()
    assert upload(dataset_dir, folder, progress=steps) == address
    names = names_in(dataset_dir / "manifest.json")
    assert written[1:5] == names[:4] and steps.copied == names[3:], "only missing files are copied"
    salientpp.load(address, part_id=0, verify="full")


def test_an_upload_copies_only_what_is_missing_or_different(dataset_dir, bucket):
    folder = bucket.at("shop/graphs")
    upload(dataset_dir, folder)
    missing, shorter, altered = "indptr.npy", "indices.npy", "part-00000/node_x.npy"
    bucket.client.delete_object(Bucket="shop", Key=f"graphs/parts/{missing}")
    bucket.client.put_object(Bucket="shop", Key=f"graphs/parts/{shorter}", Body=b"short")
    data = bytearray((dataset_dir / altered).read_bytes())
    data[-1] ^= 1
    bucket.client.put_object(Bucket="shop", Key=f"graphs/parts/{altered}", Body=bytes(data))
    steps = Steps()
    address = upload(dataset_dir, folder, progress=steps)
    assert sorted(steps.copied) == sorted([missing, shorter, altered])
    salientpp.load(address, verify="full")
    steps = Steps()
    upload(dataset_dir, folder, progress=steps, verify="full")
    assert steps.copied == []


def test_a_broken_connection_is_an_error_and_the_next_copy_goes_on(dataset_dir, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(copy_source, "PIECE", 1000)
    address = upload(dataset_dir, bucket.at("shop/graphs"))
    name = "part-00000/node_x.npy"
    bucket.proxy.breaks = name
    with pytest.raises(OSError, match=rf"s3://shop/graphs/parts/{name} cannot be read \(.*; check the connection"):
        copy_to_disk(address, tmp_path / "disk", parts=[0])
    copy = tmp_path / "disk" / "parts"
    finished = list(copy.rglob("*.npy"))
    assert bucket.proxy.broken and finished
    with pytest.raises(DatasetError, match="it has no manifest.json"):
        salientpp.load(copy, part_id=0)
    bucket.proxy.breaks = ""
    bucket.proxy.requests.clear()
    copy_to_disk(address, tmp_path / "disk", parts=[0])
    asked = " ".join(bucket.proxy.requests)
    assert not any(str(path.relative_to(copy)) in asked for path in finished), "finished files are not copied again"
    salientpp.load(copy, part_id=0, verify="full")


@pytest.mark.parametrize("kept", ["the first bytes", "other bytes"])
def test_a_file_goes_on_where_its_copy_was_stopped(dataset_dir, folder, tmp_path, monkeypatch, kept):
    address = upload(dataset_dir, folder)
    monkeypatch.setattr(copy_source, "PIECE", 100)
    whole, read = copy_source.RemoteDirectory.read, []

    def stopped(self, name, target, begin):
        class Target:
            def write(self, data: bytes) -> None:
                target.write(data[:50])
                raise KeyboardInterrupt

        read.append((name, begin))
        whole(self, name, target if begin or len(read) > 1 else Target(), begin)

    monkeypatch.setattr(copy_source.RemoteDirectory, "read", stopped)
    with pytest.raises(KeyboardInterrupt):
        copy_to_disk(address, tmp_path, parts=[0])
    name = read[0][0]
    left = tmp_path / "parts" / f"{name}.copying"
    assert left.stat().st_size == 50
    if kept == "other bytes":
        left.write_bytes(bytes(50))
    salientpp.load(copy_to_disk(address, tmp_path, parts=[0]), part_id=0, verify="full")
    assert read[1] == (name, 50) and ((name, 0) in read[2:]) == (kept == "other bytes")
    assert not list((tmp_path / "parts").rglob("*.copying"))


# --- mistakes ---------------------------------------------------------------------------------------------


def test_nothing_is_written_where_other_files_are(dataset_dir, folder, tmp_path):
    address = upload(dataset_dir, folder)
    other = partitioned(1, tmp_path / "other" / "parts")
    with pytest.raises(DatasetError, match="graphs/parts has other contents"):
        upload(other, folder)
    there = copy_source.RemoteDirectory(address)
    there.system.delete_file(there.path_of("manifest.json"))
    with pytest.raises(
        DatasetError, match=r"graphs/parts has indices\.npy and is no copy .*, so nothing is written there"
    ):
        upload(dataset_dir, folder)


def test_a_damaged_file_is_not_copied_to_an_address(dataset_dir, folder, tmp_path):
    altered = Path(shutil.copytree(dataset_dir, tmp_path / "altered" / "parts"))
    path = altered / "part-00001" / "node_x.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"part-00001/node_x.npy was altered"):
        upload(altered, folder)
    with pytest.raises(DatasetError, match="is not a dataset directory"):
        salientpp.load(f"{folder.partition('?')[0]}/parts{''.join(folder.partition('?')[1:])}")


def test_a_damaged_file_at_an_address_is_refused(dataset_dir, bucket, tmp_path):
    address = upload(dataset_dir, bucket.at("shop/graphs"))
    data = bytearray((dataset_dir / "indices.npy").read_bytes())
    data[-1] ^= 1
    bucket.client.put_object(Bucket="shop", Key="graphs/parts/indices.npy", Body=bytes(data))
    with pytest.raises(DatasetError, match="s3://shop/graphs/parts/indices.npy was altered: it does not match"):
        copy_to_disk(address, tmp_path, parts=[0])
    bucket.client.delete_object(Bucket="shop", Key="graphs/parts/indices.npy")
    with pytest.raises(DatasetError, match="s3://shop/graphs/parts/indices.npy is missing"):
        copy_to_disk(address, tmp_path, parts=[0])
    bucket.put("graphs/parts/indices.npy", dataset_dir / "indices.npy")
    salientpp.load(copy_to_disk(address, tmp_path, parts=[0]), part_id=0, verify="full")


def test_an_address_that_cannot_be_used_is_named_without_its_secrets(dataset_dir, bucket, tmp_path):
    secret = f"s3://user:secret@nobucket/parts{bucket.query}"
    with pytest.raises((OSError, DatasetError), match="s3://nobucket/parts") as caught:
        salientpp.load(secret, part_id=0)
    assert "secret" not in str(caught.value)
    with pytest.raises(OSError, match=r"s3://nobucket/.* cannot be written") as caught:
        upload(dataset_dir, f"s3://user:secret@nobucket{bucket.query}")
    assert "secret" not in str(caught.value)
    bucket.proxy.forbids = "shop"
    with pytest.raises(PermissionError, match=r"no permission to read s3://shop/parts/manifest.json"):
        salientpp.load(bucket.at("shop/parts"))
    bucket.proxy.forbids = "indptr"
    with pytest.raises(PermissionError, match=r"no permission to write s3://shop/graphs/parts/indptr.npy"):
        upload(dataset_dir, bucket.at("shop/graphs"))
    with pytest.raises(ValueError, match=r"nosuch://graph has the unknown scheme nosuch://"):
        salientpp.load("nosuch://graph")
    with pytest.raises(ValueError, match=r"to must be an address such as s3://bucket/folder, got .*disk"):
        upload(dataset_dir, str(tmp_path / "disk"))
    with pytest.raises(
        ValueError, match="to must be a directory of this host, got s3://shop/x; salientpp.upload copies"
    ):
        copy_to_disk(dataset_dir, "s3://user:secret@shop/x", parts=[0])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r'memory://g needs the "fsspec" package, .*pip install salientpp\[tables\]'):
        salientpp.load("memory://g")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r's3://b/g needs the "pyarrow" package, .*pip install salientpp\[tables\]'):
        salientpp.load("s3://b/g")


@pytest.mark.parametrize("kind", ["a link", "writable by others"])
def test_copies_are_not_kept_where_other_users_may_write(dataset_dir, tmp_path, own_disk, kind):
    address = upload(dataset_dir, "memory://shared")
    folder, elsewhere = own_disk / f"salientpp-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "a link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(DatasetError, match="must be a folder that only this user may write"):
        salientpp.load(address)
    assert not list(elsewhere.iterdir())


def test_a_file_address_is_a_path(dataset_dir, tmp_path):
    assert salientpp.load(f"file://{dataset_dir}", part_id=0).root == dataset_dir
    assert copy_to_disk(f"file://{dataset_dir}", tmp_path, parts=[0]) == tmp_path / "parts"
