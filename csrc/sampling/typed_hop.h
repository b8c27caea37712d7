// Expands a hop over one relation, or finds all its edges between the vertices of the batch. Expanding a block finds
// the visible lists of its vertices, draws from them, and assigns places to the drawn vertices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "check.h"
#include "memory.h"
#include "random.h"
#include "sampling/typed_batch.h"

// An anonymous namespace, so that each file that includes this one has its own functions: those called once are then
// always inlined.
namespace salientpp::typed {
namespace {

// Sets block.low[i] to the first entry of each list for whose time `is_before` is false. The searches run side by side,
// so that their cache misses overlap.
template <class TimeOf, class Prefetch, class IsBefore>
void search_lists(Block& block, const TimeOf& time_of, const Prefetch& prefetch, const IsBefore& is_before) {
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
      const int64_t before = is_before(i, time_of(middle));  // as a number, since a branch would be unpredictable
      block.low[i] += before * (half + 1);
      block.left[i] = half - (before & ~block.left[i]);  // the upper half is one smaller if the size is even
      prefetch(block.low[i] + block.left[i] / 2);
      block.searching[kept] = i;
      kept += block.left[i] > 0;
    }
    num_searching = kept;
  }
}

// Shortens each list of the block to the neighbours whose time is at most block.now and, with `has_window`, at least
// block.since.
template <class TimeOf, class Prefetch>
void keep_visible(Block& block, bool has_window, const TimeOf& time_of, const Prefetch& prefetch) {
  search_lists(block, time_of, prefetch, [&](int64_t i, int64_t time) { return time <= block.now[i]; });
  std::copy_n(block.low.begin(), block.size, block.end.begin());
  if (!has_window) return;
  search_lists(block, time_of, prefetch, [&](int64_t i, int64_t time) { return time < block.since[i]; });
  std::copy_n(block.low.begin(), block.size, block.begin.begin());
}

// Reads the bounds of the lists of the block's rows in `indptr`, and prefetches for the next block. `num_left` rows are
// left from the block on. Errors call a row `name`.
inline void read_bounds(Block& block, const int64_t* indptr, int64_t num_edges, const int64_t* row, int64_t num_left,
                        const char* name) {
  block.size = std::min(kBlockVertices, num_left);
  for (int64_t i = 0; i < block.size; ++i) {
    const int64_t begin = indptr[row[i]], end = indptr[row[i] + 1];
    check(begin >= 0 && begin <= end && end <= num_edges, "indptr is corrupt at ", name, " ", row[i]);
    block.begin[i] = begin;
    block.end[i] = end;
  }
  const int64_t ahead = std::min(2 * kBlockVertices, num_left);
  for (int64_t i = block.size; i < ahead; ++i) prefetch_read(&indptr[row[i]]);
}

// The same as keep_visible for lists with times of their own, in list order.
inline void keep_visible_entries(Block& block, bool has_window, const Tensor& times) {
  dispatch_index(times, [&](auto* time) {
    keep_visible(
        block, has_window, [&](int64_t e) -> int64_t { return time[e]; }, [&](int64_t e) { prefetch_read(&time[e]); });
  });
}

// Finds the visible lists of the block's vertices, and prefetches for the next block.
template <class Lists>
void find_lists(Scratch& s, Relation& relation, const Lists& lists, int64_t first, int64_t last) {
  VertexType& target = s.types[relation.target];
  const VertexType& source = s.types[relation.source];
  Block& block = s.block;
  block.first = first;
  read_bounds(block, relation.indptr, relation.num_edges, target.n_id.data() + first, last - first, "vertex");
  if (s.seed_time.empty()) return;
  const int32_t* tree = target.tree.data() + first;
  for (int64_t i = 0; i < block.size; ++i) block.now[i] = s.seed_time[static_cast<size_t>(tree[i])];
  const bool has_window = !s.seed_since.empty();
  for (int64_t i = 0; has_window && i < block.size; ++i) block.since[i] = s.seed_since[static_cast<size_t>(tree[i])];
  if (relation.time != nullptr) keep_visible_entries(block, has_window, *relation.time);
  if (source.time != nullptr) {
    keep_visible(
        block, has_window,
        [&](int64_t e) {
          const auto id = static_cast<uint64_t>(lists.source(e));
          check(id < static_cast<uint64_t>(source.num_vertices), "indices is corrupt: it holds ",
                static_cast<int64_t>(id));
          return source.time[id];
        },
        [&](int64_t e) { lists.prefetch(e); });
  }
}

