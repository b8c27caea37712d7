"""Laws of damaged files: reading one gives a graph or a clear error of the package."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_python import python
from torch_geometric.data import Data, HeteroData

from salientpp import cli
from salientpp.datasets import convert, load_dataset, load_dgl_assignment

N, NUM_CASES = 60, 30
ROOT = Path(__file__).parents[2]


# The sources state their numbers of vertices. Otherwise a damaged id could mean a graph with billions of vertices.


def edges() -> np.ndarray:
    return np.random.default_rng(0).integers(0, N, (2, 300))


def graph() -> Data:
    ends = torch.from_numpy(edges())
    return Data(x=torch.randn(N, 3), y=torch.arange(N) % 4, train_mask=torch.arange(N) < 30, edge_index=ends)


def write_npz(folder: Path, save: Callable = np.savez, **more) -> str:
    splits = {f"{split}_idx": np.arange(at, N, 3) for at, split in enumerate(("train", "val", "test"))}
    save(
        folder / "f.npz",
        edge_index=edges(),
        x=np.ones((N, 3), np.float32),
        y=np.arange(N) % 4,
        num_nodes=np.int64(N),
        **splits,
        **more,
    )
    return f"npz:{folder}/f.npz"


def write_npy_edges(folder: Path) -> str:
    np.save(folder / "f.npy", edges())
    return f"edges:{folder}/f.npy,num_vertices={N}"


def write_npy_rows(folder: Path) -> str:
    np.save(folder / "f.npy", np.ones((N, 3), np.float32))
    np.save(folder / "e.npy", edges())
    return f"edges:{folder}/e.npy,x={folder}/f.npy"


def write_parquet(folder: Path, compression: str = "snappy", lists: bool = False) -> str:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ends = edges()
    table = {"source": ends[0], "target": ends[1]}
    if lists:
        np.save(folder / "e.npy", ends)
        table = {"x": pyarrow.array(np.ones((N, 3), np.float32).tolist(), pyarrow.list_(pyarrow.float32()))}
    parquet.write_table(pyarrow.table(table), folder / "f.parquet", row_group_size=50, compression=compression)
    return f"edges:{folder}/e.npy,x={folder}/f.parquet" if lists else f"edges:{folder}/f.parquet,num_vertices={N}"


def write_text(folder: Path, name: str) -> str:
    text = "# source and target\n" + "".join(f"{source}\t{target}\n" for source, target in edges().T)
    with gzip.open(folder / name, "wt") if name.endswith(".gz") else (folder / name).open("w") as file:
        file.write(text)
    return f"edges:{folder}/{name},num_vertices={N}"


def write_pt(folder: Path, data: object, **options) -> str:
    torch.save(data, folder / "f.pt", **options)
    return f"pyg:{folder}/f.pt"


def several_types() -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(N, 2), torch.randn(5, 1)
    data["a", "to", "b"].edge_index = torch.from_numpy(edges() % 5)
    return data


FORMATS: dict[str, Callable[[Path], str]] = {
    "npz": write_npz,
    "compressed npz": lambda folder: write_npz(folder, np.savez_compressed),
    "npy, edges": write_npy_edges,
    "npy, rows": write_npy_rows,
    "parquet": write_parquet,
    "parquet, not compressed": lambda folder: write_parquet(folder, "none"),
    "parquet, lists": lambda folder: write_parquet(folder, lists=True),
    "text": lambda folder: write_text(folder, "f.tsv"),
    "text in gzip": lambda folder: write_text(folder, "f.csv.gz"),
    "pt": lambda folder: write_pt(folder, graph()),
    "pt, several types": lambda folder: write_pt(folder, several_types()),
    "pt, dict": lambda folder: write_pt(folder, graph().to_dict()),
    "pt of old torch": lambda folder: write_pt(folder, graph(), _use_new_zipfile_serialization=False),
}


def damaged(contents: bytes, rng: random.Random) -> bytes:
    """Returns contents that are cut off, longer, or have changed bytes. Half of the damage is near the ends, where headers are."""
    data = bytearray(contents)
    kind = rng.choice(["cut", "bytes", "bytes", "bytes", "zeros", "insert", "disks"])
    at_end = rng.random() < 0.5

    def place() -> int:
        near = min(len(data), 400)
        return (rng.randrange(near) if rng.random() < 0.5 else -1 - rng.randrange(near)) if at_end else rng.randrange(len(data))  # fmt: skip

    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "zeros":
        first = place() % len(data)
        data[first : first + 64] = bytes(len(data[first : first + 64]))
    elif kind == "insert":
        first = place() % len(data)
        data[first:first] = rng.randbytes(rng.randrange(1, 40))
    elif kind == "disks" and (end := data.rfind(b"PK\5\6")) >= 0:  # makes the archive say that it spans several disks
        data[end + 4 + rng.randrange(4)] = 1 + rng.randrange(255)
        if rng.random() < 0.5:
            data[end:end] = b"PK\6\7" + (7).to_bytes(4, "little") + rng.randbytes(8) + (3).to_bytes(4, "little")
    else:
        for _ in range(rng.choice([1, 1, 2, 5, 30])):
            data[place()] = rng.choice([rng.randrange(256), 0, 255, 128])
    return bytes(data)


def check_command(capsys, *words: str) -> int:
    """Returns the exit code of a command, which must be 0 or 2. With 2, stderr must have one line apart from steps and warnings."""
    capsys.readouterr()
    code = cli.main([*words])
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("salientpp convert: ") and "left out" not in line]
    assert code in (0, 2) and "Traceback" not in err, err
    assert len(lines) == (code == 2), err
    return code


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_gives_a_graph_or_a_clear_error(tmp_path, capsys, name):
    source = FORMATS[name](tmp_path)
    (file,) = tmp_path.glob("f.*")
    whole, root = file.read_bytes(), tmp_path / "c"
    # Files of torch before 1.6 can be loaded, but not converted.
    assert check_command(capsys, "convert", source, str(root)) == (2 if "old" in name else 0)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, refused = random.Random(seed), 0
    for case in range(NUM_CASES):
        shutil.rmtree(root, ignore_errors=True)
        file.write_bytes(damaged(whole, rng))
        try:
            refused += check_command(capsys, "convert", source, str(root)) == 2
            if not source.startswith("edges:"):
                try:
                    load_dataset(source)
                except ValueError as error:
                    assert str(file) in str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}") from error
    assert refused


def test_a_damaged_parquet_footer_does_not_abort_the_process(tmp_path):
    # pyarrow aborts the process when asked for the metadata of a column in this footer.
    source = write_parquet(tmp_path, "none")
    file = tmp_path / "f.parquet"
    file.write_bytes(damaged(file.read_bytes(), random.Random(1774)))
    program = "import sys; from salientpp import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run(
        [python(), "-c", program, "convert", source, str(tmp_path / "c")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 2 and f"{file}: damaged after row 0 (" in done.stderr, done.stderr


def test_a_damaged_converted_graph_is_refused(tmp_path):
    convert(write_npz(tmp_path), tmp_path / "c")
    files = sorted((tmp_path / "c").iterdir())
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for case in range(3 * NUM_CASES):
        file = rng.choice(files)
        whole = file.read_bytes()
        file.write_bytes(changed := damaged(whole, rng))
        try:
            load_dataset(f"converted:{tmp_path / 'c'}")
        except ValueError as error:
            assert len(str(error).splitlines()) == 1, (seed, case)
        else:
            assert changed == whole, (seed, case)
        file.write_bytes(whole)


@pytest.mark.parametrize("reshuffled", [True, False])
def test_a_damaged_dgl_file_gives_an_assignment_or_a_clear_error(tmp_path, reshuffled):
    file = tmp_path / "g.json"
    ranges = {"_N": [[0, 20], [20, 45], [45, N]]}
    np.save(tmp_path / "parts.npy", np.arange(N) % 3)
    file.write_text(json.dumps({"num_parts": 3, "num_nodes": N, "node_map": ranges if reshuffled else "parts.npy"}))
    assert load_dgl_assignment(file)[0].numel() == N
    files = [file, tmp_path / "parts.npy"]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for case in range(3 * NUM_CASES):
        chosen = rng.choice(files)
        whole = chosen.read_bytes()
        contents = damaged(whole, rng)
        if rng.random() < 0.2:  # change digits, so that the file stays JSON
            contents = whole.replace(b"60]", rng.choice([b"6" * rng.randrange(3, 25), b"-6", b"1e9"]) + b"]")
        chosen.write_bytes(contents)
        try:
            load_dgl_assignment(file)
        except (ValueError, FileNotFoundError) as error:
            assert str(error).startswith(str(tmp_path)), (seed, case)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}") from error
        chosen.write_bytes(whole)
