// Neighbour sampling with all features of PyG's loaders: several vertex types and relations between them, disjoint
// trees, times, weights and induced subgraphs.
//
// A relation is a CSC matrix over two vertex types: `indices[indptr[v]:indptr[v + 1]]` are the vertices of its source
// type that vertex v of its target type aggregates from. Hop h expands, in every relation, the target vertices first
// found at hop h - 1. Each vertex draws from a stream keyed by (batch key, hop, relation, tree, vertex). With one
// relation and without trees and weights, the draws equal the draws of sample_neighbors.cpp, which is faster there.
//
//   disjoint   every seed grows a tree of its own; a vertex is identified by (tree, id).
//   times      a tree sees a neighbour only if the time of the neighbour, or of its edge, is at most the time of the
//              tree's seed. With a time window, the time is also at least the begin of the window. Lists are sorted by
//              time, so a tree sees consecutive entries of a list. The strategy 'last' draws from the end of these.
//   shared     the neighbours' numbers decide (shared_draw.h). They are keyed by (batch key, source type, neighbour):
//              the same for all trees, and for all relations from a type.
//   induced    at the end, all edges between the found vertices replace the drawn edges.
//
// As in sample_neighbors.cpp, the frontier is processed in blocks, and each block in phases. Each phase prefetches the
// data that the next phase reads. Conditions (times, weights, the kind of map) are handled by separate phases, so that
// their loops do not branch on them.
#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "check.h"
#include "random.h"
#include "sampling/typed_batch.h"
#include "sampling/typed_hop.h"

namespace salientpp::typed {
namespace {

// Arguments of the operator, see salientpp/ops/sampling.py.
struct Arguments {
  const std::vector<Tensor>&indptr, &indices;
  const std::vector<std::optional<Tensor>>&edge_id, &links, &edge_weight, &edge_time;
  const std::vector<int64_t>&source_type, &target_type, &num_vertices;
  const std::vector<std::optional<Tensor>>& node_time;
  const std::vector<Tensor>& seeds;
  const std::vector<std::optional<Tensor>>&seed_time, &seed_since;
  const std::vector<int64_t>&first_tree, &fanouts;
  int64_t num_hops, batch_key, map_budget_bytes;
  Options options;

