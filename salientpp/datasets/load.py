"""Loads a graph by its name as a PyG `Data` or `HeteroData`, and checks its arrays.

No file can run code. Archives (.npz) are read with ``allow_pickle=False``, and PyG's files with ``weights_only=True``. OGB's raw files are read directly,
without the pickled cache that OGB's dataset class writes.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.addresses import is_remote, without_passwords
from salientpp.datasets.arrays import check_data
from salientpp.datasets.converted.directory import load_converted
from salientpp.datasets.converted.layouts import LAYOUTS
from salientpp.datasets.converted.sources import EDGE_FILES
from salientpp.datasets.generated import synthetic
from salientpp.datasets.generated_mag import synthetic_mag
from salientpp.datasets.npz import load_npz
from salientpp.datasets.ogb import load_ogb
from salientpp.datasets.own_objects import load_python, read_pyg
from salientpp.datasets.partitions.load import FORMATS, GivenPartition, load_partition
from salientpp.datasets.spec import call_with, with_spec
from salientpp.store.directory.kinds import is_converted
from salientpp.suggestions import did_you_mean

#: Kinds of datasets, apart from the names of OGB.
KINDS = ("synthetic", "synthetic-mag", "npz", "pyg", "python", "converted", *FORMATS)

# Only for suggestions. `ogb_meta` reads all names from the installed ogb.
_OGB_EXAMPLES = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "ogbn-proteins")


def load_dataset(
    dataset: str | Data | HeteroData, *, root: str | Path = "data", **parameters: Any
) -> Data | HeteroData:
    """Returns the graph that `dataset` names as PyG's `Data`, or as `HeteroData` if the graph has several types. The arrays are checked.

    The graph has these arrays; a `HeteroData` has them for every type:

    * `edge_index` int64 [2, E]: row 0 has the sources, row 1 the targets. An undirected graph holds both directions.
    * `x` float [N, F], in the stored dtype; `y` int64 [N]; `train_mask`, `val_mask` and `test_mask` bool [N]; `num_nodes`.

    The label -1 means "unlabelled" if labels are classes: integers, none below -1, and 0 among them. Unlabelled vertices are left out of the splits of an
    archive or an OGB dataset, and a warning says how many. Other negative labels are values. The masks of a PyG object are not changed.

    Args:
        dataset: one of

            * a `Data` object with `edge_index` or `adj_t`, or a `HeteroData`. It is checked, also for N rows and finite values in `x`, and the same object is
              returned;
            * ``"npz:FILE"``: an archive with the key `edge_index` [2, E]. The keys `x` [N, F] and `y` [N] are optional. So are the splits `train_idx`,
              `val_idx` and `test_idx` (all three or none). The key `num_nodes` is needed if `x` and `y` are missing. The key `directed` is true by default;
              false means that each undirected edge is stored once. Other keys are left out with a warning;
            * ``"pyg:FILE"``: a file in which `torch.save` wrote a `Data` or `HeteroData` object or its `to_dict()`, or in which `InMemoryDataset.save` wrote
              a single graph. It is read with ``weights_only=True``. A file that needs more than tensors and the classes that PyG registers is refused;
            * ``"python:MODULE:FUNCTION"``: the result of the function, called without arguments. The module is searched in the current directory, then on
              `sys.path`. The standard output of the module and the function goes to stderr;
            * ``"converted:DIR"``: a directory that `convert` wrote. Its arrays are mapped copy-on-write, and `adj_t` (torch's CSR) replaces `edge_index`.
              Sizes and sampled checksums are checked; with `verify=True`, every byte. Types of vertices that were tables with keys have a `key_table`, whose
              `rows(ids)` gives the keys of vertices;
            * the name of a homogeneous OGB node-property dataset. The result also has the attributes that OGB's own PyG loader sets: `edge_attr`, `node_year`
              and `node_species`, if the dataset has them. `y` of the multi-label ogbn-proteins is int64 [N, 112]. Each call reads the raw files (about a
              minute for ogbn-products);
            * ``"pyg-partition:DIR"`` and ``"glt-partition:DIR"``: a graph that another library has partitioned, see `load_partition`, which also returns the
              assignment to parts. Files of labels and splits may follow: ``"pyg-partition:DIR,y=label.pt,train=train_idx.pt"``;
            * ``"synthetic"``, see `synthetic`, and ``"synthetic-mag"``, see `synthetic_mag`.

            A name may carry its parameters, for the command line: ``"synthetic:num_vertices=20000,seed=3"``,
            ``"ogbn-papers100M:undirected=true"``.
        root: the folder of OGB datasets, each in a folder of its own (`root/ogbn_arxiv/raw/...`) as `ogb` lays them out. Used for OGB names only.
        parameters: keyword arguments that depend on the name.

            * "synthetic" and "synthetic-mag" take the keyword arguments of these functions.
            * "npz:FILE" and OGB names take `undirected`. None (default) loads the graph as the dataset defines it. True gives every edge its inverse, even if
              the dataset's definition does not. It merges duplicates and keeps a self-loop single. This is customary for ogbn-papers100M, a directed citation
              graph. False loads the edges as they are stored, so an undirected graph has each edge once.
            * OGB names also take `download`. True allows the download of a missing dataset (default False). Nothing is ever asked on standard input.

    Raises:
        ValueError: `dataset` is none of these, a parameter is unknown, or the arrays are not as described.
        FileNotFoundError: the file, or a raw file of the OGB dataset, does not exist.
        ImportError: an OGB name was given and `ogb` is not installed.
    """
    if isinstance(dataset, (Data, HeteroData)):
        if parameters:
            raise ValueError(
                f"a {type(dataset).__name__} object takes no parameters, got {', '.join(sorted(parameters))}"
            )
        check_data(dataset)
        return dataset
    if not isinstance(dataset, str):
        raise ValueError(_not_accepted(dataset))

    name, _, rest = dataset.partition(":")
    if name == "npz" and rest:
        return call_with(load_npz, dataset, parameters, file=Path(rest))
    if name == "pyg" and rest:
        return call_with(read_pyg, dataset, parameters, file=Path(rest), map_tensors=False)
    if name == "python" and rest:
        return call_with(load_python, dataset, parameters, where=dataset, source=rest)
    if name == "converted" and rest:
        folder, _, spec = rest.partition(",")
        return call_with(load_converted, dataset, with_spec(dataset, spec, parameters), root=Path(folder))
    if name in FORMATS:
        return _named_partition(dataset, parameters).data
    if name == "synthetic":
        return call_with(synthetic, name, with_spec(dataset, rest, parameters))
    if name == "synthetic-mag":
        return call_with(synthetic_mag, name, with_spec(dataset, rest, parameters))
    if name.startswith("ogbn-"):
        return call_with(load_ogb, name, with_spec(dataset, rest, parameters), name=name, root=Path(root))
    raise ValueError(_not_accepted(dataset))


def is_partition(dataset: str) -> bool:
    """True if `dataset` names a graph that another library has partitioned. Its files then also say which part each vertex has."""
    return dataset.partition(":")[0] in FORMATS


def load_given(dataset: str, num_parts: int) -> tuple[Data | HeteroData, Tensor | dict[str, Tensor]]:
    """Returns the graph of ``"pyg-partition:DIR"`` or ``"glt-partition:DIR"``, and the part of each vertex.

    Raises ValueError if the number of parts is not ``num_parts``.
    """
    given = _named_partition(dataset, {})
    if given.num_parts != num_parts:
        raise ValueError(
            f"{dataset} has {given.num_parts} parts, expected {num_parts}; ask for {given.num_parts} parts, or partition again with a method such as metis"
        )
    return given.data, given.assignment


def _named_partition(dataset: str, parameters: dict[str, Any]) -> GivenPartition:
    name, _, rest = dataset.partition(":")
    folder, _, spec = rest.partition(",")
    if not folder:
        raise ValueError(f"expected {name}:DIR, or {name}:DIR,y=FILE,train=FILE, got {dataset!r}")
    if (Path(folder) / next(FORMATS[other] for other in FORMATS if other != name)).is_file():
        raise ValueError(
            f"{folder} is a {' or '.join(other for other in FORMATS if other != name)}, got {dataset!r}; name it in place of {name!r}"
        )
    return call_with(load_partition, name, with_spec(dataset, spec, parameters, as_text=True), root=Path(folder))


def to_convert(dataset: str) -> str | None:
    """Returns the source to give to `convert`, for a dataset that must be converted before it is loaded, else None.

    Raises:
        FileNotFoundError: its file or directory does not exist.
    """
    kind, colon, rest = dataset.partition(":")
    if kind.startswith("ogbl-"):
        return dataset
    if kind not in ("edges", "tables", *LAYOUTS) and Path(kind).suffix not in (*EDGE_FILES, ".toml"):
        return None
    path = rest.partition(",")[0] if colon else dataset
    if not is_remote(path) and not Path(path).exists() and not (glob.has_magic(path) and glob.glob(path)):
        raise FileNotFoundError(f"{path}: no such {'directory' if kind in LAYOUTS else 'file'}")
    return dataset if colon else f"{'tables' if Path(dataset).suffix == '.toml' else 'edges'}:{dataset}"


def undirected_hint(source: str) -> str:
    """Returns a hint to append where an error suggests `convert`. It is "" unless the source is a file of edges, which cannot say if they are directed."""
    return " (add --undirected if your edges have no direction)" if source.startswith("edges:") else ""


def _not_accepted(dataset: object) -> str:
    if isinstance(dataset, (str, Path)):
        dataset = without_passwords(dataset) if isinstance(dataset, str) else dataset
        source = to_convert(str(dataset))
        if source is not None:
            return (
                f"{dataset} must be converted first, with `salientpp convert {source} graph`{undirected_hint(source)}; "
                "then pass converted:graph"
            )
    got = repr(dataset) if isinstance(dataset, (str, Path)) else f"an object of type {type(dataset).__name__}"
    message = (
        f'dataset must be a torch_geometric Data or HeteroData object, "npz:FILE", "pyg:FILE", "python:MODULE:FUNCTION", '
        f'"converted:DIR", "pyg-partition:DIR", "glt-partition:DIR", "synthetic", "synthetic-mag" or the name of '
        f"an OGB node-property dataset such as {', '.join(_OGB_EXAMPLES)}; got {got}"
    )
    if isinstance(dataset, Path) or (isinstance(dataset, str) and dataset.endswith(".npz")):
        return f'{message}. Did you mean "npz:{dataset}"?'
    if isinstance(dataset, str) and dataset.endswith((".pt", ".pth")) and ":" not in dataset:
        return f'{message}. Did you mean "pyg:{dataset}"?'
    if isinstance(dataset, str) and is_converted(dataset):
        return f'{message}. Did you mean "converted:{dataset}"?'
    if isinstance(dataset, str):
        return message + did_you_mean(
            dataset.partition(":")[0],
            (*KINDS, *_OGB_EXAMPLES),
        )
    return message
