// Node-wise neighbour sampling in the sense of Hamilton et al. (GraphSAGE, NeurIPS 2017) with PyG's hops:
// hop h expands only the vertices first found at hop h - 1.
//
// Each vertex draws from a stream keyed by (batch key, hop, vertex). So its neighbours do not depend on the other
// vertices of the batch, on the thread, or on the kind of map. Shared draws are keyed by (batch key, neighbour). This
// kernel is for one vertex type and uniform draws; sample_typed_neighbors.cpp has the kernel for everything else.
//
// A cache that looks ahead needs only the vertices of later batches: `sample_vertices` draws in the same way and keeps
// no edges.
//
// The loop is bound by cache misses, three per edge: the neighbour list, the neighbour, its map slot. So the
// frontier is processed in blocks, and each block in phases. Each phase prefetches the data that the next phase reads.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "check.h"
#include "random.h"
#include "sampling/buffer.h"
#include "sampling/draw_memory.h"
#include "sampling/lists.h"
#include "sampling/shared_draw.h"
#include "sampling/uniform_draw.h"
#include "sampling/vertex_map.h"

namespace salientpp {
namespace {

constexpr int64_t kBlockVertices = 64;

// For lists that are read whole: the number of the widest ids in a cache line, and the number of ids to prefetch. The
// hardware prefetcher finds the rest by itself.
constexpr int64_t kLine = 64 / sizeof(int64_t);
constexpr int64_t kMostAhead = 16 * kLine;

// Size of topology and map that fits into a core's own cache.
constexpr int64_t kNearBytes = int64_t{1} << 20;

// Scratch memory that a thread keeps between batches. It never influences a result.
struct Scratch {
  StampMap stamp_map;
  HashMap hash_map;
  DrawnSet drawn;
  SharedDraw shared;
  DrawMemory memory;
  Buffer<int64_t> n_id;       // global ids in order of discovery
  Buffer<int64_t> edge;       // per sampled edge: its position in `indices`, or its id if stored with the source
  Buffer<int32_t> source;     // per sampled edge: local id of its source
  Buffer<int32_t> num_drawn;  // per expanded vertex: number of its sampled edges
  std::vector<int64_t> num_nodes, num_edges;
};

// Draws with and without edges share it, so that a thread that does both has one map.
Scratch& scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

struct Topology {
  const int64_t* indptr;
  int64_t num_vertices;
  int64_t num_edges;
};

// Returns the number of neighbours that a vertex draws from its list [begin, end).
[[gnu::always_inline]] inline int64_t draws_of(const Topology& graph, int64_t vertex, int64_t begin, int64_t end,
                                               int64_t fanout, bool replace) {
  // If an array was altered on disk after its validation, reads must not leave it. Compare before subtracting, because
  // a difference may overflow.
  check(begin >= 0 && begin <= end && end <= graph.num_edges, "indptr is corrupt at vertex ", vertex);
  const int64_t count = num_draws(end - begin, fanout, replace);
  check(count <= std::numeric_limits<int32_t>::max(), "vertex ", vertex, " has ", count,
        " neighbours, too many to draw all; use a fanout < 2^31");
  return count;
}

// Expands all hops. `is_far`: topology and map do not fit into a core's own cache, so the next reads are prefetched.
template <bool keeps_edges, bool is_far, class Lists, class Map>
void expand_hops(Scratch& s, Map& map, const Topology& graph, const Lists& lists, const std::vector<int64_t>& fanouts,
                 uint64_t batch_key, bool replace, bool shared) {
  const uint64_t shared_key = SharedDraw::key_of(batch_key);
  const auto source_at = [&](int64_t position) { return lists.source(position); };
  int64_t hop_begin = 0;
  for (size_t hop = 0; hop < fanouts.size(); ++hop) {
    const uint64_t hop_key = join_key(batch_key, hop);
    const int64_t fanout = fanouts[hop];
    const bool with_replacement = replace && fanout >= 0;
    const int64_t hop_end = s.n_id.size();
    [[maybe_unused]] const int64_t edges_before = s.edge.size();
    s.num_drawn.reserve(hop_end);
    s.num_drawn.set_size(hop_end);

    for (int64_t block = hop_begin; block < hop_end; block += kBlockVertices) {
      const int64_t block_end = std::min(block + kBlockVertices, hop_end);
      int64_t block_edges = 0;
      for (int64_t i = block; i < block_end; ++i) {
        const int64_t vertex = s.n_id.data()[i];
        const int64_t begin = graph.indptr[vertex], end = graph.indptr[vertex + 1];
        const int64_t count = draws_of(graph, vertex, begin, end, fanout, replace);
        s.num_drawn.data()[i] = static_cast<int32_t>(count);
        block_edges += count;
        if (is_far && shared && SharedDraw::applies(end - begin, count) &&
            s.memory.find(vertex, end - begin, count) == nullptr) {
          const int64_t last = std::min(end, begin + kMostAhead);
          for (int64_t e = begin; e < last; e += kLine) lists.prefetch(e);
        }
      }
      if constexpr (is_far) {
        const int64_t next_end = std::min(block_end + kBlockVertices, hop_end);
        for (int64_t i = block_end; i < next_end; ++i) prefetch_read(&graph.indptr[s.n_id.data()[i]]);
        if (shared && s.memory.is_on())
          for (int64_t i = block_end; i < next_end; ++i) s.memory.prefetch(s.n_id.data()[i], fanout);
      }

      const int64_t first = s.edge.size();  // 0 if no edges are kept
      s.edge.reserve(first + block_edges + kWide);
      if constexpr (keeps_edges) s.source.reserve(first + block_edges);
      s.n_id.reserve(s.n_id.size() + block_edges);
      map.reserve(s.n_id.size() + block_edges);
      int64_t* edge = s.edge.data() + first;
      const int64_t* n_id = s.n_id.data();

      int64_t at = 0;
      for (int64_t i = block; i < block_end; ++i) {
        const int64_t vertex = n_id[i];
        const int64_t begin = graph.indptr[vertex];
        const int64_t degree = graph.indptr[vertex + 1] - begin;
        const int64_t count = s.num_drawn.data()[i];
        if (is_far && shared && SharedDraw::applies(degree, count)) {
          if (const uint16_t* known = s.memory.find(vertex, degree, count); known != nullptr) {
            for (int64_t k = 0; k < count; ++k) edge[at + k] = begin + known[k];
          } else {
            s.shared(shared_key, source_at, begin, degree, count, edge + at);
            s.memory.keep(vertex, begin, degree, count, edge + at);
          }
        } else if (!is_far && count == degree && !with_replacement) {
          for (int64_t k = 0; k < count; k += kWide) {
            for (int64_t j = 0; j < kWide; ++j) edge[at + k + j] = begin + k + j;
          }
        } else {
          draw(vertex_stream(hop_key, vertex), begin, degree, count, with_replacement, s.drawn, edge + at);
        }
        for (int64_t k = at; is_far && k < at + count; ++k) lists.prefetch(edge[k]);
        at += count;
      }
      // From here on, `n_id` grows, and only the block's edges are read.
      s.n_id.set_size(find_sources<keeps_edges, is_far>(map.inserter(), graph.num_vertices, lists, block_edges, edge,
                                                        s.source.data() + first, s.n_id.data(), s.n_id.size()));
      if constexpr (keeps_edges) {
        s.edge.set_size(first + block_edges);
        s.source.set_size(first + block_edges);
      }
    }
    if constexpr (keeps_edges) {
      s.num_edges.push_back(s.edge.size() - edges_before);
      s.num_nodes.push_back(s.n_id.size() - hop_end);
    }
    hop_begin = hop_end;
  }
}

// Returns an upper bound on the size of n_id: every draw finds a new vertex, or all vertices of the graph are found.
int64_t most_local_ids(const Topology& graph, int64_t num_seeds, const std::vector<int64_t>& fanouts) {
  const int64_t whole_graph = num_seeds + graph.num_vertices;
  int64_t bound = num_seeds;
  int64_t frontier = num_seeds;
  for (const int64_t fanout : fanouts) {
    if (fanout < 0 || (frontier > 0 && fanout > whole_graph / frontier)) return whole_graph;
    frontier *= fanout;
    bound += frontier;
  }
  return std::min(bound, whole_graph);
}

// Draws a batch into the scratch memory of this thread: everything, or only its vertices.
template <bool keeps_edges>
Scratch& draw_batch(const Tensor& indptr, const Tensor& indices, const std::optional<Tensor>& links,
                    const Tensor& seeds, const std::vector<int64_t>& fanouts, int64_t batch_key, bool replace,
                    int64_t map_budget_bytes, bool shared, int64_t graph_number) {
  check(!shared || !replace, "shared draws are without replacement; pass replace=False");
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check_vector(seeds, ScalarType::Long, "seeds");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  const Topology graph{int64_data(indptr), indptr.numel() - 1, indices.numel()};
  if (links) {
    check_vector(*links, ScalarType::Long, "links");
    check(links->numel() == graph.num_edges, "links must have one entry per edge, expected ", graph.num_edges, ", got ",
          links->numel());
  }
  for (size_t hop = 0; hop < fanouts.size(); ++hop) {
    check(fanouts[hop] >= -1, "fanouts[", hop, "] must be >= 0, or -1 for all neighbours, got ", fanouts[hop]);
    check(fanouts[hop] <= std::numeric_limits<int32_t>::max(), "fanouts[", hop, "] must be < 2^31, got ", fanouts[hop]);
  }

  Scratch& s = scratch_of_thread();
  const int64_t num_seeds = seeds.numel();
  const int64_t* seed = int64_data(seeds);
  s.n_id.clear();
  s.edge.clear();
  s.num_drawn.clear();
  s.source.clear();
  s.num_nodes.clear();
  s.num_edges.clear();
  s.n_id.reserve(num_seeds);

  s.memory.begin_batch(SharedDraw::key_of(static_cast<uint64_t>(batch_key)),
                       shared ? static_cast<uint64_t>(graph_number) : 0, graph.num_vertices);
  const auto run = [&](auto& map) {
    map.begin_batch(graph.num_vertices, num_seeds);
    map.reserve(num_seeds);
    const auto inserter = map.inserter();
    for (int64_t i = 0; i < num_seeds; ++i) {
      check(seed[i] >= 0 && seed[i] < graph.num_vertices, "seeds[", i, "] must be in [0, ", graph.num_vertices,
            "), got ", seed[i]);
      // A repeated seed keeps its place in n_id; edges refer to its first place.
      inserter.insert(seed[i], i);
      s.n_id.data()[i] = seed[i];
    }
    s.n_id.set_size(num_seeds);
    s.num_nodes.push_back(num_seeds);
    const auto expand = [&](const auto& lists) {
      const auto key = static_cast<uint64_t>(batch_key);
      if constexpr (std::is_same_v<decltype(map), StampMap&>) {
        const int64_t bytes = (graph.num_vertices + 1) * int64_t{sizeof(int64_t)} +
                              StampMap::bytes(graph.num_vertices) + graph.num_edges * lists.kBytes;
        if (!shared && bytes <= kNearBytes)
          return expand_hops<keeps_edges, false>(s, map, graph, lists, fanouts, key, replace, false);
      }
      expand_hops<keeps_edges, true>(s, map, graph, lists, fanouts, key, replace, shared);
    };
    if (links)
      expand(Links{static_cast<const uint64_t*>(links->const_data_ptr())});
    else
      dispatch_index(indices, [&](auto* sources) { expand(Sources{sources}); });
  };
  const int64_t most = most_local_ids(graph, num_seeds, fanouts);
  if (StampMap::bytes(graph.num_vertices) <= map_budget_bytes && most < StampMap::kMaxLocalIds) {
    run(s.stamp_map);
  } else {
    check(most < HashMap::kMaxLocalIds, "a batch must hold fewer than ", HashMap::kMaxLocalIds,
          " vertices; use a smaller batch_size or smaller fanouts");
    run(s.hash_map);
  }
  return s;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sample_neighbors(
    const Tensor& indptr, const Tensor& indices, const std::optional<Tensor>& edge_id, const Tensor& seeds,
    const std::vector<int64_t>& fanouts, int64_t batch_key, bool replace, int64_t map_budget_bytes,
    const std::optional<Tensor>& links, bool shared, int64_t graph_number) {
  if (edge_id) {
    check_index_vector(indices, "indices");
    check_vector(*edge_id, ScalarType::Long, "edge_id");
    check(edge_id->numel() == indices.numel(), "edge_id must have one entry per edge, expected ", indices.numel(),
          ", got ", edge_id->numel());
    check(!links, "edge_id must be None if links are given, because links hold the ids");
  }
  Scratch& s = draw_batch<true>(indptr, indices, links, seeds, fanouts, batch_key, replace, map_budget_bytes, shared,
                                graph_number);
  const auto [edge_index, e_id] = edges_of(s.edge, s.source, s.num_drawn, edge_id ? &*edge_id : nullptr);
  return {copy_of(s.n_id), edge_index, e_id, vector_of(s.num_nodes), vector_of(s.num_edges)};
}

Tensor sample_vertices(const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                       const std::vector<int64_t>& fanouts, int64_t batch_key, bool replace, int64_t map_budget_bytes,
                       bool shared, int64_t graph_number) {
  Scratch& s = draw_batch<false>(indptr, indices, std::nullopt, seeds, fanouts, batch_key, replace, map_budget_bytes,
                                 shared, graph_number);
  return copy_of(s.n_id);
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("sample_neighbors", TORCH_BOX(&sample_neighbors));
  m.impl("sample_vertices", TORCH_BOX(&sample_vertices));
}

}  // namespace
}  // namespace salientpp
