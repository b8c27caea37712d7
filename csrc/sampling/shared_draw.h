// Draws that agree between vertices. Every neighbour has one number for the whole batch, and a vertex takes the
// neighbours with the smallest numbers. So vertices that list the same neighbours tend to draw the same. Draws are
// without replacement. (LABOR-0: Balin and Catalyurek, Layer-Neighbor Sampling, NeurIPS 2023.)
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "random.h"

namespace salientpp {

// The object keeps its memory between vertices.
//
// The number of a neighbour is a one-to-one function of its id for each key, so equal numbers mean parallel edges. The
// i-th of several parallel edges (from 0) gets its own number, a function of (key, id, i). So all edges of a list have
// different, independent numbers, and a vertex takes a uniform subset of its edges.
class SharedDraw {
 public:
  // A longer list is not read for a few draws: its vertex draws by itself, without sharing.
  static constexpr int64_t kMostNeighbors = 1000;

  static bool applies(int64_t degree, int64_t count) { return count > 0 && count < degree && degree <= kMostNeighbors; }

  // Returns the key of the numbers from the key of the batch. Keys of hops are made from other numbers.
  static uint64_t key_of(uint64_t batch_key) { return join_key(batch_key, 0x736861726564ULL); }

  // Writes `count` positions to `out`, ascending; `source` gives the id at a position. To be called only if `applies`.
  template <class Source>
  void operator()(uint64_t key, const Source& source, int64_t begin, int64_t degree, int64_t count, int64_t* out) {
    // Expected number of neighbours below the threshold. It is so large that at least `count` nearly always are below.
    // If not, all numbers are kept.
    const double wanted = static_cast<double>(count) + 3.0 * std::sqrt(static_cast<double>(count)) + 2.0;
    const double chance = wanted / static_cast<double>(degree);
    uint64_t threshold = chance >= 1.0 ? ~uint64_t{0} : static_cast<uint64_t>(chance * 0x1p64);
    int64_t num_low = find_numbers(key, source, begin, degree, threshold);
    if (num_low < count) num_low = keep_below(threshold = ~uint64_t{0}, degree);
    // Find the largest number to take by bisection: sorting would branch unpredictably at every step.
    uint64_t few = 0, enough = threshold;  // fewer than `count` are below `few`; at least `count` are up to `enough`
    int64_t num_enough = num_low;
    while (num_enough > count && few < enough) {
      const uint64_t middle = few + (enough - few) / 2;
      int64_t num_middle = 0;
      for (int64_t k = 0; k < num_low; ++k) num_middle += low_number_[static_cast<size_t>(k)] <= middle;
      if (num_middle < count) {
        few = middle + 1;
      } else {
        enough = middle;
        num_enough = num_middle;
      }
    }
    for (int64_t k = num_low - 1; num_enough > count; --k) {  // drop the last of equal numbers
      if (low_number_[static_cast<size_t>(k)] != enough) continue;
      std::copy(low_.data() + k + 1, low_.data() + num_low, low_.data() + k);
      std::copy(low_number_.data() + k + 1, low_number_.data() + num_low, low_number_.data() + k);
      --num_low;
      --num_enough;
    }
    int64_t taken = 0;
    for (int64_t k = 0; taken < count; ++k) {
      out[taken] = begin + low_[static_cast<size_t>(k)];
      taken += low_number_[static_cast<size_t>(k)] <= enough;
    }
  }

 private:
  static constexpr int64_t kBitsPerNeighbor = 64;
  static constexpr int64_t kFewSuspects = 32;

  // Computes all numbers, keeps the numbers up to the threshold, and returns how many are kept. A number whose leading
  // bits occurred earlier in the list may be equal to an earlier one.
  template <class Source>
  int64_t find_numbers(uint64_t key, const Source& source, int64_t begin, int64_t degree, uint64_t threshold) {
    const uint64_t num_bits = std::bit_ceil(static_cast<uint64_t>(kBitsPerNeighbor * degree));
    const int shift = 64 - std::countr_zero(num_bits);
    std::fill_n(seen_.data(), num_bits / 64, 0);
    int64_t num_suspects = 0, num_low = 0;
    for (int64_t i = 0; i < degree; ++i) {
      const uint64_t number = mix64(key + static_cast<uint64_t>(source(begin + i)) * kGolden);
      number_[static_cast<size_t>(i)] = number;
      low_[static_cast<size_t>(num_low)] = static_cast<int32_t>(i);
      low_number_[static_cast<size_t>(num_low)] = number;
      num_low += number <= threshold;
      const uint64_t bit = number >> shift;
      uint64_t& word = seen_[bit / 64];
      suspect_[static_cast<size_t>(num_suspects)] = static_cast<int32_t>(i);
      num_suspects += static_cast<int64_t>(word >> (bit % 64) & 1);
      word |= uint64_t{1} << (bit % 64);
    }
    bool repeats = false;
    if (num_suspects <= kFewSuspects) {
      for (int64_t k = num_suspects - 1; k >= 0; --k) {  // from the end, so that earlier ones are unchanged
        const int32_t place = suspect_[static_cast<size_t>(k)];
        uint64_t& number = number_[static_cast<size_t>(place)];
        const auto before = static_cast<uint64_t>(std::count(number_.data(), number_.data() + place, number));
        if (before > 0) number = join_key(number, before);
        repeats |= before > 0;
      }
    } else {
      number_repeats(degree);
      repeats = true;
    }
    return repeats ? keep_below(threshold, degree) : num_low;
  }

  // The same for lists with many parallel edges.
  void number_repeats(int64_t degree) {
    for (int64_t i = 0; i < degree; ++i) low_[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::sort(low_.data(), low_.data() + degree, [&](int32_t a, int32_t b) {
      const uint64_t of_a = number_[static_cast<size_t>(a)], of_b = number_[static_cast<size_t>(b)];
      return of_a != of_b ? of_a < of_b : a < b;
    });
    uint64_t previous = 0, before = 0;
    for (int64_t i = 0; i < degree; ++i) {
      uint64_t& number = number_[static_cast<size_t>(low_[static_cast<size_t>(i)])];
      before = i > 0 && number == previous ? before + 1 : 0;
      previous = number;
      if (before > 0) number = join_key(number, before);
    }
  }

  int64_t keep_below(uint64_t threshold, int64_t degree) {
    int64_t num_low = 0;
    for (int64_t i = 0; i < degree; ++i) {
      low_[static_cast<size_t>(num_low)] = static_cast<int32_t>(i);
      low_number_[static_cast<size_t>(num_low)] = number_[static_cast<size_t>(i)];
      num_low += number_[static_cast<size_t>(i)] <= threshold;
    }
    return num_low;
  }

  std::array<uint64_t, kMostNeighbors> number_, low_number_;
  std::array<int32_t, kMostNeighbors> low_, suspect_;
  std::array<uint64_t, std::bit_ceil(static_cast<uint64_t>(kMostNeighbors))> seen_;
};

}  // namespace salientpp
