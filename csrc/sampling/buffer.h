// Buffers that the samplers keep between batches, and functions that write many short lists one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "check.h"
#include "memory.h"

namespace salientpp {

// A buffer that keeps its capacity and does not initialise its memory.
template <class T>
class Buffer {
 public:
  T* data() { return data_.get(); }
  int64_t size() const { return size_; }
  void clear() { size_ = 0; }
  void set_size(int64_t size) { size_ = size; }
  void reserve(int64_t size) {
    if (size <= capacity_) return;
    const int64_t capacity = std::max(size, 2 * capacity_);
    std::unique_ptr<T[]> grown(new T[static_cast<size_t>(capacity)]);
    if (size_ > 0) std::memcpy(grown.get(), data_.get(), sizeof(T) * static_cast<size_t>(size_));
    data_ = std::move(grown);
    capacity_ = capacity;
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

// Copies the results of a batch. Large results bypass the caches, because most of them would not stay there.
template <class T>
void copy_out(const T* from, int64_t size, int64_t* to) {
  if (kCanStream && size >= kStreamedBytes / static_cast<int64_t>(sizeof(int64_t)))
    stream_numbers(from, size, to);
  else
    std::copy_n(from, size, to);
}

// Lists are short and of different lengths. So this number of entries is written at a time, and the excess is
// overwritten later. A loop of exact length would end at a random point, which causes branch mispredictions.
constexpr int64_t kWide = 8;

// Writes first + i count[i] times, for each i of [0, size), up to `end` exactly.
template <class Count>
void repeat_places(const Count* count, int64_t size, int64_t* out, int64_t* end, int64_t first = 0) {
  for (int64_t i = 0; i < size; ++i) {
    if (count[i] + kWide > end - out) [[unlikely]] {
      std::fill(out, out + count[i], first + i);
    } else {
      for (int64_t k = 0; k < count[i]; k += kWide) std::fill_n(out + k, kWide, first + i);
    }
    out += count[i];
  }
}

template <class T>
Tensor copy_of(Buffer<T>& buffer) {
  Tensor out = new_table(buffer.size(), ScalarType::Long);
  copy_out(buffer.data(), buffer.size(), mutable_int64_data(out));
  return out;
}

// Returns the edges of a batch: their ends, int64 [2, e], and their ids.
//
// edge       per edge, its id, or its position in `edge_id` if that is given.
// source     per edge, the local id of its source.
// num_drawn  per target, the number of its edges, which stand together.
static inline std::pair<Tensor, Tensor> edges_of(Buffer<int64_t>& edge, Buffer<int32_t>& source,
                                                 Buffer<int32_t>& num_drawn, const Tensor* edge_id) {
  const int64_t size = edge.size();
  Tensor edge_index = new_large_tensor<2>({2, size}, ScalarType::Long);
  int64_t* row = mutable_int64_data(edge_index);
  copy_out(source.data(), size, row);
  repeat_places(num_drawn.data(), num_drawn.size(), row + size, row + 2 * size);
  if (edge_id == nullptr) return {edge_index, copy_of(edge)};
  Tensor e_id = new_table(size, ScalarType::Long);
  int64_t* out = mutable_int64_data(e_id);
  const int64_t* position = edge.data();
  constexpr int64_t kAhead = 32;
  dispatch_index(*edge_id, [&](auto* ids) {
    for (int64_t e = 0; e < size; ++e) {
      if (e + kAhead < size) prefetch_read(&ids[position[e + kAhead]]);
      out[e] = ids[position[e]];
    }
  });
  return {edge_index, e_id};
}

}  // namespace salientpp
