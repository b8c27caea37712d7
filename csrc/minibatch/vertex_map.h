// Global id -> local id, for one batch at a time: the maps that the sampler inserts into.
//
// Promise of both maps: `begin_batch` forgets every id; `insert(id, next)` returns the local id of `id`, which
// is `next` exactly when the id was not there; `reserve(size)` precedes the inserts that it makes room for.
//
// HashMap also has `find(id)`, -1 where the id is not there.
//
//   StampMap  4 bytes per vertex of the graph and thread; one load and one store per insert. A slot holds an
//             8-bit batch stamp and a 24-bit local id, so only every 255th batch clears anything.
//   HashMap   32 to 64 bytes per vertex of the batch; linear probing at a load of at most one half. For graphs
//             whose StampMap would exceed the memory budget, and for batches of 2^24 vertices or more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "random.h"

namespace salientpp {

class StampMap {
 public:
  static constexpr int64_t kMaxLocalIds = int64_t{1} << 24;

  static int64_t bytes(int64_t num_vertices) { return num_vertices * int64_t{sizeof(uint32_t)}; }

  void begin_batch(int64_t num_vertices, int64_t /*expected*/) {
    if (static_cast<int64_t>(slots_.size()) < num_vertices) {
      slots_.assign(static_cast<size_t>(num_vertices), 0);
      stamp_ = 0;
    }
    if (stamp_ == 255) {
      std::fill(slots_.begin(), slots_.end(), 0);
      stamp_ = 0;
    }
    ++stamp_;
  }

  void prefetch(int64_t id) const { prefetch_write(&slots_[id]); }
  void reserve(int64_t /*size*/) {}

  // Branch-free: whether the id is new is a coin toss that no predictor wins.
  int64_t insert(int64_t id, int64_t next) {
    const uint32_t slot = slots_[id];
    const uint32_t fresh = (stamp_ << 24) | static_cast<uint32_t>(next);
    const bool is_new = (slot >> 24) != stamp_;
    const uint32_t value = is_new ? fresh : slot;
    slots_[id] = value;
    return value & 0xffffffU;
  }

 private:
  std::vector<uint32_t, HugePageAllocator<uint32_t>> slots_;
  uint32_t stamp_ = 0;
};

class HashMap {
  struct Entry {
    uint64_t key = 0;  // id + 1; 0 is empty
    int64_t local_id = 0;
  };
  using Table = std::vector<Entry, HugePageAllocator<Entry>>;

 public:
  static constexpr int64_t kMaxLocalIds = int64_t{1} << 31;

  void begin_batch(int64_t /*num_vertices*/, int64_t expected) {
    // The last batch foretells the size of this one.
    const uint64_t wanted = capacity_for(std::max(expected, size_));
    size_ = 0;
    // A table grown by one huge batch would be cleared in full for every small one after it.
    if (table_.size() > 8 * wanted || table_.size() < wanted) {
      table_ = Table(wanted);
      set_shift();
    } else {
      std::fill(table_.begin(), table_.end(), Entry{});
    }
  }

  void prefetch(int64_t id) const { prefetch_write(&table_[home(id)]); }

  // Makes room for `size` ids in all; must precede the inserts, so that prefetched addresses stay valid.
  void reserve(int64_t size) {
    if (capacity_for(size) <= table_.size()) return;
    Table old(capacity_for(2 * size));
    old.swap(table_);
    set_shift();
    for (const Entry& entry : old) {
      if (entry.key != 0) place(entry);
    }
  }

  int64_t insert(int64_t id, int64_t next) {
    const uint64_t mask = table_.size() - 1;
    for (uint64_t at = home(id);; at = (at + 1) & mask) {
      Entry& entry = table_[at];
      if (entry.key == static_cast<uint64_t>(id) + 1) return entry.local_id;
      if (entry.key == 0) {
        entry = Entry{static_cast<uint64_t>(id) + 1, next};
        ++size_;
        return next;
      }
    }
  }

  int64_t find(int64_t id) const {
    const uint64_t mask = table_.size() - 1;
    for (uint64_t at = home(id);; at = (at + 1) & mask) {
      if (table_[at].key == static_cast<uint64_t>(id) + 1) return table_[at].local_id;
      if (table_[at].key == 0) return -1;
    }
  }

 private:
  static uint64_t capacity_for(int64_t size) {
    uint64_t capacity = 1024;
    while (capacity < 2 * static_cast<uint64_t>(size)) capacity *= 2;
    return capacity;
  }

  void set_shift() {
    shift_ = 64;
    for (uint64_t c = table_.size(); c > 1; c /= 2) --shift_;
  }

  uint64_t home(int64_t id) const { return (static_cast<uint64_t>(id) * kGolden) >> shift_; }

  void place(const Entry& moved) {
    const uint64_t mask = table_.size() - 1;
    uint64_t at = home(static_cast<int64_t>(moved.key - 1));
    while (table_[at].key != 0) at = (at + 1) & mask;
    table_[at] = moved;
  }

  Table table_;
  int64_t size_ = 0;
  int shift_ = 64;
};

}  // namespace salientpp
