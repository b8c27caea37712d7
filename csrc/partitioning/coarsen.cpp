// Coarsens a large undirected graph for a partitioner that has no room for it.
//
// In `cluster_vertices`, every vertex in turn joins the cluster that it has most edge weight to, unless that cluster
// would become too heavy. This is label propagation with a size limit, as multilevel partitioners use it for coarsening
// (Meyerhenke, Sanders and Schulz, SEA 2014). Vertices that stay alone are put together with others that favour the
// same cluster. Vertices without edges are put together with each other. `contract_lists` makes the lists of a run of
// clusters.
//
// Both read the lists in the order in which they lie in memory, which may be a mapped file. With one thread, the
// same arguments give the same clusters. Several threads take vertices at the same time, and clusters vary with timing.
#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "graph/csc.h"
#include "memory.h"
#include "random.h"

namespace salientpp {
namespace {

constexpr int64_t kPrefetchAhead = 32;
constexpr int64_t kGrain = 256;
constexpr int64_t kVertexGrain = 1 << 14;
// Rounds end when fewer than 1 / kFewMoves of the vertices have moved.
constexpr int64_t kFewMoves = 50;
// Limit of the total weight of all vertices.
constexpr int64_t kMostWeight = int64_t{1} << 61;

template <class T>
using Table = std::vector<T, HugePageAllocator<T>>;

// Edge weight of one vertex to each cluster: a hash table with open addressing, of the size that the vertex's list
// needs.
class Ratings {
 public:
  struct Entry {
    int32_t cluster = -1;
    int64_t weight = 0;
  };

  void reset(int64_t most) {
    for (const size_t place : used_) entries_[place] = Entry{};
    used_.clear();
    while (static_cast<int64_t>(entries_.size()) < 2 * most) entries_.resize(2 * entries_.size());
  }

  void add(int32_t cluster, int64_t weight) {
    const size_t mask = entries_.size() - 1;
    size_t place = static_cast<size_t>((static_cast<uint64_t>(static_cast<uint32_t>(cluster)) * kGolden) >> 32) & mask;
    while (entries_[place].cluster != cluster) {
      if (entries_[place].cluster < 0) {
        entries_[place].cluster = cluster;
        used_.push_back(place);
        break;
      }
      place = (place + 1) & mask;
    }
    entries_[place].weight += weight;
  }

  template <class F>
  void each(F&& f) const {
    for (const size_t place : used_) f(entries_[place].cluster, entries_[place].weight);
  }

 private:
  std::vector<Entry> entries_ = std::vector<Entry>(64);
  std::vector<size_t> used_;
};

template <class Index>
class Clusters {
 public:
  Clusters(const int64_t* indptr, const Index* indices, const EdgeWeights& edge_weights, const int64_t* vertex_weights,
           int64_t num_vertices, int64_t most_weight, uint64_t key, int32_t* cluster)
      : indptr_(indptr),
        indices_(indices),
        edge_weights_(edge_weights),
        vertex_weights_(vertex_weights),
        n_(num_vertices),
        most_(most_weight),
        key_(key),
        cluster_(cluster),
        weight_(vertex_weights, vertex_weights + num_vertices) {
    for (int64_t v = 0; v < n_; ++v) cluster_[v] = static_cast<int32_t>(v);
  }

  // Returns the number of vertices that moved to another cluster.
  int64_t round() {
    std::atomic<int64_t> all{0};
    torch::stable::parallel_for(0, n_, kVertexGrain, [&](int64_t begin, int64_t end) {
      Ratings ratings;
      int64_t moved = 0;
      for (int64_t v = begin; v < end; ++v) {
        if (vertex_weights_[v] >= most_) continue;
        rate(v, ratings);
        moved += move(v, heaviest(v, ratings, /*with_room=*/true));
      }
      all += moved;
    });
    return all;
  }

