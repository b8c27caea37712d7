// Memory that is read at random: prefetching, and huge pages for large arrays.
//
// A gather, a sampled edge and a hop of VIP touch memory at random, and with pages of 4 KB most touches also miss the
// table of address translations. With pages of 2 MB sampling and gathering take about two thirds of the time. These are
// requests: a system that has no huge pages, or none left, gives small ones, and nothing else changes.
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

// Copies that go past the caches: a line that is written whole need not be read first. For more than would stay in the
// caches anyway: rows of whole lines that are written in no order (in order nothing was gained), and the numbers of a
// large batch.
#ifdef __SSE2__
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif
constexpr int64_t kStreamedLine = 64;
constexpr int64_t kStreamedBytes = int64_t{1} << 22;  // half of less would still be there for who reads it next

// `to` at the begin of a line, and whole lines.
inline void stream_lines([[maybe_unused]] char* to, [[maybe_unused]] const char* from, [[maybe_unused]] int64_t bytes) {
#ifdef __SSE2__
  for (int64_t b = 0; b < bytes; b += static_cast<int64_t>(sizeof(__m128i)))
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + b), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + b)));
#endif
}

// After the last of them: what follows, in any thread, sees them.
inline void end_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Whole numbers, of which 32-bit ones are not negative, as 64-bit ones; with its end.
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

// Asks for huge pages where whole ones lie in [data, data + bytes). Before the first touch this costs nothing.
inline void advise_huge_pages([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#ifdef __linux__
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// For std::vector: large memory starts on a huge page and asks for more of them.
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

// An uninitialised tensor that asks for huge pages: it lives long and is read at random, or is large and made anew for
// every batch, when zeroing pages one by one takes longer than writing them.
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
