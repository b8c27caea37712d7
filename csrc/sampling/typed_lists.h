// Finds the neighbour lists of a block's vertices, as far as the vertices' trees may see them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "memory.h"
#include "sampling/typed_batch.h"

namespace salientpp::typed {

// Shortens each list of the block to the neighbours whose time is at most its seed's. The searches go on side by side,
// so that their cache misses overlap.
template <class TimeOf, class Prefetch>
void keep_past(Block& block, const TimeOf& time_of, const Prefetch& prefetch) {
  int64_t num_searching = 0;
  for (int64_t i = 0; i < block.size; ++i) {
    block.low[i] = block.begin[i];
    block.left[i] = block.end[i] - block.begin[i];
    prefetch(block.low[i] + block.left[i] / 2);
    block.searching[num_searching] = static_cast<int32_t>(i);
    num_searching += block.left[i] > 0;
  }
  while (num_searching > 0) {
    int64_t kept = 0;
    for (int64_t k = 0; k < num_searching; ++k) {
      const int32_t i = block.searching[k];
      const int64_t half = block.left[i] / 2;
      const int64_t middle = block.low[i] + half;
      const int64_t is_past = time_of(middle) <= block.now[i];  // as a number: a coin toss that no predictor wins
      block.low[i] += is_past * (half + 1);
      block.left[i] = half - (is_past & ~block.left[i]);  // the upper half is one smaller where the size is even
      prefetch(block.low[i] + block.left[i] / 2);
      block.searching[kept] = i;
      kept += block.left[i] > 0;
    }
    num_searching = kept;
  }
  for (int64_t i = 0; i < block.size; ++i) block.end[i] = block.low[i];
}

// Finds the lists of the block's vertices, as far as their trees may see them, and prefetches for the next block.
template <class Lists>
void find_lists(Scratch& s, Relation& relation, const Lists& lists, int64_t first, int64_t last) {
  VertexType& target = s.types[relation.target];
  const VertexType& source = s.types[relation.source];
  Block& block = s.block;
  block.first = first;
  block.size = std::min(kBlockVertices, last - first);
  const int64_t* n_id = target.n_id.data() + first;
  for (int64_t i = 0; i < block.size; ++i) {
    const int64_t begin = relation.indptr[n_id[i]], end = relation.indptr[n_id[i] + 1];
    check(begin >= 0 && begin <= end && end <= relation.num_edges, "indptr is corrupt at vertex ", n_id[i]);
    block.begin[i] = begin;
    block.end[i] = end;
  }
  const int64_t ahead = std::min(2 * kBlockVertices, last - first);
  for (int64_t i = block.size; i < ahead; ++i) prefetch_read(&relation.indptr[n_id[i]]);
  if (s.seed_time.empty()) return;
  const int32_t* tree = target.tree.data() + first;
  for (int64_t i = 0; i < block.size; ++i) block.now[i] = s.seed_time[static_cast<size_t>(tree[i])];
  if (relation.time != nullptr) {
    dispatch_index(*relation.time, [&](auto* time) {
      keep_past(block, [&](int64_t e) -> int64_t { return time[e]; }, [&](int64_t e) { prefetch_read(&time[e]); });
    });
  }
  if (source.time != nullptr) {
    keep_past(
        block,
        [&](int64_t e) {
          const auto id = static_cast<uint64_t>(lists.source(e));
          check(id < static_cast<uint64_t>(source.num_vertices), "indices is corrupt: it holds ",
                static_cast<int64_t>(id));
          return source.time[id];
        },
        [&](int64_t e) { lists.prefetch(e); });
  }
}

}  // namespace salientpp::typed
