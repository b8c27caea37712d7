// Finds the tier that holds a row, and the place in it: sets of ids, and the look-up over them.
#include <algorithm>
#include <bit>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "memory.h"
#include "store/places.h"

namespace salientpp {
namespace {

// A set of ids as a bitmap with ranks. Word w holds the membership bits of ids 32 w to 32 w + 31 in its lower half, and
// the number of smaller members in its upper half. So one load tells both membership and slot. The set takes a quarter
// of a byte for each possible id.
class IdSet {
 public:
  IdSet(const Tensor& words, const char* name) {
    check_vector(words, ScalarType::Long, name);
    words_ = static_cast<const uint64_t*>(words.const_data_ptr());
    num_words_ = words.numel();
  }

  bool empty() const { return num_words_ == 0; }
  bool covers(int64_t num_ids) const { return empty() || num_words_ * 32 >= num_ids; }
  void prefetch_word(int64_t id) const { prefetch_read(&words_[id >> 5]); }

  // The slot of `id`, or -1.
  int64_t slot(int64_t id) const {
    const uint64_t word = words_[id >> 5];
    const uint32_t bits = static_cast<uint32_t>(word);
    const uint32_t bit = static_cast<uint32_t>(id & 31);
    const int64_t rank = static_cast<int64_t>(word >> 32) + std::popcount(bits & ((1U << bit) - 1U));
    return ((bits >> bit) & 1U) != 0 ? rank : -1;
  }

 private:
  const uint64_t* words_;
  int64_t num_words_;
};

// Packs `ids`, ascending and distinct; slot i of the set is ids[i].
Tensor pack_id_set(const Tensor& ids, int64_t num_ids) {
  check_vector(ids, ScalarType::Long, "ids");
  check(num_ids >= 0, "num_ids must be >= 0, got ", num_ids);
  const int64_t size = ids.numel();
  check(size < (int64_t{1} << 32), "a set must hold fewer than 2^32 ids, got ", size);
  const int64_t num_words = size == 0 ? 0 : num_ids / 32 + (num_ids % 32 != 0);
  Tensor words = new_table(num_words, ScalarType::Long);
  auto* out = reinterpret_cast<uint64_t*>(words.mutable_data_ptr());
  const int64_t* id = int64_data(ids);
  int64_t at = 0;
  for (int64_t w = 0; w < num_words; ++w) {
    uint64_t word = static_cast<uint64_t>(at) << 32;
    for (; at < size && (id[at] >> 5) == w; ++at) {
      check(at == 0 || id[at] > id[at - 1], "ids must ascend without repeats, got ", id[at], " after ", id[at - 1]);
      word |= uint64_t{1} << (id[at] & 31);
    }
    out[w] = word;
  }
  check(at == size, "ids must ascend and lie in [0, ", num_ids, "), got ", at < size ? id[at] : 0);
  check(size == 0 || id[size - 1] < num_ids, "ids must ascend and lie in [0, ", num_ids, "), got ",
        size == 0 ? 0 : id[size - 1]);
  return words;
}

// Pairs (position in the batch, row or slot or id), in memory that a thread keeps between calls. The memory is not
// initialised, so that only pages with pairs are resident.
struct Group {
  std::unique_ptr<int64_t[]> position, row;
  int64_t size = 0, capacity = 0;

  void clear(int64_t most) {
    if (capacity < most) {
      const int64_t more = most + most / 4;
      position.reset(new int64_t[static_cast<size_t>(more)]);
      row.reset(new int64_t[static_cast<size_t>(more)]);
      capacity = more;  // last, because the memory may be missing
    }
    size = 0;
  }
};

// Output position for pairs. It is a local variable, so that its size is in a register: inside a Group, the compiler
// would have to assume that the written integers change it.
struct Writer {
  int64_t* position;
  int64_t* row;
  int64_t size;

