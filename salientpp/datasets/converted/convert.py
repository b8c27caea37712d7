"""Converts a source to a converted graph within a memory budget. A journal records the finished steps.

The result depends on the source and the options, never on the budget.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from salientpp.addresses import without_passwords
from salientpp.datasets.converted import buckets
from salientpp.datasets.converted.arrays import StoredArray, array_rows
from salientpp.datasets.converted.budget import Budget, read_bytes
from salientpp.datasets.converted.columns import DTYPES, write_column, write_mask
from salientpp.datasets.converted.directory import manifest_text, needs_version_3
from salientpp.datasets.converted.fetched import finder_for, names_addresses
from salientpp.datasets.converted.key_files import write_keys_of_vertices
from salientpp.datasets.converted.link_files import write_links
from salientpp.datasets.converted.names import check_edge_names, check_vertex_names
from salientpp.datasets.converted.pieces import EdgeName, EdgeSource, LinkFile, Source, Vertices
from salientpp.datasets.converted.sources import open_source
from salientpp.datasets.tabular.changes import check_report, is_made_of
from salientpp.datasets.tabular.encoding import Encoding, load_encoding
from salientpp.datasets.tabular.open import TABLES, described_tables, opened_tables
from salientpp.files import says_where_to_write
from salientpp.progress import Progress
from salientpp.store.directory.journal import HALF_WRITTEN, JOURNAL, RUNS, Journal, alone, check_empty
from salientpp.store.directory.kinds import CONVERTED, MANIFEST, has_manifest, is_converted
from salientpp.store.directory.labels import marks_unlabelled
from salientpp.store.directory.owned import listed_files, others_in


@dataclass(frozen=True)
class Options:
    """Options that change the result of a conversion."""

    deduplicate: bool
    dtype: Mapping[str, str]
    finite: bool
    encode_as: str | None = None  # digest of the encoding of tables


def convert(
    source: str | Mapping[str, Any],
    root: str | Path,
    *,
    memory: int | str = "4GB",
    undirected: bool | None = None,
    deduplicate: bool = False,
    dtype: Mapping[str, str] | None = None,
    finite: bool = False,
    data: str | Path = "data",
    overwrite: bool = False,
    report: str | Path | None = None,
    encode_as: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a graph to a directory of files that :func:`load_dataset` maps, in bounded memory.

    If a run is stopped in any way, a call with the same arguments continues it. A call that would write a complete graph of tables again does nothing.

    Args:
        source: one of

            * ``"npz:FILE"``, ``"pyg:FILE"`` or the name of a node-property dataset of OGB, as in :func:`load_dataset`;
            * ``"ogbl-..."``: a link-prediction dataset of OGB, whose splits :func:`load_link_splits` loads;
            * ``"npy:DIR"``, ``"mag240m:DIR"`` or ``"igb:DIR"``: a folder of arrays for each type, in the general layout or in that of MAG240M or IGB.
              Append ``,homogeneous=true`` to take one type only; IGB also has ``,classes=2983``;
            * ``"edges:FILES[,x=FILES][,y=FILES][,nodes=FILES][,train=FILES][,val=FILES][,test=FILES][,num_vertices=N][,skip=LINES]"``. Edges are text
              (two numbers a line, also .gz), .npy ([2, E] or [E, 2]) or .parquet. Names of columns, such as source and target, decide which end a column
              holds; ``,source=COLUMN,target=COLUMN`` names others. ``nodes`` are Parquet tables with a row per vertex. FILES may have wildcards; several
              files are read in the order of the numbers in their names.
              FILES and DIR may also be addresses such as ``s3://bucket/edges-*.npy``. Their files are first fetched to a hidden folder beside ``root``, which
              needs disk space for them until the conversion is complete.
            * ``"tables:FILE.toml"``: tables whose rows have keys, as the file describes. A mapping with the entries ``nodes`` and ``edges`` of such a file
              works too; its tables may be objects of pyarrow, pandas, polars or DuckDB.
        root: the directory to write.
        memory: limit of the resident memory, Python and torch included: bytes, or a text such as "4GB". More memory makes fewer and longer pieces.
        undirected: None stores edges as the dataset defines them; True stores every edge in both directions, each pair once; False stores edges as they
            are in the source. In a folder of arrays, True gives a relation between two types an inverse relation, ``rev_RELATION``.
        deduplicate: store each pair of vertices once; the sources in a neighbour list then ascend.
        dtype: maps names of attributes to fp64, fp32, fp16 or bf16; other attributes keep their dtype.
        finite: refuse NaN and infinity in attributes.
        data: folder of OGB datasets.
        overwrite: replace a converted graph, or an unfinished conversion, in ``root``. The call fails if ``root`` also holds files that no conversion wrote.
        report: file to write as JSON, for ``tables``: rows that were kept and dropped, with examples, and what each column became.
        encode_as: an earlier graph of tables, for ``tables``. Columns are encoded with its categories, means, deviations and unit of time.
        progress: object that is told of every step, and of the amount of the step that is done.

    Returns:
        ``root``.

    Raises:
        ValueError: an argument, the source or the directory is wrong, or a step needs more memory. The text says where, and what to do.
        OSError: the directory cannot be written. Finished steps are kept for the next run.
    """
    root, progress = Path(root), progress or Progress()
    read_bytes(memory)  # a wrong text is an error even if nothing is to do
    with contextlib.ExitStack() as stack:
        if isinstance(source, Mapping) or (isinstance(source, str) and source.startswith(TABLES)):
            graph = described_tables(source)
            if undirected is not None:
                raise ValueError(
                    f"{graph.name}: undirected is not for tables; set reverse = true or false in each entry of edges"
                )
            encoding = None if encode_as is None else _encoding(encode_as, root)
            digest = None if encoding is None else encoding.digest
            given = {"deduplicate": deduplicate, "dtype": dict(dtype or {}), "finite": finite, "encode_as": digest}
            if not overwrite and is_converted(root) and is_made_of(root, graph, given, progress):
                check_report(report, root)
                return root
            _check_result(root, overwrite)
            budget = Budget.of(memory)
            opened = stack.enter_context(opened_tables(graph, root, budget, report, encoding, progress))
        else:
            of_tables = {"report": report, "encode_as": encode_as}
            opened = stack.enter_context(_opened(source, root, Path(data), undirected, overwrite, of_tables, progress))
            digest = None
            budget = Budget.of(memory)
        options = Options(_flag("deduplicate", deduplicate), _dtypes(dtype, opened), _flag("finite", finite), digest)
        return write_converted(opened, root, budget, options, overwrite=overwrite, progress=progress)


