// A cache that knows the next batches: coded lists of the rows that they need, and what stays, enters and leaves.
//
// Everything that lasts is in tensors of the caller:
//   list      the distinct ids that a batch needs, ascending and coded: a byte for the kind, and then either the gaps
//             between ids, or a bit per id, whichever is shorter. About 5 to 7 bits an id.
//   slot_id   per slot the id whose row it holds, -1 for none.
//   slot_key  per slot when the row is needed next: the batch's number mod 2^15 if it is known, else 2^15 + a level
//             that falls as the row is more probable; 2^16 - 1 without a row.
//   table     open addressing from id to slot + 1, 0 for nobody.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "memory.h"
#include "random.h"

namespace salientpp {
namespace {

constexpr int64_t kMostIds = int64_t{1} << 31;
constexpr uint8_t kGaps = 0, kBits = 1;

// --- lists ------------------------------------------------------------------------------------------------
//
// Gaps are Rice's codes (Some practical universal noiseless coding techniques, JPL 79-22, 1979), lowest bit first: of a
// gap g the number g >> k as so many zeros and a one, and then the low k bits of g. Ids of a part are in the order of
// how probably it needs them itself, so gaps grow and shrink along a list: each 64 of them have a k of their own, in
// five bits before them. A bit per id is the same code with k = 0 throughout. What is left of the last byte is zeros.

constexpr int64_t kBlockIds = 64;
constexpr int kKindBits = 8, kParameterBits = 5;

void check_num_ids(int64_t num_ids) {
  check(num_ids >= 0 && num_ids < kMostIds, "num_ids must be in [0, 2^31), got ", num_ids);
}

// Sorts by the bits from `first` on, least significant digit first; `spare` is as long.
void radix_sort(std::vector<uint64_t>& keys, std::vector<uint64_t>& spare, int first, int bits) {
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

int bits_of(int64_t num_ids) {
  return num_ids <= 1 ? 0 : 64 - std::countl_zero(static_cast<uint64_t>(num_ids - 1));
}

class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  // At most 32 bits, and no others.
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

// Of a block of gaps: the k of the shortest code among those near the mean's, and how many bits that takes.
std::pair<int, int64_t> best_code(const uint32_t* gaps, int64_t size) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += gaps[i];
  // Of gaps that are spread geometrically, the best is about log2 of 0.7 times the mean.
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

// Leaves the distinct ids of a list in ascending order. `spare` and `bits` are for its use.
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
  // A bit per id that there is takes less time than sorting, where there are not many more of them.
  bits.assign(num_words, 0);
  for (const uint64_t id : ids) bits[id / 64] |= uint64_t{1} << (id % 64);
  size_t size = 0;
  for (size_t at = 0; at < num_words; ++at)
    for (uint64_t word = bits[at]; word != 0; word &= word - 1)
      ids[size++] = 64 * at + static_cast<uint64_t>(std::countr_zero(word));
  ids.resize(size);
}

// The distinct ids that are not in [but_from, but_to).
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

// The ids of a list, in order.
class Reader {
 public:
  Reader(const Tensor& list, int64_t num_ids, const char* name) : name_(name), num_ids_(num_ids) {
    check_vector(list, ScalarType::Byte, name);
    check(list.numel() >= 1, name, " must be a list of code_ids, got nothing");
    at_ = static_cast<const uint8_t*>(list.const_data_ptr());
    end_ = at_ + list.numel();
    const uint8_t kind = *at_++;
    check(kind == kGaps || kind == kBits, name, " must be a list of code_ids, got kind ", int{kind});
    left_ = kind == kBits ? kEnd : 0;
    advance();
  }

  // Calls f(id) for all that are left below `limit`.
  template <class F>
  void until(int64_t limit, F&& f) {
    Reader here = *this;  // what f writes to is none of this, so that all of it stays in registers
    while (here.next_ < limit) {
      f(here.next_);
      here.advance();
    }
    *this = here;
  }

