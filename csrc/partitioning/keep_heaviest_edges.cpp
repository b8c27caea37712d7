// Selects the most important edges of an undirected graph, for a partitioner that has no room for all of them.
//
// Every vertex keeps the `most` heaviest of its edges, and an edge stays if either end keeps it. So sparse regions stay
// whole, and the removed edges are light edges of vertices with many others. A hash of the two ends breaks ties, so
// that no id is favoured.
#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "graph/csc.h"
#include "random.h"

namespace salientpp {
namespace {

using Rank = std::pair<int64_t, uint64_t>;  // weight, then hash; the same from both ends

template <class Index>
void keep_edges(const int64_t* indptr, const Index* indices, const EdgeWeights& edge_weights, int64_t num_vertices,
                int64_t most, bool* keep) {
  constexpr int64_t kGrain = 4096;
  const auto rank = [&](int64_t v, int64_t e) {
    const auto u = static_cast<int64_t>(indices[e]);
    const auto low = static_cast<uint64_t>(std::min(u, v)), high = static_cast<uint64_t>(std::max(u, v));
    return Rank{edge_weights[e], join_key(join_key(0, low), high)};
  };
  // The lowest rank that each vertex keeps.
  std::vector<Rank> least(static_cast<size_t>(num_vertices), {std::numeric_limits<int64_t>::min(), 0});
  torch::stable::parallel_for(0, num_vertices, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Rank> ranks;
    for (int64_t v = begin; v < end; ++v) {
      if (indptr[v + 1] - indptr[v] <= most) continue;
      ranks.clear();
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) ranks.push_back(rank(v, e));
      std::nth_element(ranks.begin(), ranks.begin() + (most - 1), ranks.end(), std::greater<Rank>());
      least[static_cast<size_t>(v)] = ranks[static_cast<size_t>(most - 1)];
    }
  });
  torch::stable::parallel_for(0, num_vertices, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
        const Rank own = rank(v, e);
        keep[e] = own >= least[static_cast<size_t>(v)] || own >= least[static_cast<size_t>(indices[e])];
      }
    }
  });
}

Tensor keep_heaviest_edges(const Tensor& indptr, const Tensor& indices, int64_t most,
                           const std::optional<Tensor>& edge_weights) {
  check_lists(indptr, indices);
  check(most >= 1, "most must be >= 1, got ", most);
  const int64_t num_vertices = indptr.numel() - 1;
  const int64_t* ptr = int64_data(indptr);
  const EdgeWeights edge_weight(edge_weights, indices.numel(), "edge_weights");
  Tensor keep = new_vector(indices.numel(), ScalarType::Bool);
  dispatch_index(indices, [&](auto* sources) {
    check_ids(sources, indices.numel(), num_vertices, "indices");
    keep_edges(ptr, sources, edge_weight, num_vertices, most, static_cast<bool*>(keep.mutable_data_ptr()));
  });
  return keep;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("keep_heaviest_edges", TORCH_BOX(&keep_heaviest_edges));
}

}  // namespace
}  // namespace salientpp
