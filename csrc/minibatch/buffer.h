// What the samplers keep between batches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace salientpp {

// A buffer that keeps its capacity and does not initialise what it hands out.
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

}  // namespace salientpp
