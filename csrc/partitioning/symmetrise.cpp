// Makes a directed graph undirected, as partitioners need it.
//
// An entry {v, u} of the result stands for all edges u -> v and v -> u. The list of v is a merge of its in-list and its
// out-list. So memory holds only the result and the transposed graph, 4 bytes per edge. Sorting both directions of all
// edges as 64-bit keys would take 16 bytes per edge.
#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "check.h"
#include "graph/csc.h"
#include "memory.h"

namespace salientpp {
namespace {

constexpr int64_t kGrain = 4096;
// Every edge adds its weight at both ends.
constexpr int64_t kMostWeight = int64_t{1} << 61;

template <class Index>
class Symmetriser {
 public:
  Symmetriser(const int64_t* indptr, const Index* indices, const int64_t* of_target, const EdgeWeights& of_each,
              int64_t num_vertices)
      : indptr_(indptr), indices_(indices), of_target_(of_target), of_each_(of_each), n_(num_vertices) {
    const auto num_edges = static_cast<size_t>(indptr[n_]);
    out_indptr_.assign(static_cast<size_t>(n_) + 1, 0);
    for (size_t e = 0; e < num_edges; ++e) ++out_indptr_[static_cast<size_t>(indices[e]) + 1];
    std::partial_sum(out_indptr_.begin(), out_indptr_.end(), out_indptr_.begin());
    targets_.resize(num_edges);
    if (of_each) out_weights_.resize(num_edges);
    std::vector<int64_t> next(out_indptr_.begin(), out_indptr_.end() - 1);
    for (int64_t v = 0; v < n_; ++v) {
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
        const auto at = static_cast<size_t>(next[static_cast<size_t>(indices[e])]++);
        targets_[at] = static_cast<Index>(v);
        if (of_each) out_weights_[at] = of_each[e];
      }
    }
  }

  // Writes the lengths of the lists to length[1:]. Afterwards `largest` is the largest weight, and `same` is true if
  // all weights are equal.
  void count(int64_t* length) {
    std::mutex mutex;
    torch::stable::parallel_for(0, n_, kGrain, [&](int64_t begin, int64_t end) {
      int64_t least = std::numeric_limits<int64_t>::max(), most = 0;
      std::vector<int64_t> order;
      for (int64_t v = begin; v < end; ++v) {
        int64_t entries = 0;
        merge(v, order, [&](Index, int64_t weight) {
          ++entries;
          least = std::min(least, weight);
          most = std::max(most, weight);
        });
        length[v + 1] = entries;
      }
      const std::lock_guard<std::mutex> lock(mutex);
      least_ = std::min(least_, least);
      largest_ = std::max(largest_, most);
    });
  }

  bool same() const { return least_ >= largest_; }
  int64_t largest() const { return largest_; }

  template <class Weight>
  void write(const int64_t* indptr, Index* indices, Weight* weights) {
    torch::stable::parallel_for(0, n_, kGrain, [&](int64_t begin, int64_t end) {
      std::vector<int64_t> order;
      for (int64_t v = begin; v < end; ++v) {
        int64_t at = indptr[v];
        merge(v, order, [&](Index u, int64_t weight) {
          if (weights != nullptr) weights[at] = static_cast<Weight>(weight);
          indices[at++] = u;
        });
      }
    });
  }

