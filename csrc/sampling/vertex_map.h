// Global id -> local id, for one batch at a time: the maps that the sampler inserts into.
//
// Promises of both maps:
//   * `begin_batch` forgets every id.
//   * `insert(id, next)` of the inserter returns the local id of `id`: `next` if and only if `id` was not there.
//   * `reserve(size)` must come before the inserts that it makes room for.
//   * `find(id)` returns -1 if `id` is not there.
//
//   StampMap  4 bytes per vertex of the graph and thread; one load and one store per insert. A slot holds an
//             8-bit batch stamp and a 24-bit local id, so only every 255th batch clears anything.
//   HashMap   32 to 64 bytes per vertex of the batch; linear probing at a load of at most one half. For graphs
//             whose StampMap would exceed the memory budget, and for batches of 2^24 vertices or more.
//   TreeMap   for disjoint trees, (tree, id) -> local id. Each tree has its own hash table, so that the current tree's
//             table stays in the processor's cache. It takes 16 to 32 bytes per vertex of the batch, and twice that
//             for ids >= 2^32 - 2.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "random.h"

namespace salientpp {

// Number of inserts by which slots are prefetched ahead: about the number of cache misses that a core can have under
// way. Further requests only wait. With several hundred (a whole block), sampling took 1.7 times as long on 2.4 M
// vertices.
constexpr int64_t kInsertsAhead = 24;

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

  // A view for loops. Its fields stay in registers, because they are not part of the memory that the loop writes. It
  // has no branch: new and known ids alternate at random, and mispredictions would be expensive.
  struct Inserter {
    uint32_t* slots;
    uint32_t stamped;  // the slot value of local id 0

    void prefetch(int64_t id) const { prefetch_write(&slots[id]); }
    int64_t insert(int64_t id, int64_t next) const {
      const uint32_t slot = slots[id];
      // All ones if the id is new. A condition would be compiled to a jump here.
      const auto mask = static_cast<uint32_t>(-static_cast<int32_t>((slot ^ stamped) >> 24) >> 31);
      const uint32_t value = slot ^ ((slot ^ (stamped | static_cast<uint32_t>(next))) & mask);
      slots[id] = value;
      return value ^ stamped;
    }
  };
  Inserter inserter() { return {slots_.data(), stamp_ << 24}; }

  int64_t find(int64_t id) const {
    const uint32_t slot = slots_[id];
    return (slot >> 24) == stamp_ ? int64_t{slot & 0xffffffU} : -1;
  }

 private:
  std::vector<uint32_t, HugePageAllocator<uint32_t>> slots_;
  uint32_t stamp_ = 0;
};

class HashMap {
  struct Entry {
    uint64_t key = 0;  // id + 1; 0 means empty
    int64_t local_id = 0;
  };
  using Table = std::vector<Entry, HugePageAllocator<Entry>>;

 public:
  static constexpr int64_t kMaxLocalIds = int64_t{1} << 31;

  void begin_batch(int64_t /*num_vertices*/, int64_t expected) {
    // The size of the last batch predicts the size of this one.
    const uint64_t wanted = capacity_for(std::max(expected, size_));
    size_ = 0;
    // A table that one huge batch has grown would be cleared in full for every small batch after it.
    if (table_.size() > 8 * wanted || table_.size() < wanted) {
      table_ = Table(wanted);
      set_shift();
    } else {
      std::fill(table_.begin(), table_.end(), Entry{});
    }
  }

  void prefetch(int64_t id) const { prefetch_write(&table_[home(id)]); }

  // A view for loops.
  struct Inserter {
    HashMap* map;
    void prefetch(int64_t id) const { map->prefetch(id); }
    int64_t insert(int64_t id, int64_t next) const { return map->insert(id, next); }
  };
  Inserter inserter() { return {this}; }

  // Makes room for `size` ids in total. It must come before the inserts, so that prefetched addresses stay valid.
  void reserve(int64_t size) {
    if (capacity_for(size) <= table_.size()) return;
    Table old(capacity_for(2 * size));
    old.swap(table_);
    set_shift();
    size_ = 0;
    for (const Entry& entry : old) {
      if (entry.key != 0) insert(static_cast<int64_t>(entry.key - 1), entry.local_id);
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
    return std::max(uint64_t{1024}, std::bit_ceil(2 * static_cast<uint64_t>(size)));
  }

  void set_shift() { shift_ = 64 - std::countr_zero(table_.size()); }

  uint64_t home(int64_t id) const { return (static_cast<uint64_t>(id) * kGolden) >> shift_; }

  Table table_;
  int64_t size_ = 0;
  int shift_ = 64;
};

// Key: an unsigned type that can hold every id plus one.
template <class Key>
class TreeMap {
  struct Entry {
    Key key = 0;  // id + 1; 0 means empty
    int32_t local_id = 0;
  };
  using Chunk = std::vector<Entry, HugePageAllocator<Entry>>;
  static constexpr size_t kChunk = size_t{1} << 18;
  static constexpr int kLeastBits = 3;