@contextlib.contextmanager
def _opened(
    source: str,
    root: Path,
    data: Path,
    undirected: bool | None,
    overwrite: bool,
    of_tables: Mapping[str, object],
    progress: Progress,
) -> Iterator[Source]:
    """Opens a source without keys. ``of_tables`` are arguments that only tables with keys have."""
    for name, value in of_tables.items():
        if value is not None:
            shown = without_passwords(repr(source))
            raise ValueError(f"{name} is only for tables with keys ({TABLES}FILE.toml), got {shown}; leave it out")
    if names_addresses(source):
        _check_result(root, overwrite)
    with finder_for(source, root, progress) as finder:
        yield replace(open_source(source, data, undirected, finder), versions=finder.versions)


def _encoding(encode_as: str | Path, root: Path) -> Encoding:
    """Loads the encoding of an earlier graph. Raises ValueError if that is ``root``: a run killed while it replaces the graph would lose the encoding."""
    encoding = load_encoding(encode_as)
    if encoding.root.resolve() == root.resolve():
        raise ValueError(f"encode_as must be another graph than {root}, which is written; choose another directory")
    return encoding


def _check_result(root: Path, overwrite: bool) -> None:
    """Raises ValueError if ``root`` may not be written. Called at once where reading tables, or fetching files, takes long."""
    _check_directory(root)
    if has_manifest(root):
        if not overwrite:
            raise _exists(root)
        _replaced(root)
    elif root.is_dir() and not (root / JOURNAL).is_file():
        check_empty(root)


def _check_directory(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} exists and is not a directory; choose another")


def _exists(root: Path) -> ValueError:
    return ValueError(f"{root} exists; pass --overwrite to replace it, or choose another directory")


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _dtypes(dtype: Mapping[str, str] | None, source: Source) -> dict[str, str]:
    types: list[Vertices | EdgeSource] = [*source.vertices.values(), *source.edges.values()]
    known = {name for type_ in types for name in type_.columns} - {"y"}
    for name, format in (dtype or {}).items():
        if name not in known:
            raise ValueError(
                f"dtype: {source.name} has no attribute {name!r} whose dtype can be chosen; it has {', '.join(sorted(known)) or 'none'}"
            )
        if format not in DTYPES:
            raise ValueError(f"dtype of {name!r} must be one of {', '.join(DTYPES)}, got {format!r}")
    return dict(dtype or {})