  int64_t fanout(size_t relation, int64_t hop) const {
    return fanouts[relation * static_cast<size_t>(num_hops) + static_cast<size_t>(hop)];
  }
};

Tensor table_of(const std::vector<std::vector<int64_t>>& rows, int64_t columns) {
  Tensor out = torch::stable::empty({static_cast<int64_t>(rows.size()), columns}, ScalarType::Long);
  int64_t* to = mutable_int64_data(out);
  for (const auto& row : rows) to = std::copy(row.begin(), row.end(), to);
  return out;
}

const int64_t* optional_int64(const std::optional<Tensor>& tensor, int64_t size, const char* name, size_t at) {
  if (!tensor) return nullptr;
  check_vector(*tensor, ScalarType::Long, name);
  check(tensor->numel() == size, name, "[", at, "] must have ", size, " entries, got ", tensor->numel());
  return int64_data(*tensor);
}

void check_sizes(const Arguments& a) {
  check(!a.options.shared || !a.options.replace, "shared draws are without replacement; pass replace=False");
  const size_t num_types = a.num_vertices.size();
  const size_t num_relations = a.indptr.size();
  check(a.node_time.size() == num_types && a.seeds.size() == num_types && a.seed_time.size() == num_types &&
            a.first_tree.size() == num_types,
        "node_time, seeds, seed_time and first_tree must have one entry per vertex type, ", num_types);
  check(a.seed_since.empty() || a.seed_since.size() == num_types,
        "seed_since must be empty or have one entry per vertex type, ", num_types, ", got ", a.seed_since.size());
  check(
      a.indices.size() == num_relations && a.edge_id.size() == num_relations && a.links.size() == num_relations &&
          a.edge_weight.size() == num_relations && a.edge_time.size() == num_relations &&
          a.source_type.size() == num_relations && a.target_type.size() == num_relations,
      "indices, edge_id, links, edge_weight, edge_time, source_type and target_type must have one entry per relation, ",
      num_relations);
  check(a.num_hops >= 0 && a.num_hops < std::numeric_limits<int32_t>::max(), "num_hops must be in [0, 2^31), got ",
        a.num_hops);
  check(a.fanouts.size() == num_relations * static_cast<size_t>(a.num_hops), "fanouts must have ", a.num_hops,
        " entries per relation, got ", a.fanouts.size(), " for ", num_relations, " relations");
  for (size_t i = 0; i < a.fanouts.size(); ++i) {
    check(a.fanouts[i] >= -1 && a.fanouts[i] <= std::numeric_limits<int32_t>::max(), "fanouts[", i,
          "] must be in [0, 2^31), or -1 for all neighbours, got ", a.fanouts[i]);
  }
}

// Copies values of the seeds of a type, if there are any, to their trees. Returns their number.
int64_t set_trees(std::vector<int64_t>& of_tree, const std::optional<Tensor>& of_seed, int64_t first_tree,
                  int64_t num_seeds, int64_t num_trees, const char* name, size_t type) {
  const int64_t* value = optional_int64(of_seed, num_seeds, name, type);
  if (value == nullptr) return 0;
  of_tree.resize(static_cast<size_t>(num_trees));
  std::copy(value, value + num_seeds, of_tree.begin() + first_tree);
  return num_seeds;
}

// Sets the time of each tree, and the begin of its time window, if seeds have them; returns the number of trees.
int64_t set_seed_times(Scratch& s, const Arguments& a) {
  const size_t num_types = a.num_vertices.size();
  s.seed_time.clear();
  s.seed_since.clear();
  int64_t num_trees = 0, num_timed = 0, num_windows = 0;
  for (size_t t = 0; t < num_types; ++t) {
    check_vector(a.seeds[t], ScalarType::Long, "seeds");
    check(a.num_vertices[t] >= 0, "num_vertices[", t, "] must be >= 0, got ", a.num_vertices[t]);
    num_trees += a.seeds[t].numel();
  }
  for (size_t t = 0; t < num_types; ++t) {
    const int64_t num_seeds = a.seeds[t].numel();
    check(a.first_tree[t] >= 0 && a.first_tree[t] <= num_trees - num_seeds, "first_tree[", t, "] must be in [0, ",
          num_trees - num_seeds, "], got ", a.first_tree[t]);
    num_timed += set_trees(s.seed_time, a.seed_time[t], a.first_tree[t], num_seeds, num_trees, "seed_time", t);
    if (a.seed_since.empty()) continue;
    num_windows += set_trees(s.seed_since, a.seed_since[t], a.first_tree[t], num_seeds, num_trees, "seed_since", t);
  }
  check(num_timed == 0 || num_timed == num_trees, "seed_time must be given for all seeds or for none, got it for ",
        num_timed, " of ", num_trees);
  check(num_windows == 0 || num_windows == num_timed,
        "seed_since must be given for all seeds with seed_time or for none, got it for ", num_windows, " of ",
        num_timed);
  check(s.seed_time.empty() || a.options.disjoint,
        "seed_time needs disjoint=True, because one tree may see a vertex and another may not");
  return num_trees;
}

void set_relation(Relation& relation, const Arguments& a, size_t r) {
  check_vector(a.indptr[r], ScalarType::Long, "indptr");
  check_index_vector(a.indices[r], "indices");
  const size_t num_types = a.num_vertices.size();
  const auto in_range = [&](int64_t type) { return type >= 0 && static_cast<size_t>(type) < num_types; };
  check(in_range(a.source_type[r]) && in_range(a.target_type[r]), "source_type and target_type must be in [0, ",
        num_types, ")");
  relation.source = static_cast<size_t>(a.source_type[r]);
  relation.target = static_cast<size_t>(a.target_type[r]);
  const uint64_t num_offsets = static_cast<uint64_t>(a.num_vertices[relation.target]) + 1;  // may be 2^63
  check(static_cast<uint64_t>(a.indptr[r].numel()) == num_offsets, "indptr[", r, "] must have ", num_offsets,
        " entries, got ", a.indptr[r].numel());
  relation.indptr = int64_data(a.indptr[r]);
  relation.indices = &a.indices[r];
  relation.num_edges = a.indices[r].numel();
  const auto of_edges = [&](const std::optional<Tensor>& given, const char* name) -> const Tensor* {
    if (!given) return nullptr;
    check(given->numel() == relation.num_edges, name, "[", r, "] must have ", relation.num_edges, " entries, got ",
          given->numel());
    return &*given;
  };
  const auto& time = a.edge_time[r];
  if (time) {
    if (time->scalar_type() != ScalarType::Int) check_vector(*time, ScalarType::Long, "edge_time");
    check_index_vector(*time, "edge_time");
  }
  relation.time = of_edges(time, "edge_time");
  const auto& weight = a.edge_weight[r];
  if (weight) {
    check(!a.options.shared, "shared draws are uniform; pass edge_weight[", r, "] = None");
    check_defined(*weight, "edge_weight");
    const auto dtype = weight->scalar_type();
    check(dtype == ScalarType::Float || dtype == ScalarType::Double,
          "edge_weight must have dtype float32 or float64, got ", dtype);
    check_vector(*weight, dtype, "edge_weight");
  }
  relation.weight = of_edges(weight, "edge_weight");
  if (a.edge_id[r]) check_index_vector(*a.edge_id[r], "edge_id");
  relation.edge_id = of_edges(a.edge_id[r], "edge_id");
  relation.links = reinterpret_cast<const uint64_t*>(optional_int64(a.links[r], relation.num_edges, "links", r));
  check(relation.links == nullptr || relation.edge_id == nullptr, "edge_id[", r,
        "] must be None if links are given, because links hold the ids");
  relation.edge.clear();
  relation.row.clear();
  relation.num_drawn.clear();
  relation.num_sampled.clear();
}

// Returns the largest number of vertices of each type in a batch: every draw finds a new one, or all are found.
std::vector<int64_t> most_local_ids(const Arguments& a) {
  const size_t num_types = a.num_vertices.size();
  std::vector<int64_t> frontier(num_types), most(num_types), whole(num_types);
  for (size_t t = 0; t < num_types; ++t) {
    most[t] = frontier[t] = a.seeds[t].numel();
    whole[t] = a.num_vertices[t] > std::numeric_limits<int64_t>::max() - most[t] ? std::numeric_limits<int64_t>::max()
                                                                                 : a.num_vertices[t] + most[t];
  }
  for (int64_t hop = 0; hop < a.num_hops; ++hop) {
    std::vector<int64_t> found(num_types, 0);
    for (size_t r = 0; r < a.source_type.size(); ++r) {
      const auto s = static_cast<size_t>(a.source_type[r]), t = static_cast<size_t>(a.target_type[r]);
      const int64_t fanout = a.fanout(r, hop);
      if (frontier[t] == 0 || fanout == 0) continue;
      const bool is_more = fanout < 0 || fanout > (whole[s] - found[s]) / frontier[t];
      found[s] = is_more ? whole[s] : found[s] + fanout * frontier[t];
    }
    for (size_t t = 0; t < num_types; ++t) {
      frontier[t] = found[t];
      most[t] = std::min(whole[t], most[t] > whole[t] - found[t] ? whole[t] : most[t] + found[t]);
    }
  }
  return most;
}

// Starts the batch's vertices of a type with its seeds.
void set_type(VertexType& type, const Arguments& a, size_t t, MapKind map_kind, int64_t num_trees) {
  type.num_vertices = a.num_vertices[t];
  type.time = optional_int64(a.node_time[t], type.num_vertices, "node_time", t);
  type.num_nodes.clear();
  type.n_id.clear();
  type.tree.clear();
  const int64_t num_seeds = a.seeds[t].numel();
  const int64_t* seed = int64_data(a.seeds[t]);
  type.n_id.reserve(num_seeds);
  for (int64_t i = 0; i < num_seeds; ++i) {
    check(seed[i] >= 0 && seed[i] < type.num_vertices, "seeds[", i, "] must be in [0, ", type.num_vertices, "), got ",
          seed[i]);
    type.n_id.data()[i] = seed[i];
  }
  type.n_id.set_size(num_seeds);
  if (a.options.disjoint) {
    type.tree.reserve(num_seeds);
    std::iota(type.tree.data(), type.tree.data() + num_seeds, static_cast<int32_t>(a.first_tree[t]));
    type.tree.set_size(num_seeds);
  }
  type.map_kind = map_kind;
  fill_map(type, num_trees);
  type.hop_begin = 0;
  type.hop_end = num_seeds;
  type.num_nodes.push_back(num_seeds);
}

void sample_hops(Scratch& s, std::span<VertexType> types, std::span<Relation> relations, const Arguments& a) {
  const auto batch_key = static_cast<uint64_t>(a.batch_key);
  for (int64_t hop = 0; hop < a.num_hops; ++hop) {
    const bool is_last = hop + 1 == a.num_hops && relations.size() == 1 && !a.options.induced;
    for (size_t r = 0; r < relations.size(); ++r) {
      Relation& relation = relations[r];
      const int64_t before = relation.edge.size();
      const uint64_t key = relation_key(batch_key, hop, r), shared_key = shared_key_of(batch_key, relation.source);
      with_lists(relation, [&](const auto& lists) {
        expand(s, relation, lists, a.fanout(r, hop), key, shared_key, is_last, a.options);
      });
      relation.num_sampled.push_back(relation.edge.size() - before);
    }
    for (VertexType& type : types) {
      type.num_nodes.push_back(type.n_id.size() - type.hop_end);
      type.hop_begin = type.hop_end;
      type.hop_end = type.n_id.size();
    }
  }
  if (a.options.induced) {
    for (Relation& relation : relations) {
      with_lists(relation, [&](const auto& lists) { induce(s, relation, lists); });
    }
  }
}

using TypedSample =
    std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor>;

TypedSample sample_typed_neighbors(
    const std::vector<Tensor>& indptr, const std::vector<Tensor>& indices,
    const std::vector<std::optional<Tensor>>& edge_id, const std::vector<std::optional<Tensor>>& links,
    const std::vector<std::optional<Tensor>>& edge_weight, const std::vector<std::optional<Tensor>>& edge_time,
    const std::vector<int64_t>& source_type, const std::vector<int64_t>& target_type,
    const std::vector<int64_t>& num_vertices, const std::vector<std::optional<Tensor>>& node_time,
    const std::vector<Tensor>& seeds, const std::vector<std::optional<Tensor>>& seed_time,
    const std::vector<std::optional<Tensor>>& seed_since, const std::vector<int64_t>& first_tree,
    const std::vector<int64_t>& fanouts, int64_t num_hops, int64_t batch_key, bool replace, bool disjoint, bool last,
    bool induced, int64_t map_budget_bytes, bool shared) {
  const Options options{replace, disjoint, last, induced, shared};
  const Arguments a{indptr,    indices,     edge_id,          links,        edge_weight,
                    edge_time, source_type, target_type,      num_vertices, node_time,
                    seeds,     seed_time,   seed_since,       first_tree,   fanouts,
                    num_hops,  batch_key,   map_budget_bytes, options};
  check_sizes(a);
  const size_t num_types = num_vertices.size();
  const size_t num_relations = indptr.size();
  static thread_local Scratch scratch;
  Scratch& s = scratch;
  // Loaders of several graphs may take turns, so the memory of the other types stays.
  if (s.types.size() < num_types) s.types.resize(num_types);
  if (s.relations.size() < num_relations) s.relations.resize(num_relations);
  const std::span<VertexType> types(s.types.data(), num_types);
  const std::span<Relation> relations(s.relations.data(), num_relations);
  const int64_t num_trees = set_seed_times(s, a);
  for (size_t r = 0; r < num_relations; ++r) set_relation(relations[r], a, r);
  const std::vector<int64_t> most = most_local_ids(a);
  const bool fit = stamps_fit(num_vertices, map_budget_bytes);
  check(num_trees < HashMap::kMaxLocalIds, "a batch must hold fewer than ", HashMap::kMaxLocalIds, " vertices, got ",
        num_trees, " seeds");
  for (size_t t = 0; t < num_types; ++t) {
    set_type(types[t], a, t, map_kind_of(disjoint, num_vertices[t], fit, most[t]), num_trees);
  }
  sample_hops(s, types, relations, a);

  std::vector<Tensor> out_n_id, out_tree, out_edge_index, out_e_id;
  std::vector<std::vector<int64_t>> num_nodes, num_edges;
  for (VertexType& type : types) {
    out_n_id.push_back(copy_of(type.n_id));
    if (disjoint) out_tree.push_back(copy_of(type.tree));
    num_nodes.push_back(type.num_nodes);
  }
  for (Relation& relation : relations) {
    const auto [edge_index, e_id] = edges_of(relation.edge, relation.row, relation.num_drawn, relation.edge_id);
    out_edge_index.push_back(edge_index);
    out_e_id.push_back(e_id);
    num_edges.push_back(relation.num_sampled);
  }
  return {
      out_n_id, out_tree, out_edge_index, out_e_id, table_of(num_nodes, num_hops + 1), table_of(num_edges, num_hops)};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("sample_typed_neighbors", TORCH_BOX(&sample_typed_neighbors));
}

}  // namespace
}  // namespace salientpp::typed
