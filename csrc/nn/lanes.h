// Sums over the columns of a head. Partial sums in a fixed number of lanes let the compiler use vectors, and make the
// result the same on every CPU.
#pragma once

#include <cstdint>

namespace salientpp {

// The sum of term(c) for c in [from, to). A term must not branch, or the compiler cannot vectorise the loop.
template <class Wide, class Term>
Wide sum_in_lanes(int64_t from, int64_t to, const Term& term) {
  constexpr int64_t kLanes = 16;
  Wide lane[kLanes] = {};
  int64_t c = from;
  for (; c + kLanes <= to; c += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += term(c + j);
  for (int64_t j = 0; c + j < to; ++j) lane[j] += term(c + j);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}

}  // namespace salientpp
