// Weighted draws of a vertex from its neighbour list: positions in [begin, begin + degree), a pure function of a
// stream.
//
// Draws without replacement use successive sampling: one draw after another, with probability proportional to the
// remaining weights. This takes the `count` smallest of E_i / w_i with E_i exponential (Efraimidis and Spirakis, IPL
// 97(5), 2006). Draws with replacement are independent and use the running sum of the weights.
//
// A weight of zero acts as a vanishing weight: it is drawn only after all positive weights. Only ratios of weights
// matter. Scaling by powers of two keeps E / w and the running sum within the range of a double.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "random.h"

namespace salientpp {

// Natural logarithm of a normal x > 0, to a few units in the last place. The library's result differs between CPUs.
// This one only adds, multiplies and divides, so it does not: log(m 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)), with
// m in [1/sqrt 2, sqrt 2). It has no branch and converts no integer, so that the compiler can vectorise a loop of it.
inline double portable_log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  // An integer below 2^52 in the low bits of 2^52.
  double exponent = std::bit_cast<double>(bits >> 52 | 0x4330000000000000ULL) - (0x1p52 + 1023.0);
  double mantissa = std::bit_cast<double>((bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL);
  const bool is_large = mantissa > 1.4142135623730951;
  mantissa *= is_large ? 0.5 : 1.0;
  exponent += is_large ? 1.0 : 0.0;
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double series = 0.0;
  for (int k = 21; k >= 1; k -= 2) series = series * square + 1.0 / k;
  return exponent * 0.6931471805599453 + 2.0 * s * series;
}

// Weighted draws. The object keeps its memory between vertices.
class WeightedDraw {
 public:
  // Writes `count` positions to `out`, ascending without replacement. `weights` has the weights of the whole list,
  // finite and >= 0. Floats draw the same as equal doubles.
  template <class Weight>
  void operator()(Stream stream, const Weight* weights, int64_t begin, int64_t degree, int64_t count, bool replace,
                  int64_t* out) {
    if (replace) {
      with_replacement(stream, weights, begin, degree, count, out);
    } else if (count == degree) {
      for (int64_t i = 0; i < count; ++i) out[i] = begin + i;
    } else {
      without_replacement(stream, weights, begin, degree, count, out);
    }
  }

 private:
  // An exponential variable divided by a weight, as time * 2^exponent with time in [1, 2). For weights near either end
  // of the range of a double, the quotient itself would be infinite or zero. Weights are never infinite, so zero is the
  // only special case.
  struct Arrival {
    int64_t exponent;
    double time;
    int64_t position;
    bool operator<(const Arrival& other) const {
      if (exponent != other.exponent) return exponent < other.exponent;
      return time != other.time ? time < other.time : position < other.position;
    }
  };

  // Later than every arrival over a positive weight.
  static constexpr int64_t kWeightless = int64_t{1} << 32;

  static Arrival arrival(double exponential, double weight, int64_t position) {
    if (weight == 0.0) {
      const Arrival weightless = split(exponential, position);
      return {weightless.exponent + kWeightless, weightless.time, position};
    }
    const Arrival divisor = split(weight, position);
    Arrival found = split(exponential / divisor.time, position);
    found.exponent -= divisor.exponent;
    return found;
  }

