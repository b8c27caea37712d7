// Uniform draws of a vertex from its neighbour list: positions in [begin, begin + degree), a pure function of a stream.
//
// Draws without replacement use Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987), whose j-th draw is from [0, j]
// inclusive. Draws with replacement are independent.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "random.h"

namespace salientpp {

// Above this fanout, a scan of the vertex's earlier draws is slower than a hash set of them.
constexpr int64_t kScanFanout = 48;

// Membership of Floyd's earlier draws, for large fanouts.
class DrawnSet {
 public:
  void clear(int64_t fanout) {
    table_.assign(std::max(size_t{128}, std::bit_ceil(2 * static_cast<size_t>(fanout))), -1);
  }
  bool insert(int64_t value) {
    const size_t mask = table_.size() - 1;
    for (size_t at = mix64(static_cast<uint64_t>(value)) & mask;; at = (at + 1) & mask) {
      if (table_[at] == value) return false;
      if (table_[at] == -1) {
        table_[at] = value;
        return true;
      }
    }
  }

 private:
  std::vector<int64_t> table_;
};

// Returns the stream of a vertex, from the key of everything else that its draws depend on. Both samplers use it, so
// both draw the same.
inline Stream vertex_stream(uint64_t key, int64_t vertex) {
  return Stream(mix64(key ^ static_cast<uint64_t>(vertex) * kGolden));
}

// Returns the number of neighbours that a vertex draws. A fanout below 0 takes all, each once, also with replacement.
inline int64_t num_draws(int64_t degree, int64_t fanout, bool replace) {
  return degree == 0 ? 0 : fanout < 0 ? degree : replace ? fanout : std::min(fanout, degree);
}

// Uniform draws, written to `out`.
inline void draw(Stream stream, int64_t begin, int64_t degree, int64_t count, bool replace, DrawnSet& drawn,
                 int64_t* out) {
  if (replace) {
    for (int64_t i = 0; i < count; ++i)
      out[i] = begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree)));
  } else if (count == degree) {
    for (int64_t i = 0; i < count; ++i) out[i] = begin + i;
  } else if (degree <= 64) {
    uint64_t taken = 0;  // one bit per place
    for (int64_t i = 0; i < count; ++i) {
      const auto last = static_cast<uint64_t>(degree - count + i);
      const uint64_t candidate = stream.below(last + 1);
      const uint64_t place = (taken >> candidate & 1) != 0 ? last : candidate;
      taken |= uint64_t{1} << place;
      out[i] = begin + static_cast<int64_t>(place);
    }
  } else if (count <= kScanFanout) {
    uint64_t seen = 0;  // one bit per last six bits of a place, so that few draws need the scan
    for (int64_t i = 0; i < count; ++i) {
      const auto last = static_cast<uint64_t>(degree - count + i);
      uint64_t place = stream.below(last + 1);
      if ((seen >> (place & 63) & 1) != 0) {
        bool taken = false;
        for (int64_t k = 0; k < i; ++k) taken |= out[k] == begin + static_cast<int64_t>(place);
        if (taken) place = last;
      }
      seen |= uint64_t{1} << (place & 63);
      out[i] = begin + static_cast<int64_t>(place);
    }
  } else {
    drawn.clear(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t last = begin + degree - count + i;
      const int64_t candidate =
          begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree - count + i + 1)));
      if (drawn.insert(candidate)) {
        out[i] = candidate;
      } else {
        drawn.insert(last);
        out[i] = last;
      }
    }
  }
}

}  // namespace salientpp
