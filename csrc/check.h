// Checks of kernels' arguments: bad input raises one exception with a text, and never causes undefined behaviour.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace salientpp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error (a RuntimeError in Python). The text is the arguments, streamed in order.
template <class... Words>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Words&... words) {
  std::ostringstream text;
  (text << ... << words);
  throw std::runtime_error(text.str());
}

template <class... Words>
inline void check(bool holds, const Words&... words) {
  if (!holds) [[unlikely]]
    fail(words...);
}

// Python's None reaches a kernel as an undefined tensor, which supports no other query.
inline void check_defined(const Tensor& tensor, const char* name) {
  check(tensor.defined(), name, " must be a tensor, got None");
}

inline void check_vector(const Tensor& tensor, ScalarType dtype, const char* name) {
  check_defined(tensor, name);
  check(tensor.dim() == 1, name, " must have 1 dimension, got ", tensor.dim());
  check(tensor.scalar_type() == dtype, name, " must have dtype ", dtype, ", got ", tensor.scalar_type());
  check(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_index_vector(const Tensor& tensor, const char* name) {
  check_defined(tensor, name);
  const auto dtype = tensor.scalar_type();
  check(dtype == ScalarType::Int || dtype == ScalarType::Long, name, " must have dtype int32 or int64, got ", dtype);
  check_vector(tensor, dtype, name);
}

// Returns an uninitialised, contiguous tensor on the CPU. torch::stable::empty goes through the dispatcher and takes
// 3 us, which is most of the cost of an operator on a small batch. When memory is short, libtorch's error names only
// its own functions, so this one raises its own.
template <size_t kDims>
Tensor new_tensor(const std::array<int64_t, kDims>& sizes, ScalarType dtype) {
  std::array<int64_t, kDims> strides;
  int64_t stride = 1;
  for (size_t d = kDims; d-- > 0; stride *= sizes[d]) strides[d] = stride;
  AtenTensorHandle made = nullptr;
  const auto error = aoti_torch_empty_strided(kDims, sizes.data(), strides.data(), static_cast<int32_t>(dtype),
                                              aoti_torch_device_type_cpu(), 0, &made);
  if (error != AOTI_TORCH_SUCCESS)
    fail("cannot allocate a ", kDims == 1 ? "vector" : "tensor", " of ", stride, " entries of dtype ", dtype);
  return Tensor(made);
}

inline Tensor new_vector(int64_t size, ScalarType dtype) {
  return new_tensor<1>({size}, dtype);
}

// Calls f with a null pointer of the integer type that `tensor` holds: int32_t or int64_t.
template <class F>
decltype(auto) dispatch_index(const Tensor& tensor, F&& f) {
  if (tensor.scalar_type() == ScalarType::Int) return f(static_cast<const int32_t*>(tensor.const_data_ptr()));
  return f(static_cast<const int64_t*>(tensor.const_data_ptr()));
}

inline const int64_t* int64_data(const Tensor& tensor) {
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

// Checks the offsets of lists that lie one after the other in an array of `num_entries` entries. Errors call the array
// `entries`. `offsets` has passed check_vector.
inline void check_offsets(const Tensor& offsets, int64_t num_entries, const char* name, const char* entries) {
  const int64_t* offset = int64_data(offsets);
  const int64_t last = offsets.numel() - 1;
  check(offset[0] == 0 && offset[last] == num_entries, name, " must run from 0 to the number of ", entries, ", ",
        num_entries, ", got ", offset[0], " to ", offset[last]);
  for (int64_t i = 0; i < last; ++i)
    check(offset[i] <= offset[i + 1], name, " must not decrease, got ", offset[i + 1], " after ", offset[i]);
}

template <class Id>
void check_ids(const Id* ids, int64_t size, int64_t num_ids, const char* name) {
  for (int64_t i = 0; i < size; ++i)
    check(ids[i] >= 0 && ids[i] < num_ids, name, "[", i, "] must be in [0, ", num_ids, "), got ", ids[i]);
}

inline int64_t* mutable_int64_data(const Tensor& tensor) {
  return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

inline Tensor vector_of(std::span<const int64_t> values) {
  Tensor out = new_vector(static_cast<int64_t>(values.size()), ScalarType::Long);
  std::copy(values.begin(), values.end(), mutable_int64_data(out));
  return out;
}

}  // namespace salientpp
