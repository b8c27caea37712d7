"""Opens a converted graph as memory maps.

``manifest.json`` is written last. A directory without this file is not a graph. The file lists every array with dtype, shape and checksums. The arrays are
.npy files, and keys an Arrow file:

* ``e<k>.indptr.npy`` int64 [N + 1] and ``e<k>.indices.npy`` [E] of relation ``k``; indices are int32 if the ids fit, else int64.
* ``n<k>.<name>.npy``, an attribute or mask of vertex type ``k``.
* ``e<k>.<name>.npy``, an attribute of relation ``k``, in the order of its indices.
* ``n<k>.keys.arrow``, the keys of vertex type ``k``: an Arrow file with a row per vertex.
* ``l.<split>.<column>.npy``, a column of a link split: ``edge`` int64 [M, 2], ``edge_neg`` int64 [K, 2], and others with M rows.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.datasets.converted.pieces import Source
from salientpp.store.directory.files import ARROW, DatasetError, cannot_be_read, numpy_dtype, open_array, verify_file
from salientpp.store.directory.journal import JOURNAL
from salientpp.store.directory.kinds import CONVERTED, MANIFEST
from salientpp.store.directory.manifest import manifest_checksum
from salientpp.store.frames import Frame, check_installed, put_tables_together
from salientpp.store.key_table import KeyTable

#: Version 2 may have link splits. Version 3 has keys of vertices, attributes of edges, and says where tables came from. A graph is written as the least
#: version that can hold it, since earlier releases read that.
VERSIONS = (1, 2, 3)

_AGAIN = "convert again"


def load_converted(root: Path, verify: bool = False) -> Data | HeteroData:
    """Loads ``converted:DIR``, see `load_dataset`."""
    if not isinstance(verify, bool):
        raise ValueError(f"converted:{root}: verify must be True or False, got {verify!r}")
    manifest = read_converted(root)
    arrays = open_arrays(root, manifest["files"], verify)

    sizes = {vertices["name"]: vertices["num_vertices"] for vertices in manifest["node_types"]}
    data = Data() if list(sizes) == [None] else HeteroData()
    for number, vertices in enumerate(manifest["node_types"]):
        store = data if isinstance(data, Data) else data[vertices["name"]]
        store.num_nodes = vertices["num_vertices"]
        for name in vertices["columns"]:
            store[name] = arrays[f"n{number}.{name}.npy"]
        if frames := {name: Frame.of_json(said) for name, said in vertices.get("frames", {}).items()}:
            check_installed(f"converted:{root}", frames.values())
            put_tables_together(store, frames)
        if vertices.get("keys") is not None:
            store.key_table = KeyTable(root / f"n{number}.keys.arrow")
    for number, edges in enumerate(manifest["edge_types"]):
        name = None if edges["name"] is None else tuple(edges["name"])
        indptr, indices = (arrays[f"e{number}.{part}.npy"] for part in ("indptr", "indices"))
        ones = torch.ones(1, device="cpu").expand(indices.numel())  # all values share a single 1
        size = sizes[name and name[2]], sizes[name and name[0]]
        # torch's check wants indptr and indices of the same width, but torch also reads them with two widths. Widening one would load it into memory. So the
        # check is off. Both arrays were checked when they were written.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            adj_t = torch.sparse_csr_tensor(indptr, indices, ones, size=size, check_invariants=False, device="cpu")
        relation = data if isinstance(data, Data) else data[name]
        relation.adj_t = adj_t
        for column in edges.get("columns", ()):
            relation[column] = arrays[f"e{number}.{column}.npy"]
    return data


def open_arrays(root: Path, entries: Mapping[str, Mapping[str, Any]], verify: bool) -> dict[str, Tensor]:
    """Memory-maps the files that the manifest's ``entries`` describe, and returns them as tensors by file name. Arrow files are only checked.

    ``verify`` checks every byte, instead of sizes and sampled checksums only. Raises DatasetError if a file was altered.
    """
    try:
        arrays = {}
        for name, entry in entries.items():
            verify_file(root, name, entry, full=verify)
        for name, entry in entries.items():
            if entry["dtype"] == ARROW:
                continue
            array, _ = open_array(root / name, entry)
            arrays[name] = torch.from_numpy(array).view(getattr(torch, entry["torch_dtype"]))
    except DatasetError as error:
        raise DatasetError(str(error).replace("partition again", _AGAIN)) from None
    return arrays


def read_converted(root: Path) -> dict[str, Any]:
    """Reads the manifest. Raises DatasetError if the manifest is missing, was altered, or describes something else than a converted graph."""
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        if (root / JOURNAL).is_file():
            raise DatasetError(
                f"{root} is an unfinished conversion; repeat its `salientpp convert` command to continue it"
            ) from None
        raise DatasetError(
            f"{root} is not a converted graph: it has no {MANIFEST}; write one with `salientpp convert`"
        ) from None
    except OSError as error:
        raise cannot_be_read(path, error, _AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid JSON ({error}); copy it again, or {_AGAIN}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != CONVERTED:
        raise DatasetError(
            f"{path} does not describe a converted graph: expected format {CONVERTED!r}; for a dataset directory see salientpp.load"
        )
    if manifest.get("version") not in VERSIONS:
        raise DatasetError(
            f"{path} has format version {manifest.get('version')}, this salientpp reads versions 1, 2 and 3; upgrade salientpp, or {_AGAIN}"
        )
    stated = manifest.pop("checksum", None)
    if stated != manifest_checksum(manifest):
        raise DatasetError(f"{path} was altered: its checksum does not match its contents; copy it again, or {_AGAIN}")
    try:
        _check_manifest(manifest)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DatasetError(
            f"{path} does not describe a converted graph ({type(error).__name__}: {error}); {_AGAIN}"
        ) from None
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raises an error unless the manifest lists a file of the right size for each array of its types and relations."""
    files: dict[str, Any] = manifest["files"]
    expected: dict[str, int] = {}
    sizes = {}
    for number, vertices in enumerate(manifest["node_types"]):
        size = sizes[vertices["name"]] = vertices["num_vertices"]
        expected |= {f"n{number}.{name}.npy": size for name in vertices["columns"]}
        of_frames = [column for said in vertices.get("frames", {}).values() for column in Frame.of_json(said).columns]
        if missing := set(of_frames) - set(vertices["columns"]):
            raise ValueError(f"a TensorFrame has columns without files: {', '.join(sorted(missing))}")
        if (keys := vertices.get("keys")) is not None:
            expected[f"n{number}.keys.arrow"] = size
            _check_keys(keys)
    for number, edges in enumerate(manifest["edge_types"]):
        name = edges["name"]
        target, source = (None, None) if name is None else (name[2], name[0])
        if source not in sizes:
            raise ValueError(f"edges from {source!r}, which is not a type of vertices")
        expected |= {f"e{number}.indptr.npy": sizes[target] + 1, f"e{number}.indices.npy": edges["num_edges"]}
        expected |= {f"e{number}.{name}.npy": edges["num_edges"] for name in edges.get("columns", ())}
    for split in manifest.get("link_splits", ()):
        expected |= {f"l.{split['name']}.{name}.npy": rows for name, rows in split["columns"].items()}
    if set(files) != set(expected):
        raise ValueError(
            f"files do not fit its types; missing or unexpected: {', '.join(sorted(set(files) ^ set(expected)))}"
        )
    for name, rows in expected.items():
        entry = files[name]
        if not {"quick", "sha256", "bytes"} <= set(entry):
            raise ValueError(f"{name} has no size or checksums")
        if name.endswith(".arrow"):
            if [entry["dtype"], entry["shape"]] != [ARROW, [rows]]:
                raise ValueError(f"{name} has {entry['dtype']} {entry['shape']}, expected {rows} rows of keys")
            continue
        dtype = getattr(torch, entry["torch_dtype"])
        if entry["shape"][0] != rows or numpy_dtype(dtype).str != entry["dtype"]:
            raise ValueError(f"{name} has {entry['dtype']} {entry['shape']}, expected {rows} rows of {dtype}")


def _check_keys(keys: Any) -> None:
    names = [column["name"] for column in keys]
    texts = [column[field] for column in keys for field in ("name", "type")]
    if not names or len(set(names)) < len(names) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"keys must be null or a list of columns, each with a name of its own and a type, got {keys}")


def needs_version_3(source: Source) -> bool:
    """True if a source has keys, attributes of edges, or an origin."""
    has_keys = any(vertices.keys is not None for vertices in source.vertices.values())
    return has_keys or any(edges.columns for edges in source.edges.values()) or bool(source.origin)


def manifest_text(body: dict[str, Any]) -> str:
    """Returns the text of the manifest's file, with format, version and checksum."""
    version = 3 if "tables" in body else VERSIONS["link_splits" in body]
    manifest = {"format": CONVERTED, "version": version, **body}
    manifest["checksum"] = manifest_checksum(manifest)
    return json.dumps(manifest, indent=1, sort_keys=True)