def write_converted(
    source: Source,
    root: Path,
    budget: Budget,
    options: Options,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes a source that is already open. Otherwise the same as :func:`convert`."""
    _check_names(source)
    _check_edges(source, options)
    if source.left_out:
        warnings.warn(
            f"{', '.join(source.left_out)} of {source.name} left out: a converted graph holds only edges, attributes of vertices, and splits",
            UserWarning,
            stacklevel=3,
        )
    task = {
        "source": source.name,
        "files": [
            *([path.name, (found := path.stat()).st_size, found.st_mtime_ns] for path in source.files),
            *source.versions,
        ],
        "parameters": dict(source.made_of),
        "both directions": source.both_directions,
        "undirected": source.undirected,
        "deduplicate": options.deduplicate,
        "dtype": dict(options.dtype),
        "finite": options.finite,
    }
    _check_directory(root)
    with says_where_to_write(root, "choose another directory"):
        root.mkdir(parents=True, exist_ok=True)
    with alone(root):
        complete = has_manifest(root)
        if complete and not overwrite:
            raise _exists(root)
        replaced = _replaced(root) if complete else None
        journal = Journal.open(root, "conversion", task, overwrite=overwrite, replaced=replaced)
        conversion = _Conversion(source, journal, budget, options, progress or Progress())
        journal.finish(manifest_text(conversion.run()))
        (root / JOURNAL).unlink()
    return root


def _replaced(root: Path) -> set[str]:
    """Returns the files of the complete conversion in ``root``, which a new conversion replaces.

    Raises:
        ValueError: ``root`` is not a converted graph, or also holds files that no conversion wrote.
    """
    listed = listed_files(root / MANIFEST, CONVERTED)
    if listed is None:
        raise ValueError(f"{root} exists and is not a converted graph, so it is not replaced; choose another directory")
    if others := others_in(root, listed | {MANIFEST, JOURNAL}, [HALF_WRITTEN]):
        raise ValueError(
            f"{root} also holds {others[0]}, which no command of salientpp wrote, so it is not replaced; move it away, or choose another directory"
        )
    return listed


def _check_names(source: Source) -> None:
    """Raises ValueError if an attribute's name cannot be a file name, or has another meaning in PyG, such as ``edge_index``."""
    for type_, vertices in source.vertices.items():
        check_vertex_names(source.name, type_, vertices.columns, vertices.splits)
    for relation, edges in source.edges.items():
        check_edge_names(source.name, relation, edges.columns)


def _check_edges(source: Source, options: Options) -> None:
    """Raises ValueError if edges have attributes, and an option would add, merge or reorder edges."""
    named = {
        "deduplicate": options.deduplicate,
        "undirected": source.undirected,
        "undirected=False": source.both_directions,
    }
    for relation, edges in source.edges.items():
        if edges.columns and (chosen := [name for name, is_set in named.items() if is_set]):
            raise ValueError(
                f"{source.name}: {_edges_of(relation)} have attributes ({', '.join(edges.columns)}), so {chosen[0]} is not possible, since each edge keeps its "
                "row; leave it out"
            )


class _Conversion:
    """The steps of one conversion. A step that the journal records as finished is skipped."""

    def __init__(self, source: Source, journal: Journal, budget: Budget, options: Options, progress: Progress) -> None:
        self.source, self.journal, self.budget, self.options = source, journal, budget, options
        self.progress = progress
        self.sizes: dict[str | None, int] = {}
        doubles = source.both_directions or source.undirected
        self.edges_at_once = max(1, budget.working // (buckets.SPREAD_BYTES * (1 + doubles)))
        self.capacity = max(1, budget.working // buckets.SORT_BYTES)  # number of words that are sorted together

    def run(self) -> dict[str, Any]:
        """Runs all steps. Returns the contents of the manifest, without format, version and checksum."""
        node_types: list[dict[str, Any]] = []
        is_keyed = needs_version_3(self.source)
        for number, (type_, vertices) in enumerate(self.source.vertices.items()):
            size = self.sizes[type_] = self._columns(number, type_, vertices)
            columns = [*vertices.columns, *(f"{split}_mask" for split in vertices.splits)]
            node_types.append({"name": type_, "num_vertices": size, "columns": columns})
            if is_keyed:
                node_types[-1]["keys"] = self._keys(number, type_, vertices.keys)
            if vertices.frames:
                node_types[-1]["frames"] = {name: frame.to_json() for name, frame in vertices.frames.items()}
        if not any(self.sizes.values()):
            raise ValueError(f"{self.source.name}: the graph has no vertices; give files that are not empty")
        edge_types: list[dict[str, Any]] = []
        for number, (name, edges) in enumerate(self.source.edges.items()):
            edge_types.append({"name": name, "num_edges": self._lists(number, name, edges)})
            if is_keyed:
                self._edge_columns(number, name, edges, edge_types[-1]["num_edges"])
                edge_types[-1]["columns"] = [*edges.columns]
        links = [{"name": split, "columns": self._links(split, file)} for split, file in self.source.links.items()]
        return {
            "source": self.source.name,
            "node_types": node_types,
            "edge_types": edge_types,
            **({"link_splits": links} if links else {}),
            **({"tables": {**self.source.origin, "options": asdict(self.options)}} if is_keyed else {}),
            "files": self.journal.file_entries(),
        }

    def _links(self, split: str, file: LinkFile) -> dict[str, int]:
        """Writes a link split. Returns the number of rows of each column."""
        step = f"l.{split}"
        facts = self.journal.facts(step)
        if facts is None:
            written = write_links(split, file, self.sizes[None], self.journal.work, self.budget, self.progress)
            facts = self.journal.note(step, *written)
        return facts

    # --- vertices -----------------------------------------------------------------------------------------

    def _columns(self, number: int, type_: str | None, vertices: Vertices) -> int:
        """Writes the attributes and splits of a type of vertices. Returns its number of vertices."""
        num_vertices = vertices.num_vertices
        of = "" if type_ is None else f" of {type_}"
        for name, rows in vertices.columns.items():
            step = f"n{number}.{name}"
            facts = self.journal.facts(step)
            if facts is None:
                self.progress.begin(f"reading {name}{of}", rows.total, rows.unit)
                file, dtype = f"{step}.npy", self.options.dtype.get(name)
                size = rows.num_rows if num_vertices is None else num_vertices
                path = self.journal.work / file
                entry = write_column(
                    name, rows, size, path, self.budget, dtype=dtype, finite=self.options.finite, progress=self.progress
                )
                facts = self.journal.note(step, {file: entry}, {"num_rows": entry["shape"][0]})
            num_vertices = facts["num_rows"]
        if num_vertices is None:
            num_vertices = self._count(number, type_)
        if num_vertices > buckets.MOST_VERTICES:
            raise ValueError(f"{self.source.name}: a type must have at most 2^32 vertices, got {num_vertices}")
        labels = None
        if vertices.splits and "y" in vertices.columns and not vertices.keeps_unlabelled:
            stored = array_rows([StoredArray.of(self.journal.root / f"n{number}.y.npy")])
            pieces = stored.pieces(max(1, self.budget.working // 8))
            labels = stored if marks_unlabelled(piece.values for piece in pieces) else None
        for name, split in vertices.splits.items():
            step = f"n{number}.{name}_mask"
            if self.journal.facts(step) is None:
                self.progress.begin(f"reading the split {name}{of}", split.rows.total, split.rows.unit)
                file = f"{step}.npy"
                entry = write_mask(
                    name, split, num_vertices, labels, self.journal.work / file, self.budget, self.progress
                )
                self.journal.note(step, {file: entry}, {})
        return num_vertices

    def _keys(self, number: int, type_: str | None, keys: Path | None) -> list[dict[str, str]] | None:
        """Writes the keys of a type of vertices. Returns name and type of each key column, or None without keys."""
        if keys is None:
            return None
        step = f"keys of n{number}"
        facts = self.journal.facts(step)
        if facts is None:
            self.progress.begin(f"writing the keys{'' if type_ is None else f' of {type_}'}")
            file = f"n{number}.keys.arrow"
            entry, columns = write_keys_of_vertices(keys, self.sizes[type_], self.journal.work / file)
            facts = self.journal.note(step, {file: entry}, {"columns": columns})
        return facts["columns"]

    def _count(self, number: int, type_: str | None) -> int:
        """Finds the number of vertices of a type from its edges: the largest id plus one."""
        step = f"n{number}.count"
        facts = self.journal.facts(step)
        if facts is None:
            most = 0
            for name, edges in self.source.edges.items():
                if name is not None and type_ not in (name[0], name[2]):
                    continue
                self.progress.begin(f"counting the vertices of {_edges_of(name)}", edges.total, edges.unit)
                for piece in edges.pieces(self.edges_at_once):
                    for is_end, ids in ((0, piece.source), (2, piece.target)):
                        if ids.size and (name is None or name[is_end] == type_):
                            most = max(most, int(ids.max()) + 1)
                    self.progress.reach(piece.done)
            facts = self.journal.note(step, {}, {"num_vertices": most})
        return facts["num_vertices"]

    def _is_symmetric(self, name: EdgeName) -> bool:
        """True if the result holds each pair of a relation once in each direction."""
        return self.source.undirected and (name is None or name[0] == name[2])

    # --- edges --------------------------------------------------------------------------------------------

    def _lists(self, number: int, name: EdgeName, edges: EdgeSource) -> int:
        """Writes the neighbour lists of a relation. Returns its number of edges."""
        num_sources, num_targets = (self.sizes[end] for end in ((None, None) if name is None else (name[0], name[2])))
        spread, step = f"e{number}.spread", f"e{number}.lists"
        facts = self.journal.facts(step)
        if facts is None:
            indptr, indices = f"e{number}.indptr.npy", f"e{number}.indices.npy"
            work, unique = self.journal.work, self._is_symmetric(name) or self.options.deduplicate
            if (edges.ascends or edges.columns) and not unique and not self.source.both_directions:
                words = self._words_in_order(name, edges, num_sources, num_targets)
                progress = Progress()  # reading the words shows it
            else:
                runs = self._spread(spread, name, edges, num_sources, num_targets)
                progress = self.progress
                progress.begin(f"sorting {_edges_of(name)}", int(runs.sizes.sum()), "edges")
                words = buckets.in_order(runs, self.capacity, "once" if unique else "read", work)
            files = buckets.write_lists(words, num_sources, num_targets, work / indptr, work / indices, progress)
            facts = self.journal.note(step, dict(zip((indptr, indices), files)), {"num_edges": files[1]["shape"][0]})
        self.journal.drop(spread)
        return facts["num_edges"]

    def _words_in_order(
        self, name: EdgeName, edges: EdgeSource, num_sources: int, num_targets: int
    ) -> Iterator[np.ndarray]:
        """Yields the words of edges whose targets ascend, as they are read. Raises ValueError if they do not ascend."""
        self.progress.begin(f"reading {_edges_of(name)}", edges.total, edges.unit)
        pieces = edges.pieces(self.edges_at_once)
        words = buckets.edge_words(pieces, num_sources, num_targets, False, self.progress)
        return buckets.ascending(words, f"{self.source.name}: {_edges_of(name)}")

    def _edge_columns(self, number: int, relation: EdgeName, edges: EdgeSource, num_edges: int) -> None:
        """Writes the attributes of a relation."""
        for name, rows in edges.columns.items():
            step = f"attribute e{number}.{name}"
            if self.journal.facts(step) is not None:
                continue
            self.progress.begin(f"reading {name} of {_edges_of(relation)}", rows.total, rows.unit)
            file, dtype = f"e{number}.{name}.npy", self.options.dtype.get(name)
            entry = write_column(
                name,
                rows,
                num_edges,
                self.journal.work / file,
                self.budget,
                dtype=dtype,
                finite=self.options.finite,
                progress=self.progress,
                of="edge",
            )
            self.journal.note(step, {file: entry}, {})

    def _spread(self, step: str, name: EdgeName, edges: EdgeSource, num_sources: int, num_targets: int) -> buckets.Runs:
        """Does the first pass of :mod:`~salientpp.datasets.converted.buckets` over a relation, unless the journal records it. Returns the runs on disk."""
        file, ends = f"{step}{RUNS}", f"{step}.ends.npy"
        facts = self.journal.facts(step)
        if facts is None:
            # If the number of edges is unknown, use an upper bound: an edge takes at least four bytes of text.
            most_edges = edges.total // 4 if edges.num_edges is None else edges.num_edges
            doubles = self.source.both_directions or self._is_symmetric(name)
            num_buckets = 1 + 4 * most_edges * (1 + doubles) // self.capacity
            # The ends of all buckets in all runs take at most a quarter of the memory. Buckets that become too large by this are spread again.
            most_entries = self.budget.working // (4 * buckets.TABLE_BYTES)
            num_buckets = max(1, min(num_buckets, most_entries // (1 + most_edges // self.edges_at_once)))
            self.progress.begin(f"reading {_edges_of(name)}", edges.total, edges.unit)
            words = buckets.edge_words(
                edges.pieces(self.edges_at_once), num_sources, num_targets, doubles, self.progress
            )
            runs = buckets.spread(words, self.journal.work / file, 0, max(1, num_targets) << 32, num_buckets, 32)
            np.save(self.journal.work / ends, runs.ends)
            facts = self.journal.note(step, {file: {}, ends: {}}, {"shift": runs.shift})
        return buckets.Runs(self.journal.root / file, np.load(self.journal.root / ends), 0, facts["shift"])


def _edges_of(name: EdgeName) -> str:
    return "edges" if name is None else f"edges {' '.join(name)}"
