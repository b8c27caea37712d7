"""PyG's data modules for Lightning, with this package's loaders.

The data modules of :mod:`torch_geometric.data.lightning` draw with PyG's own sampler, which needs pyg-lib or torch-sparse. The modules here take the
same arguments and draw with this package's sampler, also on a partitioned graph. Lightning (``pip install salientpp[lightning]``) is needed to construct a data
module, not to import this file.

Lightning counts epochs and batches, and stores the counts in its checkpoints. So a loader that a ``Trainer`` iterates over *follows* the trainer: before its
first batch it asks for the position in the epoch. A checkpoint also needs the random seed, which the data module adds to it.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.lightning import datamodule as pyg
from torch_geometric.sampler import BaseSampler

from salientpp.loader.batch_loader import BatchLoader
from salientpp.loader.link_loader import LinkNeighborLoader
from salientpp.loader.module_arguments import divided, for_full_batches, split_draws
from salientpp.loader.node_loader import NeighborLoader
from salientpp.loader.values import Options
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.store.directory.opened import PartitionedGraph

#: Attributes of a sampler that may be set on a copy, to draw differently from the same graph.
_SETTABLE = {"num_neighbors", "replace", "disjoint", "subgraph_type", "temporal_strategy", "time_window"}


#: Options that size the cache for rows of other ranks. A loader that gets the cache of another loader does not get them.
_OF_CACHE = {"memory", "replication_factor"}


class FollowingLoader:
    """Loader whose epochs and batches follow the counts of a ``Trainer``. It is not a torch ``DataLoader``, so that Lightning does not replace it.

    It has all attributes of ``loader``. If other code than the trainer iterates over this object, it gives the loader's own epochs.

    Args:
        loader: the loader that gives the batches.
        trainer: Lightning's ``Trainer``, which counts epochs and batches.
    """

    def __init__(self, loader: BatchLoader, trainer: Any) -> None:
        self.loader = loader
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # missing while the object is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        # A generator, because Lightning asks for an iterator before it restores its counts, and for a batch afterwards.
        epoch, batches = self._position()
        if epoch is not None:
            self.loader.set_epoch(epoch)
        if batches and not self.loader.has_state:
            warnings.warn(
                f"epoch {epoch} should continue after {batches} batches, but your sampler has no state, so it starts from the beginning",
                UserWarning,
                stacklevel=2,
            )
        elif batches:
            self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "batches": batches})
        yield from self.loader

    def _position(self) -> tuple[int | None, int]:
        """Returns the trainer's epoch, and how many of its batches are done. Returns None and 0 if other code than the trainer iterates."""
        trainer = self._trainer
        fit = trainer.fit_loop
        if self is trainer.train_dataloader:
            done = fit.epoch_loop.batch_progress.current.ready
        elif self is trainer.val_dataloaders:
            done = fit.epoch_loop.val_loop.batch_progress.current.ready if trainer.state.fn == "fit" else 0
        else:
            return None, 0
        # A hook at the end of an epoch may iterate again; this pass then covers the whole epoch.
        return fit.epoch_progress.current.processed, done if done < len(self.loader) else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that Lightning stores for a loader. A resumed run compares it with its own. Empty if the user gave a sampler."""
        return self.loader.state_dict() if self.loader.has_state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks that this loader can continue where the loader that saved ``state`` stopped, and takes the random seed from that state.

        Raises:
            ValueError: the data or an argument differs; the text says which.
        """
        if state and self.loader.has_state:
            own = self.loader.state_dict()
            if state.get("ranks", own["ranks"]) != own["ranks"] and not (state.get("joined") and own["joined"]):
                raise ValueError(
                    f"this checkpoint comes from {state['ranks']} ranks, but this run has {own['ranks']}; a Trainer counts the batches of one rank, "
                    "whose number depends on the number of ranks unless logical_ranks={'join': True}"
                )
            self.loader.load_state_dict({**state, "rank": own["rank"]})  # Lightning keeps rank 0's state for all ranks


