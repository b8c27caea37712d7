"""A table of files as other programs write them: each becomes the graph that its author meant, byte for byte, or is refused with an error that says why."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from salientpp.datasets import convert, load_dataset

pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

N = 6
SOURCE, TARGET = np.array([0, 1, 2, 3, 5]), np.array([1, 2, 3, 0, 4])
PAIRS = sorted(zip(SOURCE.tolist(), TARGET.tolist()))


def table(path: Path, schema: dict[str, Any] | None = None, /, **columns: Any) -> Path:
    """Writes a Parquet file. ``schema`` has columns whose names are no identifiers."""
    parquet.write_table(pa.table({**(schema or {}), **columns}), path)
    return path


def edge_file(folder: Path) -> str:
    np.save(folder / "e.npy", np.stack([SOURCE, TARGET]))
    return f"edges:{folder}/e.npy"


def text(folder: Path, contents: str | bytes, more: str = ",num_vertices=6", name: str = "e.csv") -> str:
    (folder / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return f"edges:{folder}/{name}{more}"


def lines(separator: str = ",", end: str = "\n") -> str:
    return "".join(f"{s}{separator}{t}{end}" for s, t in zip(SOURCE, TARGET))


def rows(key: str, *files: dict[str, Any]) -> Callable[[Path], str]:
    """Returns a writer of edges, and of Parquet files of ``key``, one for each dictionary of columns."""

    def write(folder: Path) -> str:
        for number, columns in enumerate(files):
            table(folder / f"t-{number}.parquet", columns)
        return f"{edge_file(folder)},{key}={folder}/t-*.parquet"

    return write


def edge_table(more: str = ",num_vertices=6", **columns: Any) -> Callable[[Path], str]:
    return lambda folder: f"edges:{table(folder / 'e.parquet', columns)}{more}"


def array(key: str, values: Any, more: str = "", **options: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        if options.get("fortran"):
            with (folder / "a.npy").open("wb") as file:
                header = {"descr": values.dtype.str, "fortran_order": True, "shape": values.shape}
                np.lib.format.write_array_header_1_0(file, header)
                file.write(values.tobytes("F"))
        elif version := options.get("version"):
            with (folder / "a.npy").open("wb") as file:
                np.lib.format.write_array(file, values, version)
        else:
            np.save(folder / "a.npy", values)
        return f"{edge_file(folder)},{key}={folder}/a.npy{more}"

    return write


def npz(**arrays: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        np.savez(folder / "g.npz", **{"edge_index": np.stack([SOURCE, TARGET]), "num_nodes": np.int64(N), **arrays})
        return f"npz:{folder}/g.npz"

    return write


def numbers(path: str, contents: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / f"{path}.txt").write_text(contents)
        return f"{edge_file(folder)},num_vertices=6,{path}={folder}/{path}.txt"

    return write


def saved(data: Data | HeteroData) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        torch.save(data, folder / "g.pt")
        return f"pyg:{folder}/g.pt"

    return write


def graph(**more: Any) -> Data:
    return Data(edge_index=torch.tensor(np.stack([SOURCE, TARGET])), num_nodes=N, **more)


def folder_of(**files: Any) -> Callable[[Path], str]:
    """Returns a writer of users and items, whose relation is a Parquet table, with further files."""

    def write(folder: Path) -> str:
        for name, value in files.items():
            path = folder / "shop" / name.replace("__in__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, dict):
                table(path.with_suffix(".parquet"), value)
            elif isinstance(value, str):
                path.with_suffix(".json").write_text(value)
            else:
                np.save(path.with_suffix(".npy"), value)
        return f"npy:{folder}/shop"

    return write


def typed() -> HeteroData:
    data = HeteroData()
    data["a"].num_nodes = N
    data["a", "to", "a"].edge_index = graph().edge_index
    data.label = torch.tensor([3.0])
    return data


INTS, X = np.arange(N), np.arange(2 * N, dtype=np.float32).reshape(N, 2)
_ORDER = np.array([3, 1, 5, 0, 2, 4])
_LISTS = pa.list_(pa.float32())
_BUYS = "user__buys__item__in__edge_index"


def _lists(type_: Any) -> Any:
    return pa.array(X.tolist(), type_)


#: name -> (writer of the files, the text of the error, or the attributes of the graph)
TABLE: dict[str, tuple[Callable[[Path], str], Any]] = {
    # dtypes of later files
    "labels int64, then double": (
        rows("y", {"y": INTS[:3]}, {"y": INTS[3:].astype(float)}),
        r"t-1\.parquet, row 0: y must have rows of int64 \[\], as earlier rows, got float64 \[\]; write all rows with one dtype",
    ),
    "rows float32, then float64": (
        rows("nodes", {"x": _lists(_LISTS)[:3]}, {"x": _lists(pa.list_(pa.float64()))[3:]}),
        r"t-1\.parquet, row 0: x must have rows of float32 \[2\], as earlier rows, got float64 \[2\]",
    ),
    "numbers int32, then int64": (
        rows("nodes", {"age": INTS[:3].astype(np.int32)}, {"age": INTS[3:]}),
        r"t-1\.parquet, row 0: age must have rows of int32 \[\]",
    ),
    "bool, then int8": (
        rows("nodes", {"flag": INTS[:3] > 1}, {"flag": INTS[3:].astype(np.int8)}),
        r"t-1\.parquet, row 0: flag must have rows of bool \[\]",
    ),
    "lists, then large and fixed lists of one dtype": (
        rows(
            "nodes",
            {"x": _lists(_LISTS)[:2]},
            {"x": _lists(pa.large_list(pa.float32()))[2:4]},
            {"x": _lists(pa.list_(pa.float32(), 2))[4:]},
        ),
        {"x": X},
    ),
    "files with columns in another order": (
        rows("nodes", {"x": INTS[:3], "y": INTS[:3] * 2}, {"y": INTS[3:] * 2, "x": INTS[3:]}),
        {"x": INTS, "y": INTS * 2},
    ),
    "a file without one of the columns": (
        rows("nodes", {"x": INTS[:3], "y": INTS[:3]}, {"x": INTS[3:]}),
        r"t-1\.parquet must have the columns x, y, got x",
    ),
    "an empty file among others": (
        rows("nodes", {"x": INTS}, {"x": INTS[:0].astype(np.int64)}),
        {"x": INTS},
    ),
    # values that are missing
    "a number that is missing": (
        rows("nodes", {"x": pa.array([1, 2, None, 4, 5, 6])}),
        r"t-0\.parquet, row 2: column 'x' has no value; fill it",
    ),
    "a number that is missing inside a list": (
        rows("nodes", {"x": pa.array([[1, 2], [3, 4], [5, None], [7, 8], [9, 9], [1, 1]])}),
        r"t-0\.parquet, row 2: column 'x' has a list in which a value is missing; fill it",
    ),
    "a column without any value": (
        rows("nodes", {"x": pa.nulls(N)}),
        r"t-0\.parquet, row 0: column 'x' has no value",
    ),
    "lists of unequal length": (
        rows("nodes", {"x": pa.array([[1], [2, 3], [4], [5], [6], [7]])}),
        r"row 1: column 'x' must hold 1 numbers in each row, got 2",
    ),
    "lists of lists": (rows("nodes", {"x": pa.array([[[1]]] * N)}), r"column 'x' must hold numbers, got list<"),
    # types of columns
    "categories of integers": (
        rows("nodes", {"x": pa.array([5, 5, 7, 9, 7, 5]).dictionary_encode()}),
        {"x": np.array([5, 5, 7, 9, 7, 5])},
    ),
    "categories of words": (
        rows("nodes", {"x": pa.array(list("abcabc")).dictionary_encode()}),
        r"column 'x' must hold numbers, got string; cast it to numbers, or leave it out",
    ),
    "times": (
        rows("nodes", {"x": pa.array(INTS, pa.timestamp("ms", tz="Europe/Paris"))}),
        r"column 'x' must hold numbers, got timestamp\[ms, tz=Europe/Paris\]",
    ),
    "durations": (rows("nodes", {"x": pa.array(INTS, pa.duration("s"))}), r"must hold numbers, got duration\[s\]"),
    "decimals": (
        rows("nodes", {"x": pa.array(INTS, pa.int64()).cast(pa.decimal128(22, 2))}),
        r"must hold numbers, got decimal128\(22, 2\)",
    ),
    "large strings": (rows("nodes", {"x": pa.array(list("abcdef"), pa.large_string())}), r"got large_string"),
    "records": (rows("nodes", {"x": pa.array([{"a": 1}] * N)}), r"must hold numbers, got struct<a: int64>"),
    "float16 and int8": (
        rows("nodes", {"x": INTS.astype(np.float16), "z": INTS.astype(np.int8)}),
        {"x": INTS.astype(np.float16), "z": INTS.astype(np.int8)},
    ),
    "labels above int64": (
        rows("nodes", {"y": np.array([0, 1, 2, 3, 4, 2**63], np.uint64)}),
        r"row 5: y must hold numbers below 2\^63",
    ),
    "a column beside wider ones, rounded": (
        rows("nodes", {"x_0": np.array([0, 1, 2, 3, 4, 2**53 + 1]), "x_1": INTS / 2}),
        r"row 5: column 'x_0' has integers that float64 would round",
    ),
    "a column beside wider ones, not rounded": (
        rows("nodes", {"x_0": INTS, "x_1": INTS / 2}),
        {"x": np.stack([INTS, INTS / 2], 1)},
    ),
    # names of columns
    "two columns of one name": (
        lambda folder: (
            parquet.write_table(pa.Table.from_arrays([pa.array(INTS)] * 2, ["x", "x"]), folder / "t.parquet")
            or f"{edge_file(folder)},nodes={folder}/t.parquet"
        ),
        r"t\.parquet has several columns called 'x'; rename them",
    ),
    **{
        f"a column called {name}": (
            rows("nodes", {name: INTS}),
            rf"the attribute '{name}' cannot have this name",
        )
        for name in ("adj_t", "edge_index", "num_nodes", "edge_attr", "num_edges", "my_edges", "a/b", "n" * 250)
    },
    "ids in capitals": (
        rows("nodes", {"ID": _ORDER, "x": _ORDER * 10}),
        {"x": INTS * 10},
    ),
    "ids called NodeId": (rows("nodes", {"NodeId": _ORDER, "x": _ORDER * 10}), {"x": INTS * 10}),
    "ids in a file of rows": (
        rows("x", {"id": _ORDER, "a": _ORDER, "b": _ORDER * 2}),
        {"x": np.stack([INTS, INTS * 2], 1)},
    ),
    "ids in a file of labels": (rows("y", {"node_id": _ORDER, "label": _ORDER * 3}), {"y": INTS * 3}),
    "two columns of ids": (
        rows("nodes", {"id": INTS, "node_id": INTS}),
        r"id and node_id may both hold the vertex ids",
    ),
    "an index of pandas": (
        rows("nodes", {"x": INTS, "__index_level_0__": _ORDER}),
        r"pandas stored an index as column '__index_level_0__'",
    ),
    "ids from 1": (rows("nodes", {"id": INTS + 1, "x": INTS}), r"row 5: the id must be a vertex id in \[0, 6\), got 6"),
    # ends of edges
    "Target, Source": (edge_table(Target=TARGET, Source=SOURCE), {}),
    "to, from": (edge_table(to=TARGET, **{"from": SOURCE}), {}),
    "dst_id, src_id": (edge_table(dst_id=TARGET, src_id=SOURCE), {}),
    "dst, source": (edge_table(dst=TARGET, source=SOURCE), {}),
    "ToNodeId, FromNodeId": (edge_table(ToNodeId=TARGET, FromNodeId=SOURCE), {}),
    "tail, head": (edge_table(tail=TARGET, head=SOURCE), {}),
    "numbered columns": (edge_table(_c0=SOURCE, _c1=TARGET), {}),
    "users and items": (edge_table(user=SOURCE, item=TARGET), r"\(user, item\) do not say which holds the sources"),
    "user_id and item_id": (edge_table(user_id=SOURCE, item_id=TARGET), r"\(user_id, item_id\) do not say which"),
    "two sources": (edge_table(source=SOURCE, src=TARGET), r"\(source, src\) do not say which"),
    "columns that the user names": (
        edge_table(",num_vertices=6,source=citing,target=cited", cited=TARGET, citing=SOURCE),
        {},
    ),
    "a column that is not there": (
        edge_table(",num_vertices=6,source=citing,target=cites", cited=TARGET, citing=SOURCE),
        r"must have one column 'cites', got cited, citing",
    ),
    "start and end of something else": (
        edge_table(person=SOURCE, firm=TARGET, start=SOURCE + 1990, end=TARGET + 2000),
        r"\(person, firm, start, end\) do not say which holds the sources",
    ),
    "ends of edges beside start and end": (
        edge_table(v=TARGET, u=SOURCE, start=INTS[:5], end=INTS[:5]),
        "warns: start, end of",
    ),
    "start_id and end_id": (edge_table(end_id=TARGET, start_id=SOURCE, since=INTS[:5]), "warns: since of"),
    "names of types that words contradict": (
        folder_of(v__in__x=X, u__in__x=X, v__likes__u__in__edge_index={"v": SOURCE, "u": TARGET}),
        r"\(v, u\) do not say which holds the sources",
    ),
    "names of types that numbers contradict": (
        folder_of(t1__in__x=X, t0__in__x=X, t1__likes__t0__in__edge_index={"t1": SOURCE, "t0": TARGET}),
        r"\(t1, t0\) do not say which holds the sources",
    ),
    "ids as real numbers": (
        edge_table(source=SOURCE.astype(float), target=TARGET),
        r"column 'source' must hold integers, got double; cast it to int64",
    ),
    "ids that are missing": (
        edge_table(source=pa.array([0, 1, None, 3, 5]), target=TARGET),
        r"e\.parquet, row 2: column 'source' has no value",
    ),
    "ids of other widths in other files": (
        lambda folder: (
            table(folder / "e-0.parquet", source=SOURCE[:2].astype(np.int16), target=TARGET[:2])
            and table(folder / "e-1.parquet", target=TARGET[2:].astype(np.uint64), source=SOURCE[2:])
            and f"edges:{folder}/e-*.parquet,num_vertices=6"
        ),
        {},
    ),
    "an id above int64": (
        edge_table(source=np.array([0, 1, 2, 3, 2**63], np.uint64), target=TARGET),
        r"row 4: the source must be a vertex id in \[0, 6\), got 9223372036854775808",
    ),
    "a negative id": (edge_table(source=-SOURCE, target=TARGET), r"row 1: the source must be a vertex id .* got -1"),
    # what is left out
    "times of edges": (edge_table(source=SOURCE, target=TARGET, time=SOURCE), "warns: time of edges:.* left out"),
    "other arrays of an archive": (npz(edge_weight=SOURCE), "warns: edge_weight of npz:.* left out"),
    "an attribute of the whole graph": (saved(typed()), "warns: label of pyg:.* left out"),
    "a split that is given twice": (
        saved(graph(train_mask=torch.arange(N) < 2, train_idx=torch.tensor([5]))),
        "warns: train_idx of pyg:.* left out",
    ),
    "a split that is given twice, as ids first": (
        saved(graph(train_idx=torch.tensor([5]), train_mask=torch.arange(N) < 2)),
        "warns: train_mask of pyg:.* left out",
    ),
    "files beside the edges of a folder": (
        folder_of(**{_BUYS: np.stack([SOURCE, TARGET]), "user__buys__item__in__edge_attr": '"other"'}),
        r"warns: user__buys__item/edge_attr\.json of npy:.* left out",
    ),
    "columns beside the edges of a folder": (
        folder_of(**{_BUYS: {"user_id": SOURCE, "item_id": TARGET, "time": SOURCE}}),
        "warns: column time of user__buys__item of npy:.* left out",
    ),
    "a file of another kind beside attributes": (
        folder_of(**{_BUYS: np.stack([SOURCE, TARGET]), "user__in__x": X, "item__in__about": '"other"'}),
        r"warns: item/about\.json of npy:.* left out",
    ),
    "a type with a mistake in its name": (
        folder_of(**{_BUYS: np.stack([SOURCE, TARGET]), "num_nodes": json.dumps({"users": 6})}),
        r"num_nodes\.json names 'users', but the folder has the types 'user', 'item'.* Did you mean user\?",
    ),
    # arrays
    "columns first, of three dimensions": (
        array("x", X.reshape(N, 1, 2), fortran=True),
        r"a\.npy is stored column by column",
    ),
    "columns first, of one column": (array("x", X[:, :1], fortran=True), {"x": X[:, :1]}),
    "bytes in the other order": (array("x", X.astype(">f4")), {"x": X}),
    "longdouble": (array("x", X.astype(np.longdouble)), r"a\.npy must hold numbers of a dtype that torch has"),
    "clongdouble": (array("x", X.astype(np.clongdouble)), r"a\.npy must hold numbers of a dtype that torch has"),
    "records of fields": (array("x", np.zeros(N, [("a", "i4"), ("b", "f4")])), r"a\.npy must hold numbers, got dtype"),
    "records with unusual names": (
        array("x", np.zeros(N, [("é", "i4")]), version=(3, 0)),
        r"a\.npy has version 3\.0 of numpy's format, which is not for plain numbers",
    ),
    "times in an array": (array("x", INTS.astype("datetime64[s]")), r"must hold numbers of a dtype that torch has"),
    "skip without text": (array("x", X, ",skip=1"), r"skip=1 is for lines of text, and no file is text"),
    # splits
    "a flag per vertex": (
        array("train", np.array([0, 1, 1, 0, 0, 1]), ",num_vertices=6"),
        r"a\.npy\[2\]: the split 'train' must hold each vertex id once, got 1 again; if the file has a flag per vertex",
    ),
    "an id twice": (array("train", np.array([4, 2, 4]), ",num_vertices=6"), r"a\.npy\[2\]: .* once, got 4 again"),
    "a flag per vertex in text": (numbers("val", "1\n0\n1\n0\n0\n0\n"), r"val\.txt, line 3: .* once, got 1 again"),
    "flags of bool": (array("test", INTS > 3, ",num_vertices=6"), r"the split 'test' must be vertex ids"),
    "flags beside ids": (rows("train", {"id": INTS, "train": INTS}), r"must be vertex ids alone"),
    "a flag per vertex in an archive": (
        npz(train_idx=np.array([0, 1, 1, 0, 0, 1]), val_idx=np.array([2]), test_idx=np.array([3])),
        r"the split 'train' must hold each vertex id once",
    ),
    # text
    "ends of lines of Windows": (lambda folder: text(folder, lines(end="\r\n")), {}),
    "semicolons and a comment": (lambda folder: text(folder, "% a\n" + lines(";")), {}),
    "the mark of UTF-8": (lambda folder: text(folder, b"\xef\xbb\xbf" + lines().encode()), {}),
    "the mark of UTF-8 before a comment": (lambda folder: text(folder, b"\xef\xbb\xbf# a\n" + lines().encode()), {}),
    "UTF-16": (lambda folder: text(folder, lines().encode("utf-16")), r"line 1: .* byte order mark of UTF-16"),
    "quotes": (lambda folder: text(folder, '"0","1"\n'), r"line 1: expected 2 integers, got '\"0\",\"1\"'"),
    "a header": (lambda folder: text(folder, "source,target\n" + lines()), {}),
    "a header below a comment": (lambda folder: text(folder, "# a\n\n'src' 'dst'\n" + lines(" ")), {}),
    "a header with the target first, without skip": (
        lambda folder: text(folder, "to;from\n" + "".join(f"{t};{s}\n" for s, t in PAIRS)),
        {},
    ),
    "a header that must not be skipped": (
        lambda folder: text(folder, "source,target\n" + lines(), ",num_vertices=6,skip=0"),
        r"line 1: expected 2 integers, .*skip=",
    ),
    "a header with other names": (
        lambda folder: text(folder, "a,b\n" + lines()),
        r"e\.csv, line 1 looks like a header \(a, b\); write edges:.*e\.csv,num_vertices=6,source=a,target=b if the edges lead from a to b",
    ),
    "keys that are text": (
        lambda folder: text(folder, "a,b\nb,c\n"),
        r"line 1: expected 2 integers, .*Keys that are text need numbers",
    ),
    "a first line of a number and a word": (lambda folder: text(folder, "0,source\n" + lines()), r"line 1: expected 2"),
    "a header with given names": (
        lambda folder: text(
            folder, "b,a\n" + "".join(f"{t},{s}\n" for s, t in PAIRS), ",num_vertices=6,source=a,target=b"
        ),
        {},
    ),
    "ids that look like names of ends": (
        lambda folder: text(folder, "v1,u2\n" + lines()),
        r"e\.csv, line 1 looks like a header \(v1, u2\)",
    ),
    "a name twice": (lambda folder: text(folder, "id,id\n" + lines()), r"line 1: expected 2 integers"),
    "a header without the given names": (
        lambda folder: text(folder, "c,d\n" + lines(), ",num_vertices=6,source=a,target=b"),
        r"e\.csv, line 1 must have one column 'a', got c, d",
    ),
    "names that are numbers of the first edge": (
        lambda folder: text(folder, lines(), ",num_vertices=6,source=0,target=1"),
        r"must have one column '0', got none; the first line of text must be a header with the two names",
    ),
    "quoted numbers as names": (
        lambda folder: text(folder, '"0","1"\n' + lines(), ",num_vertices=6,source=0,target=1"),
        r"must have one column '0', got none; the first line of text must be a header",
    ),
    "a header with the target first in each of two files": (
        lambda folder: (
            text(folder, "to,from\n" + "".join(f"{t},{s}\n" for s, t in PAIRS[:2]), name="e-0.csv")
            and text(folder, "source,target\n" + "".join(f"{s},{t}\n" for s, t in PAIRS[2:]), name="e-1.csv").replace(
                "-1", "-*"
            )
        ),
        {},
    ),
    "a header in one of two files, without skip": (
        lambda folder: (
            text(folder, lines(), name="e-1.csv")
            and text(folder, "to,from\n" + lines(), name="e-0.csv").replace("-0", "-*")
        ),
        r"e-1\.csv begins with numbers, but .*e-0\.csv has a header; give the header to all files or to none",
    ),
    "a header that is skipped": (
        lambda folder: text(folder, "source,target\n" + lines(), ",num_vertices=6,skip=1"),
        {},
    ),
    "a header with the target first": (
        lambda folder: text(
            folder, "Target;Source\n" + "".join(f"{t};{s}\n" for s, t in PAIRS), ",num_vertices=6,skip=1"
        ),
        {},
    ),
    "a comment below other comments that names the target first": (
        lambda folder: text(
            folder,
            "# Directed graph\n# Nodes: 6 Edges: 5\n\n# ToNodeId FromNodeId\n"
            + "".join(f"{t} {s}\n" for s, t in PAIRS),
        ),
        {},
    ),
    "a comment below a skipped line that names the target first": (
        lambda folder: text(
            folder, "about this graph\n# to from\n" + "".join(f"{t} {s}\n" for s, t in PAIRS), ",num_vertices=6,skip=1"
        ),
        {},
    ),
    "a header above a skipped line": (
        lambda folder: text(
            folder, "dst,src\n---,---\n" + "".join(f"{t},{s}\n" for s, t in PAIRS), ",num_vertices=6,skip=2"
        ),
        {},
    ),
    "names in a comment below other comments": (
        lambda folder: text(
            folder,
            "# a graph\n# cited citing\n" + "".join(f"{t} {s}\n" for s, t in PAIRS),
            ",num_vertices=6,source=citing,target=cited",
        ),
        {},
    ),
    "a comment with the target first": (
        lambda folder: text(folder, "# ToNodeId FromNodeId\n" + "".join(f"{t} {s}\n" for s, t in PAIRS)),
        {},
    ),
    "a header of users and items": (
        lambda folder: text(folder, "user_id,item_id\n" + lines(), ",num_vertices=6,skip=1"),
        r"e\.csv, line 1: the columns \(user_id, item_id\) do not say which",
    ),
    "a header whose names are given": (
        lambda folder: text(
            folder,
            "cited,citing\n" + "".join(f"{t},{s}\n" for s, t in PAIRS),
            ",num_vertices=6,skip=1,source=citing,target=cited",
        ),
        {},
    ),
    "a third column": (lambda folder: text(folder, "0,1,9\n"), r"line 1: expected 2 integers, got '0,1,9'"),
    "a separator at the end": (lambda folder: text(folder, lines(end=",\n")), {}),
    "integers as real numbers": (lambda folder: text(folder, "0.0,1.0\n"), r"line 1: expected 2 integers"),
    "an integer above int64": (
        lambda folder: text(folder, "0 1\n99999999999999999999 1\n"),
        r"line 2: expected 2 integers in \[-2\^63, 2\^63\), got '99999999999999999999 1'",
    ),
    "an integer below int64": (
        numbers("y", "0\n1\n-99999999999999999999\n1\n1\n1\n"),
        r"y\.txt, line 3: expected 1 integers in ",
    ),
    "the largest and the least integer": (
        numbers("y", f"{2**63 - 1}\n{-(2**63)}\n1\n2\n3\n4\n"),
        {"y": np.array([2**63 - 1, -(2**63), 1, 2, 3, 4])},
    ),
    "a number above float32": (
        numbers("x", "1\n2\n3\n1e39\n5\n6\n"),
        r"x\.txt, line 4: 1e\+39 is too large for float32",
    ),
    "a number above float64": (
        numbers("x", "1\n2\n3\n1e400\n5\n6\n"),
        r"x\.txt, line 4: expected 1 numbers that float64 can hold",
    ),
    "infinity and nan": (
        numbers("x", "1\ninf\n-Infinity\nnan\n5\n6\n"),
        {"x": np.array([[1], [np.inf], [-np.inf], [np.nan], [5], [6]], np.float32)},
    ),
    "an empty file": (lambda folder: text(folder, ""), r"e\.csv: expected lines of numbers, got none"),
    "a file of comments": (lambda folder: text(folder, "# a\n# b\n"), r"expected lines of numbers, got none"),
    "skip past the end": (
        lambda folder: text(folder, lines(), ",num_vertices=6,skip=50"),
        r"got none after the first 50 lines, which are left out",
    ),
    "an empty file of text among others": (
        lambda folder: text(folder, "", name="e-1.csv") and text(folder, lines(), name="e-0.csv").replace("-0", "-*"),
        {},
    ),
    "an empty file of a split": (numbers("train", "# none\n"), r"train\.txt: expected lines of numbers, got none"),
    "a graph without vertices": (
        lambda folder: np.save(folder / "a.npy", np.empty((2, 0), int)) or f"edges:{folder}/a.npy",
        r"the graph has no vertices",
    ),
    "labels beside a key in another order": (
        rows("y", {"user": _ORDER, "label": INTS % 2}),
        r"t-0\.parquet: column 'user' has a different integer in each row, like a key; name it id",
    ),
    "features beside a key with gaps": (
        rows("x", {"user": 10 + 3 * INTS[:4], "f": X[:4, 0]}, {"user": [50, 90], "f": X[4:, 0]}),
        r"column 'user' has a different integer in each row",
    ),
    "features beside a key from 1": (
        rows("x", {"f": X[:, 0], "number": 1 + _ORDER}),
        r"column 'number' has a different",
    ),
    "attributes beside a key in another order": (
        rows("nodes", {"user": _ORDER, "f": X[:, 0]}),
        r"column 'user' has a different integer in each row",
    ),
    "attributes beside a key in the order of the rows": (
        rows("nodes", {"user": 7 * INTS, "f": X[:, 0]}),
        {"user": 7 * INTS, "f": X[:, 0]},
    ),
    "several labels": (
        rows("y", {"a": INTS % 2, "b": INTS[::-1] // 2}),
        {"y": np.stack([INTS % 2, INTS[::-1] // 2], 1)},
    ),
    "labels of one column": (rows("y", {"label": _ORDER}), {"y": _ORDER}),
    "uid and vid": (edge_table(vid=TARGET, uid=SOURCE), r"\(vid, uid\) do not say which"),
    "a comment of vid and uid": (lambda folder: text(folder, "# vid uid\n" + lines()), {}),
    "u and v": (edge_table(v=TARGET, u=SOURCE), {}),
    "pairs of edges, two of them in the second file": (
        lambda folder: (
            [np.save(folder / f"a-{at}.npy", np.stack([SOURCE, TARGET], 1)[3 * at :][:3]) for at in (0, 1)]
            and f"edges:{folder}/a-*.npy,num_vertices=6"
        ),
        {},
    ),
    "files of edges of both forms, and one that may have either": (
        lambda folder: (
            [np.save(folder / f"a-{at}.npy", np.zeros(shape, int)) for at, shape in enumerate([(2, 3), (3, 2), (2, 2)])]
            and f"edges:{folder}/a-*.npy,num_vertices=6"
        ),
        r"a-2\.npy has shape \[2, 2\], which may mean \[2, E\] or \[E, 2\]",
    ),
    "a header in the first of two files": (
        lambda folder: (
            text(folder, lines(), name="e-1.csv")
            and text(folder, "source,target\n" + lines(), ",num_vertices=6,skip=1", "e-0.csv").replace("-0", "-*")
        ),
        r"e-1\.csv: skip=1 would skip numbers at the start of this file, but none in .*e-0\.csv",
    ),
    "counts in the first line of two files": (
        lambda folder: (
            text(folder, "6 2\n" + lines()[8:], name="e-1.csv")
            and text(folder, "6 3\n" + lines()[:8], ",num_vertices=6,skip=1", "e-0.csv").replace("-0", "-*")
        ),
        {},
    ),
    "decimal commas between semicolons": (
        numbers("x", "0,5;1,25\n" * N),
        r"x\.txt, line 1: expected one separator between numbers, got '0,5;1,25' with several",
    ),
    "decimal commas between blanks": (numbers("x", "# a b\n0,5 1,25\n" * N), r"x\.txt, line 2: expected one separator"),
    "commas and blanks": (numbers("x", "0, 1 ,2,\n" * N), {"x": np.tile(np.arange(3, dtype=np.float32), (N, 1))}),
    "pieces with a gap": (
        folder_of(**{_BUYS: np.stack([SOURCE, TARGET]), "user__in__x-0": X, "user__in__x-2": X}),
        r"user must have the pieces of x as x-0\.npy, x-1\.npy and so on, got x-0\.npy, x-2\.npy",
    ),
    "pieces beside the whole": (
        folder_of(**{_BUYS: np.stack([SOURCE, TARGET]), "user__in__x-0": X, "user__in__x": X}),
        r"user must have the pieces of x",
    ),
    "a table that is not Parquet": (array("nodes", X), r"nodes= must be Parquet tables, got .*a\.npy"),
}


def pairs_of(data: Data | HeteroData) -> list[tuple[int, int]]:
    adj_t = data.adj_t if isinstance(data, Data) else data[data.edge_types[0]].adj_t
    targets = torch.repeat_interleave(torch.arange(adj_t.size(0)), adj_t.crow_indices().diff())
    return sorted(zip(adj_t.col_indices().tolist(), targets.tolist()))


@pytest.mark.parametrize("name", TABLE)
def test_each_file_is_read_as_meant_or_refused(tmp_path, name):
    write, expected = TABLE[name]
    source = write(tmp_path)
    if isinstance(expected, str) and not expected.startswith("warns: "):
        with pytest.raises(ValueError, match=expected):
            convert(source, tmp_path / "c")
        assert not (tmp_path / "c" / "manifest.json").exists()
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(source, tmp_path / "c")
    said = [str(each.message) for each in caught if "left out" in str(each.message)]
    data = load_dataset(f"converted:{tmp_path / 'c'}")
    assert pairs_of(data) == PAIRS
    if isinstance(expected, str):
        assert len(said) == 1

        assert re.search(expected.removeprefix("warns: "), said[0]), said
        return
    assert not said
    assert set(data.keys()) == {*expected, "adj_t", "num_nodes"}
    for key, values in expected.items():
        got = data[key].numpy()
        assert (got.dtype, got.shape) == (values.dtype, values.shape)
        assert got.tobytes() == np.ascontiguousarray(values).tobytes()
