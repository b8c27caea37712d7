// Neighbour sampling with everything that PyG's loaders offer: several types of vertices and relations between them,
// disjoint trees, times, weights, induced subgraphs.
//
// A relation is a CSC matrix over two vertex types: `indices[indptr[v]:indptr[v + 1]]` are the vertices of its source
// type that vertex v of its target type aggregates from. Hop h expands, in every relation, the target vertices first
// found at hop h - 1. Each vertex draws from a stream keyed by (batch key, hop, relation, tree, vertex); with one
// relation, no trees and no weights these are the draws of sample_neighbors.cpp, which is the faster kernel for that
// case.
//
//   disjoint   every seed grows a tree of its own; a vertex is known by (tree, id).
//   times      a tree sees a neighbour only if its time (or its edge's) is at most that of the tree's seed. Lists are
//              sorted by time, so what a tree sees of a list is a prefix; the strategy 'last' draws from its end.
//   induced    in the end all edges between the vertices found, instead of those that were drawn.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "minibatch/buffer.h"
#include "minibatch/draw.h"
#include "minibatch/vertex_map.h"
#include "random.h"

namespace salientpp {
namespace {

constexpr int64_t kBlockVertices = 64;

// One type of vertices: the graph's side of it and the batch's.
struct VertexType {
  int64_t num_vertices = 0;
  const int64_t* time = nullptr;  // [num_vertices] or absent
  HashMap map;                    // tree * num_vertices + id -> local id
  Buffer<int64_t> n_id;
  Buffer<int64_t> tree;  // [n_id] if disjoint
  int64_t hop_begin = 0, hop_end = 0;
  std::vector<int64_t> num_nodes;
};

struct Relation {
  const int64_t* indptr = nullptr;
  const Tensor* indices = nullptr;
  int64_t num_edges = 0;
  const double* weight = nullptr;  // [num_edges], in list order, or absent
  const int64_t* time = nullptr;   // [num_edges], in list order, or absent
  size_t source = 0, target = 0;
  Buffer<int64_t> edge;      // per sampled edge: its position in `indices`
  Buffer<int32_t> row, col;  // per sampled edge: local ids of source and target
  std::vector<int64_t> num_sampled;
};

struct Options {
  bool replace, disjoint, last, induced;
};

// What a thread keeps between batches. It never influences a result.
struct Scratch {
  std::vector<VertexType> types;
  std::vector<Relation> relations;
  DrawnSet drawn;
  WeightedDraw weighted;
  std::vector<int64_t> seed_time;             // per tree
  std::vector<int64_t> begin, count, degree;  // of a block's vertices
};

// The part of v's list that its tree may see.
template <class Index>
std::pair<int64_t, int64_t> visible(const Relation& relation, const VertexType& source, const Index* indices,
                                    int64_t vertex, const int64_t* seed_time) {
  const int64_t begin = relation.indptr[vertex];
  int64_t end = relation.indptr[vertex + 1];
  check(begin >= 0 && begin <= end && end <= relation.num_edges, "indptr is corrupt at vertex ", vertex);
  if (seed_time == nullptr) return {begin, end};
  const auto past = [&](const auto& time_of) {
    int64_t low = begin, high = end;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (time_of(middle) <= *seed_time)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  if (relation.time != nullptr) end = past([&](int64_t e) { return relation.time[e]; });
  if (source.time != nullptr) {
    end = std::min(end, past([&](int64_t e) {
                     const auto id = static_cast<uint64_t>(indices[e]);
                     check(id < static_cast<uint64_t>(source.num_vertices), "indices is corrupt: it holds ",
                           static_cast<int64_t>(id));
                     return source.time[id];
                   }));
  }
  return {begin, end};
}

inline const int64_t* time_of_tree(const Scratch& s, VertexType& type, int64_t local_id) {
  return s.seed_time.empty() ? nullptr : &s.seed_time[static_cast<size_t>(type.tree.data()[local_id])];
}

inline int64_t map_key(const VertexType& type, int64_t tree, int64_t vertex) {
  return tree * type.num_vertices + vertex;
}

template <class Index>
void expand(Scratch& s, Relation& relation, const Index* indices, int64_t fanout, uint64_t key,
            const Options& options) {
  VertexType& target = s.types[relation.target];
  VertexType& source = s.types[relation.source];
  for (int64_t block = target.hop_begin; block < target.hop_end; block += kBlockVertices) {
    const int64_t size = std::min(kBlockVertices, target.hop_end - block);
    s.begin.resize(static_cast<size_t>(size));
    s.count.resize(static_cast<size_t>(size));
    s.degree.resize(static_cast<size_t>(size));
    int64_t block_edges = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t* time = time_of_tree(s, target, block + i);
      auto [begin, end] = visible(relation, source, indices, target.n_id.data()[block + i], time);
      if (options.last && time != nullptr && fanout >= 0) begin = std::max(begin, end - fanout);
      s.begin[static_cast<size_t>(i)] = begin;
      s.degree[static_cast<size_t>(i)] = end - begin;
      s.count[static_cast<size_t>(i)] = num_draws(end - begin, fanout, options.replace);
      block_edges += s.count[static_cast<size_t>(i)];
    }
    const int64_t first = relation.edge.size();
    check(source.n_id.size() + block_edges < HashMap::kMaxLocalIds &&
              first + block_edges < std::numeric_limits<int64_t>::max() / 16,
          "a batch may hold fewer than ", HashMap::kMaxLocalIds,
          " vertices; use a smaller batch_size or smaller fanouts");
    relation.edge.reserve(first + block_edges);
    relation.row.reserve(first + block_edges);
    relation.col.reserve(first + block_edges);
    source.n_id.reserve(source.n_id.size() + block_edges);
    if (options.disjoint) source.tree.reserve(source.n_id.size() + block_edges);
    source.map.reserve(source.n_id.size() + block_edges);
    int64_t* edge = relation.edge.data() + first;
    int32_t* col = relation.col.data() + first;
    int64_t at = 0;
    for (int64_t i = 0; i < size; ++i) {
      const auto k = static_cast<size_t>(i);
      const int64_t vertex = target.n_id.data()[block + i];
      const uint64_t tree_key =
          options.disjoint ? join_key(key, static_cast<uint64_t>(target.tree.data()[block + i])) : key;
      const Stream stream = vertex_stream(tree_key, vertex);
      const bool replace = options.replace && fanout >= 0;
      if (relation.weight != nullptr) {
        s.weighted(stream, relation.weight, s.begin[k], s.degree[k], s.count[k], replace, edge + at);
      } else {
        draw(stream, s.begin[k], s.degree[k], s.count[k], replace, s.drawn, edge + at);
      }
      for (int64_t e = at; e < at + s.count[k]; ++e) prefetch_read(&indices[edge[e]]);
      std::fill(col + at, col + at + s.count[k], static_cast<int32_t>(block + i));
      at += s.count[k];
    }
    uint64_t largest = 0;
    for (int64_t e = 0; e < block_edges; ++e) largest = std::max(largest, static_cast<uint64_t>(indices[edge[e]]));
    check(block_edges == 0 || largest < static_cast<uint64_t>(source.num_vertices), "indices is corrupt: it holds ",
          static_cast<int64_t>(largest), ", expected ids in [0, ", source.num_vertices, ")");
    const auto tree_of = [&](int64_t e) { return options.disjoint ? target.tree.data()[col[e]] : 0; };
    for (int64_t e = 0; e < block_edges; ++e) source.map.prefetch(map_key(source, tree_of(e), indices[edge[e]]));
    int32_t* row = relation.row.data() + first;
    for (int64_t e = 0; e < block_edges; ++e) {
      const int64_t vertex = indices[edge[e]];
      const int64_t tree = tree_of(e);
      const int64_t next = source.n_id.size();
      const int64_t local_id = source.map.insert(map_key(source, tree, vertex), next);
      if (local_id == next) {
        source.n_id.data()[next] = vertex;
        source.n_id.set_size(next + 1);
        if (options.disjoint) {
          source.tree.data()[next] = tree;
          source.tree.set_size(next + 1);
        }
      }
      row[e] = static_cast<int32_t>(local_id);
    }
    relation.edge.set_size(first + block_edges);
    relation.row.set_size(first + block_edges);
    relation.col.set_size(first + block_edges);
  }
}

// Replaces what was drawn by every visible edge between vertices of the batch (of the same tree).
template <class Index>
void induce(Scratch& s, Relation& relation, const Index* indices, const Options& options) {
  VertexType& target = s.types[relation.target];
  VertexType& source = s.types[relation.source];
  relation.edge.clear();
  relation.row.clear();
  relation.col.clear();
  for (int64_t i = 0; i < target.n_id.size(); ++i) {
    const auto [begin, end] = visible(relation, source, indices, target.n_id.data()[i], time_of_tree(s, target, i));
    const int64_t tree = options.disjoint ? target.tree.data()[i] : 0;
    const int64_t size = relation.edge.size();
    relation.edge.reserve(size + end - begin);
    relation.row.reserve(size + end - begin);
    relation.col.reserve(size + end - begin);
    int64_t at = size;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t vertex = indices[e];
      check(vertex >= 0 && vertex < source.num_vertices, "indices is corrupt: it holds ", vertex);
      const int64_t local_id = source.map.find(map_key(source, tree, vertex));
      if (local_id < 0) continue;
      relation.edge.data()[at] = e;
      relation.row.data()[at] = static_cast<int32_t>(local_id);
      relation.col.data()[at] = static_cast<int32_t>(i);
      ++at;
    }
    relation.edge.set_size(at);
    relation.row.set_size(at);
    relation.col.set_size(at);
  }
}

template <class T>
Tensor copy_of(Buffer<T>& buffer) {
  Tensor out = new_vector(buffer.size(), ScalarType::Long);
  std::copy(buffer.data(), buffer.data() + buffer.size(), mutable_int64_data(out));
  return out;
}

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

using TypedSample =
    std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor>;

TypedSample sample_typed_neighbors(
    const std::vector<Tensor>& indptr, const std::vector<Tensor>& indices,
    const std::vector<std::optional<Tensor>>& edge_id, const std::vector<std::optional<Tensor>>& edge_weight,
    const std::vector<std::optional<Tensor>>& edge_time, const std::vector<int64_t>& source_type,
    const std::vector<int64_t>& target_type, const std::vector<int64_t>& num_vertices,
    const std::vector<std::optional<Tensor>>& node_time, const std::vector<Tensor>& seeds,
    const std::vector<std::optional<Tensor>>& seed_time, const std::vector<int64_t>& first_tree,
    const std::vector<int64_t>& fanouts, int64_t num_hops, int64_t batch_key, bool replace, bool disjoint, bool last,
    bool induced) {
  const size_t num_types = num_vertices.size();
  const size_t num_relations = indptr.size();
  check(node_time.size() == num_types && seeds.size() == num_types && seed_time.size() == num_types &&
            first_tree.size() == num_types,
        "node_time, seeds, seed_time and first_tree must have one entry per vertex type, ", num_types);
  check(indices.size() == num_relations && edge_id.size() == num_relations && edge_weight.size() == num_relations &&
            edge_time.size() == num_relations && source_type.size() == num_relations &&
            target_type.size() == num_relations,
        "indices, edge_id, edge_weight, edge_time, source_type and target_type must have one entry per relation, ",
        num_relations);
  check(num_hops >= 0 && num_hops < std::numeric_limits<int32_t>::max(), "num_hops must be in [0, 2^31), got ",
        num_hops);
  check(fanouts.size() == num_relations * static_cast<size_t>(num_hops), "fanouts must have ", num_hops,
        " entries per relation, got ", fanouts.size(), " for ", num_relations, " relations");
  for (size_t i = 0; i < fanouts.size(); ++i) {
    check(fanouts[i] >= -1 && fanouts[i] <= std::numeric_limits<int32_t>::max(), "fanouts[", i,
          "] must be in [0, 2^31), or -1 for all neighbours, got ", fanouts[i]);
  }

  static thread_local Scratch scratch;
  Scratch& s = scratch;
  const Options options{replace, disjoint, last, induced};
  s.types.resize(num_types);
  s.relations.resize(num_relations);
  s.seed_time.clear();
  int64_t num_trees = 0, num_timed = 0;
  for (size_t t = 0; t < num_types; ++t) {
    check_vector(seeds[t], ScalarType::Long, "seeds");
    check(num_vertices[t] >= 0, "num_vertices[", t, "] must be >= 0, got ", num_vertices[t]);
    num_trees += seeds[t].numel();
  }
  for (size_t t = 0; t < num_types; ++t) {
    const int64_t num_seeds = seeds[t].numel();
    check(first_tree[t] >= 0 && first_tree[t] <= num_trees - num_seeds, "first_tree[", t, "] must be in [0, ",
          num_trees - num_seeds, "], got ", first_tree[t]);
    const int64_t* time = optional_int64(seed_time[t], num_seeds, "seed_time", t);
    if (time == nullptr) continue;
    s.seed_time.resize(static_cast<size_t>(num_trees));
    std::copy(time, time + num_seeds, s.seed_time.begin() + first_tree[t]);
    num_timed += num_seeds;
  }
  check(num_timed == 0 || num_timed == num_trees, "seed_time must be there for all seeds or for none, got it for ",
        num_timed, " of ", num_trees);
  check(s.seed_time.empty() || disjoint,
        "seed_time needs disjoint=True: a vertex may be seen by one tree and not by another");

  for (size_t t = 0; t < num_types; ++t) {
    VertexType& type = s.types[t];
    type.num_vertices = num_vertices[t];
    type.time = optional_int64(node_time[t], num_vertices[t], "node_time", t);
    check(!disjoint || num_trees == 0 || num_vertices[t] <= std::numeric_limits<int64_t>::max() / num_trees - 1,
          "num_vertices[", t, "] times the number of seeds must be < 2^63, got ", num_vertices[t], " and ", num_trees);
    type.num_nodes.clear();
    type.n_id.clear();
    type.tree.clear();
    const int64_t num_seeds = seeds[t].numel();
    const int64_t* seed = int64_data(seeds[t]);
    type.map.begin_batch(type.num_vertices, num_seeds);
    type.map.reserve(num_seeds);
    type.n_id.reserve(num_seeds);
    if (disjoint) type.tree.reserve(num_seeds);
    for (int64_t i = 0; i < num_seeds; ++i) {
      const int64_t tree = first_tree[t] + i;
      check(seed[i] >= 0 && seed[i] < type.num_vertices, "seeds[", i, "] must be in [0, ", type.num_vertices, "), got ",
            seed[i]);
      // A repeated seed keeps its place in n_id; edges refer to its first one, or each to its own tree.
      type.map.insert(map_key(type, disjoint ? tree : 0, seed[i]), i);
      type.n_id.data()[i] = seed[i];
      if (disjoint) type.tree.data()[i] = tree;
    }
    type.n_id.set_size(num_seeds);
    if (disjoint) type.tree.set_size(num_seeds);
    type.hop_begin = 0;
    type.hop_end = num_seeds;
    type.num_nodes.push_back(num_seeds);
  }
  for (size_t r = 0; r < num_relations; ++r) {
    Relation& relation = s.relations[r];
    check_vector(indptr[r], ScalarType::Long, "indptr");
    check_index_vector(indices[r], "indices");
    const auto in_range = [&](int64_t type) { return type >= 0 && static_cast<size_t>(type) < num_types; };
    check(in_range(source_type[r]) && in_range(target_type[r]), "source_type and target_type must be in [0, ",
          num_types, ")");
    relation.source = static_cast<size_t>(source_type[r]);
    relation.target = static_cast<size_t>(target_type[r]);
    const uint64_t num_offsets = static_cast<uint64_t>(num_vertices[relation.target]) + 1;  // may be 2^63
    check(static_cast<uint64_t>(indptr[r].numel()) == num_offsets, "indptr[", r, "] must have ", num_offsets,
          " entries, got ", indptr[r].numel());
    relation.indptr = int64_data(indptr[r]);
    relation.indices = &indices[r];
    relation.num_edges = indices[r].numel();
    relation.time = optional_int64(edge_time[r], relation.num_edges, "edge_time", r);
    relation.weight = nullptr;
    if (edge_weight[r]) {
      check_vector(*edge_weight[r], ScalarType::Double, "edge_weight");
      check(edge_weight[r]->numel() == relation.num_edges, "edge_weight[", r, "] must have ", relation.num_edges,
            " entries, got ", edge_weight[r]->numel());
      relation.weight = static_cast<const double*>(edge_weight[r]->const_data_ptr());
    }
    optional_int64(edge_id[r], relation.num_edges, "edge_id", r);
    relation.edge.clear();
    relation.row.clear();
    relation.col.clear();
    relation.num_sampled.clear();
  }

  for (int64_t hop = 0; hop < num_hops; ++hop) {
    const uint64_t hop_key = join_key(static_cast<uint64_t>(batch_key), static_cast<uint64_t>(hop));
    for (size_t r = 0; r < num_relations; ++r) {
      Relation& relation = s.relations[r];
      const int64_t before = relation.edge.size();
      const int64_t fanout = fanouts[r * static_cast<size_t>(num_hops) + static_cast<size_t>(hop)];
      const uint64_t key = r == 0 ? hop_key : join_key(hop_key, r);
      if (fanout != 0) {
        dispatch_index(*relation.indices, [&](auto* sources) { expand(s, relation, sources, fanout, key, options); });
      }
      relation.num_sampled.push_back(relation.edge.size() - before);
    }
    for (VertexType& type : s.types) {
      type.num_nodes.push_back(type.n_id.size() - type.hop_end);
      type.hop_begin = type.hop_end;
      type.hop_end = type.n_id.size();
    }
  }
  if (induced) {
    for (Relation& relation : s.relations) {
      dispatch_index(*relation.indices, [&](auto* sources) { induce(s, relation, sources, options); });
    }
  }

  std::vector<Tensor> out_n_id, out_tree, out_edge_index, out_e_id;
  std::vector<std::vector<int64_t>> num_nodes, num_edges;
  for (VertexType& type : s.types) {
    out_n_id.push_back(copy_of(type.n_id));
    if (disjoint) out_tree.push_back(copy_of(type.tree));
    num_nodes.push_back(type.num_nodes);
  }
  for (size_t r = 0; r < num_relations; ++r) {
    Relation& relation = s.relations[r];
    const int64_t size = relation.edge.size();
    Tensor edge_index = torch::stable::empty({2, size}, ScalarType::Long);
    std::copy(relation.row.data(), relation.row.data() + size, mutable_int64_data(edge_index));
    std::copy(relation.col.data(), relation.col.data() + size, mutable_int64_data(edge_index) + size);
    out_edge_index.push_back(edge_index);
    Tensor e_id = new_vector(size, ScalarType::Long);
    const int64_t* ids = edge_id[r] ? int64_data(*edge_id[r]) : nullptr;
    for (int64_t e = 0; e < size; ++e)
      mutable_int64_data(e_id)[e] = ids == nullptr ? relation.edge.data()[e] : ids[relation.edge.data()[e]];
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
}  // namespace salientpp
