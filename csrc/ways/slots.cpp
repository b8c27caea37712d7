// The slots of a cache that knows the next batches. All lasting state is in tensors of the caller:
//
//   slot_id   per slot, the id whose row it holds; -1 for none.
//   slot_key  per slot, the time of the row's next use. If it is known, this is the batch's number mod 2^15. If not, it
//             is 2^15 + a level that is lower for more probable rows. Without a row it is 2^16 - 1.
//   table     open addressing from id to slot + 1; 0 for an empty entry.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "check.h"
#include "memory.h"
#include "random.h"
#include "ways/id_list.h"
#include "ways/radix_sort.h"

namespace salientpp {
namespace {

constexpr uint32_t kUnknown = 0x8000, kNoRow = 0xffff, kNumberMask = 0x7fff;

// 16 levels per factor of two; the last level is probability 0. Positive floats have the same order as their bits.
constexpr uint32_t kLevels = 1024;

inline uint32_t level_of(float probability) {
  const auto bits = std::bit_cast<uint32_t>(probability);
  if (!(probability > 0.0F)) return kLevels - 1;
  return probability >= 1.0F ? 0 : std::min((0x3f800000U - bits) >> 19, kLevels - 2);
}

// Entry: an unsigned type that can hold the number of slots.
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

  // Every entry must name a slot, and entries must be as many as slots with rows, so that every search ends. The types
  // allow vectorised code, since this reads the whole table.
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