  // Splits a positive, finite x into time * 2^exponent.
  static Arrival split(double x, int64_t position) {
    int64_t bias = 1023;
    if (x < std::numeric_limits<double>::min()) {  // subnormal; scale it to a normal number
      x *= 0x1p54;
      bias += 54;
    }
    const auto bits = std::bit_cast<uint64_t>(x);
    return {static_cast<int64_t>(bits >> 52) - bias,
            std::bit_cast<double>((bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL), position};
  }

  // Returns a uniform draw from the midpoints of 2^52 equal parts of (0, 1): never 0 and never 1.
  static double uniform(Stream& stream) { return (static_cast<double>(stream.next() >> 12) + 0.5) * 0x1p-52; }

  // Fills the running sums of the weights, and returns the last. Scales in two steps, since one factor may overflow.
  template <class Weight>
  double add_up(const Weight* weights, int64_t degree, double scale, double again = 1.0) {
    sums_.resize(static_cast<size_t>(degree));
    double sum = 0.0;
    for (int64_t i = 0; i < degree; ++i) sums_[static_cast<size_t>(i)] = sum += double{weights[i]} * scale * again;
    return sum;
  }

  template <class Weight>
  void with_replacement(Stream& stream, const Weight* weights, int64_t begin, int64_t degree, int64_t count,
                        int64_t* out) {
    double sum = add_up(weights + begin, degree, 1.0);
    if (sum != 0.0 && !(sum > 0x1p-900 && sum < 0x1p1000)) {
      // Scale the largest weight to about 2^900, so that 2^100 of them can be summed. Weights that are lost below would
      // be lost in the sum anyway.
      const double largest{*std::max_element(weights + begin, weights + begin + degree)};
      const int shift = 900 - std::ilogb(largest);
      sum = add_up(weights + begin, degree, std::ldexp(1.0, shift / 2), std::ldexp(1.0, shift - shift / 2));
    }
    for (int64_t i = 0; i < count; ++i) {
      if (sum == 0.0) {
        out[i] = begin + static_cast<int64_t>(stream.below(static_cast<uint64_t>(degree)));
        continue;
      }
      const auto found = std::upper_bound(sums_.begin(), sums_.end(), uniform(stream) * sum);
      // Rounding may give the whole sum. Then take the last neighbour with weight.
      const auto last = std::lower_bound(sums_.begin(), sums_.end(), sum);
      out[i] = begin + (std::min(found, last) - sums_.begin());
    }
  }

  template <class Weight>
  void without_replacement(const Stream& stream, const Weight* weights, int64_t begin, int64_t degree, int64_t count,
                           int64_t* out) {
    if (count == 0) return;
    if (!draw_early(stream, weights + begin, begin, degree, count, out))
      draw_any(stream, weights, begin, degree, count, out);
  }

  // Draws the same as `draw_any`, but without computing every arrival. The exponential variable -log(u) is never below
  // 2 (1 - u) / (1 + u), so entries that cannot arrive before a given moment are excluded without a logarithm. If at
  // least `count` of the others arrive before that moment, the earliest are among them. If fewer do, a later moment is
  // tried. Returns false if weights are so large or small that an arrival does not fit a double.
  template <class Weight>
  bool draw_early(const Stream& stream, const Weight* weights, int64_t begin, int64_t degree, int64_t count,
                  int64_t* out) {
    if (degree > std::numeric_limits<int32_t>::max()) return false;
    constexpr double kLeast = 0x1p-900, kMost = 0x1p900;
    constexpr double kNever = std::numeric_limits<double>::infinity();
    constexpr double kRounding = 1.0 + 0x1p-40;  // larger than all rounding errors
    std::array<double, 4> sums{};  // sums of every fourth weight, because a single chain of additions waits
    int64_t i = 0;
    for (; i + 4 <= degree; i += 4) {
      for (int64_t k = 0; k < 4; ++k) sums[static_cast<size_t>(k)] += double{weights[i + k]};
    }
    for (; i < degree; ++i) sums[0] += double{weights[i]};
    const double sum = sums[0] + sums[1] + sums[2] + sums[3];
    if (!(sum >= kLeast && sum <= kMost)) return false;
    if (static_cast<int64_t>(place_.size()) < degree) {
      time_.resize(static_cast<size_t>(degree));
      heavy_.resize(static_cast<size_t>(degree));
      place_.resize(static_cast<size_t>(degree));
    }
    double* __restrict time = time_.data(), * __restrict heavy = heavy_.data();
    int32_t* __restrict place = place_.data();
    // If all weights are equal, `wanted` entries arrive before the moment on average, and seldom fewer than `count`.
    const double wanted = static_cast<double>(count) + 1.5 * std::sqrt(static_cast<double>(count)) + 2.0;
    const double share = wanted / static_cast<double>(degree);
    double moment = share < 0.9 ? -static_cast<double>(degree) * std::log1p(-share) / sum : kNever;
    for (int tries = 0;; ++tries) {
      Stream draws = stream;
      int64_t num_early = 0;
      const double latest = moment * kRounding;
      for (int64_t k = 0; k < degree; ++k) {
        const double u = uniform(draws), weight{weights[k]};
        time[num_early] = u;
        heavy[num_early] = weight;
        place[num_early] = static_cast<int32_t>(k);
        num_early += !(2.0 * (1.0 - u) > latest * weight * (1.0 + u));  // infinity times zero compares false
      }
      if (num_early >= count) {
        bool is_usual = true;
        for (int64_t k = 0; k < num_early; ++k)
          is_usual &= (heavy[k] == 0.0) | ((heavy[k] >= kLeast) & (heavy[k] <= kMost));
        if (!is_usual) return false;
        for (int64_t k = 0; k < num_early; ++k) time[k] = -portable_log(time[k]) / heavy[k];  // infinite for weight 0
        if (take_earliest(begin, count, num_early, std::min(moment, std::numeric_limits<double>::max()), out))
          return true;
        if (moment == kNever) return false;  // too few have weight; `draw_any` chooses among the others
      }
      moment = tries < 3 ? 8.0 * moment : kNever;
    }
  }

  // Writes the `count` places of `size` with the smallest times; ties go to the first. Returns false if fewer than
  // `count` times are at most `most`. It uses bisection, because sorting would branch unpredictably at every step.
  bool take_earliest(int64_t begin, int64_t count, int64_t size, double most, int64_t* out) const {
    const double* time = time_.data();
    const auto num_until = [&](uint64_t bits) {
      const double moment = std::bit_cast<double>(bits);
      int64_t number = 0;
      for (int64_t k = 0; k < size; ++k) number += time[k] <= moment;
      return number;
    };
    // As integers, the bits of non-negative doubles have the same order. Fewer than `count` times are up to `few`, and
    // at least `count` are up to `enough`.
    uint64_t enough = std::bit_cast<uint64_t>(most);
    int64_t num_enough = num_until(enough);
    if (num_enough < count) return false;
    constexpr uint64_t kSixOctaves = uint64_t{6} << 52;
    uint64_t few = enough > kSixOctaves && num_until(enough - kSixOctaves) < count ? enough - kSixOctaves : 0;
    while (num_enough > count && enough - few > 1) {
      const uint64_t middle = few + (enough - few) / 2;
      const int64_t number = num_until(middle);
      if (number < count) {
        few = middle;
      } else {
        enough = middle;
        num_enough = number;
      }
    }
    const double last = std::bit_cast<double>(enough);
    int64_t num_equal = 0;  // number of entries to take that arrive exactly at `last`, if not all are taken
    if (num_enough > count)
      num_equal = count - std::count_if(time, time + size, [&](double each) { return each < last; });
    for (int64_t k = 0, taken = 0; taken < count; ++k) {
      out[taken] = begin + place_[static_cast<size_t>(k)];
      taken += num_enough == count ? time[k] <= last : time[k] < last || (time[k] == last && num_equal-- > 0);
    }
    return true;
  }

  template <class Weight>
  void draw_any(Stream stream, const Weight* weights, int64_t begin, int64_t degree, int64_t count, int64_t* out) {
    earliest_.clear();
    for (int64_t i = 0; i < degree; ++i) {
      const Arrival found = arrival(-portable_log(uniform(stream)), double{weights[begin + i]}, begin + i);
      if (static_cast<int64_t>(earliest_.size()) < count) {
        earliest_.push_back(found);
        std::push_heap(earliest_.begin(), earliest_.end());
      } else if (found < earliest_.front()) {
        std::pop_heap(earliest_.begin(), earliest_.end());
        earliest_.back() = found;
        std::push_heap(earliest_.begin(), earliest_.end());
      }
    }
    for (int64_t i = 0; i < count; ++i) out[i] = earliest_[static_cast<size_t>(i)].position;
    std::sort(out, out + count);
  }

  std::vector<double> sums_;
  std::vector<double> time_, heavy_;  // for entries that may be early: the arrival, and the weight
  std::vector<int32_t> place_;        // their places in the list
  std::vector<Arrival> earliest_;     // a heap with the latest arrival in front
};

}  // namespace salientpp