class _GraphData(pyg.LightningDataModule):
    """Base of both data modules. All loaders of a module use one sampler, one cache and one random seed, and each rank visits its part of the seeds.

    Args:
        data, loader, eval_loader_kwargs, kwargs: as in :class:`LightningNodeData`.
        seeds: split -> the values that the user gave, one for each of ``_seed_names`` except the last. Each becomes an attribute ``input_{split}_{name}``.
        sampler: the user's own sampler. None: this package's sampler.
    """

    _loader_class: type[BatchLoader]
    _seed_names: tuple[str, ...]

    def __init__(
        self,
        data: Any,
        seeds: dict[str, tuple[Any, ...]],
        loader: str,
        sampler: BaseSampler | None,
        eval_loader_kwargs: dict[str, Any] | None,
        **kwargs: Any,
    ) -> None:
        loader = "custom" if sampler is not None else loader
        if loader not in ("full", "neighbor", "link_neighbor", "custom"):
            raise ValueError(f"loader must be 'neighbor' or 'full', got {loader!r}")
        partitioned = isinstance(data, PartitionedGraph)
        if partitioned and loader in ("full", "custom"):
            what = "loader='full'" if loader == "full" else "a sampler of your own"
            raise ValueError(
                f"{what} needs the whole graph in one process; pass a Data or HeteroData, or leave {what} out"
            )
        if loader == "full":
            kwargs = for_full_batches(kwargs, type(self).__name__)
        what, *_ = self._seed_names
        for split, (chosen, *others) in seeds.items():
            found = _stored_seeds(data, what, split) if chosen is None else chosen
            for name, value in zip(self._seed_names, (found, *others, None), strict=True):
                setattr(self, f"input_{split}_{name}", value)
        has_val, has_test = (getattr(self, f"input_{split}_{what}") is not None for split in ("val", "test"))
        super().__init__(has_val, has_test, **kwargs)
        self.data = data
        self.loader = loader
        self.graph_sampler = self.eval_graph_sampler = sampler
        self.seed: int | None = self.kwargs.get("seed")
        self._seed_is_given = self.seed is not None
        self._cache: Any = None
        self._first: BatchLoader | None = None  # the training loader, if setup() made it to fill the shared cache

        given, given_eval = dict(self.kwargs), dict(eval_loader_kwargs or {})
        if loader == "custom":
            names = set(inspect.signature(type(sampler)).parameters)
            ignored = sorted(split_draws(given, names)[0])
            if ignored:
                warnings.warn(
                    f"{', '.join(ignored)} have no effect, because the sampler that was passed has its own values",
                    UserWarning,
                    stacklevel=3,
                )
        if not partitioned and loader != "full":
            names = set(inspect.signature(type(sampler) if sampler is not None else NeighborSampler).parameters)
            how, given = split_draws(given, names)
            eval_how, given_eval = split_draws(given_eval, names)
            if sampler is None:
                self.graph_sampler = NeighborSampler(data, **how)
                if "shared_draws" in given_eval:  # blocks alone mean that vertices draw independently
                    eval_how.setdefault("shared_draws", None)
            self.eval_graph_sampler = self.graph_sampler
            if eval_how and sampler is None and not eval_how.keys() <= _SETTABLE:
                self.eval_graph_sampler = NeighborSampler(data, **{**how, **eval_how})
            elif eval_how:
                self.eval_graph_sampler = copy.copy(self.graph_sampler)
                for name, value in eval_how.items():
                    setattr(self.eval_graph_sampler, name, value)
        self.loader_kwargs = given
        _, self.eval_loader_kwargs = divided({**given, **given_eval}, {"sampler", "batch_sampler"})
        if given.get("batch_sampler") is not None:
            self.loader_kwargs.pop("batch_size", None)

    # --- loaders ------------------------------------------------------------------------------------------

    def _open(self, sampler: BaseSampler | None, seeds: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """Makes a loader of this package for these seeds. It shares the module's sampler, cache and random seed, and visits this rank's part of the seeds."""
        if self.loader == "full":
            return pyg.LightningData.full_dataloader(self, **kwargs)
        partitioned = isinstance(self.data, PartitionedGraph)
        # Ranks get equally many batches unless the user asks otherwise, because a step of validation may wait for the others.
        kwargs = {"uneven": "wrap", **kwargs, "seed": self._agreed_seed()}
        trainer, accelerator = self.trainer, torch.accelerator.current_accelerator()
        if trainer is not None and accelerator is not None and trainer.strategy.root_device.type == accelerator.type:
            kwargs.setdefault("device", trainer.strategy.root_device)
        if partitioned and self._cache is not None and kwargs.get("cache") is None and _fills_cache(kwargs):
            # Other loaders share the first one's cache, so they get no memory of their own.
            _, kwargs = divided({**kwargs, "cache": self._cache}, _OF_CACHE)
            if isinstance(kwargs.get("device_rows"), Mapping):
                kwargs["device_rows"] = divided(kwargs["device_rows"], {"cache"})[1]
        if not partitioned:
            if kwargs.get("neighbor_sampler") is not None:
                raise ValueError(
                    f"neighbor_sampler={kwargs['neighbor_sampler']!r} would replace the sampler that the loaders share; leave it out, and pass a "
                    "sampler of your own as the data module's"
                )
            kwargs["neighbor_sampler"] = sampler
            kwargs["num_neighbors"] = getattr(sampler, "num_neighbors", [])
            if any(value is not None for name, value in seeds.items() if name.endswith("_time")):
                kwargs["time_attr"] = "time"  # says that seeds have times; the sampler has those of the vertices
            if trainer is not None and trainer.world_size > 1:
                if any(kwargs.get(name) is not None for name in ("sampler", "batch_sampler")):
                    raise ValueError(
                        "sampler= and batch_sampler= are for one process; on several ranks the loaders divide the seeds among the ranks; "
                        "leave the sampler out, or train on one device"
                    )
                kwargs["share"] = (trainer.global_rank, trainer.world_size)
        found = self._loader_class(self.data, **kwargs, **seeds)
        if partitioned:
            _check_every_rank_has_batches(found)
        # A cache that looks ahead follows the batches of its loader, so each such loader has a cache of its own.
        filled = _has_budget(kwargs) or (kwargs.get("replication_factor") and not kwargs.get("lookahead"))
        if partitioned and self._cache is None and filled:
            self._cache = found.cache
        return found

    def _follow(self, loader: Any) -> Any:
        follows = self.trainer is not None and isinstance(loader, BatchLoader)
        return FollowingLoader(loader, self.trainer) if follows else loader

    def _agreed_seed(self) -> int:
        """Returns the random seed, which is the same on all ranks and in all loaders of this module."""
        if self.seed is None:
            self.seed = int(torch.randint(2**62, (), device="cpu"))
            if self.trainer is not None and self.trainer.world_size > 1:
                self.seed = self.trainer.strategy.broadcast(self.seed)
        return self.seed

    def _train(self) -> Any:
        return self.dataloader(
            *self._seeds("train"), self.graph_sampler, shuffle=self.train_shuffle, **self.loader_kwargs
        )

    def _evaluate(self, split: str, **kwargs: Any) -> Any:
        kwargs = {**self.eval_loader_kwargs, **kwargs}
        return self._follow(self.dataloader(*self._seeds(split), self.eval_graph_sampler, shuffle=False, **kwargs))

    def _seeds(self, split: str) -> list[Any]:
        return [getattr(self, f"input_{split}_{name}") for name in self._seed_names]

    @property
    def train_shuffle(self) -> bool:
        """True if the training seeds are shuffled. They are not if the user passed a sampler of seeds, or set the trainer's ``overfit_batches``."""
        overfits = self.trainer is not None and self.trainer.overfit_batches > 0
        return not overfits and all(self.loader_kwargs.get(name) is None for name in ("sampler", "batch_sampler"))

    def train_dataloader(self) -> Any:
        """Returns a loader of the training seeds, shuffled if :attr:`train_shuffle`."""
        loader, self._first = self._first or self._train(), None
        return self._follow(loader)

    def val_dataloader(self) -> Any:
        """Returns a loader of the validation seeds, in their order."""
        return self._evaluate("val")

    def test_dataloader(self) -> Any:
        """Returns a loader of the test seeds, in their order."""
        return self._evaluate("test")

    def predict_dataloader(self) -> Any:
        """Returns a loader that gives each prediction seed once, in their order, also on several ranks."""
        uneven = {} if self.loader == "full" else {"uneven": self.eval_loader_kwargs.get("uneven", "exact")}
        return self._evaluate("pred", **uneven)

    # --- Lightning's hooks --------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Raises ValueError if ``loader='full'`` is used on several devices, as PyG does."""
        if self.loader == "full" and self.trainer is not None and self.trainer.num_devices > 1:
            raise ValueError(f"'{type(self).__name__}' with loader='full' requires training on a single device")
        super().prepare_data()

    def setup(self, stage: str) -> None:
        """Makes the training loader before the others, because the cache that all loaders share is planned for the training workload."""
        if stage == "fit" and self._cache is None and _fills_cache(self.loader_kwargs):
            self._first = self._train()

    def state_dict(self) -> dict[str, Any]:
        """Returns the random seed. Lightning's own counts hold all other state."""
        return {} if self.seed is None else {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the random seed of a checkpoint, unless the user gave one."""
        if not self._seed_is_given and "seed" in state_dict:
            self.seed = int(state_dict["seed"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({pyg.kwargs_repr(data=self.data, loader=self.loader, **self.kwargs)})"

    #: Lightning's ``__str__`` constructs every loader to print its size, and so would wait for other ranks.
    __str__ = __repr__


class LightningNodeData(_GraphData):
    """PyG's ``LightningNodeData`` with :class:`~salientpp.NeighborLoader`: loaders for a Lightning ``Trainer``.

    Args:
        data: a ``Data``, a ``HeteroData``, a pair ``(feature_store, graph_store)``, or a :class:`~salientpp.PartitionedGraph`.
        input_train_nodes, input_val_nodes, input_test_nodes, input_pred_nodes: seeds, as in :class:`~salientpp.NeighborLoader`. None: for
            training, the data's ``train_mask``, ``train_idx`` or ``train_index``, or a partitioned graph's split 'train'. The other splits follow the
            same rule.
        input_train_time, input_val_time, input_test_time, input_pred_time: times of the seeds.
        loader: 'neighbor', or 'full' for the whole graph as the only batch.
        node_sampler: a PyG ``BaseSampler`` to draw with.
        eval_loader_kwargs: arguments that have other values in validation, test and prediction than in training.
        **kwargs: arguments of :class:`~salientpp.NeighborLoader`. Training is shuffled, the rest is not.

    On several ranks, each rank visits its share of the seeds. On a partitioned graph these are the seeds of its part. On a graph that every process holds,
    each of W ranks takes every W-th seed of the epoch's order. ``Trainer(use_distributed_sampler=...)`` has no effect.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
        ValueError: an argument is wrong.
    """

    _loader_class = NeighborLoader
    _seed_names = ("nodes", "time", "id")

    def __init__(
        self,
        data: Data | HeteroData | PartitionedGraph,
        input_train_nodes: Any = None,
        input_train_time: Tensor | None = None,
        input_val_nodes: Any = None,
        input_val_time: Tensor | None = None,
        input_test_nodes: Any = None,
        input_test_time: Tensor | None = None,
        input_pred_nodes: Any = None,
        input_pred_time: Tensor | None = None,
        loader: str = "neighbor",
        node_sampler: BaseSampler | None = None,
        eval_loader_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        seeds = {
            "train": (input_train_nodes, input_train_time),
            "val": (input_val_nodes, input_val_time),
            "test": (input_test_nodes, input_test_time),
            "pred": (input_pred_nodes, input_pred_time),
        }
        super().__init__(data, seeds, loader, node_sampler, eval_loader_kwargs, **kwargs)

    def dataloader(
        self,
        input_nodes: Any,
        input_time: Tensor | None = None,
        input_id: Tensor | None = None,
        node_sampler: BaseSampler | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns a loader of ``input_nodes`` with the module's random seed. It draws with ``node_sampler``, or else with the module's sampler."""
        seeds = {"input_nodes": input_nodes, "input_time": input_time, "input_id": input_id}
        return self._open(node_sampler or self.graph_sampler, seeds, kwargs)


class LightningLinkData(_GraphData):
    """PyG's ``LightningLinkData`` with :class:`~salientpp.LinkNeighborLoader`: loaders for a Lightning ``Trainer``.

    Args:
        data: a ``Data``, a ``HeteroData``, a pair ``(feature_store, graph_store)``, or a :class:`~salientpp.PartitionedGraph`.
        input_train_edges, input_val_edges, input_test_edges, input_pred_edges: seeds, as ``edge_label_index`` of
            :class:`~salientpp.LinkNeighborLoader`. None: the partitioned graph's split of
            edges 'train', 'val', 'test' or 'pred'. Without such a split, training takes all edges, and validation and testing are left out.
        input_train_labels, input_val_labels, input_test_labels, input_pred_labels: labels of the seeds, as ``edge_label``.
        input_train_time, input_val_time, input_test_time, input_pred_time: times of the seeds, as ``edge_label_time``.
        loader: 'neighbor', or 'full' for the whole graph as the only batch.
        link_sampler: a PyG ``BaseSampler`` to draw with.
        eval_loader_kwargs: arguments that have other values in validation, test and prediction than in training.
        **kwargs: arguments of :class:`~salientpp.LinkNeighborLoader`. Training is shuffled, the rest is not.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
        ValueError: an argument is wrong.
    """

    _loader_class = LinkNeighborLoader
    _seed_names = ("edges", "labels", "time", "id")

    def __init__(
        self,
        data: Data | HeteroData | PartitionedGraph,
        input_train_edges: Any = None,
        input_train_labels: Tensor | str | None = None,
        input_train_time: Tensor | str | None = None,
        input_val_edges: Any = None,
        input_val_labels: Tensor | str | None = None,
        input_val_time: Tensor | str | None = None,
        input_test_edges: Any = None,
        input_test_labels: Tensor | str | None = None,
        input_test_time: Tensor | str | None = None,
        input_pred_edges: Any = None,
        input_pred_labels: Tensor | str | None = None,
        input_pred_time: Tensor | str | None = None,
        loader: str = "neighbor",
        link_sampler: BaseSampler | None = None,
        eval_loader_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        seeds = {
            "train": (input_train_edges, input_train_labels, input_train_time),
            "val": (input_val_edges, input_val_labels, input_val_time),
            "test": (input_test_edges, input_test_labels, input_test_time),
            "pred": (input_pred_edges, input_pred_labels, input_pred_time),
        }
        super().__init__(data, seeds, loader, link_sampler, eval_loader_kwargs, **kwargs)

    def dataloader(
        self,
        input_edges: Any,
        input_labels: Tensor | str | None = None,
        input_time: Tensor | str | None = None,
        input_id: Tensor | None = None,
        link_sampler: BaseSampler | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns a loader of ``input_edges`` with the module's random seed. It draws with ``link_sampler``, or else with the module's sampler."""
        seeds = {
            "edge_label_index": input_edges,
            "edge_label": input_labels,
            "edge_label_time": input_time,
            "input_id": input_id,
        }
        return self._open(link_sampler or self.graph_sampler, seeds, kwargs)


def _check_every_rank_has_batches(loader: BatchLoader) -> None:
    """Raises on every rank if some ranks have batches and others have none. Lightning would skip the loop and its hooks on the ranks without batches."""
    ranks = loader.batches_by_rank
    batches = ranks[: len(ranks) - getattr(loader.data, "num_storage_ranks", 0)]
    if 0 in batches and any(batches):
        raise ValueError(
            f"rank {batches.index(0)} has no batches, so Lightning skips its loop there, and the other ranks would wait for it (batches by rank: "
            f"{batches}); partition so that every part has seeds, or iterate over the loader yourself"
        )


def _stored_seeds(data: Any, what: str, split: str) -> Any:
    """Returns a split of the data as a loader's seed argument takes it, or None if no type has it. As in PyG, the first type that has the split counts.

    ``what`` is 'nodes' for a split of vertices, or 'edges'.
    """
    for name in ("val", "valid") if split == "val" else (split,):
        if isinstance(data, PartitionedGraph):
            types = data.description.node_types if what == "nodes" else data.description.edge_types
            names = [type_.name for type_ in types if name in type_.splits]
            found = None if not names else name if names[0] is None else (names[0], name)
        else:
            is_named = what == "nodes" and isinstance(data, (Data, HeteroData))
            found = pyg.infer_input_nodes(data, name) if is_named else None
        if found is not None:
            return found
    return None


def _fills_cache(kwargs: dict[str, Any]) -> bool:
    """Returns True if a loader with these arguments would fill a cache, by ``replication_factor`` or a memory budget."""
    return bool(kwargs.get("replication_factor")) or _has_budget(kwargs)


def _has_budget(kwargs: dict[str, Any]) -> bool:
    """Returns True if a loader with these arguments has a memory budget for copies of other ranks' rows."""
    return Options(memory=kwargs.get("memory")).memory is not None
