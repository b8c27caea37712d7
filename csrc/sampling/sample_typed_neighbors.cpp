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
//   shared     the neighbours' numbers decide (draw.h), keyed by (batch key, source type, neighbour): the same for all
//              trees, and for all relations from a type.
//   induced    in the end all edges between the vertices found, instead of those that were drawn.
//
// As in sample_neighbors.cpp the frontier is taken in blocks, and each block in phases that first prefetch what the
// next phase reads. A phase knows what it needs alone (times, weights, the kind of map), so its loop asks for nothing
// else.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "check.h"
#include "memory.h"
#include "sampling/buffer.h"
#include "sampling/draw.h"
#include "sampling/lists.h"
#include "sampling/vertex_map.h"
#include "random.h"

namespace salientpp {
namespace {

constexpr int64_t kBlockVertices = 64;
constexpr int64_t kLookAhead = 1024;  // vertices of a tree beyond the block

enum class MapKind { kStamp, kHash, kTree, kWideTree };

// One type of vertices: the graph's side of it and the batch's.
struct VertexType {
  int64_t num_vertices = 0;
  const int64_t* time = nullptr;  // [num_vertices] or absent
  MapKind map_kind = MapKind::kHash;
  StampMap stamp_map;  // without trees: id -> local id, one of the two
  HashMap hash_map;
  TreeMap<uint32_t> tree_map;  // with them: (tree, id) -> local id, by how many bits an id takes
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
  const uint64_t* links = nullptr;  // [num_edges], read in place of `indices` and `edge_id`, or absent
  Buffer<int64_t> edge;       // per sampled edge: its position in `indices`, or its id where that comes with the source
  Buffer<int32_t> row;        // per sampled edge: local id of its source
  Buffer<int32_t> num_drawn;  // per vertex of the target type: how many of the edges are its, which stand together
  std::vector<int64_t> num_sampled;
};

// Calls f with what a position in the relation leads to.
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

// What the vertices of a block draw from.
struct Block {
  int64_t first, size;                             // local ids
  std::array<int64_t, kBlockVertices> begin, end;  // the lists, or what may be seen of them
  std::array<int64_t, kBlockVertices> count;       // how many to draw
  std::array<int64_t, kBlockVertices> now;         // with times: the seed's
  std::array<int64_t, kBlockVertices> low, left;   // of the search: where it starts, how many it has left
  std::array<int32_t, kBlockVertices> searching;   // of the search: who is not done
};

// What a thread keeps between batches. It never influences a result.
struct Scratch {
  std::vector<VertexType> types;
  std::vector<Relation> relations;
  DrawnSet drawn;
  WeightedDraw weighted;
  SharedDraw shared;
  std::vector<int64_t> seed_time;  // per tree
  Block block;
};

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

[[noreturn, gnu::cold]] void fail_at_source(int64_t source, const VertexType& type) {
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

// How many vertices of each type a batch can hold at most: every draw finds one, or all are found.
std::vector<int64_t> most_local_ids(const std::vector<int64_t>& num_vertices, const std::vector<Tensor>& seeds,
                                    const std::vector<int64_t>& source_type, const std::vector<int64_t>& target_type,
                                    const std::vector<int64_t>& fanouts, int64_t num_hops) {
  const size_t num_types = num_vertices.size();
  std::vector<int64_t> frontier(num_types), most(num_types), whole(num_types);
  for (size_t t = 0; t < num_types; ++t) {
    most[t] = frontier[t] = seeds[t].numel();
    whole[t] = num_vertices[t] > std::numeric_limits<int64_t>::max() - most[t] ? std::numeric_limits<int64_t>::max()
                                                                               : num_vertices[t] + most[t];
  }
  for (int64_t hop = 0; hop < num_hops; ++hop) {
    std::vector<int64_t> found(num_types, 0);
    for (size_t r = 0; r < source_type.size(); ++r) {
      const auto s = static_cast<size_t>(source_type[r]), t = static_cast<size_t>(target_type[r]);
      const int64_t fanout = fanouts[r * static_cast<size_t>(num_hops) + static_cast<size_t>(hop)];
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

template <class T>
Tensor copy_of(Buffer<T>& buffer) {
  Tensor out = new_table(buffer.size(), ScalarType::Long);
  copy_out(buffer.data(), buffer.size(), mutable_int64_data(out));
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
    const std::vector<std::optional<Tensor>>& edge_id, const std::vector<std::optional<Tensor>>& links,
    const std::vector<std::optional<Tensor>>& edge_weight, const std::vector<std::optional<Tensor>>& edge_time,
    const std::vector<int64_t>& source_type, const std::vector<int64_t>& target_type,
    const std::vector<int64_t>& num_vertices, const std::vector<std::optional<Tensor>>& node_time,
    const std::vector<Tensor>& seeds, const std::vector<std::optional<Tensor>>& seed_time,
    const std::vector<int64_t>& first_tree, const std::vector<int64_t>& fanouts, int64_t num_hops, int64_t batch_key,
    bool replace, bool disjoint, bool last, bool induced, int64_t map_budget_bytes, bool shared) {
  check(!shared || !replace, "shared draws are without replacement; pass replace=False");
  const size_t num_types = num_vertices.size();
  const size_t num_relations = indptr.size();
  check(node_time.size() == num_types && seeds.size() == num_types && seed_time.size() == num_types &&
            first_tree.size() == num_types,
        "node_time, seeds, seed_time and first_tree must have one entry per vertex type, ", num_types);
  check(
      indices.size() == num_relations && edge_id.size() == num_relations && links.size() == num_relations &&
          edge_weight.size() == num_relations && edge_time.size() == num_relations &&
          source_type.size() == num_relations && target_type.size() == num_relations,
      "indices, edge_id, links, edge_weight, edge_time, source_type and target_type must have one entry per relation, ",
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
  const Options options{replace, disjoint, last, induced, shared};
  // Loaders of several graphs may take turns, so what the others keep stays.
  if (s.types.size() < num_types) s.types.resize(num_types);
  if (s.relations.size() < num_relations) s.relations.resize(num_relations);
  const std::span<VertexType> types(s.types.data(), num_types);
  const std::span<Relation> relations(s.relations.data(), num_relations);
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

  for (size_t r = 0; r < num_relations; ++r) {
    Relation& relation = relations[r];
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
    relation.time = nullptr;
    if (edge_time[r]) {
      if (edge_time[r]->scalar_type() != ScalarType::Int) check_vector(*edge_time[r], ScalarType::Long, "edge_time");
      check_index_vector(*edge_time[r], "edge_time");
      check(edge_time[r]->numel() == relation.num_edges, "edge_time[", r, "] must have ", relation.num_edges,
            " entries, got ", edge_time[r]->numel());
      relation.time = &*edge_time[r];
    }
    relation.weight = nullptr;
    if (edge_weight[r]) {
      check(!shared, "shared draws are uniform; pass edge_weight[", r, "] = None");
      check_defined(*edge_weight[r], "edge_weight");
      const auto dtype = edge_weight[r]->scalar_type();
      check(dtype == ScalarType::Float || dtype == ScalarType::Double,
            "edge_weight must have dtype float32 or float64, got ", dtype);
      check_vector(*edge_weight[r], dtype, "edge_weight");
      check(edge_weight[r]->numel() == relation.num_edges, "edge_weight[", r, "] must have ", relation.num_edges,
            " entries, got ", edge_weight[r]->numel());
      relation.weight = &*edge_weight[r];
    }
    relation.edge_id = nullptr;
    if (edge_id[r]) {
      check_index_vector(*edge_id[r], "edge_id");
      check(edge_id[r]->numel() == relation.num_edges, "edge_id[", r, "] must have ", relation.num_edges,
            " entries, got ", edge_id[r]->numel());
      relation.edge_id = &*edge_id[r];
    }
    relation.links = reinterpret_cast<const uint64_t*>(optional_int64(links[r], relation.num_edges, "links", r));
    check(relation.links == nullptr || relation.edge_id == nullptr, "edge_id[", r,
          "] must be None where there are links, which hold the ids");
    relation.edge.clear();
    relation.row.clear();
    relation.num_drawn.clear();
    relation.num_sampled.clear();
  }
  const std::vector<int64_t> most = most_local_ids(num_vertices, seeds, source_type, target_type, fanouts, num_hops);
  int64_t stamp_bytes = 0;  // of all types together
  bool stamps_fit = true;
  for (const int64_t size : num_vertices) {
    stamps_fit = stamps_fit && size <= (map_budget_bytes - stamp_bytes) / StampMap::bytes(1);
    if (stamps_fit) stamp_bytes += StampMap::bytes(size);
  }
  check(num_trees < HashMap::kMaxLocalIds, "a batch may hold fewer than ", HashMap::kMaxLocalIds, " vertices, got ",
        num_trees, " seeds");
  for (size_t t = 0; t < num_types; ++t) {
    VertexType& type = types[t];
    type.num_vertices = num_vertices[t];
    type.time = optional_int64(node_time[t], num_vertices[t], "node_time", t);
    type.num_nodes.clear();
    type.n_id.clear();
    type.tree.clear();
    const int64_t num_seeds = seeds[t].numel();
    const int64_t* seed = int64_data(seeds[t]);
    type.n_id.reserve(num_seeds);
    for (int64_t i = 0; i < num_seeds; ++i) {
      check(seed[i] >= 0 && seed[i] < type.num_vertices, "seeds[", i, "] must be in [0, ", type.num_vertices, "), got ",
            seed[i]);
      type.n_id.data()[i] = seed[i];
    }
    type.n_id.set_size(num_seeds);
    if (disjoint) {
      type.tree.reserve(num_seeds);
      std::iota(type.tree.data(), type.tree.data() + num_seeds, static_cast<int32_t>(first_tree[t]));
      type.tree.set_size(num_seeds);
      type.map_kind = type.num_vertices < std::numeric_limits<uint32_t>::max() ? MapKind::kTree : MapKind::kWideTree;
    } else {
      type.map_kind = stamps_fit && most[t] < StampMap::kMaxLocalIds ? MapKind::kStamp : MapKind::kHash;
    }
    with_map(type, [&](auto& map) {
      if constexpr (requires { map.table(0); }) {
        map.begin_batch(num_trees);
        for (int64_t i = 0; i < num_seeds; ++i) {
          const int32_t tree = type.tree.data()[i];
          map.reserve(tree, 1, 1);
          map.table(tree).insert(seed[i], i);
        }
      } else {
        map.begin_batch(type.num_vertices, num_seeds);
        map.reserve(num_seeds);
        // A repeated seed keeps its place in n_id; edges refer to its first one.
        for (int64_t i = 0; i < num_seeds; ++i) map.insert(seed[i], i);
      }
    });
    type.hop_begin = 0;
    type.hop_end = num_seeds;
    type.num_nodes.push_back(num_seeds);
  }

  const uint64_t shared_key = SharedDraw::key_of(static_cast<uint64_t>(batch_key));
  for (int64_t hop = 0; hop < num_hops; ++hop) {
    const uint64_t hop_key = join_key(static_cast<uint64_t>(batch_key), static_cast<uint64_t>(hop));
    const bool is_last = hop + 1 == num_hops && num_relations == 1 && !induced;
    for (size_t r = 0; r < num_relations; ++r) {
      Relation& relation = relations[r];
      const int64_t before = relation.edge.size();
      const int64_t fanout = fanouts[r * static_cast<size_t>(num_hops) + static_cast<size_t>(hop)];
      const uint64_t key = r == 0 ? hop_key : join_key(hop_key, r);
      const uint64_t of_type = relation.source == 0 ? shared_key : join_key(shared_key, relation.source);
      with_lists(relation,
                 [&](const auto& lists) { expand(s, relation, lists, fanout, key, of_type, is_last, options); });
      relation.num_sampled.push_back(relation.edge.size() - before);
    }
    for (VertexType& type : types) {
      type.num_nodes.push_back(type.n_id.size() - type.hop_end);
      type.hop_begin = type.hop_end;
      type.hop_end = type.n_id.size();
    }
  }
  if (induced) {
    for (Relation& relation : relations) {
      with_lists(relation, [&](const auto& lists) { induce(s, relation, lists); });
    }
  }

  std::vector<Tensor> out_n_id, out_tree, out_edge_index, out_e_id;
  std::vector<std::vector<int64_t>> num_nodes, num_edges;
  for (VertexType& type : types) {
    out_n_id.push_back(copy_of(type.n_id));
    if (disjoint) out_tree.push_back(copy_of(type.tree));
    num_nodes.push_back(type.num_nodes);
  }
  for (size_t r = 0; r < num_relations; ++r) {
    Relation& relation = relations[r];
    const int64_t size = relation.edge.size();
    Tensor edge_index = new_large_tensor<2>({2, size}, ScalarType::Long);
    int64_t* row = mutable_int64_data(edge_index);
    copy_out(relation.row.data(), size, row);
    int64_t* col = row + size;
    repeat_places(relation.num_drawn.data(), relation.num_drawn.size(), col, col + size);
    out_edge_index.push_back(edge_index);
    Tensor e_id = new_table(size, ScalarType::Long);
    int64_t* out = mutable_int64_data(e_id);
    const int64_t* edge = relation.edge.data();
    if (relation.edge_id != nullptr) {
      constexpr int64_t kAhead = 32;
      dispatch_index(*relation.edge_id, [&](auto* ids) {
        for (int64_t e = 0; e < size; ++e) {
          if (e + kAhead < size) prefetch_read(&ids[edge[e + kAhead]]);
          out[e] = ids[edge[e]];
        }
      });
    } else {
      copy_out(edge, size, out);
    }
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