// Sets the number of draws from each list of the block, and returns their sum. `last`: draws come from the list's end.
inline int64_t count_draws(Block& block, int64_t fanout, bool replace, bool last) {
  int64_t num_edges = 0;
  for (int64_t i = 0; i < block.size; ++i) {
    if (last) block.begin[i] = std::max(block.begin[i], block.end[i] - fanout);
    block.count[i] = num_draws(block.end[i] - block.begin[i], fanout, replace);
    num_edges += block.count[i];
  }
  return num_edges;
}

// Draws positions in `indices` for the block, list by list. While it draws from one list, it prefetches the next.
//
// vertex      per list, the vertex whose list it is.
// tree        per list, its tree; null without trees.
// all_weights of all edges, in list order; null for uniform draws.
template <class Lists, class Tree>
void draw_block(Draws& s, const Block& block, const int64_t* vertex, const Tree* tree, const Tensor* all_weights,
                const Lists& lists, int64_t fanout, uint64_t key, uint64_t shared_key, const Options& options,
                int64_t* edge) {
  const bool replace = options.replace && fanout >= 0;
  const auto stream_of = [&](int64_t i) {
    return vertex_stream(tree == nullptr ? key : join_key(key, static_cast<uint64_t>(tree[i])), vertex[i]);
  };
  constexpr int64_t kMostLines = 16;  // prefetched lines of a list; the hardware prefetcher detects the rest
  if (all_weights == nullptr) {
    const auto is_shared = [&](int64_t i) {
      return options.shared && SharedDraw::applies(block.end[i] - block.begin[i], block.count[i]);
    };
    constexpr int64_t kLine = 64 / Lists::kBytes;
    for (int64_t i = 0; options.shared && i < block.size; ++i) {
      const int64_t end = is_shared(i) ? std::min(block.end[i], block.begin[i] + kMostLines * kLine) : 0;
      for (int64_t e = block.begin[i]; e < end; e += kLine) lists.prefetch(e);
    }
    const auto source_at = [&](int64_t position) { return lists.source(position); };
    for (int64_t i = 0; i < block.size; ++i) {
      const int64_t degree = block.end[i] - block.begin[i];
      if (is_shared(i))
        s.shared(shared_key, source_at, block.begin[i], degree, block.count[i], edge);
      else
        draw(stream_of(i), block.begin[i], degree, block.count[i], replace, s.drawn, edge);
      for (const int64_t* end = edge + block.count[i]; edge < end; ++edge) lists.prefetch(*edge);
    }
    return;
  }
  const auto draw_all = [&](const auto* weight) {
    constexpr int64_t kLine = 64 / sizeof(*weight);
    constexpr int64_t kAhead = 8;  // lists; more would evict each other from the nearest cache
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
  if (all_weights->scalar_type() == ScalarType::Float)
    draw_all(static_cast<const float*>(all_weights->const_data_ptr()));
  else
    draw_all(static_cast<const double*>(all_weights->const_data_ptr()));
}

constexpr int64_t kLookAhead = 1024;  // number of vertices that are inspected beyond the block

// As find_sources, but with trees. `tree_of` holds the trees of the `num_left` vertices from the block on. With `ends`,
// no later vertices are added to a tree after its last one among these, so its table is released.
template <class Lists, class Key, class Edge, class Local>
void insert_in_trees(VertexType& source, TreeMap<Key>& map, const Lists& lists, Edge* edge, const Block& block,
                     const int32_t* tree_of, int64_t num_left, bool ends, Local* row) {
  const auto num_vertices = static_cast<uint64_t>(source.num_vertices);
  bool is_cold = false;  // true if some table is neither new nor in use by the previous block
  for (int64_t i = 0; i < block.size;) {
    const int32_t tree = tree_of[i];
    const int64_t begin = i;
    int64_t num_edges = 0;
    for (; i < block.size && tree_of[i] == tree; ++i) num_edges += block.count[i];
    // Vertices of this tree may continue in later blocks. Reserve for them too, so that the table does not grow in each
    // block.
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
        fail_at_source(vertex, source.num_vertices);
      const int64_t local_id = table.insert(vertex, size);
      found[size] = vertex;
      tree_found[size] = tree;
      size += local_id == size;
      row[at] = static_cast<Local>(local_id);
      if constexpr (!std::is_const_v<Edge>) edge[at] = lists.id(edge[at]);
    }
    map.give_back(tree, block.count[i] - (size - before));
    if (ends && (i + 1 == num_left || tree_of[i + 1] != tree)) map.release(tree);
  }
  source.n_id.set_size(size);
  source.tree.set_size(size);
}

