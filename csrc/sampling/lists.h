// Data of an edge by its position: its source, its id, and the local id of its source in the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "check.h"
#include "memory.h"
#include "sampling/vertex_map.h"

namespace salientpp {

// The id is the position itself, or is stored elsewhere.
template <class Index>
struct Sources {
  const Index* indices;
  static constexpr int64_t kBytes = sizeof(Index);
  void prefetch(int64_t position) const { prefetch_read(&indices[position]); }
  int64_t source(int64_t position) const { return indices[position]; }
  static int64_t id(int64_t position) { return position; }
};

// Source and id are in one word, so that an edge costs one cache miss instead of two.
struct Links {
  const uint64_t* links;
  static constexpr int64_t kBytes = sizeof(uint64_t);
  void prefetch(int64_t position) const { prefetch_read(&links[position]); }
  int64_t source(int64_t position) const { return static_cast<int64_t>(links[position] & 0xffffffffU); }
  int64_t id(int64_t position) const { return static_cast<int64_t>(links[position] >> 32); }
};

// Sources that were read before: an edge is given by its source instead of a position.
struct Drawn {
  static int64_t source(int64_t vertex) { return vertex; }
};

[[noreturn, gnu::cold]] inline void fail_at_source(int64_t source, int64_t num_vertices) {
  fail("indices is corrupt: it holds ", source, ", expected ids in [0, ", num_vertices, ")");
}

// Writes the local ids of the sources of `num_edges` positions, and, if edges are kept and not const, replaces
// positions by ids. New vertices are appended to the `size` entries of `n_id`; returns the new size. It is not inlined,
// so that everything its loop reads is in registers. `is_far`: the map may not be in a cache.
template <bool keeps_edges, bool is_far, class Inserter, class Lists, class Edge, class Local>
[[gnu::noinline]] int64_t find_sources(const Inserter inserter, const int64_t num_vertices, const Lists lists,
                                       const int64_t num_edges, Edge* __restrict edge, Local* __restrict source,
                                       int64_t* __restrict n_id, int64_t size) {
  for (int64_t k = 0; is_far && k < std::min(kInsertsAhead, num_edges); ++k) inserter.prefetch(lists.source(edge[k]));
  for (int64_t k = 0; k < num_edges; ++k) {
    if (is_far && k + kInsertsAhead < num_edges) inserter.prefetch(lists.source(edge[k + kInsertsAhead]));
    const int64_t vertex = lists.source(edge[k]);
    if (static_cast<uint64_t>(vertex) >= static_cast<uint64_t>(num_vertices)) [[unlikely]]
      fail_at_source(vertex, num_vertices);
    const int64_t local_id = inserter.insert(vertex, size);
    n_id[size] = vertex;
    size += local_id == size;
    if constexpr (keeps_edges) {
      source[k] = static_cast<Local>(local_id);
      if constexpr (!std::is_const_v<Edge>) edge[k] = lists.id(edge[k]);
    }
  }
  return size;
}

}  // namespace salientpp
