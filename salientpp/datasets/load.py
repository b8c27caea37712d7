"""Loads a graph by its name, as a PyG `Data` or `HeteroData` whose arrays are checked.

No file can run code: .npz files are read with ``allow_pickle=False``, PyG's with ``weights_only=True``, and OGB's raw files are read directly rather than
through the pickled cache that its dataset class writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.datasets.arrays import check_data
from salientpp.datasets.converted.directory import is_converted, load_converted
from salientpp.datasets.generated import synthetic
from salientpp.datasets.generated_mag import synthetic_mag
from salientpp.datasets.npz import load_npz
from salientpp.datasets.ogb import load_ogb
from salientpp.datasets.own_objects import load_python, read_pyg
from salientpp.datasets.partitions.load import FORMATS, GivenPartition, load_partition
from salientpp.datasets.spec import call_with, did_you_mean, with_spec

# Only for suggestions; which names exist is read from the installed ogb (`ogb_meta`).
_OGB_EXAMPLES = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "ogbn-proteins")


def load_dataset(
    dataset: str | Data | HeteroData, *, root: str | Path = "data", **parameters: Any
) -> Data | HeteroData:
    """Return the graph that `dataset` names, checked, as PyG's `Data`, or `HeteroData` where it has several types.

    Its arrays, of a `HeteroData` those of every type: `edge_index` int64 [2, E] (row 0 sources, row 1 targets; an undirected graph holds both directions),
    `x` float [N, F] in the dtype it is stored in, `y` int64 [N], `train_mask`, `val_mask`, `test_mask` bool [N], `num_nodes`.

    The label -1 means "unlabelled" where labels are classes: integers, none below -1, and 0 among them. Such a vertex is left out of the splits of an archive
    or an OGB dataset, and a warning says how many there are. Other negative labels are values. A PyG object's masks stay as they are.

    Args:
        dataset: one of

            * a `Data` object with `edge_index` or `adj_t`, or a `HeteroData`: checked, also for N rows and finite values in
              `x`, and returned as is, the same object;
            * ``"npz:FILE"`` with the keys `edge_index` [2, E] and, optionally, `x` [N, F], `y` [N], the splits `train_idx`,
              `val_idx` and `test_idx` (all three or none), `num_nodes` (needed without `x` and `y`) and `directed` (default
              true; false means that each undirected edge is stored once). Other keys are ignored;
            * ``"pyg:FILE"``: what `torch.save` wrote of a `Data` or `HeteroData` object or of its `to_dict()`, or what
              `InMemoryDataset.save` wrote of a single graph. Read with ``weights_only=True``: a file that needs more than
              tensors and the classes that PyG registers is refused;
            * ``"python:MODULE:FUNCTION"``: what the function returns, called without arguments. The module is looked for
              in the current directory, then on `sys.path`. What it prints goes to stderr;
            * ``"converted:DIR"``: what `convert` wrote. Its arrays are mapped copy-on-write, `adj_t` (torch's CSR) in place of `edge_index`; sizes and
              sampled checksums are checked, with `verify=True` every byte;
            * the name of a homogeneous OGB node-property dataset. The result also carries what OGB's own PyG loader sets
              (`edge_attr`, `node_year`, `node_species`, where there are any); `y` of the multi-label ogbn-proteins is
              int64 [N, 112]. The raw files are read anew each time (about a minute for ogbn-products);
            * ``"pyg-partition:DIR"`` and ``"glt-partition:DIR"``: the graph that another partitioner took apart, see `load_partition`, which gives
              its assignment too. Files of labels and splits follow: ``"pyg-partition:DIR,y=label.pt,train=train_idx.pt"``;
            * ``"synthetic"``, see `synthetic`, and ``"synthetic-mag"``, see `synthetic_mag`.

            A name may carry its parameters, for the command line: ``"synthetic:num_vertices=20000,seed=3"``,
            ``"ogbn-papers100M:undirected=true"``.
        root: the folder in which OGB datasets lie, each in its own folder (`root/ogbn_arxiv/raw/...`), as `ogb` lays them out. Used for OGB names only.
        parameters: of "synthetic" and "synthetic-mag": the keyword arguments of these functions. Of "npz:FILE" and OGB names: `undirected`: None (default)
            takes the graph as the dataset defines it; True adds the inverse of each edge if the dataset does not (customary for ogbn-papers100M, a directed
            citation graph), merges duplicates and keeps a self-loop single; False takes the edges as they are stored, so an undirected graph has each edge
            once. Of OGB names also `download`: whether a missing dataset may be fetched (default False; nothing is ever asked on standard input).

    Raises:
        ValueError: `dataset` is none of these, a parameter is unknown, or the arrays are not as described.
        FileNotFoundError: the file, or the OGB dataset's raw files, are not there.
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
    """Whether `dataset` is called a partition of another partitioner's, which has an assignment of its own."""
    return dataset.partition(":")[0] in FORMATS


def load_given(dataset: str, num_parts: int) -> tuple[Data | HeteroData, Tensor | dict[str, Tensor]]:
    """The graph and the assignment of ``"pyg-partition:DIR"`` or ``"glt-partition:DIR"``; ValueError if it has another number of parts."""
    given = _named_partition(dataset, {})
    if given.num_parts != num_parts:
        raise ValueError(
            f"{dataset} has {given.num_parts} parts, expected {num_parts}; ask for {given.num_parts}, or for a new partition such as metis"
        )
    return given.data, given.assignment


def _named_partition(dataset: str, parameters: dict[str, Any]) -> GivenPartition:
    name, _, rest = dataset.partition(":")
    folder, _, spec = rest.partition(",")
    if not folder:
        raise ValueError(f"expected {name}:DIR, or {name}:DIR,y=FILE,train=FILE, got {dataset!r}")
    if (Path(folder) / next(FORMATS[other] for other in FORMATS if other != name)).is_file():
        raise ValueError(f"{folder} is a {' or '.join(other for other in FORMATS if other != name)}, got {dataset!r}")
    return call_with(load_partition, name, with_spec(dataset, spec, parameters, as_text=True), root=Path(folder))


def _not_accepted(dataset: object) -> str:
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
    if isinstance(dataset, str) and is_converted(Path(dataset)):
        return f'{message}. Did you mean "converted:{dataset}"?'
    if isinstance(dataset, str):
        return message + did_you_mean(
            dataset.partition(":")[0],
            ("synthetic", "synthetic-mag", "npz", "pyg", "python", "converted", *FORMATS, *_OGB_EXAMPLES),
        )
    return message