  // Returns the place of an id's entry, or the place where it would be.
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

// Calls f with the slots that the tensors hold.
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

// Fills the first slots with rows; no next use is known yet.
void fill_slots(const Tensor& ids, const Tensor& prior, const Tensor& slot_id, const Tensor& slot_key,
                const Tensor& table) {
  check_vector(ids, ScalarType::Long, "ids");
  check_vector(prior, ScalarType::Float, "prior");
  const int64_t size = ids.numel();
  const int64_t* id = int64_data(ids);
  const auto* chance = static_cast<const float*>(prior.const_data_ptr());
  check_num_ids(prior.numel());
  check_ids(id, size, prior.numel(), "ids");
  with_slots(slot_id, slot_key, table, [&](auto slots) {
    check(size <= slots.num_slots, "there must be at most as many ids as the ", slots.num_slots, " slots, got ", size);
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

// Records in slots the batch that needs their rows next.
void note_uses(const Tensor& list, int64_t batch, int64_t num_ids, const Tensor& slot_id, const Tensor& slot_key,
               const Tensor& table) {
  check_num_ids(num_ids);
  static thread_local std::vector<int64_t> ids;
  ids.clear();
  // Read the whole list before anything is written.
  ListReader(list, num_ids, "list").until(num_ids, [&](int64_t id) { ids.push_back(id); });
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

// A batch's rows of other parts: their ids, and the number of batches until their next use, in ascending order of ids.
struct Batch {
  const int64_t* id;
  const int16_t* link;
  int64_t size;
  const float* chance;  // by id, the probability that a batch needs it
  uint32_t now;         // the batch's number mod 2^15

  // A larger rank is a later use: known distances first, then levels.
  uint32_t rank_of(uint32_t key) const { return (key & kUnknown) != 0 ? key : (key - now) & kNumberMask; }
};

constexpr size_t kNumRanks = kUnknown + kLevels + 1;

size_t index_of(uint32_t rank) {
  return static_cast<size_t>(std::min(rank, kUnknown + kLevels));
}

// Scratch memory that a thread keeps between calls. It never influences a result.
struct Scratch {
  std::vector<uint64_t> sorted, spare;  // the ids, with their places in the lower half
  std::vector<int32_t> slot_at;         // by place in the batch: its slot, or -1
  std::vector<uint16_t> key_at;         // by place: the former key of the slot
  std::vector<int32_t> row_at;          // by place: its number among the fetched rows
  std::vector<uint32_t> rank;           // fetched rows by ascending id: rank of their next use
  std::vector<int32_t> place;           // the same rows: their places
  std::vector<int32_t> admitted;        // numbers of the rows that enter, among the same rows
  std::vector<uint16_t> slot_rank;
  std::vector<uint32_t>
      count[2];  // numbers of rows by rank; two arrays for alternate rows, since adjacent rows often have equal ranks
};

// Checks the batch and sorts its ids.
void sort_ids(Scratch& s, const Batch& batch, int64_t num_ids) {
  s.sorted.resize(static_cast<size_t>(batch.size));
  for (int64_t i = 0; i < batch.size; ++i) {
    check(batch.id[i] >= 0 && batch.id[i] < num_ids, "remote_id[", i, "] must be in [0, ", num_ids, "), got ",
          batch.id[i]);
    check(batch.link[i] >= 0, "links[", i, "] must be >= 0, got ", batch.link[i]);
    s.sorted[static_cast<size_t>(i)] = static_cast<uint64_t>(batch.id[i]) << 32 | static_cast<uint64_t>(i);
  }
  radix_sort(s.sorted, s.spare, 32, bits_of(num_ids));
  for (int64_t k = 1; k < batch.size; ++k)
    check(s.sorted[static_cast<size_t>(k)] >> 32 != s.sorted[static_cast<size_t>(k - 1)] >> 32,
          "remote_id must be distinct, got ", static_cast<int64_t>(s.sorted[static_cast<size_t>(k)] >> 32), " twice");
}

// Finds the slots of the batch's rows and sets their keys to the next uses. Finds the ranks of all other rows.
template <class Entry>
void find_rows(Scratch& s, const Slots<Entry>& slots, const Batch& batch) {
  s.slot_at.resize(static_cast<size_t>(batch.size));
  s.key_at.resize(static_cast<size_t>(batch.size));
  s.rank.clear();
  s.place.clear();
  const auto id_of = [&](int64_t k) { return static_cast<int64_t>(s.sorted[static_cast<size_t>(k)] >> 32); };
  const uint32_t now = batch.now;
  const int64_t size = batch.size;
  constexpr int64_t kFar = 32, kNear = 12;
  for (int64_t k = 0; k < size; ++k) {
    if (k + kFar < size) {
      slots.prefetch(id_of(k + kFar));
      prefetch_read(&batch.chance[id_of(k + kFar)]);
    }
    if (k + kNear < size) slots.prefetch_slot(id_of(k + kNear));
    const auto place = static_cast<int32_t>(s.sorted[static_cast<size_t>(k)] & 0xffffffffU);
    const int64_t slot = slots.find(id_of(k));
    const auto next = static_cast<uint32_t>(batch.link[k]);
    const uint32_t key = next != 0 ? (now + next) & kNumberMask : kUnknown | level_of(batch.chance[id_of(k)]);
    s.slot_at[static_cast<size_t>(place)] = static_cast<int32_t>(slot);
    if (slot >= 0) {
      s.key_at[static_cast<size_t>(place)] = slots.key[slot];
      slots.key[slot] = static_cast<uint16_t>(key);
    } else {
      s.rank.push_back(batch.rank_of(key));
      s.place.push_back(place);
    }
  }
}

// Rows of ranks below `last` are kept, and rows of ranks above it go. Of the rows of rank `last`, `slots_to_go` leave
// their slots, and `may_enter` of the fetched rows may enter.
struct Boundary {
  size_t last;
  int64_t slots_to_go, may_enter;
};

// Finds the rows that are needed last: they leave their slots or do not enter. Their number is the number of fetched
// rows, because every slot is in use by a row or by none. Slots without a row are reused first.
template <class Entry>
Boundary find_boundary(Scratch& s, const Slots<Entry>& slots, uint32_t now) {
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
  // `to_go` rows of the last rank go. Fetched rows stay out first, which saves writing them.
  auto to_go = static_cast<int64_t>(s.rank.size());
  size_t last = kNumRanks - 1;
  while (to_go > even[last] + int64_t{odd[last]}) {
    to_go -= even[last] + int64_t{odd[last]};
    last = last == kUnknown ? farthest : last - 1;
  }
  for (uint32_t* count : {even, odd}) {
    std::fill_n(count, size_t{farthest} + 1, 0U);
    std::fill(count + kUnknown, count + kNumRanks, 0U);
  }
  int64_t at_last = 0;  // fetched rows of the last rank
  for (const uint32_t rank : s.rank) at_last += index_of(rank) == last;
  const int64_t stay_out = std::min(at_last, to_go);
  return {last, to_go - stay_out, at_last - stay_out};
}

void admit_rows(Scratch& s, const Boundary& boundary) {
  s.admitted.clear();
  int64_t may_enter = boundary.may_enter;
  for (size_t k = 0; k < s.rank.size(); ++k) {
    const size_t at = index_of(s.rank[k]);
    if (at < boundary.last || (at == boundary.last && may_enter-- > 0)) s.admitted.push_back(static_cast<int32_t>(k));
  }
}

// Writes the places of rows in the slots, by place in the batch, and numbers the fetched rows.
void write_places(Scratch& s, int64_t size, int64_t* hit, int64_t* from, int64_t* fetched) {
  s.row_at.resize(static_cast<size_t>(size));
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
}

// Writes the slots that are reused, ascending. All are checked before the first changes: if the table does not lead to
// one of them, this raises and no slot is changed.
template <class Entry>
void find_leaving(const Scratch& s, const Slots<Entry>& slots, const Boundary& boundary, int64_t size, int64_t* to) {
  const uint16_t* slot_rank = s.slot_rank.data();
  const auto num_admitted = static_cast<int64_t>(s.admitted.size());
  const size_t last = boundary.last;
  int64_t num_left = 0, slots_to_go = boundary.slots_to_go;
  // Few slots leave, so stretches without any are skipped at once.
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
}

// Puts the admitted rows into the slots `to`, and writes their numbers among the fetched rows.
template <class Entry>
void enter_rows(const Scratch& s, Slots<Entry>& slots, const Batch& batch, const int64_t* to, int64_t* row) {
  for (size_t entered = 0; entered < s.admitted.size(); ++entered) {
    const int64_t slot = to[entered];
    const auto k = static_cast<size_t>(s.admitted[entered]);
    const auto place = static_cast<size_t>(s.place[k]);
    if (slots.id[slot] >= 0) slots.erase(slots.id[slot]);
    slots.insert(slot, batch.id[place]);
    const uint32_t rank = s.rank[k];
    slots.key[slot] = static_cast<uint16_t>((rank & kUnknown) != 0 ? rank : (batch.now + rank) & kNumberMask);
    row[entered] = s.row_at[place];
  }
}

using Moves = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Moves plan_batch(const Tensor& remote_id, const Tensor& links, int64_t batch_number, const Tensor& prior,
                 const Tensor& slot_id, const Tensor& slot_key, const Tensor& table) {
  check_vector(remote_id, ScalarType::Long, "remote_id");
  check_vector(links, ScalarType::Short, "links");
  check_vector(prior, ScalarType::Float, "prior");
  const int64_t size = remote_id.numel();
  check_num_ids(prior.numel());
  check(size < kMostIds, "a batch must need fewer than 2^31 rows, got ", size);
  check(links.numel() == size, "links must have one entry per id, expected ", size, ", got ", links.numel());
  const Batch batch{int64_data(remote_id), static_cast<const int16_t*>(links.const_data_ptr()), size,
                    static_cast<const float*>(prior.const_data_ptr()),
                    static_cast<uint32_t>(static_cast<uint64_t>(batch_number) & kNumberMask)};
  static thread_local Scratch scratch;
  Scratch& s = scratch;
  sort_ids(s, batch, prior.numel());
  Moves moves;
  with_slots(slot_id, slot_key, table, [&](auto slots) {
    slots.check_table();
    find_rows(s, slots, batch);
    const Boundary boundary = find_boundary(s, slots, batch.now);
    admit_rows(s, boundary);
    const auto num_fetched = static_cast<int64_t>(s.rank.size());
    const auto num_admitted = static_cast<int64_t>(s.admitted.size());
    Tensor hit_place = new_vector(size - num_fetched, ScalarType::Long);
    Tensor hit_slot = new_vector(size - num_fetched, ScalarType::Long);
    Tensor fetched_place = new_vector(num_fetched, ScalarType::Long);
    write_places(s, size, mutable_int64_data(hit_place), mutable_int64_data(hit_slot),
                 mutable_int64_data(fetched_place));
    Tensor admitted_row = new_vector(num_admitted, ScalarType::Long);
    Tensor admitted_slot = new_vector(num_admitted, ScalarType::Long);
    int64_t* to = mutable_int64_data(admitted_slot);
    find_leaving(s, slots, boundary, size, to);
    enter_rows(s, slots, batch, to, mutable_int64_data(admitted_row));
    moves = {hit_place, hit_slot, fetched_place, admitted_row, admitted_slot};
  });
  return moves;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("fill_slots", TORCH_BOX(&fill_slots));
  m.impl("note_uses", TORCH_BOX(&note_uses));
  m.impl("plan_batch", TORCH_BOX(&plan_batch));
}

}  // namespace
}  // namespace salientpp