  explicit Writer(Group& group) : position(group.position.get()), row(group.row.get()), size(group.size) {}
  // Always writes, and counts if it holds: the tier of an id is random, so a branch would be mispredicted often.
  void add_if(bool holds, int64_t p, int64_t r) {
    position[size] = p;
    row[size] = r;
    size += holds;
  }
};

// Opens `sets`, each over ids in [0, num_ids).
std::vector<IdSet> open_sets(const std::vector<Tensor>& sets, int64_t num_ids, const char* name, const char* ids) {
  std::vector<IdSet> opened;
  for (size_t i = 0; i < sets.size(); ++i) {
    opened.emplace_back(sets[i], name);
    check(opened.back().covers(num_ids), name, "[", i, "] must cover the ", num_ids, " ", ids);
  }
  return opened;
}

// Checks and returns the K + 1 bounds of K parts.
const int64_t* check_book(const Tensor& offsets) {
  check_vector(offsets, ScalarType::Long, "offsets");
  const int64_t num_parts = offsets.numel() - 1;
  check(num_parts >= 1, "offsets must have num_parts + 1 >= 2 entries, got ", offsets.numel());
  const int64_t* offset = int64_data(offsets);
  check(offset[0] == 0, "offsets[0] must be 0, got ", offset[0]);
  for (int64_t p = 0; p < num_parts; ++p)
    check(offset[p] <= offset[p + 1], "offsets must not decrease, got ", offset[p + 1], " after ", offset[p]);
  return offset;
}

// Assigns every id to the first set that has it. Local ids are searched in local_sets; the rest are rows of the part.
// Other ids are searched in remote_sets; the rest are requested from their owners. The groups are returned in this
// order, each as (position in the batch, slot).
std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor> look_up(const Tensor& n_id, const Tensor& offsets,
                                                                     int64_t part_id,
                                                                     const std::vector<Tensor>& local_sets,
                                                                     const std::vector<Tensor>& remote_sets) {
  check_vector(n_id, ScalarType::Long, "n_id");
  const int64_t* offset = check_book(offsets);
  const int64_t num_parts = offsets.numel() - 1;
  check(part_id >= 0 && part_id < num_parts, "part_id must be in [0, ", num_parts, "), got ", part_id);
  const int64_t num_vertices = offset[num_parts];
  const int64_t begin = offset[part_id];
  const int64_t end = offset[part_id + 1];
  const std::vector<IdSet> near = open_sets(local_sets, end - begin, "local_sets", "rows of the part");
  const std::vector<IdSet> copies = open_sets(remote_sets, num_vertices, "remote_sets", "vertices of the graph");

  const int64_t size = n_id.numel();
  const int64_t* id = int64_data(n_id);
  // Split into local and foreign ids first, without touching the sets. Each look-up loop then runs only over ids that
  // need it, and can prefetch the words ahead.
  static thread_local std::vector<Group> groups;
  const size_t num_groups = near.size() + copies.size() + 2;
  groups.resize(std::max(groups.size(), num_groups));
  Group& local = groups[near.size()];
  Group& foreign = groups[num_groups - 1];
  local.clear(size + 1);
  foreign.clear(size + 1);
  uint64_t largest = 0;
  {
    Writer here(local), elsewhere(foreign);
    for (int64_t i = 0; i < size; ++i) {
      // Unsigned, because a signed difference could overflow for an id far out of range. Such ids are refused below.
      const uint64_t row = static_cast<uint64_t>(id[i]) - static_cast<uint64_t>(begin);
      const bool is_local = row < static_cast<uint64_t>(end - begin);
      largest = std::max(largest, static_cast<uint64_t>(id[i]));
      here.add_if(is_local, i, static_cast<int64_t>(row));
      elsewhere.add_if(!is_local, i, id[i]);
    }
    local.size = here.size;
    foreign.size = elsewhere.size;
  }
  if (largest >= static_cast<uint64_t>(num_vertices)) check_ids(id, size, num_vertices, "n_id");

  constexpr int64_t kAhead = 32;
  // Moves the members of each set from `rest` to a group of their own. The remaining pairs close up in place: each is
  // read before another is written to its place.
  const auto split = [](Group& rest, const std::vector<IdSet>& sets, Group* to) {
    for (const IdSet& set : sets) {
      Group& members = *to++;
      members.clear(rest.size + 1);
      if (set.empty()) continue;
      const int64_t* position = rest.position.get();
      const int64_t* row = rest.row.get();
      const int64_t num_pairs = std::exchange(rest.size, 0);
      Writer in(members), out(rest);
      for (int64_t i = 0; i < num_pairs; ++i) {
        if (i + kAhead < num_pairs) set.prefetch_word(row[i + kAhead]);
        const int64_t p = position[i], r = row[i], slot = set.slot(r);
        in.add_if(slot >= 0, p, slot);
        out.add_if(slot < 0, p, r);
      }
      members.size = in.size;
      rest.size = out.size;
    }
  };
  split(local, near, groups.data());
  split(foreign, copies, groups.data() + near.size() + 1);

  std::vector<Tensor> positions, slots;
  for (size_t g = 0; g + 1 < num_groups; ++g) {
    const auto entries = static_cast<size_t>(groups[g].size);
    positions.push_back(vector_of({groups[g].position.get(), entries}));
    slots.push_back(vector_of({groups[g].row.get(), entries}));
  }

  // Group the remote ids by owner; keep their order inside a group.
  const Group& remote = foreign;
  const int64_t num_remote = remote.size;
  Tensor remote_position = new_vector(num_remote, ScalarType::Long);
  Tensor remote_id = new_vector(num_remote, ScalarType::Long);
  Tensor remote_counts = new_vector(num_parts, ScalarType::Long);
  int64_t* counts = mutable_int64_data(remote_counts);
  std::fill(counts, counts + num_parts, 0);
  static thread_local std::vector<int32_t> owner;
  owner.resize(std::max(owner.size(), static_cast<size_t>(num_remote)));
  for (int64_t i = 0; i < num_remote; ++i) {
    owner[static_cast<size_t>(i)] = owner_of(remote.row[static_cast<size_t>(i)], offset, num_parts);
    ++counts[owner[static_cast<size_t>(i)]];
  }
  std::vector<int64_t> next(static_cast<size_t>(num_parts), 0);
  for (int64_t p = 1; p < num_parts; ++p)
    next[static_cast<size_t>(p)] = next[static_cast<size_t>(p - 1)] + counts[p - 1];
  int64_t* position_out = mutable_int64_data(remote_position);
  int64_t* id_out = mutable_int64_data(remote_id);
  for (size_t i = 0; i < static_cast<size_t>(num_remote); ++i) {
    const int64_t at = next[static_cast<size_t>(owner[i])]++;
    position_out[at] = remote.position[i];
    id_out[at] = remote.row[i];
  }
  positions.push_back(remote_position);
  slots.push_back(remote_id);
  return {positions, slots, remote_counts};
}

// Splits remote rows in two: the rows at `hit_place`, which this rank has, and the others, which remain to be fetched.
// Both keep their order.
std::tuple<Tensor, Tensor, Tensor, Tensor> take_hits(const Tensor& remote_position, const Tensor& remote_id,
                                                     const Tensor& offsets, const Tensor& hit_place) {
  check_vector(remote_position, ScalarType::Long, "remote_position");
  check_vector(remote_id, ScalarType::Long, "remote_id");
  check_vector(hit_place, ScalarType::Long, "hit_place");
  const int64_t* offset = check_book(offsets);
  const int64_t num_parts = offsets.numel() - 1, size = remote_id.numel(), num_hits = hit_place.numel();
  check(remote_position.numel() == size, "remote_position must have one entry per id, expected ", size, ", got ",
        remote_position.numel());
  const int64_t *from = int64_data(remote_position), *id = int64_data(remote_id), *hit = int64_data(hit_place);
  for (int64_t i = 0; i < num_hits; ++i)
    check(hit[i] < size && hit[i] >= (i == 0 ? 0 : hit[i - 1] + 1), "hit_place must ascend in [0, ", size, "), got ",
          hit[i], " at ", i);
  Tensor hit_position = new_vector(num_hits, ScalarType::Long);
  Tensor position = new_vector(size - num_hits, ScalarType::Long);
  Tensor fetched_id = new_vector(size - num_hits, ScalarType::Long);
  Tensor fetched_counts = new_vector(num_parts, ScalarType::Long);
  int64_t *found = mutable_int64_data(hit_position), *to = mutable_int64_data(position);
  int64_t *fetched = mutable_int64_data(fetched_id), *counts = mutable_int64_data(fetched_counts);
  std::fill(counts, counts + num_parts, 0);
  for (int64_t k = 0, i = 0; k <= num_hits; ++k, ++i) {
    for (const int64_t end = k < num_hits ? hit[k] : size; i < end; ++i) {
      check(id[i] >= 0 && id[i] < offset[num_parts], "remote_id[", i, "] must be in [0, ", offset[num_parts], "), got ",
            id[i]);
      *to++ = from[i];
      *fetched++ = id[i];
      ++counts[owner_of(id[i], offset, num_parts)];
    }
    if (k < num_hits) *found++ = from[hit[k]];
  }
  return {hit_position, position, fetched_id, fetched_counts};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("pack_id_set", TORCH_BOX(&pack_id_set));
  m.impl("look_up", TORCH_BOX(&look_up));
  m.impl("take_hits", TORCH_BOX(&take_hits));
}

}  // namespace
}  // namespace salientpp