// Not inlined, because the address of the thread's scratch memory would be looked up repeatedly.
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
    const int64_t num_edges = count_draws(block, fanout, options.replace, last);
    const int64_t edges_before = relation.edge.size();
    check(source.n_id.size() + num_edges < HashMap::kMaxLocalIds &&
              edges_before + num_edges < std::numeric_limits<int64_t>::max() / 16,
          "a batch must hold fewer than ", HashMap::kMaxLocalIds,
          " vertices; use a smaller batch_size or smaller fanouts");
    for (int64_t i = 0; i < block.size; ++i) num_drawn[first + i] = static_cast<int32_t>(block.count[i]);
    relation.edge.reserve(edges_before + num_edges);
    relation.row.reserve(edges_before + num_edges);
    source.n_id.reserve(source.n_id.size() + num_edges);
    if (options.disjoint) source.tree.reserve(source.n_id.size() + num_edges);
    int64_t* edge = relation.edge.data() + edges_before;
    int32_t* row = relation.row.data() + edges_before;
    draw_block(s.draws, block, target.n_id.data() + first, options.disjoint ? target.tree.data() + first : nullptr,
               relation.weight, lists, fanout, key, shared_key, options, edge);
    with_map(source, [&](auto& map) {
      if constexpr (requires { map.table(0); }) {
        insert_in_trees(source, map, lists, edge, block, target.tree.data() + first, target.hop_end - first, ends, row);
      } else {
        map.reserve(source.n_id.size() + num_edges);
        source.n_id.set_size(find_sources<true, true>(map.inserter(), source.num_vertices, lists, num_edges, edge, row,
                                                      source.n_id.data(), source.n_id.size()));
      }
    });
    relation.edge.set_size(edges_before + num_edges);
    relation.row.set_size(edges_before + num_edges);
  }
}

// Writes the edges of a list whose source is in the map `ids`: their ids, and the local ids of their sources. Returns
// their number. There must be room for the whole list.
template <class Ids, class Lists>
int64_t find_edges(const Ids& ids, const Lists& lists, int64_t begin, int64_t end, int64_t num_sources, int64_t* edge,
                   int32_t* row) {
  uint64_t largest = 0;
  for (int64_t e = begin; e < end; ++e) largest = std::max(largest, static_cast<uint64_t>(lists.source(e)));
  check(begin == end || largest < static_cast<uint64_t>(num_sources), "indices is corrupt: it holds ",
        static_cast<int64_t>(largest), ", expected ids in [0, ", num_sources, ")");
  for (int64_t e = begin; e < end; ++e) ids.prefetch(lists.source(e));
  int64_t found = 0;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t local_id = ids.find(lists.source(e));
    edge[found] = lists.id(e);
    row[found] = static_cast<int32_t>(local_id);
    found += local_id >= 0;
  }
  return found;
}

// Replaces the drawn edges by every visible edge between vertices of the batch (of the same tree).
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
        const int64_t before = relation.edge.size();
        relation.edge.reserve(before + end - begin);
        relation.row.reserve(before + end - begin);
        const int64_t found = find_edges(ids_of(first + i), lists, begin, end, source.num_vertices,
                                         relation.edge.data() + before, relation.row.data() + before);
        check(found <= std::numeric_limits<int32_t>::max(), "vertex ", target.n_id.data()[first + i], " has ", found,
              " neighbours in the batch, too many; expected fewer than 2^31");
        relation.num_drawn.data()[first + i] = static_cast<int32_t>(found);
        relation.edge.set_size(before + found);
        relation.row.set_size(before + found);
      }
    }
  });
}

}  // namespace
}  // namespace salientpp::typed
