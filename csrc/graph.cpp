// Topology: edge lists to CSC, transposition, validation.
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "memory.h"

namespace salientpp {
namespace {

ScalarType index_dtype(int64_t num_vertices) {
  return num_vertices <= std::numeric_limits<int32_t>::max() ? ScalarType::Int : ScalarType::Long;
}

// Turns counts in indptr[1:] into offsets.
void accumulate(int64_t* indptr, int64_t num_vertices) {
  std::partial_sum(indptr, indptr + num_vertices + 1, indptr);
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
  m.impl("csc_from_coo", TORCH_BOX(&csc_from_coo));
  m.impl("transpose_csc", TORCH_BOX(&transpose_csc));
  m.impl("check_csc", TORCH_BOX(&check_csc));
}

}  // namespace
}  // namespace salientpp
