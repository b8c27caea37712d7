#include <algorithm>
#include <vector>

#include "check.h"
#include "graph/csc.h"
#include "memory.h"

namespace salientpp {
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
  dispatch_index(indices, [&](auto* sources) {
    using Index = std::remove_const_t<std::remove_pointer_t<decltype(sources)>>;
    for (int64_t e = 0; e < num_edges; ++e) ++out_ptr[sources[e] + 1];
    accumulate(out_ptr, num_vertices);
    std::vector<int64_t> next(out_ptr, out_ptr + num_vertices);
    auto* out = static_cast<Index*>(out_indices.mutable_data_ptr());
    for (int64_t v = 0; v < num_vertices; ++v) {
      for (int64_t e = ptr[v]; e < ptr[v + 1]; ++e) out[next[sources[e]]++] = static_cast<Index>(v);
    }
  });
  return {out_indptr, out_indices};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("transpose_csc", TORCH_BOX(&transpose_csc));
}

}  // namespace
}  // namespace salientpp
