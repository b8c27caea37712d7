// Expands a hop over one relation, or finds all edges of it between the vertices of the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "check.h"
#include "sampling/typed_batch.h"
#include "sampling/typed_draw.h"
#include "sampling/typed_insert.h"
#include "sampling/typed_lists.h"

namespace salientpp::typed {

// Not inlined: where the scratch of the thread is would be looked up again and again.
template <class Lists>
[[gnu::noinline]] void expand(Scratch& s, Relation& relation, const Lists lists, int64_t fanout, uint64_t key,
                              uint64_t shared_key, bool is_last, const Options& options) {
  VertexType& target = s.types[relation.target];
  VertexType& source = s.types[relation.source];
  Block& block = s.block;
  relation.num_drawn.reserve(target.hop_end);
  relation.num_drawn.set_size(target.hop_end);
  int32_t* num_drawn = relation.num_drawn.data();
  if (fanout == 0) {
    std::fill(num_drawn + target.hop_begin, num_drawn + target.hop_end, 0);
    return;
  }
  const bool last = options.last && !s.seed_time.empty() && fanout >= 0;
  const int32_t* tree_of = target.tree.data();
  const bool ends = is_last && options.disjoint && std::is_sorted(tree_of + target.hop_begin, tree_of + target.hop_end);
  for (int64_t first = target.hop_begin; first < target.hop_end; first += kBlockVertices) {
    find_lists(s, relation, lists, first, target.hop_end);
    int64_t num_edges = 0;
    for (int64_t i = 0; i < block.size; ++i) {
      if (last) block.begin[i] = std::max(block.begin[i], block.end[i] - fanout);
      block.count[i] = num_draws(block.end[i] - block.begin[i], fanout, options.replace);
      num_edges += block.count[i];
    }
    const int64_t edges_before = relation.edge.size();
    check(source.n_id.size() + num_edges < HashMap::kMaxLocalIds &&
              edges_before + num_edges < std::numeric_limits<int64_t>::max() / 16,
          "a batch may hold fewer than ", HashMap::kMaxLocalIds,
          " vertices; use a smaller batch_size or smaller fanouts");
    for (int64_t i = 0; i < block.size; ++i) num_drawn[first + i] = static_cast<int32_t>(block.count[i]);
    relation.edge.reserve(edges_before + num_edges);
    relation.row.reserve(edges_before + num_edges);
    source.n_id.reserve(source.n_id.size() + num_edges);
    if (options.disjoint) source.tree.reserve(source.n_id.size() + num_edges);
    int64_t* edge = relation.edge.data() + edges_before;
    int32_t* row = relation.row.data() + edges_before;
    if (options.shared)
      draw_shared_block(s, relation, lists, key, shared_key, options, edge);
    else
      draw_block(s, relation, lists, fanout, key, options, edge);
    with_map(source, [&](auto& map) {
      if constexpr (requires { map.table(0); }) {
        insert_block(source, map, lists, edge, block, target.tree.data() + first, target.hop_end - first, ends, row);
      } else {
        map.reserve(source.n_id.size() + num_edges);
        insert_block(source, map, lists, edge, num_edges, row);
      }
    });
    relation.edge.set_size(edges_before + num_edges);
    relation.row.set_size(edges_before + num_edges);
  }
}

// Replaces what was drawn by every visible edge between vertices of the batch (of the same tree).
template <class Lists>
[[gnu::noinline]] void induce(Scratch& s, Relation& relation, const Lists lists) {
  VertexType& target = s.types[relation.target];
  VertexType& source = s.types[relation.source];
  const Block& block = s.block;
  const int64_t num_targets = target.n_id.size();
  relation.edge.clear();
  relation.row.clear();
  relation.num_drawn.clear();
  relation.num_drawn.reserve(num_targets);
  relation.num_drawn.set_size(num_targets);
  with_map(source, [&](auto& map) {
    constexpr bool kOfTrees = requires { map.table(0); };
    const auto ids_of = [&](int64_t i) -> decltype(auto) {
      if constexpr (kOfTrees)
        return map.table(target.tree.data()[i]);
      else
        return (map);
    };
    for (int64_t first = 0; first < num_targets; first += kBlockVertices) {
      find_lists(s, relation, lists, first, num_targets);
      for (int64_t i = 0; i < block.size; ++i) {
        lists.prefetch(block.begin[i]);
        lists.prefetch(block.end[i]);
      }
      for (int64_t i = 0; i < block.size; ++i) {
        const int64_t begin = block.begin[i], end = block.end[i];
        uint64_t largest = 0;
        for (int64_t e = begin; e < end; ++e) largest = std::max(largest, static_cast<uint64_t>(lists.source(e)));
        check(begin == end || largest < static_cast<uint64_t>(source.num_vertices), "indices is corrupt: it holds ",
              static_cast<int64_t>(largest), ", expected ids in [0, ", source.num_vertices, ")");
        const auto& ids = ids_of(first + i);
        for (int64_t e = begin; e < end; ++e) ids.prefetch(lists.source(e));
        const int64_t before = relation.edge.size();
        relation.edge.reserve(before + end - begin);
        relation.row.reserve(before + end - begin);
        int64_t* edge = relation.edge.data();
        int32_t* row = relation.row.data();
        int64_t at = before;
        for (int64_t e = begin; e < end; ++e) {
          const int64_t local_id = ids.find(lists.source(e));
          edge[at] = lists.id(e);
          row[at] = static_cast<int32_t>(local_id);
          at += local_id >= 0;
        }
        check(at - before <= std::numeric_limits<int32_t>::max(), "vertex ", target.n_id.data()[first + i], " has ",
              at - before, " neighbours in the batch, too many; expected fewer than 2^31");
        relation.num_drawn.data()[first + i] = static_cast<int32_t>(at - before);
        relation.edge.set_size(at);
        relation.row.set_size(at);
      }
    }
  });
}

}  // namespace salientpp::typed
