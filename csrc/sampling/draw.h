// How a vertex draws from its neighbour list: positions in [begin, begin + degree), a pure function of a stream.
//
//   uniform, without replacement   Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987), whose j-th draw is from
//                                  [0, j] inclusive.
//   weighted, without replacement  successive sampling, that is one draw after another with probability proportional
//                                  to the weights that are left: the `count` smallest of E_i / w_i with E_i
//                                  exponential (Efraimidis and Spirakis, IPL 97(5), 2006).
//   with replacement               independent draws; weighted ones by the running sum of the weights.
//   shared, without replacement    every neighbour t has one number for the whole batch, and a vertex takes those with
//                                  the smallest (LABOR-0: Balin and Catalyurek, Layer-Neighbor Sampling, NeurIPS 2023),
//                                  so that vertices which list the same neighbours tend to draw the same.
//
// A weight of zero is the limit of an ever smaller one: drawn only where the positive ones have run out. Only ratios of
// weights count, whatever their size: E / w and the running sum are kept from leaving the range of a double, by powers
// of two.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "memory.h"
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

// What a vertex draws from, given the key of all that the draw depends on besides. Both samplers use it, so both draw
// the same.
inline Stream vertex_stream(uint64_t key, int64_t vertex) {
  return Stream(mix64(key ^ static_cast<uint64_t>(vertex) * kGolden));
}