  // Joins single vertices with others that favour the same cluster.
  void join_the_lonely() {
    Ratings ratings;
    // By favoured cluster; the last entry is for vertices without edges.
    Table<int32_t> lonely(static_cast<size_t>(n_) + 1, -1);
    for (int64_t v = 0; v < n_; ++v) {
      const int32_t own = cluster_[v];
      if (weight_[static_cast<size_t>(own)] != vertex_weights_[v]) continue;
      auto favoured = static_cast<size_t>(n_);
      if (indptr_[v] < indptr_[v + 1]) {
        rate(v, ratings);
        favoured = static_cast<size_t>(heaviest(v, ratings, /*with_room=*/false));
      }
      int32_t& other = lonely[favoured];
      if (other < 0 || !move(v, other)) other = own;
    }
  }

  // Numbers the clusters from 0 by their first vertices.
  void number() {
    Table<int32_t> number(static_cast<size_t>(n_), -1);
    int32_t found = 0;
    for (int64_t v = 0; v < n_; ++v) {
      int32_t& of = number[static_cast<size_t>(cluster_[v])];
      if (of < 0) of = found++;
      cluster_[v] = of;
    }
  }

 private:
  std::atomic_ref<int32_t> cluster(int64_t v) { return std::atomic_ref(cluster_[v]); }
  std::atomic_ref<int64_t> weight(int32_t cluster) { return std::atomic_ref(weight_[static_cast<size_t>(cluster)]); }

  void rate(int64_t v, Ratings& ratings) {
    const int64_t begin = indptr_[v], end = indptr_[v + 1];
    ratings.reset(end - begin);
    for (int64_t e = begin; e < end; ++e) {
      if (e + kPrefetchAhead < indptr_[n_]) prefetch_read(&cluster_[indices_[e + kPrefetchAhead]]);
      if (const auto u = static_cast<int64_t>(indices_[e]); u != v)
        ratings.add(cluster(u).load(std::memory_order_relaxed), edge_weights_[e]);
    }
  }

  // Returns the heaviest cluster. With equal weights the vertex stays, or a hash decides. If no neighbouring cluster
  // has room, it stays too.
  int32_t heaviest(int64_t v, const Ratings& ratings, bool with_room) {
    const uint64_t key = join_key(key_, static_cast<uint64_t>(v));
    const int32_t own = cluster_[v];
    int32_t best = own;
    std::tuple<int64_t, bool, uint64_t> highest{0, false, 0};
    ratings.each([&](int32_t other, int64_t rating) {
      if (rating < std::get<0>(highest)) return;
      if (with_room && other != own && weight(other).load(std::memory_order_relaxed) + vertex_weights_[v] > most_)
        return;
      const std::tuple rank{rating, other == own, mix64(key ^ static_cast<uint64_t>(other))};
      if (rank <= highest) return;
      best = other;
      highest = rank;
    });
    return best;
  }

  // Returns true if v is in another cluster afterwards; false if it was there already, or if the cluster is full.
  bool move(int64_t v, int32_t to) {
    const int32_t own = cluster_[v];
    if (to == own) return false;
    const int64_t added = vertex_weights_[v];
    if (weight(to).fetch_add(added, std::memory_order_relaxed) + added > most_) {
      weight(to).fetch_sub(added, std::memory_order_relaxed);
      return false;
    }
    weight(own).fetch_sub(added, std::memory_order_relaxed);
    cluster(v).store(to, std::memory_order_relaxed);
    return true;
  }