 private:
  static constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

  // 56 bits or more, unless the list ends before. Those beyond are zeros, or what will be there.
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
  int64_t left_;  // of the block
  uint64_t bits_ = 0;
  int num_bits_ = 0, k_ = 0;
};

Tensor ids_of_list(const Tensor& list, int64_t num_ids) {
  check_num_ids(num_ids);
  std::vector<int64_t> ids;
  Reader(list, num_ids, "list").until(num_ids, [&](int64_t id) { ids.push_back(id); });
  Tensor out = new_vector(static_cast<int64_t>(ids.size()), ScalarType::Long);
  std::copy(ids.begin(), ids.end(), mutable_int64_data(out));
  return out;
}

// From the last list to the first, with what was seen last of each id. A stretch of ids at a time, so that this takes
// little memory, and a fast one.
std::vector<Tensor> link_lists(const std::vector<Tensor>& lists, int64_t heads, int64_t num_ids) {
  constexpr int64_t kStretch = int64_t{1} << 15;
  check_num_ids(num_ids);
  const auto size = static_cast<int64_t>(lists.size());
  check(heads >= 0 && heads <= size, "heads must be in [0, ", size, "], got ", heads);
  check(size < 1 << 15, "there may be fewer than 2^15 lists, got ", size);
  std::vector<Reader> readers;
  readers.reserve(lists.size());
  for (const Tensor& list : lists) readers.emplace_back(list, num_ids, "lists");
  static thread_local std::vector<uint16_t> seen;  // one more than the list, 0 for none
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

// --- slots ------------------------------------------------------------------------------------------------

constexpr uint32_t kUnknown = 0x8000, kNoRow = 0xffff, kNumberMask = 0x7fff;

// 16 levels to a factor of two; the last is that of probability 0. The order of positive floats is that of their bits.
constexpr uint32_t kLevels = 1024;

uint32_t level_of(float probability) {
  const auto bits = std::bit_cast<uint32_t>(probability);
  if (!(probability > 0.0F)) return kLevels - 1;
  return probability >= 1.0F ? 0 : std::min((0x3f800000U - bits) >> 19, kLevels - 2);
}

// Entry: an unsigned type that holds the number of slots.
template <class Entry>
struct Slots {
  int32_t* id;
  uint16_t* key;
  Entry* table;
  int64_t num_slots;
  uint64_t capacity;

  uint64_t home(int64_t wanted) const { return ((static_cast<uint64_t>(wanted) * kGolden) >> 32) * capacity >> 32; }
  uint64_t after(uint64_t at) const { return at + 1 == capacity ? 0 : at + 1; }

  void prefetch(int64_t wanted) const { prefetch_read(&table[home(wanted)]); }
  void prefetch_slot(int64_t wanted) const {
    if (const Entry entry = table[home(wanted)]; entry != 0) prefetch_read(&id[entry - 1]);
  }

  // Entries name slots, as many as have rows; so every search ends. In types that leave the compiler its vectors, since
  // this reads all of the table.
  void check_table() const {
    uint32_t entries = 0, rows = 0;
    Entry largest = 0;
    for (uint64_t at = 0; at < capacity; ++at) {
      entries += table[at] != 0;
      largest = std::max(largest, table[at]);
    }
    for (int64_t slot = 0; slot < num_slots; ++slot) rows += id[slot] >= 0;
    check(static_cast<int64_t>(largest) <= num_slots, "table is corrupt: it names slot ",
          static_cast<int64_t>(largest) - 1, " of ", num_slots);
    check(entries == rows, "table is corrupt: it names ", entries, " slots, and in slot_id ", rows, " have rows");
  }

  // Where its entry is, or would be.
  uint64_t place(int64_t wanted) const {
    for (uint64_t at = home(wanted);; at = after(at)) {
      const Entry entry = table[at];
      if (entry == 0 || id[entry - 1] == wanted) return at;
    }
  }

  int64_t find(int64_t wanted) const { return static_cast<int64_t>(table[place(wanted)]) - 1; }

  void insert(int64_t slot, int64_t wanted) {
    table[place(wanted)] = static_cast<Entry>(slot + 1);
    id[slot] = static_cast<int32_t>(wanted);
  }

  void erase(int64_t wanted) {
    uint64_t hole = place(wanted);
    if (table[hole] == 0) return;
    for (uint64_t at = after(hole); table[at] != 0; at = after(at)) {
      const uint64_t from_home = at + capacity - home(id[table[at] - 1]);
      const uint64_t from_hole = at + capacity - hole;
      if ((from_home >= capacity ? from_home - capacity : from_home) >=
          (from_hole >= capacity ? from_hole - capacity : from_hole)) {
        table[hole] = table[at];
        hole = at;
      }
    }
    table[hole] = 0;
  }
};

// Calls f with the slots that the tensors are.
template <class F>
void with_slots(const Tensor& slot_id, const Tensor& slot_key, const Tensor& table, F&& f) {
  check_vector(slot_id, ScalarType::Int, "slot_id");
  check_vector(slot_key, ScalarType::Short, "slot_key");
  check_defined(table, "table");
  const int64_t num_slots = slot_id.numel();
  check(slot_key.numel() == num_slots, "slot_key must have one entry per slot, expected ", num_slots, ", got ",
        slot_key.numel());
  const bool narrow = table.scalar_type() == ScalarType::Short;
  check_vector(table, narrow ? ScalarType::Short : ScalarType::Int, "table");
  check(table.numel() > num_slots && table.numel() < kMostIds, "table must have more entries than the ", num_slots,
        " slots, got ", table.numel());
  check(!narrow || num_slots < 1 << 16, "a table of int16 is for fewer than 2^16 slots, got ", num_slots);
  const auto call = [&]<class Entry>(Entry*) {
    f(Slots<Entry>{static_cast<int32_t*>(slot_id.mutable_data_ptr()),
                   static_cast<uint16_t*>(slot_key.mutable_data_ptr()), static_cast<Entry*>(table.mutable_data_ptr()),
                   num_slots, static_cast<uint64_t>(table.numel())});
  };
  if (narrow)
    call(static_cast<uint16_t*>(nullptr));
  else
    call(static_cast<uint32_t*>(nullptr));
}

void fill_slots(const Tensor& ids, const Tensor& prior, const Tensor& slot_id, const Tensor& slot_key,
                const Tensor& table) {
  check_vector(ids, ScalarType::Long, "ids");
  check_vector(prior, ScalarType::Float, "prior");
  const int64_t size = ids.numel();
  const int64_t* id = int64_data(ids);
  const auto* chance = static_cast<const float*>(prior.const_data_ptr());
  check_num_ids(prior.numel());
  for (int64_t i = 0; i < size; ++i)
    check(id[i] >= 0 && id[i] < prior.numel(), "ids[", i, "] must be in [0, ", prior.numel(), "), got ", id[i]);
  with_slots(slot_id, slot_key, table, [&](auto slots) {
    check(size <= slots.num_slots, "there may be at most as many ids as the ", slots.num_slots, " slots, got ", size);
    std::vector<int64_t> sorted(id, id + size);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    check(twice == sorted.end(), "ids must be distinct, got ", twice == sorted.end() ? 0 : *twice, " twice");
    std::fill_n(slots.id, slots.num_slots, -1);
    std::fill_n(slots.key, slots.num_slots, static_cast<uint16_t>(kNoRow));
    std::fill_n(slots.table, slots.capacity, std::remove_pointer_t<decltype(slots.table)>{0});
    for (int64_t i = 0; i < size; ++i) {
      slots.insert(i, id[i]);
      slots.key[i] = static_cast<uint16_t>(kUnknown | level_of(chance[id[i]]));
    }
  });
}

void note_uses(const Tensor& list, int64_t batch, int64_t num_ids, const Tensor& slot_id, const Tensor& slot_key,
               const Tensor& table) {
  check_num_ids(num_ids);
  static thread_local std::vector<int64_t> ids;
  ids.clear();
  // All of it before anything is written.
  Reader(list, num_ids, "list").until(num_ids, [&](int64_t id) { ids.push_back(id); });
  const auto number = static_cast<uint16_t>(static_cast<uint64_t>(batch) & kNumberMask);
  with_slots(slot_id, slot_key, table, [&](auto slots) {
    slots.check_table();
    constexpr size_t kFar = 32, kNear = 12;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i + kFar < ids.size()) slots.prefetch(ids[i + kFar]);
      if (i + kNear < ids.size()) slots.prefetch_slot(ids[i + kNear]);
      const int64_t slot = slots.find(ids[i]);
      if (slot >= 0 && (slots.key[slot] & kUnknown) != 0) slots.key[slot] = number;
    }
  });
}

// What a thread keeps between calls. It never influences a result.
struct Scratch {
  std::vector<uint64_t> sorted, spare;
  std::vector<int32_t> slot_at;   // by place in the batch: its slot, or -1
  std::vector<uint16_t> key_at;   // by place: the key that the slot had
  std::vector<int32_t> row_at;    // by place: which of the fetched rows it is
  std::vector<uint32_t> rank;     // of the fetched rows by ascending id: when they are needed next
  std::vector<int32_t> place;     // of the same
  std::vector<int32_t> admitted;  // places, by ascending id
  std::vector<uint16_t> slot_rank;
  std::vector<uint32_t>
      count[2];  // of rows by rank; of every other row, as those that follow each other are often equal
};

using Moves = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Moves plan_batch(const Tensor& remote_id, const Tensor& links, int64_t batch, const Tensor& prior,
                 const Tensor& slot_id, const Tensor& slot_key, const Tensor& table) {
  check_vector(remote_id, ScalarType::Long, "remote_id");
  check_vector(links, ScalarType::Short, "links");
  check_vector(prior, ScalarType::Float, "prior");
  const int64_t size = remote_id.numel(), num_ids = prior.numel();
  check_num_ids(num_ids);
  check(size < kMostIds, "a batch may need fewer than 2^31 rows, got ", size);
  check(links.numel() == size, "links must have one entry per id, expected ", size, ", got ", links.numel());
  const int64_t* id = int64_data(remote_id);
  const auto* link = static_cast<const int16_t*>(links.const_data_ptr());
  const auto* chance = static_cast<const float*>(prior.const_data_ptr());
  static thread_local Scratch scratch;
  Scratch& s = scratch;
  s.sorted.resize(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    check(id[i] >= 0 && id[i] < num_ids, "remote_id[", i, "] must be in [0, ", num_ids, "), got ", id[i]);
    check(link[i] >= 0, "links[", i, "] must be >= 0, got ", link[i]);
    s.sorted[static_cast<size_t>(i)] = static_cast<uint64_t>(id[i]) << 32 | static_cast<uint64_t>(i);
  }
  radix_sort(s.sorted, s.spare, 32, bits_of(num_ids));
  for (int64_t k = 1; k < size; ++k)
    check(s.sorted[static_cast<size_t>(k)] >> 32 != s.sorted[static_cast<size_t>(k - 1)] >> 32,
          "remote_id must be distinct, got ", static_cast<int64_t>(s.sorted[static_cast<size_t>(k)] >> 32), " twice");
  s.slot_at.resize(static_cast<size_t>(size));
  s.key_at.resize(static_cast<size_t>(size));
  s.row_at.resize(static_cast<size_t>(size));
  s.rank.clear();
  s.place.clear();
  s.admitted.clear();
  const auto now = static_cast<uint32_t>(static_cast<uint64_t>(batch) & kNumberMask);
  const auto id_of = [&](int64_t k) { return static_cast<int64_t>(s.sorted[static_cast<size_t>(k)] >> 32); };
  // Larger is later: known distances first, then levels.
  const auto rank_of = [&](uint32_t key) { return (key & kUnknown) != 0 ? key : (key - now) & kNumberMask; };
  Moves moves;
  with_slots(slot_id, slot_key, table, [&](auto slots) {
    slots.check_table();
    constexpr int64_t kFar = 32, kNear = 12;
    for (int64_t k = 0; k < size; ++k) {
      if (k + kFar < size) {
        slots.prefetch(id_of(k + kFar));
        prefetch_read(&chance[id_of(k + kFar)]);
      }
      if (k + kNear < size) slots.prefetch_slot(id_of(k + kNear));
      const auto place = static_cast<int32_t>(s.sorted[static_cast<size_t>(k)] & 0xffffffffU);
      const int64_t slot = slots.find(id_of(k));
      const auto next = static_cast<uint32_t>(link[k]);
      const uint32_t key = next != 0 ? (now + next) & kNumberMask : kUnknown | level_of(chance[id_of(k)]);
      s.slot_at[static_cast<size_t>(place)] = static_cast<int32_t>(slot);
      if (slot >= 0) {
        s.key_at[static_cast<size_t>(place)] = slots.key[slot];
        slots.key[slot] = static_cast<uint16_t>(key);
      } else {
        s.rank.push_back(rank_of(key));
        s.place.push_back(place);
      }
    }
    // The rows that are needed last stay out or leave: as many as are fetched, for the slots are all in use, by a row
    // or by none, which is what leaves first.
    const auto num_fetched = static_cast<int64_t>(s.rank.size());
    constexpr size_t kNumRanks = kUnknown + kLevels + 1;
    const auto index_of = [](uint32_t rank) { return static_cast<size_t>(std::min(rank, kUnknown + kLevels)); };
    s.slot_rank.resize(static_cast<size_t>(slots.num_slots));
    uint16_t* slot_rank = s.slot_rank.data();
    for (int64_t slot = 0; slot < slots.num_slots; ++slot) {
      const auto key = slots.key[slot];
      const auto known = static_cast<uint16_t>((key - now) & kNumberMask);
      slot_rank[slot] = (key & kUnknown) != 0 ? std::min(key, static_cast<uint16_t>(kUnknown + kLevels)) : known;
    }
    for (auto& count : s.count)
      if (count.empty()) count.assign(kNumRanks, 0);
    uint32_t *even = s.count[0].data(), *odd = s.count[1].data();
    uint16_t farthest = 0;
    for (int64_t slot = 0; slot < slots.num_slots; ++slot)
      farthest = std::max(farthest, slot_rank[slot] < kUnknown ? slot_rank[slot] : uint16_t{0});
    for (int64_t slot = 0; slot + 1 < slots.num_slots; slot += 2) {
      ++even[slot_rank[slot]];
      ++odd[slot_rank[slot + 1]];
    }
    if (slots.num_slots % 2 != 0) ++even[slot_rank[slots.num_slots - 1]];
    for (const uint32_t rank : s.rank) {
      ++odd[index_of(rank)];
      farthest = std::max(farthest, static_cast<uint16_t>(rank < kUnknown ? rank : 0));
    }
    // Of the rank where it ends, `to_go` rows: fetched ones stay out first, which saves writing them.
    int64_t to_go = num_fetched;
    size_t last = kNumRanks - 1;
    while (to_go > even[last] + int64_t{odd[last]}) {
      to_go -= even[last] + int64_t{odd[last]};
      last = last == kUnknown ? farthest : last - 1;
    }
    for (uint32_t* count : {even, odd}) {
      std::fill_n(count, size_t{farthest} + 1, 0U);
      std::fill(count + kUnknown, count + kNumRanks, 0U);
    }
    int64_t at_last = 0;  // fetched rows of that rank
    for (const uint32_t rank : s.rank) at_last += index_of(rank) == last;
    const int64_t stay_out = std::min(at_last, to_go);
    int64_t slots_to_go = to_go - stay_out, may_enter = at_last - stay_out;
    for (int64_t k = 0; k < num_fetched; ++k) {
      const size_t at = index_of(s.rank[static_cast<size_t>(k)]);
      if (at < last || (at == last && may_enter-- > 0)) s.admitted.push_back(static_cast<int32_t>(k));
    }
    const auto num_admitted = static_cast<int64_t>(s.admitted.size());
    Tensor hit_place = new_vector(size - num_fetched, ScalarType::Long);
    Tensor hit_slot = new_vector(size - num_fetched, ScalarType::Long);
    Tensor fetched_place = new_vector(num_fetched, ScalarType::Long);
    int64_t *hit = mutable_int64_data(hit_place), *from = mutable_int64_data(hit_slot);
    int64_t* fetched = mutable_int64_data(fetched_place);
    int64_t num_rows = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t slot = s.slot_at[static_cast<size_t>(i)];
      if (slot >= 0) {
        *hit++ = i;
        *from++ = slot;
      } else {
        s.row_at[static_cast<size_t>(i)] = static_cast<int32_t>(num_rows);
        fetched[num_rows++] = i;
      }
    }
    Tensor admitted_row = new_vector(num_admitted, ScalarType::Long);
    Tensor admitted_slot = new_vector(num_admitted, ScalarType::Long);
    int64_t *row = mutable_int64_data(admitted_row), *to = mutable_int64_data(admitted_slot);
    // Slots that are taken over, ascending: all are looked at before the first changes.
    int64_t num_left = 0;
    // Few are: a stretch without any is passed over at once.
    constexpr int64_t kStretch = 64;
    bool sound = true;
    for (int64_t begin = 0; begin < slots.num_slots && num_left < num_admitted && sound; begin += kStretch) {
      const int64_t end = std::min(begin + kStretch, slots.num_slots);
      uint16_t most = 0;
      for (int64_t slot = begin; slot < end; ++slot) most = std::max(most, slot_rank[slot]);
      if (most < last) continue;
      for (int64_t slot = begin; slot < end && num_left < num_admitted && sound; ++slot) {
        const size_t at = slot_rank[slot];
        if (at < last || (at == last && slots_to_go-- <= 0)) continue;
        const int64_t left = slots.id[slot];
        sound = left < 0 || slots.find(left) == slot;
        if (sound) to[num_left++] = slot;
      }
    }
    if (num_left < num_admitted) {
      for (int64_t i = 0; i < size; ++i)
        if (const int32_t slot = s.slot_at[static_cast<size_t>(i)]; slot >= 0)
          slots.key[slot] = s.key_at[static_cast<size_t>(i)];
      check(false, "table is corrupt: it does not lead to the row of each slot_id");
    }
    for (int64_t entered = 0; entered < num_admitted; ++entered) {
      const int64_t slot = to[entered];
      const auto k = static_cast<size_t>(s.admitted[static_cast<size_t>(entered)]);
      const auto place = static_cast<size_t>(s.place[k]);
      if (slots.id[slot] >= 0) slots.erase(slots.id[slot]);
      slots.insert(slot, id[place]);
      const uint32_t rank = s.rank[k];
      slots.key[slot] = static_cast<uint16_t>((rank & kUnknown) != 0 ? rank : (now + rank) & kNumberMask);
      row[entered] = s.row_at[place];
    }
    moves = {hit_place, hit_slot, fetched_place, admitted_row, admitted_slot};
  });
  return moves;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("code_ids", TORCH_BOX(&code_ids));
  m.impl("ids_of_list", TORCH_BOX(&ids_of_list));
  m.impl("link_lists", TORCH_BOX(&link_lists));
  m.impl("fill_slots", TORCH_BOX(&fill_slots));
  m.impl("note_uses", TORCH_BOX(&note_uses));
  m.impl("plan_batch", TORCH_BOX(&plan_batch));
}

}  // namespace
}  // namespace salientpp
