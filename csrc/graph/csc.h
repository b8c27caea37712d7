// What the operators on compressed sparse columns share.
#pragma once

#include <numeric>
#include <optional>

#include "check.h"

namespace salientpp {

// Turns counts in indptr[1:] into offsets.
inline void accumulate(int64_t* indptr, int64_t num_vertices) {
  std::partial_sum(indptr, indptr + num_vertices + 1, indptr);
}

// Raises unless these are the arrays of a CSC matrix of N columns and N rows.
void check_csc(const Tensor& indptr, const Tensor& indices);

// The weights of the edges, in list order; null without any.
inline const int64_t* edge_weights_data(const std::optional<Tensor>& edge_weights, int64_t num_edges) {
  if (!edge_weights) return nullptr;
  check_vector(*edge_weights, ScalarType::Long, "edge_weights");
  check(edge_weights->numel() == num_edges, "edge_weights must have one entry per edge, expected ", num_edges, ", got ",
        edge_weights->numel());
  return int64_data(*edge_weights);
}

}  // namespace salientpp
