// All operators of the extension in one table, ordered by the folders of csrc/. Kernels register themselves beside
// their code. The files of salientpp/ops/ have the names of the folders and document shapes, dtypes and meanings.
#include <Python.h>

#include <torch/csrc/stable/library.h>

// clang-format off: one schema per line
STABLE_TORCH_LIBRARY(salientpp, m) {
  // graph
  m.def("csc_from_coo(Tensor source, Tensor target, int num_vertices, bool linked=False, bool is_sorted=False, bool parallel=True) -> (Tensor indptr, Tensor indices, Tensor edge_id)");
  m.def("transpose_csc(Tensor indptr, Tensor indices) -> (Tensor indptr, Tensor indices)");
  m.def("is_symmetric(Tensor indptr, Tensor indices) -> Tensor");
  m.def("check_csc(Tensor indptr, Tensor indices) -> ()");
  // vip
  m.def("inclusion_probability(Tensor indptr, Tensor out_indptr, Tensor out_indices, Tensor seeds, Tensor seed_offsets, int[] fanouts, int batch_size, bool frontier, bool include_seeds, bool replace) -> Tensor");
  m.def("sum_over_lists(Tensor indptr, Tensor indices, Tensor value) -> Tensor");
  // partitioning
  m.def("symmetrise(Tensor indptr, Tensor indices, Tensor? weight_by_target=None, Tensor? weight_of_each=None) -> (Tensor indptr, Tensor indices, Tensor weight)");
  m.def("rebalance_parts(Tensor indptr, Tensor indices, Tensor assignment, Tensor weights, Tensor limits, int num_parts, int sweeps, Tensor? edge_weights=None) -> Tensor");
  m.def("reassign_parts(Tensor cost, Tensor assignment, Tensor weights, Tensor limits, int most_moves) -> Tensor");
  m.def("keep_heaviest_edges(Tensor indptr, Tensor indices, int most, Tensor? edge_weights=None) -> Tensor");
  m.def("cluster_vertices(Tensor indptr, Tensor indices, Tensor vertex_weights, int most_weight, int rounds, int seed, Tensor? edge_weights=None) -> Tensor");
  m.def("contract_lists(Tensor indptr, Tensor indices, Tensor cluster, int num_clusters, int first, int last, Tensor? edge_weights=None) -> (Tensor length, Tensor indices, Tensor weight)");
  // store
  m.def("pack_id_set(Tensor ids, int num_ids) -> Tensor");
  m.def("look_up(Tensor n_id, Tensor offsets, int part_id, Tensor[] local_sets, Tensor[] remote_sets) -> (Tensor[] position, Tensor[] slot, Tensor remote_counts)");
  m.def("take_hits(Tensor remote_position, Tensor remote_id, Tensor offsets, Tensor hit_place) -> (Tensor hit_position, Tensor position, Tensor id, Tensor counts)");
  m.def("find_keys(Tensor hash, Tensor cells, int first, int shift, Tensor[] stored, Tensor?[] stored_offsets, Tensor[] wanted, Tensor?[] wanted_offsets, int num_keys) -> Tensor");
  m.def("gather_rows(Tensor source, Tensor source_index, Tensor(a!) out, Tensor? out_index, bool parallel=True) -> ()");
  m.def("gather_joined_rows(Tensor[] sources, Tensor source_index, Tensor(a!) out, Tensor? out_index, bool parallel=True) -> ()");
  m.def("read_rows(int file, int offset, int num_rows, Tensor source_index, Tensor(a!) out, Tensor? out_index, int gap, int num_threads) -> Tensor");
  m.def("reduce_rows(Tensor source, Tensor source_index, Tensor size, Tensor? weight, Tensor(a!) out, int reduction, bool parallel=True) -> ()");
  m.def("encode_rows(Tensor source, Tensor source_index, Tensor(a!) out, Tensor? out_index, int format, int block) -> ()");
  m.def("decode_rows(Tensor source, Tensor source_index, Tensor(a!) out, Tensor? out_index, int format, int block) -> ()");
  m.def("round_rows(Tensor source, Tensor source_index, Tensor(a!) out, Tensor? out_index, int format, int block) -> ()");
  // sampling
  m.def("permutation(int size, int key) -> Tensor");
  m.def("sample_neighbors(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor seeds, int[] fanouts, int batch_key, bool replace, int map_budget_bytes, Tensor? links=None, bool shared=False, int graph_number=0) -> (Tensor n_id, Tensor edge_index, Tensor e_id, Tensor num_sampled_nodes, Tensor num_sampled_edges)");
  m.def("sample_vertices(Tensor indptr, Tensor indices, Tensor seeds, int[] fanouts, int batch_key, bool replace, int map_budget_bytes, bool shared=False, int graph_number=0) -> Tensor");
  m.def("sample_typed_neighbors(Tensor[] indptr, Tensor[] indices, Tensor?[] edge_id, Tensor?[] links, Tensor?[] edge_weight, Tensor?[] edge_time, int[] source_type, int[] target_type, int[] num_vertices, Tensor?[] node_time, Tensor[] seeds, Tensor?[] seed_time, Tensor?[] seed_since, int[] first_tree, int[] fanouts, int num_hops, int batch_key, bool replace, bool disjoint, bool last, bool induced, int map_budget_bytes=536870912, bool shared=False) -> (Tensor[] n_id, Tensor[] tree, Tensor[] edge_index, Tensor[] e_id, Tensor num_sampled_nodes, Tensor num_sampled_edges)");
  m.def("draw_from_lists(Tensor indptr, Tensor indices, Tensor? edge_weight, Tensor? edge_time, Tensor place, Tensor vertex, Tensor? tree, Tensor? now, int fanout, int batch_key, int hop, int relation, int source_type, bool replace=False, bool last=False, bool shared=False, Tensor? since=None) -> (Tensor count, Tensor source, Tensor position)");
  m.def("join_drawn(Tensor[] n_id, Tensor[] tree, int[] first, Tensor[] count, Tensor[] source, int[] source_type, int[] target_type, int[] num_vertices, int num_trees, int map_budget_bytes, Tensor[] edge_index) -> (Tensor[] n_id, Tensor[] tree, Tensor[] edge_index)");
  m.def("edges_between(Tensor indptr, Tensor indices, Tensor? edge_time, Tensor place, Tensor? tree, Tensor? now, Tensor member, Tensor? member_tree, int num_sources, int num_trees, int map_budget_bytes=536870912, Tensor? since=None) -> (Tensor count, Tensor row, Tensor position)");
  m.def("merge_lists(int size, Tensor?[] position, Tensor[] count, Tensor[] value, Tensor[] base) -> (Tensor count, Tensor value)");
  m.def("pack_integers(Tensor[] section, Tensor?[] count, Tensor?[] base) -> Tensor");
  m.def("divide_batch(Tensor node, Tensor row, Tensor col, Tensor? edge, Tensor owner, int[] nodes_within, int[] edges_within, int ranks, int place=-1) -> (Tensor[] node, Tensor[] row, Tensor[] col, Tensor[] edge, Tensor[] send, Tensor own, Tensor edges, Tensor sent)");
  m.def("ppr_push(Tensor indptr, Tensor indices, Tensor seeds, float alpha, float epsilon, int k, Tensor? ids=None, Tensor? degree=None, bool parallel=True) -> (Tensor id, Tensor score, Tensor count, Tensor missing)");
  m.def("to_bidirectional(Tensor row, Tensor col, Tensor rev_row, Tensor rev_col, Tensor? edge_id, Tensor? rev_edge_id) -> (Tensor edge_index, Tensor edge_id)");
  // ways
  m.def("code_ids(Tensor ids, int num_ids, int but_from=0, int but_to=0) -> Tensor");
  m.def("ids_of_list(Tensor list, int num_ids) -> Tensor");
  m.def("link_lists(Tensor[] lists, int heads, int num_ids) -> Tensor[]");
  m.def("fill_slots(Tensor ids, Tensor prior, Tensor(a!) slot_id, Tensor(b!) slot_key, Tensor(c!) table) -> ()");
  m.def("note_uses(Tensor list, int batch, int num_ids, Tensor slot_id, Tensor(a!) slot_key, Tensor table) -> ()");
  m.def("plan_batch(Tensor remote_id, Tensor links, int batch, Tensor prior, Tensor(a!) slot_id, Tensor(b!) slot_key, Tensor(c!) table) -> (Tensor hit_place, Tensor hit_slot, Tensor fetched_place, Tensor admitted_row, Tensor admitted_slot)");
  m.def("plan_sums(Tensor row, Tensor col, Tensor owner, int first, int num_parts, int row_bytes, int id_bytes, int source_bytes) -> (Tensor kept_vertex, Tensor kept_edge, Tensor kept_row, Tensor target, Tensor size, Tensor summed_edge, Tensor groups, Tensor sources)");
  m.def("minimum_cut(Tensor tail, Tensor head, Tensor capacity, int num_nodes, int source, int sink) -> Tensor");
  // nn
  m.def("group_by_target(Tensor source, Tensor target, int num_sources, int num_targets) -> Tensor");
  m.def("group_by_source(Tensor indptr, Tensor source, int num_sources) -> (Tensor indptr, Tensor target, Tensor place)");
  m.def("add_self_loops(Tensor indptr, Tensor source, Tensor? edge) -> (Tensor indptr, Tensor source, Tensor edge)");
  m.def("sum_listed_rows(Tensor indptr, Tensor? index, Tensor? place, Tensor x, Tensor? weight, bool mean=False, bool prefix=False) -> Tensor");
  m.def("extreme_listed_rows(Tensor indptr, Tensor? index, Tensor x, bool largest) -> Tensor");
  m.def("share_ties(Tensor indptr, Tensor? index, Tensor x, Tensor extreme, Tensor grad) -> Tensor");
  m.def("pass_ties(Tensor indptr, Tensor target, Tensor x, Tensor extreme, Tensor share) -> Tensor");
  m.def("pass_ties_to_entries(Tensor indptr, Tensor values, Tensor extreme, Tensor share) -> Tensor");
  m.def("spread_rows(Tensor indptr, Tensor x) -> Tensor");
  m.def("dot_listed_rows(Tensor indptr, Tensor index, Tensor target_rows, Tensor source_rows, int heads) -> Tensor");
  m.def("softmax_of_lists(Tensor indptr, Tensor scores) -> Tensor");
  m.def("softmax_of_lists_backward(Tensor indptr, Tensor out, Tensor grad) -> Tensor");
  m.def("additive_scores(Tensor indptr, Tensor index, Tensor target_rows, Tensor source_rows, Tensor att, float negative_slope) -> Tensor");
  m.def("additive_scores_by_target(Tensor indptr, Tensor index, Tensor target_rows, Tensor source_rows, Tensor att, float negative_slope, Tensor grad) -> (Tensor grad_target_rows, Tensor grad_att)");
  m.def("additive_scores_by_source(Tensor indptr, Tensor target, Tensor place, Tensor target_rows, Tensor source_rows, Tensor att, float negative_slope, Tensor grad) -> Tensor");
  // memory
  m.def("use_huge_pages(Tensor tensor) -> ()");
}
// clang-format on

// The module itself is empty. Importing it loads the library, which fills torch.ops.salientpp.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
