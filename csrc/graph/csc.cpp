// Checks a graph in CSC form, and reverses its edges.
#include "graph/csc.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "memory.h"
#include "random.h"

namespace salientpp {

void check_csc(const Tensor& indptr, const Tensor& indices) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  const int64_t num_vertices = indptr.numel() - 1;
  const int64_t num_edges = indices.numel();
  const int64_t* ptr = int64_data(indptr);
  check(ptr[0] == 0, "indptr[0] must be 0, got ", ptr[0]);
  for (int64_t v = 0; v < num_vertices; ++v) {
    check(ptr[v + 1] >= ptr[v], "indptr must not decrease, got indptr[", v, "] = ", ptr[v], " and indptr[", v + 1,
          "] = ", ptr[v + 1]);
  }
  check(ptr[num_vertices] == num_edges, "indptr[-1] must be the number of indices, expected ", num_edges, ", got ",
        ptr[num_vertices]);
  dispatch_index(indices, [&](auto* sources) { check_ids(sources, num_edges, num_vertices, "indices"); });
}

namespace {

std::tuple<Tensor, Tensor> transpose_csc(const Tensor& indptr, const Tensor& indices) {
  check_csc(indptr, indices);
  const int64_t num_vertices = indptr.numel() - 1;
  const int64_t num_edges = indices.numel();
  const int64_t* ptr = int64_data(indptr);
  Tensor out_indptr = new_table(num_vertices + 1, ScalarType::Long);
  Tensor out_indices = new_table(num_edges, indices.scalar_type());
  int64_t* out_ptr = mutable_int64_data(out_indptr);
  std::fill(out_ptr, out_ptr + num_vertices + 1, 0);
  dispatch_index(indices, [&]<class Index>(const Index* sources) {
    for (int64_t e = 0; e < num_edges; ++e) ++out_ptr[sources[e] + 1];
    std::partial_sum(out_ptr, out_ptr + num_vertices + 1, out_ptr);
    std::vector<int64_t> next(out_ptr, out_ptr + num_vertices);
    auto* out = static_cast<Index*>(out_indices.mutable_data_ptr());
    for (int64_t v = 0; v < num_vertices; ++v) {
      for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) out[next[sources[e]]++] = static_cast<Index>(v);
    }
  });
  return {out_indptr, out_indices};
}

// The multisets of edges and of reversed edges are taken as equal if the sums of their hashes are. This is wrong for
// one graph in 2^64.
uint64_t hash_edge(uint64_t source, uint64_t target) {
  return mix64(source * kGolden + target);
}

// True if a graph is its own transpose. It reads the edges once, in order, and takes no memory, because a mapped graph
// may be larger than memory.
Tensor is_symmetric(const Tensor& indptr, const Tensor& indices) {
  check_lists(indptr, indices);
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
  m.impl("check_csc", TORCH_BOX(&check_csc));
  m.impl("transpose_csc", TORCH_BOX(&transpose_csc));
  m.impl("is_symmetric", TORCH_BOX(&is_symmetric));
}

}  // namespace
}  // namespace salientpp
