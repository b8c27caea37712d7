// How a vertex draws from its neighbour list: positions in [begin, begin + degree), a pure function of a stream.
//
//   uniform, without replacement   Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987), whose j-th draw is from
//                                  [0, j] inclusive.
//   weighted, without replacement  successive sampling, that is one draw after another with probability proportional
//                                  to the weights that are left: the `count` smallest of E_i / w_i with E_i
//                                  exponential (Efraimidis and Spirakis, IPL 97(5), 2006).
//   with replacement               independent draws; weighted ones by the running sum of the weights.
//
// A weight of zero is the limit of an ever smaller one: drawn only where the positive ones have run out.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "random.h"

namespace salientpp {

// Above this fanout a scan of the vertex's earlier draws costs more than a hash set of them.
constexpr int64_t kScanFanout = 48;

// Membership of Floyd's earlier draws, for large fanouts.
class DrawnSet {
 public:
  void clear(int64_t fanout) {
    size_t capacity = 128;
    while (capacity < 2 * static_cast<size_t>(fanout)) capacity *= 2;
    table_.assign(capacity, -1);
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

// What a vertex draws from, given the key of all that the draw depends on besides. Both samplers use it, so both draw the same.
inline Stream vertex_stream(uint64_t key, int64_t vertex) { return Stream(mix64(key ^ static_cast<uint64_t>(vertex) * kGolden)); }

// How many of `degree` neighbours a vertex draws; a fanout below 0 takes all, each once, also with replacement.
inline int64_t num_draws(int64_t degree, int64_t fanout, bool replace) {
  return degree == 0 ? 0 : fanout < 0 ? degree : replace ? fanout : std::min(fanout, degree);
}

// Uniform draws, written to `out`.
inline void draw(Stream stream, int64_t begin, int64_t degree, int64_t count, bool replace, DrawnSet& drawn, int64_t* out) {
  if (replace) {
    for (int64_t i = 0; i < count; ++i) out[i] = begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree)));
  } else if (count == degree) {
    for (int64_t i = 0; i < count; ++i) out[i] = begin + i;
  } else if (count <= kScanFanout) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t last = begin + degree - count + i;
      const int64_t candidate = begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree - count + i + 1)));
      bool taken = false;
      for (int64_t k = 0; k < i; ++k) taken |= out[k] == candidate;
      out[i] = taken ? last : candidate;
    }
  } else {
    drawn.clear(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t last = begin + degree - count + i;
      const int64_t candidate = begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree - count + i + 1)));
      if (drawn.insert(candidate)) {
        out[i] = candidate;
      } else {
        drawn.insert(last);
        out[i] = last;
      }
    }
  }
}

// Natural logarithm of a normal x > 0, to a few units in the last place. The library's differs between CPUs; this one
// adds, multiplies and divides, so it does not: log(m 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)), m in [1/sqrt 2, sqrt 2).
inline double portable_log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  auto exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double mantissa = std::bit_cast<double>((bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL);
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    ++exponent;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double series = 0.0;
  for (int k = 21; k >= 1; k -= 2) series = series * square + 1.0 / k;
  return static_cast<double>(exponent) * 0.6931471805599453 + 2.0 * s * series;
}

// Weighted draws; keeps its memory between vertices.
class WeightedDraw {
 public:
  // Writes `count` positions to `out`, ascending where there is no replacement. `weights` are those of the whole list:
  // finite and >= 0.
  void operator()(Stream stream, const double* weights, int64_t begin, int64_t degree, int64_t count, bool replace, int64_t* out) {
    if (replace) {
      with_replacement(stream, weights, begin, degree, count, out);
    } else if (count == degree) {
      for (int64_t i = 0; i < count; ++i) out[i] = begin + i;
    } else {
      without_replacement(stream, weights, begin, degree, count, out);
    }
  }

 private:
  // An exponential variable over a weight; infinite weights are not there, so zero is the only special one.
  struct Arrival {
    bool weightless;
    double time;
    int64_t position;
    bool operator<(const Arrival& other) const {
      if (weightless != other.weightless) return other.weightless;
      return time != other.time ? time < other.time : position < other.position;
    }
  };

  // Uniform on the midpoints of 2^52 equal parts of (0, 1): never 0 and never 1.
  static double uniform(Stream& stream) { return (static_cast<double>(stream.next() >> 12) + 0.5) * 0x1p-52; }

  void with_replacement(Stream& stream, const double* weights, int64_t begin, int64_t degree, int64_t count, int64_t* out) {
    sums_.resize(static_cast<size_t>(degree));
    double sum = 0.0;
    for (int64_t i = 0; i < degree; ++i) sums_[static_cast<size_t>(i)] = sum += weights[begin + i];
    for (int64_t i = 0; i < count; ++i) {
      if (sum == 0.0) {
        out[i] = begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree)));
        continue;
      }
      const auto found = std::upper_bound(sums_.begin(), sums_.end(), uniform(stream) * sum);
      // Rounding may give the whole sum; the last neighbour with weight has it then.
      const auto last = std::lower_bound(sums_.begin(), sums_.end(), sum);
      out[i] = begin + (std::min(found, last) - sums_.begin());
    }
  }

  void without_replacement(Stream& stream, const double* weights, int64_t begin, int64_t degree, int64_t count, int64_t* out) {
    earliest_.clear();
    if (count == 0) return;
    for (int64_t i = 0; i < degree; ++i) {
      const double weight = weights[begin + i];
      const double exponential = -portable_log(uniform(stream));
      const Arrival arrival{weight == 0.0, weight == 0.0 ? exponential : exponential / weight, begin + i};
      if (static_cast<int64_t>(earliest_.size()) < count) {
        earliest_.push_back(arrival);
        std::push_heap(earliest_.begin(), earliest_.end());
      } else if (arrival < earliest_.front()) {
        std::pop_heap(earliest_.begin(), earliest_.end());
        earliest_.back() = arrival;
        std::push_heap(earliest_.begin(), earliest_.end());
      }
    }
    for (int64_t i = 0; i < count; ++i) out[i] = earliest_[static_cast<size_t>(i)].position;
    std::sort(out, out + count);
  }

  std::vector<double> sums_;
  std::vector<Arrival> earliest_;  // a heap with the latest in front
};

}  // namespace salientpp
