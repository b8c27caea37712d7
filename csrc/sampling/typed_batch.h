// Data of a batch with several vertex types: types, relations, and blocks of a hop's vertices.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "random.h"
#include "sampling/buffer.h"
#include "sampling/lists.h"
#include "sampling/shared_draw.h"
#include "sampling/uniform_draw.h"
#include "sampling/vertex_map.h"
#include "sampling/weighted_draw.h"

namespace salientpp::typed {

constexpr int64_t kBlockVertices = 64;

enum class MapKind { kStamp, kHash, kTree, kWideTree };

// One vertex type: its data in the graph and in the batch.
struct VertexType {
  int64_t num_vertices = 0;
  const int64_t* time = nullptr;  // [num_vertices] or absent
  MapKind map_kind = MapKind::kHash;
  StampMap stamp_map;  // without trees: id -> local id, in one of the two maps
  HashMap hash_map;
  TreeMap<uint32_t> tree_map;  // with trees: (tree, id) -> local id, by the width of an id
  TreeMap<uint64_t> wide_tree_map;
  Buffer<int64_t> n_id;
  Buffer<int32_t> tree;  // [n_id] if disjoint
  int64_t hop_begin = 0, hop_end = 0;
  std::vector<int64_t> num_nodes;
};

template <class F>
void with_map(VertexType& type, F&& f) {
  switch (type.map_kind) {
    case MapKind::kStamp:
      return f(type.stamp_map);
    case MapKind::kHash:
      return f(type.hash_map);
    case MapKind::kTree:
      return f(type.tree_map);
    case MapKind::kWideTree:
      return f(type.wide_tree_map);
  }
}

// True if dense maps of all types together fit into the budget.
inline bool stamps_fit(const std::vector<int64_t>& num_vertices, int64_t map_budget_bytes) {
  int64_t bytes = 0;
  for (const int64_t size : num_vertices) {
    if (size > (map_budget_bytes - bytes) / StampMap::bytes(1)) return false;
    bytes += StampMap::bytes(size);
  }
  return true;
}

// Chooses the map of a type with at most `most` vertices in the batch.
inline MapKind map_kind_of(bool has_trees, int64_t num_vertices, bool fit, int64_t most) {
  if (has_trees) return num_vertices < std::numeric_limits<uint32_t>::max() ? MapKind::kTree : MapKind::kWideTree;
  return fit && most < StampMap::kMaxLocalIds ? MapKind::kStamp : MapKind::kHash;
}

// Begins the type's map of a batch with the vertices that `n_id` (and `tree`) hold. A repeated vertex keeps its place
// in n_id; edges refer to its first place.
inline void fill_map(VertexType& type, int64_t num_trees) {
  const int64_t size = type.n_id.size();
  const int64_t* id = type.n_id.data();
  with_map(type, [&](auto& map) {
    if constexpr (requires { map.table(0); }) {
      const int32_t* tree = type.tree.data();
      map.begin_batch(num_trees);
      for (int64_t i = 0; i < size;) {
        int64_t end = i + 1;
        while (end < size && tree[end] == tree[i]) ++end;
        map.reserve(tree[i], end - i, end - i);
        for (const auto table = map.table(tree[i]); i < end; ++i) table.insert(id[i], i);
      }
    } else {
      map.begin_batch(type.num_vertices, size);
      map.reserve(size);
      const auto inserter = map.inserter();
      for (int64_t i = 0; i < size; ++i) {
        if (i + kInsertsAhead < size) inserter.prefetch(id[i + kInsertsAhead]);
        inserter.insert(id[i], i);
      }
    }
  });
}

struct Relation {
  const int64_t* indptr = nullptr;
  const Tensor* indices = nullptr;
  int64_t num_edges = 0;
  const Tensor* weight = nullptr;  // [num_edges], in list order, or absent
  const Tensor* time = nullptr;    // [num_edges], in list order, or absent
  size_t source = 0, target = 0;
  const Tensor* edge_id = nullptr;  // [num_edges], in list order, or absent
  const uint64_t* links = nullptr;  // [num_edges], read instead of `indices` and `edge_id`, or absent
  Buffer<int64_t> edge;             // per sampled edge: its position in `indices`, or its id if stored with the source
  Buffer<int32_t> row;              // per sampled edge: local id of its source
  Buffer<int32_t> num_drawn;        // per vertex of the target type: number of its edges, which stand together
  std::vector<int64_t> num_sampled;
};

// Calls f with the object that gives the source and id at a position of the relation.
template <class F>
void with_lists(const Relation& relation, F&& f) {
  if (relation.links != nullptr)
    f(Links{relation.links});
  else
    dispatch_index(*relation.indices, [&]<class Index>(const Index* indices) { f(Sources<Index>{indices}); });
}

// Key of the draws of a hop over a relation. The number of the relation counts from 0.
inline uint64_t relation_key(uint64_t batch_key, int64_t hop, size_t relation) {
  const uint64_t hop_key = join_key(batch_key, static_cast<uint64_t>(hop));
  return relation == 0 ? hop_key : join_key(hop_key, relation);
}

// Key of the neighbours' numbers for shared draws of a type.
inline uint64_t shared_key_of(uint64_t batch_key, size_t source_type) {
  const uint64_t key = SharedDraw::key_of(batch_key);
  return source_type == 0 ? key : join_key(key, source_type);
}

struct Options {
  bool replace, disjoint, last, induced, shared;
};

// Lists that the vertices of a block draw from.
struct Block {
  int64_t first, size;                             // local ids
  std::array<int64_t, kBlockVertices> begin, end;  // bounds of the lists, or of their visible entries
  std::array<int64_t, kBlockVertices> count;       // number of draws
  std::array<int64_t, kBlockVertices> now;         // with times: the seed's time
  std::array<int64_t, kBlockVertices> since;       // with a time window: its begin
  std::array<int64_t, kBlockVertices> low, left;   // state of the search: its start, and the number of entries left
  std::array<int32_t, kBlockVertices> searching;   // state of the search: vertices that are not done
};

// Memory of the draws from lists.
struct Draws {
  DrawnSet drawn;
  WeightedDraw weighted;
  SharedDraw shared;
};

// Scratch memory that a thread keeps between batches. It never influences a result.
struct Scratch {
  std::vector<VertexType> types;
  std::vector<Relation> relations;
  Draws draws;
  std::vector<int64_t> seed_time, seed_since;  // per tree
  Block block;
};

}  // namespace salientpp::typed
