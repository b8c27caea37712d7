// Places of rows: checks of the indices that every kernel over rows takes.
#pragma once

#include <algorithm>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "check.h"

namespace salientpp {

// Calls f with a null pointer of the type of a tensor's values; raises unless they are floats.
template <class F>
void dispatch_float(const Tensor& tensor, const char* name, F&& f) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return f(static_cast<float*>(nullptr));
    case ScalarType::Double:
      return f(static_cast<double*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<torch::headeronly::Half*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<torch::headeronly::BFloat16*>(nullptr));
    default:
      fail(name, " must have dtype float32, float64, float16 or bfloat16, got ", tensor.scalar_type());
  }
}

// Returns the number of values of a row. Raises unless `source` and `out` have the same dtype and row shape.
inline int64_t check_kind(const Tensor& source, const Tensor& out) {
  check(source.dim() >= 1 && out.dim() == source.dim(),
        "source and out must have the same number of dimensions >= 1, got ", source.dim(), " and ", out.dim());
  check(source.scalar_type() == out.scalar_type(), "out must have the dtype of source, expected ", source.scalar_type(),
        ", got ", out.scalar_type());
  check(source.is_contiguous() && out.is_contiguous(), "source and out must be contiguous");
  int64_t columns = 1;
  for (int64_t d = 1; d < source.dim(); ++d) {
    check(source.size(d) == out.size(d), "out must have rows of the same shape as source, expected size ",
          source.size(d), " in dimension ", d, ", got ", out.size(d));
    columns *= source.size(d);
  }
  return columns;
}

// Returns the range that an id is in. Range p is [offset[p], offset[p + 1]), and `id` is in one of them.
inline int32_t owner_of(int64_t id, const int64_t* offset, int64_t num_parts) {
  constexpr int64_t kCountedParts = 32;
  if (num_parts > kCountedParts)
    return static_cast<int32_t>(std::upper_bound(offset, offset + num_parts + 1, id) - offset - 1);
  int32_t part = 0;  // comparing with every bound is faster than a search with unpredictable branches
  for (int64_t p = 1; p < num_parts; ++p) part += id >= offset[p];
  return part;
}

// Returns the places of out's rows, or null: then row i goes to place i. Raises unless each row has a place.
inline const int64_t* check_places(int64_t num_rows, const Tensor& out, const std::optional<Tensor>& out_index) {
  if (!out_index) {
    check(out.size(0) >= num_rows, "out must have at least ", num_rows, " rows, got ", out.size(0));
    return nullptr;
  }
  check_vector(*out_index, ScalarType::Long, "out_index");
  check(out_index->numel() == num_rows, "out_index must have one entry per row, expected ", num_rows, ", got ",
        out_index->numel());
  return int64_data(*out_index);
}

// Checks every index before the first byte is written, so an error leaves `out` unchanged.
template <class Index>
void check_rows(const Index* index, int64_t num_rows, int64_t source_rows, const int64_t* target, int64_t out_rows) {
  for (int64_t i = 0; i < num_rows; ++i) {
    check(index[i] >= 0 && index[i] < source_rows, "source_index[", i, "] must be in [0, ", source_rows, "), got ",
          index[i]);
    if (target)
      check(target[i] >= 0 && target[i] < out_rows, "out_index[", i, "] must be in [0, ", out_rows, "), got ",
            target[i]);
  }
}

inline void check_apart(const Tensor& source, const Tensor& out) {
  const auto *from = static_cast<const char*>(source.const_data_ptr()),
             *to = static_cast<const char*>(out.const_data_ptr());
  const int64_t source_bytes = source.numel() * source.element_size(), out_bytes = out.numel() * out.element_size();
  const bool overlap = source_bytes > 0 && out_bytes > 0 && from < to + out_bytes && to < from + source_bytes;
  check(!overlap, "out must not overlap source in memory");
}

}  // namespace salientpp
