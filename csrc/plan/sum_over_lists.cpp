// For every vertex the sum of a value over its list: one product with the adjacency matrix, which need not be made.
#include <algorithm>
#include <atomic>

#include "check.h"

namespace salientpp {
namespace {

Tensor sum_over_lists(const Tensor& indptr, const Tensor& indices, const Tensor& value) {
  constexpr int64_t kPrefetchAhead = 32;
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check_vector(value, ScalarType::Double, "value");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  const int64_t num_vertices = indptr.numel() - 1, num_values = value.numel();
  const int64_t* ptr = int64_data(indptr);
  check_offsets(indptr, indices.numel(), "indptr", "indices");
  Tensor out = new_vector(num_vertices, ScalarType::Double);
  const auto* x = static_cast<const double*>(value.const_data_ptr());
  // What lies ahead is not checked yet, and a pointer may not be moved as far as a wrong id says; an integer may, and
  // prefetching never faults.
  const auto prefetch = [&](uint64_t id) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + id * sizeof(double)), 0, 3);
  };
  auto* sum = static_cast<double*>(out.mutable_data_ptr());
  dispatch_index(indices, [&](auto* list) {
    std::atomic<bool> in_range{true};
    torch::stable::parallel_for(0, num_vertices, 4096, [&](int64_t begin, int64_t end) {
      const int64_t last = ptr[end];
      for (int64_t v = begin; v < end; ++v) {
        uint64_t largest = 0;  // a list is short and read again at once, so that looking first costs next to nothing
        for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) largest = std::max(largest, static_cast<uint64_t>(list[e]));
        if (ptr[v] < ptr[v + 1] && largest >= static_cast<uint64_t>(num_values)) {
          in_range = false;
          return;
        }
        double total = 0.0;
        for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) {
          if (e + kPrefetchAhead < last) prefetch(static_cast<uint64_t>(list[e + kPrefetchAhead]));
          total += x[list[e]];
        }
        sum[v] = total;
      }
    });
    check(in_range, "indices must be in [0, ", num_values, "), the number of values; one is not");
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("sum_over_lists", TORCH_BOX(&sum_over_lists));
}

}  // namespace
}  // namespace salientpp
