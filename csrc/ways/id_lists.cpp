// Writes coded lists of ids, and reads them.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "ways/id_list.h"
#include "ways/radix_sort.h"

namespace salientpp {
namespace {

class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  // Appends at most 32 bits; no higher bits may be set.
  void put(uint64_t value, int bits) {
    word_ |= value << filled_;
    filled_ += bits;
    if (filled_ >= 32) {
      for (int i = 0; i < 4; ++i) out_[i] = static_cast<uint8_t>(word_ >> (8 * i));
      out_ += 4;
      word_ >>= 32;
      filled_ -= 32;
    }
  }

  void put_gap(uint64_t gap, int k) {
    uint64_t zeros = gap >> k;
    const uint64_t low = gap & ((uint64_t{1} << k) - 1);
    if (zeros + 1 + static_cast<uint64_t>(k) <= 32) [[likely]] {
      put((low << 1 | 1) << zeros, static_cast<int>(zeros) + 1 + k);
      return;
    }
    for (; zeros >= 32; zeros -= 32) put(0, 32);
    put(uint64_t{1} << zeros, static_cast<int>(zeros) + 1);
    put(low, k);
  }

  void finish() {
    for (; filled_ > 0; filled_ -= 8, word_ >>= 8) *out_++ = static_cast<uint8_t>(word_);
  }

 private:
  uint8_t* out_;
  uint64_t word_ = 0;
  int filled_ = 0;
};

// For a block of gaps, returns the best k near the k of the mean, and the number of bits that the block then takes.
std::pair<int, int64_t> best_code(const uint32_t* gaps, int64_t size) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += gaps[i];
  // For gaps with a geometric distribution, the best k is about log2 of 0.7 times the mean.
  const int about = static_cast<int>(std::bit_width(sum * 11 / 16 / static_cast<uint64_t>(size))) - 1;
  std::pair<int, int64_t> best{0, std::numeric_limits<int64_t>::max()};
  for (int k = std::max(0, about - 1); k <= std::min(30, about + 1); ++k) {
    uint64_t zeros = 0;
    for (int64_t i = 0; i < size; ++i) zeros += gaps[i] >> k;
    const int64_t bits = static_cast<int64_t>(zeros) + size * (1 + k);
    if (bits < best.second) best = {k, bits};
  }
  return best;
}

// Leaves the distinct ids of a list in ascending order. `spare` and `bits` are scratch memory.
void sort_distinct(std::vector<uint64_t>& ids, std::vector<uint64_t>& spare, std::vector<uint64_t>& bits,
                   int64_t num_ids) {
  if (std::is_sorted(ids.begin(), ids.end())) {
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return;
  }
  const auto num_words = static_cast<size_t>(num_ids / 64 + 1);
  if (num_words > 2 * ids.size()) {
    radix_sort(ids, spare, 0, bits_of(num_ids));
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return;
  }
  // If the range of ids is not much larger than their number, setting one bit per id is faster than sorting.
  bits.assign(num_words, 0);
  for (const uint64_t id : ids) bits[id / 64] |= uint64_t{1} << (id % 64);
  size_t size = 0;
  for (size_t at = 0; at < num_words; ++at)
    for (uint64_t word = bits[at]; word != 0; word &= word - 1)
      ids[size++] = 64 * at + static_cast<uint64_t>(std::countr_zero(word));
  ids.resize(size);
}

