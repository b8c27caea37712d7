"""Calls of each operator: one that is right, and calls that it must refuse. Also random rows and bitwise comparison."""

from __future__ import annotations

import tempfile

import torch
from graphs import random_data

from salientpp import Graph, ops


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


NONE = long()
# Vertex 0 draws from 1 and 2, vertex 1 from 0, vertex 2 from nothing.
INDPTR, INDICES = long(0, 2, 3, 3), ints(1, 2, 0)
EDGES = torch.tensor([[2, 0, 1], [0, 0, 2]])
OUT_INDPTR, OUT_INDICES = ops.transpose_csc(INDPTR, INDICES)
# Target 0 has the source 2, target 1 has 0 and 1.
LISTED = long(0, 1, 3), ints(2, 0, 1)
BIG = Graph.from_edge_index(random_data(80, 400, seed=3, directed=True).edge_index, 80)
BIG_OUT = BIG.transpose()


# Three keys of one column, and where they begin.
KEYS = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8), long(0, 1, 4, 6)

FILE = tempfile.TemporaryFile()  # 10,000 bytes
FILE.write(bytes(number % 251 for number in range(10_000)))
FILE.flush()


def slots() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """State of a cache of three slots that holds two rows of nine."""
    made = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int16), torch.empty(5, dtype=torch.int16)
    ops.fill_slots(long(5, 2), torch.full((9,), 0.5), *made)
    return made


