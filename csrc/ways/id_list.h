// Coded lists of ids. A list holds the distinct ids that a batch needs, ascending. The first byte is the kind. Then
// come either the gaps between ids or one bit per id, whichever is shorter. A list takes about 5 to 7 bits per id.
//
// Gaps are Rice codes (Some practical universal noiseless coding techniques, JPL 79-22, 1979), lowest bit first. A gap
// g is coded as g >> k zeros and a one, followed by the low k bits of g. Inside a part, ids are ordered by the part's
// own inclusion probability, so gaps grow and shrink along a list. Each block of 64 gaps therefore has its own k, in
// five bits before the block. One bit per id is the same code with k = 0 throughout. Unused bits at the end are 0.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "check.h"

namespace salientpp {

constexpr int64_t kMostIds = int64_t{1} << 31;
constexpr uint8_t kGaps = 0, kBits = 1;

constexpr int64_t kBlockIds = 64;
constexpr int kKindBits = 8, kParameterBits = 5;

inline void check_num_ids(int64_t num_ids) {
  check(num_ids >= 0 && num_ids < kMostIds, "num_ids must be in [0, 2^31), got ", num_ids);
}

// Reads the ids of a list, in order.
class ListReader {
 public:
  ListReader(const Tensor& list, int64_t num_ids, const char* name) : name_(name), num_ids_(num_ids) {
    check_vector(list, ScalarType::Byte, name);
    check(list.numel() >= 1, name, " must be a list of code_ids, got nothing");
    at_ = static_cast<const uint8_t*>(list.const_data_ptr());
    end_ = at_ + list.numel();
    const uint8_t kind = *at_++;
    check(kind == kGaps || kind == kBits, name, " must be a list of code_ids, got kind ", int{kind});
    left_ = kind == kBits ? kEnd : 0;
    advance();
  }

  // Calls f(id) for all remaining ids below `limit`.
  template <class F>
  void until(int64_t limit, F&& f) {
    ListReader here = *this;  // f cannot write to this copy, so all of it stays in registers
    while (here.next_ < limit) {
      f(here.next_);
      here.advance();
    }
    *this = here;
  }

 private:
  static constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

  // Fills `bits_` to 56 bits or more, unless the list ends. The bits above them are zeros, or already the list's next
  // bits.
  void fill() {
    if (end_ - at_ >= 8) [[likely]] {
      uint64_t word;
      std::memcpy(&word, at_, 8);
      if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
      bits_ |= word << num_bits_;
      at_ += (63 - num_bits_) / 8;
      num_bits_ |= 56;
    } else {
      for (; num_bits_ < 56 && at_ != end_; num_bits_ += 8) bits_ |= static_cast<uint64_t>(*at_++) << num_bits_;
    }
  }

  void skip(int number) {
    bits_ >>= number;
    num_bits_ -= number;
  }

  void advance() {
    fill();
    if (left_ == 0) {
      k_ = static_cast<int>(bits_ & ((1U << kParameterBits) - 1));
      if (num_bits_ < kParameterBits) {
        next_ = kEnd;
        return;
      }
      skip(kParameterBits);
      left_ = kBlockIds;
    }
    --left_;
    int64_t zeros = 0;
    int more = std::countr_zero(bits_);
    while (more >= num_bits_) [[unlikely]] {
      zeros += num_bits_;
      bits_ = 0;
      num_bits_ = 0;
      fill();
      if (num_bits_ == 0) {
        next_ = kEnd;
        return;
      }
      more = std::countr_zero(bits_);
    }
    zeros += more;
    skip(more);
    skip(1);
    if (num_bits_ < k_) [[unlikely]]
      fill();
    check(num_bits_ >= k_, name_, " is corrupt: a gap does not end");
    const auto low = static_cast<int64_t>(bits_ & ((uint64_t{1} << k_) - 1));
    skip(k_);
    next_ = zeros < num_ids_ ? last_ + 1 + (zeros << k_ | low) : kEnd - 1;
    check(next_ < num_ids_, name_, " must hold ids in [0, num_ids = ", num_ids_, "), got ", next_);
    last_ = next_;
  }

  const char* name_;
  const uint8_t *at_, *end_;
  int64_t num_ids_, next_ = kEnd, last_ = -1;
  int64_t left_;  // gaps left in the block
  uint64_t bits_ = 0;
  int num_bits_ = 0, k_ = 0;
};

}  // namespace salientpp
