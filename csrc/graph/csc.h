// What the operators on compressed sparse columns share.
#pragma once

#include <numeric>

#include "check.h"

namespace salientpp {

// Turns counts in indptr[1:] into offsets.
inline void accumulate(int64_t* indptr, int64_t num_vertices) {
  std::partial_sum(indptr, indptr + num_vertices + 1, indptr);
}

// Raises unless these are the arrays of a CSC matrix of N columns and N rows.
void check_csc(const Tensor& indptr, const Tensor& indices);

}  // namespace salientpp
