// Draws for a block of vertices from their lists.
#pragma once

#include <algorithm>
#include <cstdint>

#include "memory.h"
#include "random.h"
#include "sampling/typed_batch.h"

namespace salientpp::typed {

// Draws for the block: positions in `indices`, list by list, each fetched while the next list is drawn from.
template <class Lists>
void draw_block(Scratch& s, const Relation& relation, const Lists& lists, int64_t fanout, uint64_t key,
                const Options& options, int64_t* edge) {
  VertexType& target = s.types[relation.target];
  const Block& block = s.block;
  const int64_t* n_id = target.n_id.data() + block.first;
  const int32_t* tree = options.disjoint ? target.tree.data() + block.first : nullptr;
  const bool replace = options.replace && fanout >= 0;
  const auto stream_of = [&](int64_t i) {
    return vertex_stream(tree == nullptr ? key : join_key(key, static_cast<uint64_t>(tree[i])), n_id[i]);
  };
  if (relation.weight == nullptr) {
    for (int64_t i = 0; i < block.size; ++i) {
      draw(stream_of(i), block.begin[i], block.end[i] - block.begin[i], block.count[i], replace, s.drawn, edge);
      for (const int64_t* end = edge + block.count[i]; edge < end; ++edge) lists.prefetch(*edge);
    }
    return;
  }
  const auto draw_all = [&](const auto* weight) {
    constexpr int64_t kMostLines = 16;  // of a list; beyond that the processor has seen where it goes
    constexpr int64_t kLine = 64 / sizeof(*weight);
    constexpr int64_t kAhead = 8;  // lists: more would push each other out of the nearest cache
    const auto prefetch = [&](int64_t i) {
      const int64_t end = std::min(block.end[i], block.begin[i] + kMostLines * kLine);
      for (int64_t e = block.begin[i]; e < end; e += kLine) prefetch_read(&weight[e]);
    };
    for (int64_t i = 0; i < std::min(kAhead, block.size); ++i) prefetch(i);
    for (int64_t i = 0; i < block.size; ++i) {
      if (i + kAhead < block.size) prefetch(i + kAhead);
      s.weighted(stream_of(i), weight, block.begin[i], block.end[i] - block.begin[i], block.count[i], replace, edge);
      for (const int64_t* end = edge + block.count[i]; edge < end; ++edge) lists.prefetch(*edge);
    }
  };
  if (relation.weight->scalar_type() == ScalarType::Float)
    draw_all(static_cast<const float*>(relation.weight->const_data_ptr()));
  else
    draw_all(static_cast<const double*>(relation.weight->const_data_ptr()));
}

// The same where draws are shared; lists that they do not apply to draw by themselves.
template <class Lists>
void draw_shared_block(Scratch& s, const Relation& relation, const Lists& lists, uint64_t key, uint64_t shared_key,
                       const Options& options, int64_t* edge) {
  VertexType& target = s.types[relation.target];
  const Block& block = s.block;
  const int64_t* n_id = target.n_id.data() + block.first;
  const int32_t* tree = options.disjoint ? target.tree.data() + block.first : nullptr;
  constexpr int64_t kMostLines = 16;  // of a list; beyond that the processor has seen where it goes
  constexpr int64_t kLine = 64 / Lists::kBytes;
  for (int64_t i = 0; i < block.size; ++i) {
    if (!SharedDraw::applies(block.end[i] - block.begin[i], block.count[i])) continue;
    const int64_t end = std::min(block.end[i], block.begin[i] + kMostLines * kLine);
    for (int64_t e = block.begin[i]; e < end; e += kLine) lists.prefetch(e);
  }
  const auto source_at = [&](int64_t position) { return lists.source(position); };
  for (int64_t i = 0; i < block.size; ++i) {
    const int64_t degree = block.end[i] - block.begin[i];
    if (SharedDraw::applies(degree, block.count[i])) {
      s.shared(shared_key, source_at, block.begin[i], degree, block.count[i], edge);
    } else {
      const uint64_t own = tree == nullptr ? key : join_key(key, static_cast<uint64_t>(tree[i]));
      draw(vertex_stream(own, n_id[i]), block.begin[i], degree, block.count[i], false, s.drawn, edge);
    }
    for (const int64_t* end = edge + block.count[i]; edge < end; ++edge) lists.prefetch(*edge);
  }
}

}  // namespace salientpp::typed
