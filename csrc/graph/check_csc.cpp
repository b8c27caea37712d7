#include "check.h"
#include "graph/csc.h"

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
  dispatch_index(indices, [&](auto* sources) {
    for (int64_t e = 0; e < num_edges; ++e) {
      check(sources[e] >= 0 && sources[e] < num_vertices, "indices[", e, "] must be in [0, ", num_vertices, "), got ",
            sources[e]);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("check_csc", TORCH_BOX(&check_csc));
}

}  // namespace salientpp