// How many of `degree` neighbours a vertex draws; a fanout below 0 takes all, each once, also with replacement.
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
    uint64_t taken = 0;  // by place, a bit each
    for (int64_t i = 0; i < count; ++i) {
      const auto last = static_cast<uint64_t>(degree - count + i);
      const uint64_t candidate = stream.below(last + 1);
      const uint64_t place = (taken >> candidate & 1) != 0 ? last : candidate;
      taken |= uint64_t{1} << place;
      out[i] = begin + static_cast<int64_t>(place);
    }
  } else if (count <= kScanFanout) {
    uint64_t seen = 0;  // the same by the last six bits of a place, so that few draws need the scan
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

// Natural logarithm of a normal x > 0, to a few units in the last place. The library's differs between CPUs; this one
// adds, multiplies and divides, so it does not: log(m 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)), m in [1/sqrt 2,
// sqrt 2). Without a branch and without converting an integer, so that a loop of it takes several at once.
inline double portable_log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  // An integer below 2^52 in the last bits of 2^52.
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

// Weighted draws; keeps its memory between vertices.
class WeightedDraw {
 public:
  // Writes `count` positions to `out`, ascending where there is no replacement. `weights` are those of the whole list:
  // finite and >= 0. Floats draw what the same numbers as doubles do.
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
  // An exponential variable over a weight, time * 2^exponent with time in [1, 2): over a weight near either end of the
  // range of a double, the quotient itself would be infinite or zero. Infinite weights are not there, so zero is the
  // only special one.
  struct Arrival {
    int64_t exponent;
    double time;
    int64_t position;
    bool operator<(const Arrival& other) const {
      if (exponent != other.exponent) return exponent < other.exponent;
      return time != other.time ? time < other.time : position < other.position;
    }
  };

  // After every arrival over a positive weight.
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

  // A positive, finite x as time * 2^exponent.
  static Arrival split(double x, int64_t position) {
    int64_t bias = 1023;
    if (x < std::numeric_limits<double>::min()) {  // subnormal: normal after this
      x *= 0x1p54;
      bias += 54;
    }
    const auto bits = std::bit_cast<uint64_t>(x);
    return {static_cast<int64_t>(bits >> 52) - bias,
            std::bit_cast<double>((bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL), position};
  }

  // Uniform on the midpoints of 2^52 equal parts of (0, 1): never 0 and never 1.
  static double uniform(Stream& stream) { return (static_cast<double>(stream.next() >> 12) + 0.5) * 0x1p-52; }

  // Fills the running sums of the weights, scaled in two steps as one factor may be out of range; returns the last.
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
      // The largest weight becomes about 2^900, so that 2^100 of them may follow; what is lost below is lost in the sum
      // anyway.
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
      // Rounding may give the whole sum; the last neighbour with weight has it then.
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

  // What `draw_any` draws, without an arrival of everyone: who may arrive before some moment is found without a
  // logarithm, as the exponential variable -log(u) is at least 2 (1 - u) / (1 + u). If `count` do arrive before it, the
  // earliest are among them; if not, the moment was too early. False where weights are so large or small that an
  // arrival is no double.
  template <class Weight>
  bool draw_early(const Stream& stream, const Weight* weights, int64_t begin, int64_t degree, int64_t count,
                  int64_t* out) {
    if (degree > std::numeric_limits<int32_t>::max()) return false;
    constexpr double kLeast = 0x1p-900, kMost = 0x1p900;
    constexpr double kNever = std::numeric_limits<double>::infinity();
    constexpr double kRounding = 1.0 + 0x1p-40;  // more than all that rounding adds
    std::array<double, 4> sums{};                // of every fourth weight, since one addition waits for the one before
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
    // If weights are alike, so many arrive on average: seldom fewer than `count`.
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
        num_early += !(2.0 * (1.0 - u) > latest * weight * (1.0 + u));  // infinity times zero is not greater
      }
      if (num_early >= count) {
        bool is_usual = true;
        for (int64_t k = 0; k < num_early; ++k)
          is_usual &= (heavy[k] == 0.0) | ((heavy[k] >= kLeast) & (heavy[k] <= kMost));
        if (!is_usual) return false;
        for (int64_t k = 0; k < num_early; ++k) time[k] = -portable_log(time[k]) / heavy[k];  // never, without weight
        if (take_earliest(begin, count, num_early, std::min(moment, std::numeric_limits<double>::max()), out))
          return true;
        if (moment == kNever) return false;  // too few have weight: among the others others decide
      }
      moment = tries < 3 ? 8.0 * moment : kNever;
    }
  }

  // Writes the `count` places of `size` with the smallest times, of equals the first; false if fewer are at most
  // `most`. By bisection: sorting would be a coin toss at every step, which no predictor wins.
  bool take_earliest(int64_t begin, int64_t count, int64_t size, double most, int64_t* out) const {
    const double* time = time_.data();
    const auto num_until = [&](uint64_t bits) {
      const double moment = std::bit_cast<double>(bits);
      int64_t number = 0;
      for (int64_t k = 0; k < size; ++k) number += time[k] <= moment;
      return number;
    };
    // As numbers, the bits of doubles that are not negative have their order. Up to `few` are fewer than `count`, up to
    // `enough` are enough.
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
    int64_t num_equal = 0;  // that are taken, of those that arrive last
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
  std::vector<double> time_, heavy_;  // of those that may be early: the arrival, and the weight
  std::vector<int32_t> place_;        // where they stand in the list
  std::vector<Arrival> earliest_;     // a heap with the latest in front
};

// Draws that agree between vertices; keeps its memory between them.
//
// The number of a neighbour is a function of the key and its id, one-to-one, so that equal numbers are parallel edges.
// The i-th of these (from 0) has a number of its own, a function of (key, id, i): every edge of a list has another one,
// independent of the others, and what a vertex takes is a uniform subset of its edges.
class SharedDraw {
 public:
  // A longer list is not read for a few draws: its vertex draws by itself, as if nothing were shared.
  static constexpr int64_t kMostNeighbors = 1000;

  static bool applies(int64_t degree, int64_t count) { return count > 0 && count < degree && degree <= kMostNeighbors; }

  // What the numbers are made from, given the key of the batch; no hop's key is made from this word.
  static uint64_t key_of(uint64_t batch_key) { return join_key(batch_key, 0x736861726564ULL); }

  // Writes `count` positions to `out`, ascending; `source` gives the id at a position. Only where `applies`.
  template <class Source>
  void operator()(uint64_t key, const Source& source, int64_t begin, int64_t degree, int64_t count, int64_t* out) {
    // About so many numbers are below a threshold that keeps enough of them nearly always; all are, if it does not.
    const double wanted = static_cast<double>(count) + 3.0 * std::sqrt(static_cast<double>(count)) + 2.0;
    const double chance = wanted / static_cast<double>(degree);
    uint64_t threshold = chance >= 1.0 ? ~uint64_t{0} : static_cast<uint64_t>(chance * 0x1p64);
    int64_t num_low = find_numbers(key, source, begin, degree, threshold);
    if (num_low < count) num_low = keep_below(threshold = ~uint64_t{0}, degree);
    // The largest number to take, by bisection: sorting would be a coin toss at every step, which no predictor wins.
    uint64_t few = 0, enough = threshold;  // below `few` are fewer than `count`, up to `enough` that many or more
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
    for (int64_t k = num_low - 1; num_enough > count; --k) {  // equal ones, of which the last go
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

  // Finds all numbers, and keeps those up to the threshold; gives how many these are. Numbers whose leading bits an
  // earlier one of the list has too may be its equals.
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
      for (int64_t k = num_suspects - 1; k >= 0; --k) {  // from the end, so that those before are as they were
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

  // The same where many are parallel.
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

// Shared draws that may be asked for again: in a block of batches a vertex draws the same whenever it is expanded, and
// a batch that is foreseen is drawn twice. Then the list, of up to a thousand ids, is not read again. Each pair of a
// vertex and a count has one place, which it takes from whoever had it before, so this is of a fixed size.
class DrawMemory {
 public:
  // `graph` is a number that no other graph has had; 0: nothing is remembered.
  void begin_batch(uint64_t shared_key, uint64_t graph, int64_t num_vertices) {
    is_on_ = graph != 0;
    if (!is_on_) return;
    key_ = join_key(shared_key, graph);
    const auto wanted = std::bit_ceil(static_cast<uint64_t>(std::clamp(2 * num_vertices, int64_t{2}, kMostPlaces)));
    if (places_.size() < wanted) places_ = Places(wanted);
    shift_ = 64 - std::countr_zero(places_.size());
  }

  bool is_on() const { return is_on_; }
  void prefetch(int64_t vertex, int64_t count) const { prefetch_write(&places_[place(vertex, count)]); }

  // What it drew, counted from where its list begins; null if that is not known.
  const uint16_t* find(int64_t vertex, int64_t degree, int64_t count) const {
    const Place& found = places_[place(vertex, count)];
    // The degree too, as an array that is altered on disk must not lead outside of it.
    const bool is_known = is_on_ && found.key == key_ && found.vertex == vertex && found.degree == degree;
    return is_known && found.count == count ? found.draws.data() : nullptr;
  }

  // Only where a shared draw applies.
  void keep(int64_t vertex, int64_t begin, int64_t degree, int64_t count, const int64_t* draws) {
    if (!is_on_ || count > kMostCount) return;
    Place& to = places_[place(vertex, count)];
    to.key = key_;
    to.vertex = vertex;
    to.degree = static_cast<uint16_t>(degree);
    to.count = static_cast<uint16_t>(count);
    for (int64_t k = 0; k < count; ++k) to.draws[static_cast<size_t>(k)] = static_cast<uint16_t>(draws[k] - begin);
  }

 private:
  static constexpr int64_t kMostPlaces = int64_t{1} << 18;  // 16 MiB
  static constexpr int64_t kMostCount = 22;                 // what fits into a place

  struct Place {
    uint64_t key = 0;
    int64_t vertex = -1;
    uint16_t degree = 0, count = 0;
    std::array<uint16_t, kMostCount> draws;
  };
  static_assert(sizeof(Place) == 64);
  using Places = std::vector<Place, HugePageAllocator<Place>>;

  uint64_t place(int64_t vertex, int64_t count) const {
    return (static_cast<uint64_t>(vertex) * 64 + static_cast<uint64_t>(count)) * kGolden >> shift_;
  }

  Places places_ = Places(2);
  uint64_t key_ = 0;
  int shift_ = 63;
  bool is_on_ = false;
};

}  // namespace salientpp
