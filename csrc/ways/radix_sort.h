// Sorts 64-bit keys by some of their bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <vector>

namespace salientpp {

// Sorts by the bits from `first` on, least significant digit first; `spare` has the same length.
inline void radix_sort(std::vector<uint64_t>& keys, std::vector<uint64_t>& spare, int first, int bits) {
  constexpr int kDigit = 11;
  const size_t size = keys.size();
  spare.resize(size);
  uint32_t counts[1 << kDigit];
  for (int shift = first; shift < first + bits; shift += kDigit) {
    std::fill(std::begin(counts), std::end(counts), 0U);
    constexpr uint64_t mask = (1U << kDigit) - 1;
    for (const uint64_t key : keys) ++counts[key >> shift & mask];
    uint32_t sum = 0;
    for (uint32_t& count : counts) {
      const uint32_t here = count;
      count = sum;
      sum += here;
    }
    for (const uint64_t key : keys) spare[counts[key >> shift & mask]++] = key;
    keys.swap(spare);
  }
}

// Returns the number of bits that an id of [0, num_ids) takes.
inline int bits_of(int64_t num_ids) {
  return num_ids <= 1 ? 0 : 64 - std::countl_zero(static_cast<uint64_t>(num_ids - 1));
}

}  // namespace salientpp