 private:
  // Calls f with each neighbour of v except v itself, ascending, and the total weight of all edges between the two.
  template <class F>
  void merge(int64_t v, std::vector<int64_t>& order, F&& f) const {
    const int64_t begin = indptr_[v], size = indptr_[v + 1] - begin;
    const bool sorted = std::is_sorted(indices_ + begin, indices_ + begin + size);
    if (!sorted) {
      order.resize(static_cast<size_t>(size));
      std::iota(order.begin(), order.end(), begin);
      std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return indices_[a] < indices_[b]; });
    }
    const auto edge = [&](int64_t i) { return sorted ? begin + i : order[static_cast<size_t>(i)]; };
    int64_t i = 0;
    auto t = static_cast<size_t>(out_indptr_[static_cast<size_t>(v)]);
    const auto t_end = static_cast<size_t>(out_indptr_[static_cast<size_t>(v) + 1]);
    while (i < size || t < t_end) {
      Index u = i < size ? indices_[edge(i)] : targets_[t];
      if (t < t_end) u = std::min(u, targets_[t]);
      int64_t weight = 0;
      for (; i < size && indices_[edge(i)] == u; ++i) weight += of_target_ ? of_target_[v] : of_each_[edge(i)];
      for (; t < t_end && targets_[t] == u; ++t) weight += of_target_ ? of_target_[u] : of_each_ ? out_weights_[t] : 1;
      if (u != v) f(u, weight);
    }
  }

  const int64_t* indptr_;
  const Index* indices_;
  const int64_t* of_target_;  // null: `of_each_` has the edge weights
  EdgeWeights of_each_;
  int64_t n_;
  std::vector<int64_t> out_indptr_;
  std::vector<Index, HugePageAllocator<Index>> targets_;  // targets of the edges by source, ascending in each list
  std::vector<int64_t> out_weights_;                      // weights in the same order, if edges have their own
  int64_t least_ = std::numeric_limits<int64_t>::max(), largest_ = 0;
};

void check_weights(const int64_t* indptr, int64_t num_vertices, const int64_t* of_target, const EdgeWeights& of_each) {
  const char* const name = of_target != nullptr ? "weight_by_target" : "weight_of_each";
  int64_t total = 0;
  for (int64_t v = 0; v < num_vertices; ++v) {
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
      const int64_t weight = of_target != nullptr ? of_target[v] : of_each[e];
      check(weight >= 1, name, ": weights of edges must be >= 1, got ", weight, " for edge ", e);
      check(!__builtin_add_overflow(total, weight, &total) && total <= kMostWeight / 2, name,
            ": the edge weights sum to more than 2^60; scale them down");
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> symmetrise(const Tensor& indptr, const Tensor& indices,
                                              const std::optional<Tensor>& weight_by_target,
                                              const std::optional<Tensor>& weight_of_each) {
  check_csc(indptr, indices);
  check(!weight_by_target || !weight_of_each, "weight_by_target and weight_of_each exclude each other");
  const int64_t num_vertices = indptr.numel() - 1;
  const int64_t* ptr = int64_data(indptr);
  const int64_t* of_target = nullptr;
  if (weight_by_target) {
    check_vector(*weight_by_target, ScalarType::Long, "weight_by_target");
    check(weight_by_target->numel() == num_vertices, "weight_by_target must have one entry per vertex, expected ",
          num_vertices, ", got ", weight_by_target->numel());
    of_target = int64_data(*weight_by_target);
  }
  const EdgeWeights of_each(weight_of_each, indices.numel(), "weight_of_each");
  const bool weighted = weight_by_target || weight_of_each;
  if (weighted) check_weights(ptr, num_vertices, of_target, of_each);

  Tensor out_indptr = new_vector(num_vertices + 1, ScalarType::Long);
  int64_t* out_ptr = mutable_int64_data(out_indptr);
  std::optional<Tensor> out_indices, out_weights;
  dispatch_index(indices, [&]<class Index>(const Index* sources) {
    Symmetriser<Index> graph(ptr, sources, of_target, of_each, num_vertices);
    out_ptr[0] = 0;
    graph.count(out_ptr);
    std::partial_sum(out_ptr, out_ptr + num_vertices + 1, out_ptr);
    const int64_t entries = out_ptr[num_vertices];
    out_indices = new_vector(entries, indices.scalar_type());
    const bool wide = graph.largest() > std::numeric_limits<int32_t>::max();
    const bool needed = weighted || !graph.same();
    out_weights = new_vector(needed ? entries : 0, wide ? ScalarType::Long : ScalarType::Int);
    auto* out = static_cast<Index*>(out_indices->mutable_data_ptr());
    void* weights = needed ? out_weights->mutable_data_ptr() : nullptr;
    if (wide)
      graph.write(out_ptr, out, static_cast<int64_t*>(weights));
    else
      graph.write(out_ptr, out, static_cast<int32_t*>(weights));
  });
  return {out_indptr, *out_indices, *out_weights};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("symmetrise", TORCH_BOX(&symmetrise));
}

}  // namespace
}  // namespace salientpp
