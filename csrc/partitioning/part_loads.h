// Loads of parts: the number of vertices of each part, and the sum of their weights under each of C constraints.
#pragma once

#include <vector>

#include "check.h"

namespace salientpp {

class PartLoads {
 public:
  // `part` is changed in place. The arrays have passed check_loads and must outlive this object.
  PartLoads(int64_t num_parts, const Tensor& weights, const Tensor& limits, int64_t* part)
      : n_(weights.size(0)),
        k_(num_parts),
        num_constraints_(limits.numel()),
        weights_(int64_data(weights)),
        limits_(int64_data(limits)),
        part_(part),
        size_(static_cast<size_t>(num_parts), 0),
        load_(static_cast<size_t>(num_parts * num_constraints_), 0) {
    for (int64_t v = 0; v < n_; ++v) {
      ++size(part_[v]);
      for (int64_t c = 0; c < num_constraints_; ++c) load(part_[v], c) += weight(v, c);
    }
  }

 protected:
  int64_t& size(int64_t p) { return size_[static_cast<size_t>(p)]; }
  int64_t& load(int64_t p, int64_t c) { return load_[static_cast<size_t>(p * num_constraints_ + c)]; }
  int64_t weight(int64_t v, int64_t c) const { return weights_[v * num_constraints_ + c]; }

  void move(int64_t v, int64_t to) {
    const int64_t from = part_[v];
    --size(from);
    ++size(to);
    for (int64_t c = 0; c < num_constraints_; ++c) {
      load(from, c) -= weight(v, c);
      load(to, c) += weight(v, c);
    }
    part_[v] = to;
  }

  int64_t n_, k_, num_constraints_;
  const int64_t* weights_;  // [N, C]
  const int64_t* limits_;   // [C]
  int64_t* part_;           // [N]

 private:
  std::vector<int64_t> size_, load_;
};

// The kernels index memory by these arrays, so all are checked. `assignment` and `limits` have passed check_vector.
inline void check_loads(const Tensor& assignment, const Tensor& weights, const Tensor& limits, int64_t num_parts) {
  const int64_t num_vertices = assignment.numel(), num_constraints = limits.numel();
  check_defined(weights, "weights");
  check(weights.dim() == 2 && weights.size(0) == num_vertices && weights.size(1) == num_constraints,
        "weights must have one row per vertex and one column per limit, expected [", num_vertices, ", ",
        num_constraints, "]");
  check(weights.scalar_type() == ScalarType::Long, "weights must have dtype ", ScalarType::Long, ", got ",
        weights.scalar_type());
  check(weights.is_contiguous(), "weights must be contiguous");
  check_ids(int64_data(assignment), num_vertices, num_parts, "assignment");
  const int64_t *weight = int64_data(weights), *limit = int64_data(limits);
  for (int64_t c = 0; c < num_constraints; ++c) {
    check(limit[c] >= 0, "limits[", c, "] must be >= 0, got ", limit[c]);
    int64_t total = 0;
    for (int64_t v = 0; v < num_vertices; ++v) {
      const int64_t w = weight[v * num_constraints + c];
      check(w >= 0, "weights[", v, ", ", c, "] must be >= 0, got ", w);
      check(!__builtin_add_overflow(total, w, &total), "weights[:, ", c,
            "] sum to more than 2^63 - 1; scale them down");
    }
  }
}

}  // namespace salientpp
