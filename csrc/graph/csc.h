// Checks shared by the operators on CSC matrices (compressed sparse columns).
#pragma once

#include <optional>

#include "check.h"

namespace salientpp {

// Raises unless the arrays are a CSC matrix with N columns and N rows.
void check_csc(const Tensor& indptr, const Tensor& indices);

// Raises unless the arrays are N lists that fill `indices`. The entries themselves are not checked.
inline void check_lists(const Tensor& indptr, const Tensor& indices) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  check_offsets(indptr, indices.numel(), "indptr", "indices");
}

// The weights of the edges, int32 or int64 in list order; 1 each if no weights are given.
class EdgeWeights {
 public:
  EdgeWeights(const std::optional<Tensor>& weights, int64_t num_edges, const char* name) {
    if (!weights) return;
    check_index_vector(*weights, name);
    check(weights->numel() == num_edges, name, " must have one entry per edge, expected ", num_edges, ", got ",
          weights->numel());
    if (weights->scalar_type() == ScalarType::Int)
      narrow_ = static_cast<const int32_t*>(weights->const_data_ptr());
    else
      wide_ = int64_data(*weights);
  }

  explicit operator bool() const { return narrow_ != nullptr || wide_ != nullptr; }
  int64_t operator[](int64_t e) const { return narrow_ != nullptr ? narrow_[e] : wide_ != nullptr ? wide_[e] : 1; }

 private:
  const int32_t* narrow_ = nullptr;
  const int64_t* wide_ = nullptr;
};

}  // namespace salientpp
