// Peer of ops.look_up: a hash map from id to slot with linear probing. Key and slot lie side by side, and the load is
// at most one half. It does the same work with the same care: it separates local ids first, prefetches look-ups, avoids
// unpredictable branches where possible, and groups remote ids by owner.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

struct Entry {
  uint64_t key;  // id + 1; 0 is empty
  int64_t slot;
};

uint64_t home(int64_t id, int shift) {
  return (static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ULL) >> shift;
}

}  // namespace

// Fills `table`, which has 2^(64 - shift) zeroed entries: ids[i] gets slot i.
extern "C" void build(const int64_t* ids, int64_t size, Entry* table, int shift) {
  const uint64_t mask = (uint64_t{1} << (64 - shift)) - 1;
  for (int64_t i = 0; i < size; ++i) {
    uint64_t at = home(ids[i], shift);
    while (table[at].key != 0) at = (at + 1) & mask;
    table[at] = {static_cast<uint64_t>(ids[i]) + 1, i};
  }
}

// Writes pairs (position, row) for local ids, (position, slot) for cached ids and (position, id) for remote ids, by
// owner. All outputs have room for `size` entries. Sets sizes[0..2] to the numbers of pairs written, and counts[K] to
// the remote ids per owner.
extern "C" void look_up(const int64_t* ids, int64_t size, const int64_t* offsets, int64_t num_parts, int64_t part_id,
                        const Entry* table, int shift, int64_t* local_position, int64_t* local_row,
                        int64_t* cache_position, int64_t* cache_slot, int64_t* remote_position, int64_t* remote_id,
                        int64_t* counts, int64_t* sizes) {
  static thread_local std::vector<int64_t> foreign, foreign_at, remote, remote_at;
  static thread_local std::vector<int32_t> owner;
  for (auto* values : {&foreign, &foreign_at, &remote, &remote_at}) values->resize(static_cast<std::size_t>(size) + 1);
  owner.resize(static_cast<std::size_t>(size) + 1);
  const int64_t begin = offsets[part_id], end = offsets[part_id + 1];
  const uint64_t mask = (uint64_t{1} << (64 - shift)) - 1;
  int64_t num_local = 0, num_foreign = 0, num_cached = 0, num_remote = 0;
  for (int64_t i = 0; i < size; ++i) {
    const bool is_local = ids[i] >= begin && ids[i] < end;
    local_position[num_local] = i;
    local_row[num_local] = ids[i] - begin;
    num_local += is_local;
    foreign_at[num_foreign] = i;
    foreign[num_foreign] = ids[i];
    num_foreign += !is_local;
  }
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < num_foreign; ++i) {
    if (i + kAhead < num_foreign) __builtin_prefetch(&table[home(foreign[i + kAhead], shift)], 0, 3);
    const uint64_t key = static_cast<uint64_t>(foreign[i]) + 1;
    uint64_t at = home(foreign[i], shift);
    while (table[at].key != 0 && table[at].key != key) at = (at + 1) & mask;
    const bool is_cached = table[at].key == key;
    cache_position[num_cached] = foreign_at[i];
    cache_slot[num_cached] = table[at].slot;
    num_cached += is_cached;
    remote_at[num_remote] = foreign_at[i];
    remote[num_remote] = foreign[i];
    num_remote += !is_cached;
  }
  for (int64_t p = 0; p < num_parts; ++p) counts[p] = 0;
  for (int64_t i = 0; i < num_remote; ++i) {
    int32_t part = 0;
    for (int64_t p = 1; p < num_parts; ++p) part += remote[i] >= offsets[p];
    owner[i] = part;
    ++counts[part];
  }
  std::vector<int64_t> next(static_cast<std::size_t>(num_parts), 0);
  for (int64_t p = 1; p < num_parts; ++p) next[p] = next[p - 1] + counts[p - 1];
  for (int64_t i = 0; i < num_remote; ++i) {
    const int64_t at = next[owner[i]]++;
    remote_position[at] = remote_at[i];
    remote_id[at] = remote[i];
  }
  sizes[0] = num_local;
  sizes[1] = num_cached;
  sizes[2] = num_remote;
}
