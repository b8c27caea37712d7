"""Translates between the ids that the user's data had and the global ids of a dataset directory."""

from __future__ import annotations

import torch
from torch import Tensor

from salientpp.ids import as_tensor, check_range
from salientpp.processes import lazy
from salientpp.store.directory.description import VertexType, words_of_type
from salientpp.store.directory.files import Arrays


class OriginalIds:
    """The two numberings of a dataset directory. All views of a directory share one.

    Args:
        arrays: the files.
        node_types: the types of vertices.
    """

    def __init__(self, arrays: Arrays, node_types: tuple[VertexType, ...]) -> None:
        self._arrays, self._node_types = arrays, node_types

    @lazy
    def original(self) -> dict[str | None, Tensor]:
        """Per type int64 [N]: by the global id, the user's."""
        return {type_.name: self._arrays.open(type_.original_id_file) for type_ in self._node_types}

    @lazy
    def _reverse(self) -> dict[str | None, Tensor]:
        """Per type in use int64 [N]: by the user's id, the global one."""
        return {}

    def global_ids(self, ids: Tensor, type_: str | None) -> Tensor:
        """Global ids int64 for the user's ids of one type, of the same shape, on the same device.

        Raises:
            ValueError: the data had no such id.
        """
        must = "ids must be integer ids of the data that was partitioned"
        given = as_tensor(ids, must)
        if given.numel() and (given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex):
            raise ValueError(f"{must}, got {given.dtype}")
        flat, original = given.cpu().to(torch.int64).flatten(), self.original[type_]
        check_range(flat, original.numel(), f"{must}{words_of_type(type_)},")
        if type_ not in self._reverse:
            reverse = torch.empty_like(original)
            reverse[original] = torch.arange(original.numel(), device="cpu")
            self._reverse[type_] = reverse
        return self._reverse[type_][flat].view(given.shape).to(given.device)
