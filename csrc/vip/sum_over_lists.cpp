// Sums a value, or a row of values, over the list of every vertex. This is a product with the adjacency matrix, which
// is never built.
#include <algorithm>
#include <atomic>

#include "check.h"

namespace salientpp {
namespace {

// Number of columns that are summed together, in registers.
constexpr int64_t kMostColumns = 8;

// sum[v] = the sum of x over v's list; both have `width` columns. Returns true if all ids are in range.
template <class Value, class Index>
bool sum_rows(const int64_t* ptr, const Index* list, int64_t num_vertices, const Value* x, int64_t num_values,
              int64_t width, Value* sum) {
  constexpr int64_t kPrefetchAhead = 32;
  // Ids further ahead are not checked yet. So the address is computed as an integer; prefetching a wrong one does no
  // harm.
  const auto prefetch = [&](uint64_t id) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) +
                                                     id * static_cast<uint64_t>(width) * sizeof(Value)),
                       0, 3);
  };
  std::atomic<bool> in_range{true};
  torch::stable::parallel_for(0, num_vertices, 4096, [&](int64_t begin, int64_t end) {
    const int64_t last = ptr[end];
    for (int64_t v = begin; v < end; ++v) {
      uint64_t largest = 0;  // check first: a list is short and read again at once, so this costs almost nothing
      for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) largest = std::max(largest, static_cast<uint64_t>(list[e]));
      if (ptr[v] < ptr[v + 1] && largest >= static_cast<uint64_t>(num_values)) {
        in_range = false;
        return;
      }
      Value total[kMostColumns] = {};
      for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) {
        if (e + kPrefetchAhead < last) prefetch(static_cast<uint64_t>(list[e + kPrefetchAhead]));
        const Value* row = x + static_cast<int64_t>(list[e]) * width;
        for (int64_t k = 0; k < width; ++k) total[k] += row[k];
      }
      std::copy_n(total, width, sum + v * width);
    }
  });
  return in_range;
}

Tensor sum_over_lists(const Tensor& indptr, const Tensor& indices, const Tensor& value) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check_defined(value, "value");
  const auto dtype = value.scalar_type();
  check(dtype == ScalarType::Double || dtype == ScalarType::Float, "value must have dtype Double or Float, got ",
        dtype);
  check(value.dim() == 1 || value.dim() == 2, "value must have 1 or 2 dimensions, got ", value.dim());
  check(value.is_contiguous(), "value must be contiguous");
  const int64_t width = value.dim() == 1 ? 1 : value.size(1);
  check(width >= 1 && width <= kMostColumns, "value must have 1 to ", kMostColumns, " columns, got ", width);
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  const int64_t num_vertices = indptr.numel() - 1, num_values = value.size(0);
  check_offsets(indptr, indices.numel(), "indptr", "indices");
  Tensor out = value.dim() == 1 ? new_vector(num_vertices, dtype) : new_tensor<2>({num_vertices, width}, dtype);
  bool in_range = true;
  dispatch_index(indices, [&](auto* list) {
    const auto run = [&]<class Value>(Value* sum) {
      in_range = sum_rows(int64_data(indptr), list, num_vertices, static_cast<const Value*>(value.const_data_ptr()),
                          num_values, width, sum);
    };
    if (dtype == ScalarType::Double)
      run(static_cast<double*>(out.mutable_data_ptr()));
    else
      run(static_cast<float*>(out.mutable_data_ptr()));
  });
  check(in_range, "indices must be in [0, ", num_values, "), the number of values; one is not");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("sum_over_lists", TORCH_BOX(&sum_over_lists));
}

}  // namespace
}  // namespace salientpp
