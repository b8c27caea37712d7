// The counter-based generator behind every random choice.
//
// Promise: a stream is a pure function of its 64-bit key. It is the same on every CPU and compiler, because it uses
// only unsigned integer arithmetic. A stream keyed by (batch key, hop, vertex) gives one vertex's draws without
// knowledge of earlier draws, so any thread or host can make them again.
//
// The finaliser comes from splitmix64 (Steele, Lea, Flood, OOPSLA 2014, with Stafford's mix13 constants). Bounded
// integers use Lemire's method (ACM TOMACS 29(1), 2019) with its rejection step, so they are exactly uniform.
#pragma once

#include <cstdint>

namespace salientpp {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// Mixes one more field into a key; the order of the fields matters.
constexpr uint64_t join_key(uint64_t key, uint64_t field) {
  return mix64(mix64(key + kGolden) ^ (field * 0xd1342543de82ef95ULL + kGolden));
}

class Stream {
 public:
  explicit constexpr Stream(uint64_t key) : state_(key) {}

  constexpr uint64_t next() {
    state_ += kGolden;
    return mix64(state_);
  }

  // Uniform on {0, ..., bound - 1}; bound >= 1.
  uint64_t below(uint64_t bound) {
    using Wide = unsigned __int128;
    Wide product = static_cast<Wide>(next()) * bound;
    auto low = static_cast<uint64_t>(product);
    if (low < bound) [[unlikely]] {
      const uint64_t threshold = (0 - bound) % bound;
      while (low < threshold) {
        product = static_cast<Wide>(next()) * bound;
        low = static_cast<uint64_t>(product);
      }
    }
    return static_cast<uint64_t>(product >> 64);
  }

 private:
  uint64_t state_;
};

}  // namespace salientpp