# Each use makes its own arguments, because opcheck may write to them.
CASES = {
    "csc_from_coo": [
        lambda: (long(0, 1, 2), long(1, 1, 0), 3),
        lambda: (ints(0, 1, 2), ints(1, 1, 0), 7),
        lambda: (NONE, NONE, 0),
        lambda: (NONE, NONE, 4),
    ],
    "transpose_csc": [
        lambda: (INDPTR, INDICES),
        lambda: (INDPTR, INDICES.long()),
        lambda: (long(0), NONE),
        lambda: (BIG.indptr, BIG.indices),
    ],
    "is_symmetric": [
        lambda: (INDPTR, INDICES),
        lambda: (long(0, 1, 2), long(1, 0)),
        lambda: (long(0), NONE),
        lambda: (BIG.indptr, BIG.indices),
    ],
    "check_csc": [lambda: (INDPTR, INDICES), lambda: (INDPTR, INDICES.long()), lambda: (long(0), NONE)],
    "inclusion_probability": [
        lambda: (INDPTR, OUT_INDPTR, OUT_INDICES, long(0), long(0, 1), [2, 1], 1, True, False, False),
        lambda: (INDPTR, OUT_INDPTR, OUT_INDICES.long(), long(0, 1, 1), long(0, 1, 1, 3), [-1], 5, False, True, True),
        lambda: (
            BIG.indptr,
            BIG_OUT.indptr,
            BIG_OUT.indices,
            torch.arange(40),
            long(0, 10, 40),
            [3, 2],
            8,
            True,
            True,
            False,
        ),
        lambda: (INDPTR, OUT_INDPTR, OUT_INDICES, NONE, long(0, 0), [2], 1, True, False, False),
        lambda: (INDPTR, OUT_INDPTR, OUT_INDICES, NONE, long(0), [2], 1, True, False, False),
        lambda: (long(0), long(0), NONE, NONE, long(0, 0), [2], 1, True, False, False),
    ],
    "symmetrise": [
        lambda: (INDPTR, INDICES, None, None),
        lambda: (INDPTR, INDICES.long(), long(3, 1, 2), None),
        lambda: (INDPTR, INDICES, None, ints(*range(1, 1 + INDICES.numel()))),
        lambda: (long(0), NONE, None, None),
    ],
    "rebalance_parts": [
        lambda: (INDPTR, INDICES, long(0, 0, 1), torch.ones(3, 1, dtype=torch.int64), long(2), 2, 3, None),
        lambda: (INDPTR, INDICES, long(0, 0, 0), torch.ones(3, 2, dtype=torch.int64), long(2, 3), 2, 0, long(1, 5, 1)),
        lambda: (long(0), NONE, NONE, torch.ones(0, 1, dtype=torch.int64), long(2), 2, 3, None),
    ],
    "reassign_parts": [
        lambda: (torch.rand(2, 3), long(0, 0, 1), torch.ones(3, 1, dtype=torch.int64), long(2), 3),
        lambda: (torch.rand(3, 80), torch.arange(80) % 3, torch.ones(80, 2, dtype=torch.int64), long(30, 27), 9),
        lambda: (torch.rand(1, 0), NONE, torch.ones(0, 1, dtype=torch.int64), long(2), 3),
    ],
    "keep_heaviest_edges": [
        lambda: (long(0, 2, 3, 4), ints(1, 2, 0, 0), 1, None),
        lambda: (long(0, 2, 3, 4), long(1, 2, 0, 0), 1, long(5, 4, 5, 4)),
        lambda: (long(0), NONE, 3, None),
    ],
    "cluster_vertices": [
        lambda: (long(0, 2, 3, 4), ints(1, 2, 0, 0), long(1, 2, 1), 3, 2, 0, None),
        lambda: (long(0, 2, 3, 4), long(1, 2, 0, 0), long(1, 2, 1), 2, 1, 7, ints(5, 4, 5, 4)),
        lambda: (long(0), NONE, NONE, 3, 1, 0, None),
        lambda: (BIG.indptr, BIG.indices, torch.ones(80, dtype=torch.int64), 9, 3, -1, None),
    ],
    "contract_lists": [
        lambda: (long(0, 2, 3, 4), ints(1, 2, 0, 0), ints(0, 1, 0), 2, 0, 2, None),
        lambda: (long(0, 2, 3, 4), long(1, 2, 0, 0), ints(0, 1, 2), 3, 1, 2, ints(5, 4, 5, 4)),
        lambda: (long(0), NONE, ints(), 0, 0, 0, None),
        lambda: (BIG.indptr, BIG.indices, (torch.arange(80) // 3).int(), 27, 0, 20, None),
    ],
    "sum_over_lists": [
        lambda: (INDPTR, INDICES, torch.rand(3, dtype=torch.float64)),
        lambda: (BIG.indptr, BIG.indices.long(), torch.rand(80, dtype=torch.float64)),
        lambda: (long(0), NONE, torch.rand(0, dtype=torch.float64)),
        lambda: (BIG.indptr, BIG.indices, torch.rand(80, 5)),
    ],
    "code_ids": [
        lambda: (long(9, 3, 3, 70), 100, 0, 0),
        lambda: (long(9, 3, 70), 100, 3, 10),
        lambda: (NONE, 0, 0, 0),
        lambda: (torch.arange(50), 50, 0, 0),
    ],
    "ids_of_list": [lambda: (ops.code_ids(long(5, 2), 9), 9), lambda: (ops.code_ids(NONE, 0), 0)],
    "link_lists": [
        lambda: ([ops.code_ids(long(5, 2), 9), ops.code_ids(long(2), 9), ops.code_ids(long(5), 9)], 2, 9),
        lambda: ([ops.code_ids(NONE, 0)], 0, 0),
    ],
    "fill_slots": [
        lambda: (long(5, 2), torch.rand(9), ints(0, 0, 0), ints(0, 0, 0).short(), torch.empty(5, dtype=torch.int16)),
        lambda: (NONE, torch.rand(0), ints(), ints().short(), torch.empty(1, dtype=torch.int32)),
    ],
    "note_uses": [lambda: (ops.code_ids(long(5, 7), 9), 3, 9, *slots())],
    "plan_batch": [
        lambda: (long(7, 5, 1), torch.tensor([0, 2, 1], dtype=torch.int16), 1, torch.full((9,), 0.5), *slots()),
        lambda: (NONE, NONE.short(), 0, torch.rand(9), *slots()),
    ],
    "pack_id_set": [lambda: (long(0, 31, 32, 99), 100), lambda: (NONE, 100), lambda: (NONE, 0), lambda: (long(0), 1)],
    "look_up": [
        lambda: (
            long(5, 0, 9, 4, 2),
            long(0, 3, 6, 10),
            1,
            [ops.pack_id_set(long(1), 3)],
            [ops.pack_id_set(long(0, 9), 10), ops.pack_id_set(long(2), 10)],
        ),
        lambda: (long(5, 0, 9, 4, 2), long(0, 3, 6, 10), 0, [], [NONE]),
        lambda: (NONE, long(0, 3, 6, 10), 2, [NONE, NONE], []),
        lambda: (long(1, 0), long(0, 2), 0, [], []),
    ],
    "take_hits": [
        lambda: (long(9, 0, 4), long(1, 8, 5), long(0, 3, 6, 10), long(0, 2)),
        lambda: (long(9, 0, 4), long(1, 8, 5), long(0, 3, 6, 10), NONE),
        lambda: (NONE, NONE, long(0, 3), NONE),
    ],
    "find_keys": [
        lambda: (long(5, 9, 7), ints(0, 1, 1, 3), 5, 1, [KEYS[0]], [KEYS[1]], [KEYS[0]], [KEYS[1]], 3),
        lambda: (long(5, 9), long(0, 1, 1, 3), 5, 1, [KEYS[0].view(3, 2)], [None], [KEYS[0][2:].view(2, 2)], [None], 3),
        lambda: (long(5, 9, 7), long(0, 3), 5, 3, [KEYS[0].view(3, 2)], [None], [KEYS[0]], [KEYS[1]], 3),
        lambda: (NONE, long(0), 0, 0, [KEYS[0][:0]], [long(0)], [KEYS[0][:0]], [long(0)], 0),
    ],
    "use_huge_pages": [
        lambda: (torch.zeros(5),),
        lambda: (torch.zeros(0),),
        lambda: (torch.ones(2**20),),
        lambda: (torch.ones(4, 3).t(),),
    ],
    "to_bidirectional": [
        lambda: (
            long(1, 2, 0, 2),
            long(0, 0, 1, 1),
            long(1, 2, 0, 2),
            long(0, 0, 1, 1),
            long(5, 6, 7, 8),
            long(5, 6, 7, 8),
        ),
        lambda: (long(3, 1), long(9, 0), NONE, NONE, None, None),
        lambda: (NONE, NONE, NONE, NONE, NONE, NONE),
    ],
    "sample_typed_neighbors": [
        lambda: (
            [INDPTR],
            [INDICES],
            [None],
            [None],
            [None],
            [None],
            [0],
            [0],
            [3],
            [None],
            [long(0, 1)],
            [None],
            [],
            [0],
            [2, 1],
            2,
            7,
            False,
            False,
            False,
            False,
            2**29,
        ),
        lambda: (
            [INDPTR],
            [INDICES],
            [long(2, 0, 1)],
            [None],
            [torch.rand(3).double()],
            [None],
            [0],
            [0],
            [3],
            [long(1, 1, 2)],
            [long(0, 0)],
            [long(1, 2)],
            [long(1, 0)],
            [0],
            [-1],
            1,
            7,
            True,
            True,
            True,
            True,
            0,
        ),
        lambda: (
            [],
            [],
            [],
            [],
            [],
            [],
            [],
            [],
            [3, 2],
            [None, None],
            [long(0), NONE],
            [None, None],
            [],
            [0, 1],
            [],
            0,
            7,
            False,
            True,
            False,
            False,
            0,
        ),
        lambda: (
            [INDPTR],
            [INDICES],
            [None],
            [long(2, 0, 1) << 32 | INDICES],
            [torch.rand(3).double()],
            [None],
            [0],
            [0],
            [3],
            [None],
            [long(2, 0, 2)],
            [None],
            [],
            [0],
            [2, 1],
            2,
            7,
            False,
            False,
            False,
            True,
            0,
        ),
    ],
    "draw_from_lists": [
        lambda: (INDPTR, INDICES, None, None, long(1, 0, 2), long(8, 7, 9), None, None, 2, 7, 0, 0, 0),
        lambda: (
            INDPTR,
            INDICES.long(),
            torch.rand(3).double(),
            ints(1, 2, 0),
            long(0, 0),
            long(7, 7),
            long(1, 0),
            long(1, 2),
            1,
            7,
            1,
            1,
            0,
            False,
            True,
            False,
            long(1, 0),
        ),
        lambda: (INDPTR, INDICES, None, None, long(0), long(7), None, None, 1, 7, 1, 0, 1, False, False, True),
        lambda: (long(0), NONE, None, None, NONE, NONE, None, None, -1, -7, 0, 0, 0, True),
        lambda: (BIG.indptr, BIG.indices, None, None, torch.arange(80), torch.arange(80), None, None, 3, 7, 0, 0, 0),
    ],
    "join_drawn": [
        lambda: (
            [long(2, 0, 2)],
            [],
            [0],
            [long(1, 0, 2)],
            [long(2, 1, 0)],
            [0],
            [0],
            [3],
            0,
            ops.MAP_BUDGET_BYTES,
            [],
        ),
        lambda: ([long(2, 0, 2)], [], [1], [long(0, 2)], [long(1, 1)], [0], [0], [3], 0, 0, [EDGES]),
        lambda: (
            [long(2, 0), NONE],
            [long(1, 0), NONE],
            [0, 0],
            [long(1, 1), NONE],
            [long(5, 5), NONE],
            [1, 0],
            [0, 1],
            [3, 6],
            2,
            ops.MAP_BUDGET_BYTES,
            [EDGES, EDGES[:, :0]],
        ),
        lambda: ([long(2, 0)], [], [0], [], [], [], [], [3], 0, ops.MAP_BUDGET_BYTES, []),
    ],
    "merge_lists": [
        lambda: (3, [long(2, 0)], [long(2, 1)], [ints(5, 4, 9)], [long(10, 20)]),
        lambda: (4, [long(3), None], [long(2), long(1, 0)], [long(5, 4), torch.tensor([9], dtype=torch.uint8)], []),
        lambda: (2, [None], [long(1, 1)], [torch.tensor([9, 300], dtype=torch.int32)], [long(7)]),
    ],
    "pack_integers": [
        lambda: ([long(2, 300), torch.tensor([9], dtype=torch.uint8), NONE], [None] * 3, [None] * 3),
        lambda: ([long(5, 6, 9)], [long(2, 0, 1)], [long(5, 0, -(2**40))]),
    ],
    "divide_batch": [
        lambda: (long(7, 8, 9), long(1, 2, 0), long(0, 0, 1), long(4, 5, 6), long(0, 1, 0), [1, 3], [2, 3], 2),
        lambda: (long(7, 8, 9), long(1, 2, 0), long(0, 0, 1), None, long(0, 1, 2), [1, 2, 3], [2, 3, 3], 4, 1),
        lambda: (NONE, NONE, NONE, NONE, NONE, [0], [0], 1),
    ],
    "ppr_push": [
        lambda: (INDPTR, INDICES, long(0, 2, 0), 0.2, 1e-3, 2),
        lambda: (INDPTR, INDICES.long(), long(1), 0.9, 0.5, 5, None, None, False),
        lambda: (long(0, 2), ints(1, 2), long(0), 0.2, 1e-3, 3, long(0), ints(2, 1, 0)),
        lambda: (long(0), NONE, long(2, 0), 0.2, 1e-3, 1, NONE, long(2, 1, 0)),
        lambda: (long(0), NONE, NONE, 0.2, 1e-3, 1),
    ],
    "edges_between": [
        lambda: (INDPTR, INDICES, None, long(0, 1, 0), None, None, long(2, 0, 2), None, 3, 0),
        lambda: (INDPTR, INDICES, None, long(0, 1, 0), None, None, long(2, 0, 2), None, 3, 0, 0),
        lambda: (
            INDPTR,
            INDICES.long(),
            long(1, 2, 0),
            long(0, 1),
            long(0, 1),
            long(1, 5),
            long(1, 2, 0),
            long(0, 0, 1),
            3,
            2,
            2**29,
            long(1, 0),
        ),
        lambda: (long(0), NONE, None, NONE, None, None, NONE, None, 0, 0),
    ],
    "gather_rows": [
        lambda: (torch.rand(4, 3), ints(3, 0), torch.zeros(2, 3), None),
        lambda: (torch.rand(4, 3), long(3, 0), torch.zeros(5, 3), long(4, 1)),
        lambda: (torch.rand(4), NONE, torch.zeros(0), None),
        lambda: (torch.rand(0, 2), NONE, torch.zeros(3, 2), NONE),
    ],
    "gather_joined_rows": [
        lambda: ([torch.rand(4, 3), torch.rand(2, 3)], ints(5, 0), torch.zeros(2, 3), None),
        lambda: ([torch.rand(0), torch.rand(4), torch.rand(0)], long(3, 0), torch.zeros(5), long(4, 1)),
        lambda: ([torch.rand(0, 2)], NONE, torch.zeros(3, 2), NONE),
    ],
    "read_rows": [
        lambda: (FILE.fileno(), 0, 5000, long(0, 7, 7, 4999), torch.zeros((4, 2), dtype=torch.uint8), None, 0, 4),
        lambda: (FILE.fileno(), 9, 300, long(1, 299), torch.zeros((3, 30), dtype=torch.uint8), long(2, 0), 9000, 1),
        lambda: (FILE.fileno(), 0, 0, NONE, torch.zeros((0, 3), dtype=torch.uint8), None, 0, 1),
    ],
    "encode_rows": [
        lambda: (torch.rand(4, 3), ints(3, 0), torch.zeros(2, 12, dtype=torch.uint8), None, 2, 0),
        lambda: (torch.rand(4, 2, 3).double(), long(3), torch.zeros(5, 12, dtype=torch.uint8), long(4), 3, 0),
        lambda: (torch.rand(0, 5), NONE, torch.zeros(0, 28, dtype=torch.uint8), None, 3, 2),
    ],
    "decode_rows": [
        lambda: (torch.zeros(2, 12, dtype=torch.uint8), ints(1, 0), torch.rand(2, 3), None, 2, 0),
        lambda: (torch.zeros(5, 12, dtype=torch.uint8), long(4), torch.rand(4, 2, 3).half(), long(3), 0, 0),
    ],
    "round_rows": [
        lambda: (torch.rand(4, 3), ints(3, 0), torch.zeros(2, 3), None, 2, 0),
        lambda: (torch.rand(4, 5).bfloat16(), long(3), torch.zeros(5, 5).bfloat16(), long(4), 3, 2),
    ],
    "plan_sums": [
        lambda: (long(2, 3, 4, 0, 3, 4), long(0, 0, 0, 0, 1, 1), long(1, 1, -1), 2, 2, 100, 4, 4),
        lambda: (long(1, 2, 3, 4), long(0, 0, 0, 0), long(0, 0, 0, 1), 1, 3, 64, 8, 12),
        lambda: (NONE, NONE, NONE, 0, 1, 0, 1, 1),
    ],
    "minimum_cut": [
        lambda: (long(0, 0, 1, 2), long(1, 2, 3, 3), torch.tensor([2.0, 1.0, 1.0, torch.inf]).double(), 4, 0, 3),
        lambda: (NONE, NONE, torch.empty(0).double(), 2, 1, 0),
    ],
    "reduce_rows": [
        lambda: (torch.rand(4, 3), long(0, 1, 3), long(2, 1), None, torch.zeros(2, 3), 0),
        lambda: (torch.rand(4, 3), ints(0, 1), long(2), torch.rand(2), torch.zeros(1, 3), 2),
        lambda: (torch.rand(4, 3).half(), ints(0, 1, 3), long(0, 3), torch.rand(3), torch.zeros(2, 3).half(), 1),
        lambda: (torch.rand(4, dtype=torch.float64), NONE, NONE, None, torch.zeros(0, dtype=torch.float64), 2),
    ],
    "group_by_target": [
        lambda: (long(2, 0, 1, 1), long(0, 0, 1, 3), 3, 4),
        lambda: (long(2, 0), long(1, 0), 3, 4),
        lambda: (NONE, NONE, 0, 0),
    ],
    "group_by_source": [lambda: (*LISTED, 3), lambda: (LISTED[0], LISTED[1].long(), 5), lambda: (long(0), NONE, 0)],
    "add_self_loops": [
        lambda: (*LISTED, None),
        lambda: (LISTED[0], LISTED[1].long(), ints(7, 8, 9)),
        lambda: (long(0), NONE, None),
    ],
    "sum_listed_rows": [
        lambda: (*LISTED, None, torch.rand(3, 2, 20), None, True, False),
        lambda: (*LISTED, ints(2, 0, 1), torch.rand(3, 2, 20), torch.rand(3, 2), False, False),
        lambda: (LISTED[0], LISTED[1].long(), None, torch.rand(3).half(), torch.rand(3).half(), False, False),
        lambda: (LISTED[0], ints(0, 2, 1), None, torch.rand(2, 3).double(), None, False, True),
        lambda: (LISTED[0], None, None, torch.rand(3, 4), None, False, False),
        lambda: (long(0), NONE, None, torch.rand(0, 2), None, False, False),
    ],
    "extreme_listed_rows": [
        lambda: (*LISTED, torch.rand(3, 2, 20), True),
        lambda: (LISTED[0], None, torch.rand(3).bfloat16(), False),
    ],
    "share_ties": [
        lambda: (*LISTED, torch.ones(3, 5), torch.ones(2, 5), torch.rand(2, 5)),
        lambda: (LISTED[0], None, torch.ones(3).half(), torch.ones(2).half(), torch.rand(2).half()),
    ],
    "pass_ties": [
        lambda: (long(0, 2, 2, 3), ints(0, 1, 1), torch.ones(3, 5), torch.ones(2, 5), torch.rand(2, 5)),
        lambda: (long(0), ints(), torch.ones(0), torch.ones(0), torch.rand(0)),
    ],
    "pass_ties_to_entries": [lambda: (LISTED[0], torch.ones(3, 5), torch.ones(2, 5), torch.rand(2, 5))],
    "spread_rows": [lambda: (LISTED[0], torch.rand(3, 5)), lambda: (long(0), torch.rand(0).half())],
    "dot_listed_rows": [
        lambda: (*LISTED, torch.rand(2, 2, 20), torch.rand(3, 2, 20), 2),
        lambda: (*LISTED, torch.rand(2, 6).half(), torch.rand(3, 6).half(), 3),
    ],
    "softmax_of_lists": [lambda: (LISTED[0], torch.rand(3, 2)), lambda: (LISTED[0], torch.rand(3).bfloat16())],
    "softmax_of_lists_backward": [lambda: (LISTED[0], torch.rand(3, 2), torch.rand(3, 2))],
    "additive_scores": [lambda: (*LISTED, torch.rand(2, 2, 20), torch.rand(3, 2, 20), torch.rand(2, 20), 0.2)],
    "additive_scores_by_target": [
        lambda: (*LISTED, torch.rand(2, 2, 20), torch.rand(3, 2, 20), torch.rand(2, 20), 0.2, torch.rand(3, 2))
    ],
    "additive_scores_by_source": [
        lambda: (
            *ops.group_by_source(*LISTED, 3),
            torch.rand(2, 2, 20),
            torch.rand(3, 2, 20),
            torch.rand(2, 20),
            0.2,
            torch.rand(3, 2),
        )
    ],
    "permutation": [lambda: (5, 1), lambda: (0, -1), lambda: (1, 2**63 - 1)],
    "sample_neighbors": [
        lambda: (INDPTR, INDICES, None, long(0), [2, 1], 7, False, ops.MAP_BUDGET_BYTES),
        lambda: (INDPTR, INDICES.long(), long(5, 3, 4), long(0, 1, 1), [-1, 2], -7, True, 0),
        lambda: (BIG.indptr, BIG.indices, BIG.edge_id, torch.arange(20), [3, 2, 2], 1, False, ops.MAP_BUDGET_BYTES),
        lambda: (
            BIG.indptr,
            BIG.indices,
            BIG.edge_id,
            torch.arange(20),
            [3, 2],
            1,
            False,
            ops.MAP_BUDGET_BYTES,
            None,
            True,
            1,
        ),
        lambda: (INDPTR, INDICES, None, NONE, [2], 7, False, ops.MAP_BUDGET_BYTES),
        lambda: (INDPTR, INDICES, None, long(0), [2, 1], 7, False, ops.MAP_BUDGET_BYTES, long(5, 3, 4) << 32 | INDICES),
        lambda: (INDPTR, INDICES, None, long(2), [2], 7, False, ops.MAP_BUDGET_BYTES),
        lambda: (INDPTR, INDICES, None, long(2), [], 7, False, ops.MAP_BUDGET_BYTES),
    ],
    "sample_vertices": [
        lambda: (INDPTR, INDICES, long(0), [2, 1], 7, False, ops.MAP_BUDGET_BYTES),
        lambda: (INDPTR, INDICES.long(), long(0, 1, 1), [-1, 2], -7, True, 0),
        lambda: (BIG.indptr, BIG.indices, torch.arange(20), [3, 2, 2], 1, False, ops.MAP_BUDGET_BYTES, True),
        lambda: (BIG.indptr, BIG.indices, torch.arange(20), [3, 2, 2], 1, False, ops.MAP_BUDGET_BYTES, True, 1),
        lambda: (INDPTR, INDICES, NONE, [2], 7, False, ops.MAP_BUDGET_BYTES),
    ],
}


def rows_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random rows; all bit patterns can occur, so a conversion on the way would be noticed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (*shape, width), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if all bits are the same, those of NaNs included."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)
    )
