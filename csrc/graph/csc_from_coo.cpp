#include <algorithm>
#include <limits>
#include <vector>

#include "check.h"
#include "graph/csc.h"
#include "memory.h"

namespace salientpp {
namespace {

ScalarType index_dtype(int64_t num_vertices) {
  return num_vertices <= std::numeric_limits<int32_t>::max() ? ScalarType::Int : ScalarType::Long;
}

std::tuple<Tensor, Tensor, Tensor> csc_from_coo(const Tensor& source, const Tensor& target, int64_t num_vertices) {
  check_index_vector(source, "source");
  check_vector(target, source.scalar_type(), "target");
  const int64_t num_edges = source.numel();
  check(target.numel() == num_edges, "target must have one entry per edge, expected ", num_edges, ", got ",
        target.numel());
  check(num_vertices >= 0, "num_vertices must be >= 0, got ", num_vertices);
  check(num_vertices < std::numeric_limits<int64_t>::max(), "num_vertices must be < 2^63 - 1, got ", num_vertices);

  Tensor indptr = new_table(num_vertices + 1, ScalarType::Long);
  Tensor indices = new_table(num_edges, index_dtype(num_vertices));
  Tensor edge_id = new_table(num_edges, ScalarType::Long);
  int64_t* ptr = mutable_int64_data(indptr);
  int64_t* perm = mutable_int64_data(edge_id);
  std::fill(ptr, ptr + num_vertices + 1, 0);

  dispatch_index(source, [&](auto* from) {
    const auto* to = static_cast<decltype(from)>(target.const_data_ptr());
    for (int64_t e = 0; e < num_edges; ++e) {
      check(from[e] >= 0 && from[e] < num_vertices, "edge_index[0, ", e, "] must be in [0, ", num_vertices, "), got ",
            from[e]);
      check(to[e] >= 0 && to[e] < num_vertices, "edge_index[1, ", e, "] must be in [0, ", num_vertices, "), got ",
            to[e]);
      ++ptr[to[e] + 1];
    }
    accumulate(ptr, num_vertices);
    // A stable counting sort by target: edges keep their order inside a neighbour list.
    std::vector<int64_t> next(ptr, ptr + num_vertices);
    dispatch_index(indices, [&](auto* tag) {
      using Index = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
      auto* out = static_cast<Index*>(indices.mutable_data_ptr());
      for (int64_t e = 0; e < num_edges; ++e) {
        const int64_t slot = next[to[e]]++;
        out[slot] = static_cast<Index>(from[e]);
        perm[slot] = e;
      }
    });
  });
  return {indptr, indices, edge_id};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("csc_from_coo", TORCH_BOX(&csc_from_coo));
}

}  // namespace
}  // namespace salientpp
