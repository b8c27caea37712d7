// Memory that is read at random: prefetching, and huge pages for large arrays.
//
// A gather, a sampled edge and a hop of VIP touch memory at random. With pages of 4 KB, most touches also miss the
// TLB. With pages of 2 MB, sampling and gathering take about two thirds of the time. These calls are requests: a
// system without huge pages, or without free ones, gives small pages, and nothing else changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "check.h"

namespace salientpp {

inline void prefetch_read(const void* address) {
  __builtin_prefetch(address, 0, 3);
}
inline void prefetch_write(const void* address) {
  __builtin_prefetch(address, 1, 3);
}

// Stores that bypass the caches: a line that is written whole need not be read first. They are for data that would not
// stay in the caches anyway. They serve rows of whole lines that are written in random order (in sequential order they
// gain nothing), and the arrays of numbers of a large batch.
#ifdef __SSE2__
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif
constexpr int64_t kStreamedLine = 64;
// About half of a smaller output would still be in a cache when it is read.
constexpr int64_t kStreamedBytes = int64_t{1} << 22;

// Copies whole lines; `to` is at the beginning of a line.
inline void stream_lines([[maybe_unused]] char* to, [[maybe_unused]] const char* from, [[maybe_unused]] int64_t bytes) {
#ifdef __SSE2__
  for (int64_t b = 0; b < bytes; b += static_cast<int64_t>(sizeof(__m128i)))
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + b), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + b)));
#endif
}

// Makes all streamed stores visible to later reads in any thread. To be called after the last of them.
inline void end_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Widens integers to 64 bits with streaming stores, and ends the streaming. 32-bit integers are not negative.
template <class T>
void stream_numbers([[maybe_unused]] const T* from, [[maybe_unused]] int64_t size, [[maybe_unused]] int64_t* to) {
#ifdef __SSE2__
  constexpr int64_t kStep = sizeof(__m128i) / sizeof(T);
  int64_t k = 0;
  for (; k < size && reinterpret_cast<uintptr_t>(to + k) % sizeof(__m128i) != 0; ++k) to[k] = from[k];
  for (; k + kStep <= size; k += kStep) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
    auto* const place = reinterpret_cast<__m128i*>(to + k);
    if constexpr (sizeof(T) == sizeof(int64_t)) {
      _mm_stream_si128(place, numbers);
    } else {
      static_assert(sizeof(T) == sizeof(int32_t));
      _mm_stream_si128(place, _mm_unpacklo_epi32(numbers, _mm_setzero_si128()));
      _mm_stream_si128(place + 1, _mm_unpackhi_epi32(numbers, _mm_setzero_si128()));
    }
  }
  for (; k < size; ++k) to[k] = from[k];
  end_streaming();
#endif
}

constexpr size_t kHugePage = size_t{1} << 21;

// Asks for huge pages that lie entirely in [data, data + bytes). Before the first touch this costs nothing.
inline void advise_huge_pages([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#ifdef __linux__
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Allocator for std::vector. Large memory starts on a huge page and asks for huge pages.
template <class T>
struct HugePageAllocator {
  using value_type = T;
  HugePageAllocator() = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) {}

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    void* data = ::operator new(bytes, std::align_val_t{kHugePage});
    advise_huge_pages(data, bytes);
    return static_cast<T*>(data);
  }
  void deallocate(T* data, size_t count) {
    if (count * sizeof(T) < kHugePage)
      ::operator delete(data);
    else
      ::operator delete(data, std::align_val_t{kHugePage});
  }
  template <class U>
  bool operator==(const HugePageAllocator<U>&) const {
    return true;
  }
};

// Returns an uninitialised tensor that asks for huge pages. It suits tensors that live long and are read at random. It
// also suits large tensors that every batch allocates, where zeroing small pages takes longer than writing them.
template <size_t kDims>
Tensor new_large_tensor(const std::array<int64_t, kDims>& sizes, ScalarType dtype) {
  Tensor tensor = new_tensor<kDims>(sizes, dtype);
  advise_huge_pages(tensor.const_data_ptr(),
                    static_cast<size_t>(tensor.numel()) * static_cast<size_t>(tensor.element_size()));
  return tensor;
}

inline Tensor new_table(int64_t size, ScalarType dtype) {
  return new_large_tensor<1>({size}, dtype);
}

}  // namespace salientpp