  const int64_t* indptr_;
  const Index* indices_;
  const EdgeWeights& edge_weights_;
  const int64_t* vertex_weights_;
  int64_t n_, most_;
  uint64_t key_;
  int32_t* cluster_;
  Table<int64_t> weight_;  // weight of each cluster
};

void check_edges(const Tensor& indices, const EdgeWeights& edge_weights, int64_t num_vertices) {
  dispatch_index(indices, [&](auto* list) { check_ids(list, indices.numel(), num_vertices, "indices"); });
  int64_t total = 0;
  for (int64_t e = 0; e < indices.numel(); ++e) {
    check(edge_weights[e] >= 1, "edge_weights[", e, "] must be >= 1, got ", edge_weights[e]);
    check(!__builtin_add_overflow(total, edge_weights[e], &total), "edge_weights sum to more than 2^63");
  }
}

// Checks the lists that both operators take.
void check_narrow_lists(const Tensor& indptr, const Tensor& indices) {
  check_lists(indptr, indices);
  check(indptr.numel() - 1 <= std::numeric_limits<int32_t>::max(),
        "indptr must have at most 2^31 - 1 vertices, because clusters are int32, got ", indptr.numel() - 1);
}

Tensor cluster_vertices(const Tensor& indptr, const Tensor& indices, const Tensor& vertex_weights, int64_t most_weight,
                        int64_t rounds, int64_t seed, const std::optional<Tensor>& edge_weights) {
  check_narrow_lists(indptr, indices);
  check_vector(vertex_weights, ScalarType::Long, "vertex_weights");
  const int64_t n = indptr.numel() - 1;
  check(vertex_weights.numel() == n, "vertex_weights must have one entry per vertex, expected ", n, ", got ",
        vertex_weights.numel());
  check(most_weight >= 1, "most_weight must be >= 1, got ", most_weight);
  check(rounds >= 1, "rounds must be >= 1, got ", rounds);
  const int64_t* weight = int64_data(vertex_weights);
  int64_t total = 0;
  for (int64_t v = 0; v < n; ++v) {
    check(weight[v] >= 1, "vertex_weights[", v, "] must be >= 1, got ", weight[v]);
    check(!__builtin_add_overflow(total, weight[v], &total) && total <= kMostWeight,
          "vertex_weights sum to more than 2^61");
  }
  const EdgeWeights edge_weight(edge_weights, indices.numel(), "edge_weights");
  check_edges(indices, edge_weight, n);
  Tensor cluster = new_table(n, ScalarType::Int);
  dispatch_index(indices, [&](auto* list) {
    Clusters clusters(int64_data(indptr), list, edge_weight, weight, n, most_weight,
                      join_key(0, static_cast<uint64_t>(seed)), static_cast<int32_t*>(cluster.mutable_data_ptr()));
    for (int64_t round = 0; round < rounds && clusters.round() > n / kFewMoves; ++round) {
    }
    clusters.join_the_lonely();
    clusters.number();
  });
  return cluster;
}

// Makes the lists of the clusters in [first, last): the length of each list, then all entries, ascending in each list.
// Returns nothing if a list that is read has an id out of range or a weight below 1.
template <class Index>
std::optional<std::tuple<Tensor, Tensor, Tensor>> contract(const int64_t* indptr, const Index* indices,
                                                           const int32_t* edge_weights, const int32_t* cluster,
                                                           int64_t n, int64_t first, int64_t last) {
  const auto size = static_cast<size_t>(last - first);
  const auto in_run = [&](int64_t v) { return cluster[v] >= first && cluster[v] < last; };
  // For each cluster, the edges from its vertices to other clusters. One word holds the other cluster, with the weight
  // in the lower bits.
  std::vector<int64_t> start(size + 1, 0);
  for (int64_t v = 0; v < n; ++v) {
    if (in_run(v)) start[static_cast<size_t>(cluster[v] - first) + 1] += indptr[v + 1] - indptr[v];
  }
  std::partial_sum(start.begin(), start.end(), start.begin());
  Tensor table = new_table(start[size], ScalarType::Long);
  auto* ends = static_cast<uint64_t*>(table.mutable_data_ptr());
  std::vector<int64_t> stop(start.begin(), start.end() - 1);
  // Ids further ahead are not checked yet. So the address is computed as an integer; prefetching a wrong one does no
  // harm.
  const auto prefetch = [&](uint64_t id) {
    prefetch_read(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(cluster) + id * sizeof(int32_t)));
  };
  std::atomic<bool> valid{true};
  torch::stable::parallel_for(0, n, kVertexGrain, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> own;
    for (int64_t v = begin; v < end; ++v) {
      if (!in_run(v)) continue;
      own.clear();
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
        if (e + kPrefetchAhead < indptr[n]) prefetch(static_cast<uint64_t>(indices[e + kPrefetchAhead]));
        const int32_t weight = edge_weights ? edge_weights[e] : 1;
        if (static_cast<uint64_t>(indices[e]) >= static_cast<uint64_t>(n) || weight < 1) {
          valid = false;
          return;
        }
        const int32_t other = cluster[indices[e]];
        if (other == cluster[v]) continue;
        own.push_back((static_cast<uint64_t>(other) << 32) | static_cast<uint64_t>(weight));
      }
      std::atomic_ref at(stop[static_cast<size_t>(cluster[v] - first)]);
      std::copy(own.begin(), own.end(),
                ends + at.fetch_add(static_cast<int64_t>(own.size()), std::memory_order_relaxed));
    }
  });
  if (!valid) return {};
  const auto is_first = [&](int64_t i, size_t c) { return i == start[c] || ends[i] >> 32 != ends[i - 1] >> 32; };
  Tensor length = new_vector(last - first, ScalarType::Long);
  int64_t* lengths = mutable_int64_data(length);
  torch::stable::parallel_for(0, last - first, kGrain, [&](int64_t begin, int64_t end) {
    for (auto c = static_cast<size_t>(begin); c < static_cast<size_t>(end); ++c) {
      std::sort(ends + start[c], ends + stop[c]);
      lengths[c] = 0;
      for (int64_t i = start[c]; i < stop[c]; ++i) lengths[c] += is_first(i, c);
    }
  });
  std::vector<int64_t> out(size + 1, 0);
  std::partial_sum(lengths, lengths + size, out.begin() + 1);
  Tensor out_indices = new_vector(out[size], ScalarType::Int), out_weights = new_vector(out[size], ScalarType::Long);
  auto* others = static_cast<int32_t*>(out_indices.mutable_data_ptr());
  int64_t* weights = mutable_int64_data(out_weights);
  torch::stable::parallel_for(0, last - first, kGrain, [&](int64_t begin, int64_t end) {
    for (auto c = static_cast<size_t>(begin); c < static_cast<size_t>(end); ++c) {
      int64_t at = out[c] - 1;
      for (int64_t i = start[c]; i < stop[c]; ++i) {
        if (is_first(i, c)) {
          others[++at] = static_cast<int32_t>(ends[i] >> 32);
          weights[at] = 0;
        }
        weights[at] += static_cast<int64_t>(ends[i] & 0xffffffffU);
      }
    }
  });
  return std::tuple{length, out_indices, out_weights};
}

