// Is a graph its own transpose? Asked in one pass over the edges in order, which takes no memory: the graph may be
// mapped and larger than that.
#include <atomic>

#include "check.h"
#include "graph/csc.h"
#include "random.h"

namespace salientpp {
namespace {

// The multisets of edges and of edges turned round are equal where the sums of their hashes are, but for one graph in
// 2^64.
uint64_t hash_edge(uint64_t source, uint64_t target) {
  return mix64(source * kGolden + target);
}

Tensor is_symmetric(const Tensor& indptr, const Tensor& indices) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  check_offsets(indptr, indices.numel(), "indptr", "indices");
  const int64_t* ptr = int64_data(indptr);
  std::atomic<bool> ascending{true};
  std::atomic<uint64_t> difference{0};
  dispatch_index(indices, [&](auto* sources) {
    torch::stable::parallel_for(0, indptr.numel() - 1, 4096, [&](int64_t begin, int64_t end) {
      uint64_t sum = 0;
      for (int64_t v = begin; v < end && ascending.load(std::memory_order_relaxed); ++v) {
        for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) {
          if (e > ptr[v] && sources[e] < sources[e - 1]) ascending = false;
          const auto u = static_cast<uint64_t>(sources[e]), target = static_cast<uint64_t>(v);
          sum += hash_edge(u, target) - hash_edge(target, u);
        }
      }
      difference += sum;
    });
  });
  Tensor out = new_vector(1, ScalarType::Bool);
  *static_cast<bool*>(out.mutable_data_ptr()) = ascending && difference == 0;
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("is_symmetric", TORCH_BOX(&is_symmetric));
}

}  // namespace
}  // namespace salientpp
