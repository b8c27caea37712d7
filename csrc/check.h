// How kernels refuse bad input: one exception with words, never undefined behaviour.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace salientpp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error (a RuntimeError in Python) whose text is the arguments, streamed in order.
template <class... Words>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Words&... words) {
  std::ostringstream text;
  (text << ... << words);
  throw std::runtime_error(text.str());
}

template <class... Words>
inline void check(bool holds, const Words&... words) {
  if (!holds) [[unlikely]] fail(words...);
}

inline void check_vector(const Tensor& tensor, ScalarType dtype, const char* name) {
  check(tensor.dim() == 1, name, " must have 1 dimension, got ", tensor.dim());
  check(tensor.scalar_type() == dtype, name, " must have dtype ", dtype, ", got ", tensor.scalar_type());
  check(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_index_vector(const Tensor& tensor, const char* name) {
  const auto dtype = tensor.scalar_type();
  check(dtype == ScalarType::Int || dtype == ScalarType::Long, name, " must have dtype int32 or int64, got ", dtype);
  check_vector(tensor, dtype, name);
}

inline Tensor new_vector(int64_t size, ScalarType dtype) {
  return torch::stable::empty({size}, dtype);
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

inline int64_t* mutable_int64_data(const Tensor& tensor) {
  return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

}  // namespace salientpp