std::tuple<Tensor, Tensor, Tensor> contract_lists(const Tensor& indptr, const Tensor& indices, const Tensor& cluster,
                                                  int64_t num_clusters, int64_t first, int64_t last,
                                                  const std::optional<Tensor>& edge_weights) {
  check_narrow_lists(indptr, indices);
  const int64_t n = indptr.numel() - 1;
  check_vector(cluster, ScalarType::Int, "cluster");
  check(cluster.numel() == n, "cluster must have one entry per vertex, expected ", n, ", got ", cluster.numel());
  check(0 <= first && first <= last && last <= num_clusters && num_clusters <= n,
        "first and last must be in order within [0, num_clusters], of at most ", n, " clusters, got ", first, ", ",
        last, " and ", num_clusters);
  const auto* of = static_cast<const int32_t*>(cluster.const_data_ptr());
  check_ids(of, n, num_clusters, "cluster");
  if (edge_weights) check_vector(*edge_weights, ScalarType::Int, "edge_weights");
  const EdgeWeights edge_weight(edge_weights, indices.numel(), "edge_weights");
  std::optional<std::tuple<Tensor, Tensor, Tensor>> lists;
  dispatch_index(indices, [&](auto* ids) {
    lists = contract(int64_data(indptr), ids,
                     edge_weights ? static_cast<const int32_t*>(edge_weights->const_data_ptr()) : nullptr, of, n, first,
                     last);
  });
  if (!lists) check_edges(indices, edge_weight, n);  // raises for the entry that is wrong
  return *lists;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("cluster_vertices", TORCH_BOX(&cluster_vertices));
  m.impl("contract_lists", TORCH_BOX(&contract_lists));
}

}  // namespace
}  // namespace salientpp
