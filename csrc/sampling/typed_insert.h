// Gives the vertices that a block has drawn their places in the batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "sampling/typed_batch.h"

namespace salientpp::typed {

constexpr int64_t kLookAhead = 1024;  // vertices of a tree beyond the block

[[noreturn, gnu::cold]] inline void fail_at_source(int64_t source, const VertexType& type) {
  fail("indices is corrupt: it holds ", source, ", expected ids in [0, ", type.num_vertices, ")");
}

// Gives the sources of the block's edges their local ids, and the edges their ids where these come along. The buffers
// have room.
template <class Lists, class Map>
void insert_block(VertexType& source, Map& map, const Lists& lists, int64_t* __restrict edge, int64_t num_edges,
                  int32_t* __restrict row) {
  const auto num_vertices = static_cast<uint64_t>(source.num_vertices);
  const auto inserter = map.inserter();
  for (int64_t e = 0; e < std::min(kInsertsAhead, num_edges); ++e) inserter.prefetch(lists.source(edge[e]));
  int64_t size = source.n_id.size();
  int64_t* __restrict found = source.n_id.data();
  for (int64_t e = 0; e < num_edges; ++e) {
    if (e + kInsertsAhead < num_edges) inserter.prefetch(lists.source(edge[e + kInsertsAhead]));
    const int64_t vertex = lists.source(edge[e]);
    if (static_cast<uint64_t>(vertex) >= num_vertices) [[unlikely]]
      fail_at_source(vertex, source);
    const int64_t local_id = inserter.insert(vertex, size);
    found[size] = vertex;
    size += local_id == size;
    row[e] = static_cast<int32_t>(local_id);
    edge[e] = lists.id(edge[e]);
  }
  source.n_id.set_size(size);
}

// The same in trees; `tree_of` holds the `num_left` vertices from the block on. With `ends` a tree that none of these
// has takes no more vertices.
template <class Lists, class Key>
void insert_block(VertexType& source, TreeMap<Key>& map, const Lists& lists, int64_t* edge, const Block& block,
                  const int32_t* tree_of, int64_t num_left, bool ends, int32_t* row) {
  const auto num_vertices = static_cast<uint64_t>(source.num_vertices);
  bool is_cold = false;  // a table that was neither made now nor used for the block before
  for (int64_t i = 0; i < block.size;) {
    const int32_t tree = tree_of[i];
    const int64_t begin = i;
    int64_t num_edges = 0;
    for (; i < block.size && tree_of[i] == tree; ++i) num_edges += block.count[i];
    // A run of vertices of one tree may go on in the next blocks, and tables should not grow at each.
    int64_t run = i;
    if (i == block.size) {
      const int64_t most = std::min(i + kLookAhead, num_left);
      while (run < most && tree_of[run] == tree) ++run;
    }
    const bool is_new = map.reserve(tree, num_edges, num_edges * (run - begin) / (i - begin));
    is_cold |= !is_new && (begin > 0 || block.first == 0 || tree_of[-1] != tree);
  }
  int64_t at = 0;
  for (int64_t i = 0; is_cold && i < block.size; ++i) {
    const auto table = map.table(tree_of[i]);
    for (const int64_t end = at + block.count[i]; at < end; ++at) table.prefetch(lists.source(edge[at]));
  }
  int64_t size = source.n_id.size();
  int64_t* found = source.n_id.data();
  int32_t* tree_found = source.tree.data();
  at = 0;
  for (int64_t i = 0; i < block.size; ++i) {
    const int32_t tree = tree_of[i];
    const auto table = map.table(tree);
    const int64_t before = size;
    for (const int64_t end = at + block.count[i]; at < end; ++at) {
      const int64_t vertex = lists.source(edge[at]);
      if (static_cast<uint64_t>(vertex) >= num_vertices) [[unlikely]]
        fail_at_source(vertex, source);
      const int64_t local_id = table.insert(vertex, size);
      found[size] = vertex;
      tree_found[size] = tree;
      size += local_id == size;
      row[at] = static_cast<int32_t>(local_id);
      edge[at] = lists.id(edge[at]);
    }
    map.give_back(tree, block.count[i] - (size - before));
    if (ends && (i + 1 == num_left || tree_of[i + 1] != tree)) map.release(tree);
  }
  source.n_id.set_size(size);
  source.tree.set_size(size);
}

}  // namespace salientpp::typed
