// Data of a batch with several vertex types: types, relations, and blocks of a hop's vertices.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "check.h"
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

struct Options {
  bool replace, disjoint, last, induced, shared;
};

// Lists that the vertices of a block draw from.
struct Block {
  int64_t first, size;                             // local ids
  std::array<int64_t, kBlockVertices> begin, end;  // bounds of the lists, or of their visible prefix
  std::array<int64_t, kBlockVertices> count;       // number of draws
  std::array<int64_t, kBlockVertices> now;         // with times: the seed's time
  std::array<int64_t, kBlockVertices> low, left;   // state of the search: its start, and the number of entries left
  std::array<int32_t, kBlockVertices> searching;   // state of the search: vertices that are not done
};

// Scratch memory that a thread keeps between batches. It never influences a result.
struct Scratch {
  std::vector<VertexType> types;
  std::vector<Relation> relations;
  DrawnSet drawn;
  WeightedDraw weighted;
  SharedDraw shared;
  std::vector<int64_t> seed_time;  // per tree
  Block block;
};

}  // namespace salientpp::typed