// Codes the distinct ids that are not in [but_from, but_to).
Tensor code_ids(const Tensor& ids, int64_t num_ids, int64_t but_from, int64_t but_to) {
  check_vector(ids, ScalarType::Long, "ids");
  check_num_ids(num_ids);
  check(but_from >= 0 && but_from <= but_to, "but_from and but_to must be a range, got ", but_from, " to ", but_to);
  static thread_local std::vector<uint64_t> sorted, spare, bits;
  static thread_local std::vector<uint32_t> gaps;
  static thread_local std::vector<uint8_t> codes;
  const int64_t* id = int64_data(ids);
  sorted.resize(static_cast<size_t>(ids.numel()));
  const auto length = static_cast<uint64_t>(but_to - but_from);
  size_t size = 0;
  uint64_t largest = 0;
  uint64_t* chosen = sorted.data();
  for (int64_t i = 0, number = ids.numel(); i < number; ++i) {
    const auto value = static_cast<uint64_t>(id[i]);
    largest = std::max(largest, value);
    chosen[size] = value;
    size += value - static_cast<uint64_t>(but_from) >= length;
  }
  check(ids.numel() == 0 || largest < static_cast<uint64_t>(num_ids), "ids must be in [0, ", num_ids, "), got ",
        static_cast<int64_t>(largest));
  sorted.resize(size);
  sort_distinct(sorted, spare, bits, num_ids);
  const auto number = static_cast<int64_t>(sorted.size());
  gaps.resize(sorted.size());
  codes.clear();
  uint64_t next = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    gaps[i] = static_cast<uint32_t>(sorted[i] - next);
    next = sorted[i] + 1;
  }
  int64_t gap_bits = 0;
  for (int64_t first = 0; first < number; first += kBlockIds) {
    const auto [k, num_bits] = best_code(gaps.data() + first, std::min(kBlockIds, number - first));
    codes.push_back(static_cast<uint8_t>(k));
    gap_bits += kParameterBits + num_bits;
  }
  const auto bit_bits = static_cast<int64_t>(next);
  const bool by_gaps = gap_bits <= bit_bits;
  Tensor list = new_vector((kKindBits + std::min(gap_bits, bit_bits) + 7) / 8, ScalarType::Byte);
  BitWriter out(static_cast<uint8_t*>(list.mutable_data_ptr()));
  out.put(by_gaps ? kGaps : kBits, kKindBits);
  for (int64_t i = 0; i < number; ++i) {
    const int k = by_gaps ? codes[static_cast<size_t>(i / kBlockIds)] : 0;
    if (by_gaps && i % kBlockIds == 0) out.put(static_cast<uint64_t>(k), kParameterBits);
    out.put_gap(gaps[static_cast<size_t>(i)], k);
  }
  out.finish();
  return list;
}

Tensor ids_of_list(const Tensor& list, int64_t num_ids) {
  check_num_ids(num_ids);
  std::vector<int64_t> ids;
  ListReader(list, num_ids, "list").until(num_ids, [&](int64_t id) { ids.push_back(id); });
  return vector_of(ids);
}

// For each id of the first lists, finds the next later list that has it. It goes from the last list to the first and
// remembers where each id was seen last. It takes a stretch of ids at a time, so that this memory is small and fast.
std::vector<Tensor> link_lists(const std::vector<Tensor>& lists, int64_t heads, int64_t num_ids) {
  constexpr int64_t kStretch = int64_t{1} << 15;
  check_num_ids(num_ids);
  const auto size = static_cast<int64_t>(lists.size());
  check(heads >= 0 && heads <= size, "heads must be in [0, ", size, "], got ", heads);
  check(size < 1 << 15, "there must be fewer than 2^15 lists, got ", size);
  std::vector<ListReader> readers;
  readers.reserve(lists.size());
  for (const Tensor& list : lists) readers.emplace_back(list, num_ids, "lists");
  static thread_local std::vector<uint16_t> seen;  // number of the list plus one; 0 for none
  seen.assign(static_cast<size_t>(std::min(kStretch, num_ids)), 0);
  std::vector<std::vector<int16_t>> found(static_cast<size_t>(heads));
  for (int64_t begin = 0; begin < num_ids; begin += kStretch) {
    if (begin > 0) std::fill(seen.begin(), seen.end(), uint16_t{0});
    uint16_t* last = seen.data() - begin;
    const int64_t end = std::min(begin + kStretch, num_ids);
    for (int64_t j = size - 1; j >= heads; --j) {
      const auto number = static_cast<uint16_t>(j + 1);
      readers[static_cast<size_t>(j)].until(end, [&](int64_t id) { last[id] = number; });
    }
    for (int64_t j = heads - 1; j >= 0; --j) {
      const auto number = static_cast<uint16_t>(j + 1);
      std::vector<int16_t>& of_head = found[static_cast<size_t>(j)];
      readers[static_cast<size_t>(j)].until(end, [&](int64_t id) {
        of_head.push_back(static_cast<int16_t>(last[id] == 0 ? 0 : last[id] - number));
        last[id] = number;
      });
    }
  }
  std::vector<Tensor> links;
  for (const auto& of_head : found) {
    links.push_back(new_vector(static_cast<int64_t>(of_head.size()), ScalarType::Short));
    std::copy(of_head.begin(), of_head.end(), static_cast<int16_t*>(links.back().mutable_data_ptr()));
  }
  return links;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("code_ids", TORCH_BOX(&code_ids));
  m.impl("ids_of_list", TORCH_BOX(&ids_of_list));
  m.impl("link_lists", TORCH_BOX(&link_lists));
}

}  // namespace
}  // namespace salientpp