 public:
  // The table of one tree; valid until `reserve` is called for the tree.
  class Table {
   public:
    void prefetch(int64_t id) const { prefetch_write(&entries_[home(id)]); }

    int64_t insert(int64_t id, int64_t next) const {
      const auto key = static_cast<Key>(id + 1);
      for (uint64_t at = home(id);; at = (at + 1) & mask()) {
        Entry& entry = entries_[at];
        if (entry.key == key) return entry.local_id;
        if (entry.key == 0) {
          entry = Entry{key, static_cast<int32_t>(next)};
          return next;
        }
      }
    }

    int64_t find(int64_t id) const {
      const auto key = static_cast<Key>(id + 1);
      for (uint64_t at = home(id);; at = (at + 1) & mask()) {
        if (entries_[at].key == key) return entries_[at].local_id;
        if (entries_[at].key == 0) return -1;
      }
    }

   private:
    friend class TreeMap;
    uint64_t home(int64_t id) const { return (static_cast<uint64_t>(id) * kGolden) >> (64 - bits_); }
    uint64_t mask() const { return (uint64_t{1} << bits_) - 1; }

    Entry* entries_ = nothing_.data();
    int bits_ = 1;
    int32_t size_ = 0;
  };

  void begin_batch(int64_t num_trees) {
    tables_.assign(static_cast<size_t>(num_trees), Table());
    for (auto& entries : free_) entries.clear();
    // The memory of one huge batch would otherwise stay for all small batches after it.
    if (chunks_.size() > 2 * (chunk_ + 1)) chunks_.resize(chunk_ + 1);
    chunk_ = used_ = 0;
  }

  Table table(int32_t tree) const { return tables_[static_cast<size_t>(tree)]; }

  // Makes room for `count` more ids of a tree, or for `expected` ids if it must grow. Returns true if the table is new.
  bool reserve(int32_t tree, int64_t count, int64_t expected) {
    Table& table = tables_[static_cast<size_t>(tree)];
    const int64_t size = table.size_ + expected;
    table.size_ += static_cast<int32_t>(count);
    if (table.size_ == 0 || bits_for(table.size_) <= table.bits_) return false;
    const Table old = table;
    table.bits_ = bits_for(size);
    table.entries_ = take(table.bits_);
    if (old.bits_ < kLeastBits) return true;
    // Gather the entries first: empty and full entries alternate at random, so a branch would be mispredicted.
    uint64_t num_moved = 0;
    for (uint64_t at = 0; at <= old.mask(); ++at) {
      const Entry entry = old.entries_[at];
      old.entries_[num_moved] = entry;
      num_moved += entry.key != 0;
    }
    for (uint64_t at = 0; at < num_moved; ++at)
      table.insert(static_cast<int64_t>(old.entries_[at].key - 1), old.entries_[at].local_id);
    free_[static_cast<size_t>(old.bits_)].push_back(old.entries_);
    return true;
  }

  // Releases a tree that needs no more inserts. Its memory is reused for the next tree while it is still in the cache.
  void release(int32_t tree) {
    Table& table = tables_[static_cast<size_t>(tree)];
    if (table.bits_ >= kLeastBits) free_[static_cast<size_t>(table.bits_)].push_back(table.entries_);
    table = Table();
  }

  // Returns room that was reserved for ids which turned out to be there already.
  void give_back(int32_t tree, int64_t count) {
    tables_[static_cast<size_t>(tree)].size_ -= static_cast<int32_t>(count);
  }

 private:
  // Returns the size in bits of a table that is at most half full.
  static int bits_for(int64_t size) {
    return std::max(kLeastBits, static_cast<int>(std::bit_width(2 * static_cast<uint64_t>(size) - 1)));
  }

  // Returns 2^bits empty entries.
  Entry* take(int bits) {
    const size_t size = size_t{1} << bits;
    Entry* entries;
    auto& free = free_[static_cast<size_t>(bits)];
    if (!free.empty()) {
      entries = free.back();  // another tree has outgrown this memory, which is still in the cache
      free.pop_back();
    } else {
      while (chunk_ < chunks_.size() && used_ + size > chunks_[chunk_].size()) {
        ++chunk_;
        used_ = 0;
      }
      if (chunk_ == chunks_.size()) chunks_.emplace_back(std::max(kChunk, size));
      entries = chunks_[chunk_].data() + used_;
      used_ += size;
    }
    std::fill(entries, entries + size, Entry{});
    return entries;
  }

  static inline std::array<Entry, 2> nothing_{};  // the table of trees without ids

  std::vector<Table> tables_;
  std::vector<Chunk> chunks_;
  size_t chunk_ = 0, used_ = 0;
  std::array<std::vector<Entry*>, 64> free_;  // free tables, by size in bits
};

}  // namespace salientpp
