"""Typed functions for the compiled operators of ``csrc/library.cpp``, with shapes, dtypes and errors.

The kernels run on CPU tensors and release the GIL. They have no state that a caller can see, so several Python threads may call them at
once. A kernel raises ``RuntimeError`` with the expected and the given value. The public functions of the package check users' arguments
first. The operators have no fake kernels, because loaders call them outside compiled models.

Letters in shapes: N vertices, E edges, K parts. n is the number of ids in one call. A list is a run of entries that ``indptr`` delimits, such as the
neighbours of a vertex.
"""

# ruff: noqa: F401 (every function can be imported from here)
from salientpp.ops.graph import check_csc, csc_from_coo, is_symmetric, transpose_csc
from salientpp.ops.memory import (
    bytes_of,
    end_return_of_freed_blocks,
    keep_freed_blocks,
    mark_thread,
    return_freed_blocks,
    return_freed_memory,
    return_growth,
    use_huge_pages,
)
from salientpp.ops.nn import (
    add_self_loops,
    additive_scores,
    additive_scores_by_source,
    additive_scores_by_target,
    dot_listed_rows,
    extreme_listed_rows,
    group_by_source,
    group_by_target,
    pass_ties,
    pass_ties_to_entries,
    share_ties,
    softmax_of_lists,
    softmax_of_lists_backward,
    spread_rows,
    sum_listed_rows,
)
from salientpp.ops.partitioning import (
    cluster_vertices,
    contract_lists,
    keep_heaviest_edges,
    reassign_parts,
    rebalance_parts,
    symmetrise,
)
from salientpp.ops.sampling import (
    MAP_BUDGET_BYTES,
    divide_batch,
    draw_from_lists,
    edges_between,
    join_drawn,
    join_key,
    merge_lists,
    pack_integers,
    permutation,
    ppr_push,
    sample_neighbors,
    sample_typed_neighbors,
    sample_vertices,
    to_bidirectional,
)
from salientpp.ops.store import (
    decode_rows,
    encode_rows,
    find_keys,
    gather_joined_rows,
    gather_rows,
    look_up,
    pack_id_set,
    read_rows,
    reduce_rows,
    round_rows,
    take_hits,
)
from salientpp.ops.vip import inclusion_probability, sum_over_lists
from salientpp.ops.ways import (
    code_ids,
    fill_slots,
    ids_of_list,
    link_lists,
    minimum_cut,
    note_uses,
    plan_batch,
    plan_sums,
)
