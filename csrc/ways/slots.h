// The slots of a cache that knows the next batches. Everything that lasts is in tensors of the caller:
//
//   slot_id   per slot the id whose row it holds, -1 for none.
//   slot_key  per slot when the row is needed next: the batch's number mod 2^15 if it is known, else 2^15 + a level
//             that falls as the row is more probable; 2^16 - 1 without a row.
//   table     open addressing from id to slot + 1, 0 for nobody.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "check.h"
#include "memory.h"
#include "random.h"
#include "ways/id_list.h"

namespace salientpp {

constexpr uint32_t kUnknown = 0x8000, kNoRow = 0xffff, kNumberMask = 0x7fff;

// 16 levels to a factor of two; the last is that of probability 0. The order of positive floats is that of their bits.
constexpr uint32_t kLevels = 1024;

inline uint32_t level_of(float probability) {
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

}  // namespace salientpp
