// Joins the edges of a batch with their reverses, sorted by target and then source, each pair of ends once.
//
// PyG does this by sorting all pairs. This operator uses the order of sampled edges: they stand together by target,
// with few per target. Reversing them in this order lists each target's new sources in ascending order. So it sorts the
// edges of each target, finds the reversed ones by counting, and merges the two lists. For edges in any other order the
// result is also right, but takes longer.
#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "check.h"
#include "memory.h"
#include "sampling/buffer.h"

namespace salientpp {
namespace {

// An edge in the list of its target. `position` counts the edges first, then the reversed edges.
struct Entry {
  int32_t source;
  int32_t position;
  bool operator<(const Entry& other) const { return source < other.source; }
};

// Edges by target: the edges of t are entries[offset[t]:offset[t + 1]], in the order in which they were given.
struct Lists {
  Buffer<int32_t> offset;
  Buffer<Entry> entries;
};

// Scratch memory that a thread keeps between batches. It never influences a result.
struct Scratch {
  Lists forward, reversed;
  Buffer<int32_t> row, col;
  Buffer<int64_t> edge;
};

constexpr int64_t kAhead = 16;  // distance of prefetching
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

int64_t largest_of(const Tensor& ids, const char* name) {
  const int64_t* id = int64_data(ids);
  const int64_t size = ids.numel();
  uint64_t largest = 0;
  for (int64_t e = 0; e < size; ++e) largest = std::max(largest, static_cast<uint64_t>(id[e]));
  check(largest < static_cast<uint64_t>(kMost), name, " must hold ids in [0, ", kMost, "), got ",
        static_cast<int64_t>(largest));
  return static_cast<int64_t>(largest);
}

void list(Lists& lists, const int64_t* source, const int64_t* target, int64_t size, int64_t num_targets,
          int64_t first_position) {
  lists.offset.reserve(num_targets + 2);
  lists.entries.reserve(size);
  int32_t* offset = lists.offset.data();
  Entry* entries = lists.entries.data();
  std::fill(offset, offset + num_targets + 2, 0);
  // Count one place too far; the second pass moves this back.
  for (int64_t e = 0; e < size; ++e) ++offset[target[e] + 2];
  for (int64_t t = 2; t < num_targets + 2; ++t) offset[t] += offset[t - 1];
  for (int64_t e = 0; e < size; ++e) {
    if (e + kAhead < size) prefetch_write(&entries[offset[target[e + kAhead] + 1]]);
    entries[offset[target[e] + 1]++] = {static_cast<int32_t>(source[e]), static_cast<int32_t>(first_position + e)};
  }
}

// Sorts a list; equal entries keep their order.
void sort(Entry* begin, Entry* end) {
  constexpr int64_t kFew = 32;
  if (end - begin > kFew) {
    if (!std::is_sorted(begin, end)) std::stable_sort(begin, end);
    return;
  }
  for (Entry* at = begin + 1; at < end; ++at) {
    const Entry moved = *at;
    Entry* to = at;
    for (; to > begin && moved < to[-1]; --to) *to = to[-1];
    *to = moved;
  }
}

std::tuple<Tensor, Tensor> to_bidirectional(const Tensor& row, const Tensor& col, const Tensor& rev_row,
                                            const Tensor& rev_col, const std::optional<Tensor>& edge_id,
                                            const std::optional<Tensor>& rev_edge_id) {
  check_vector(row, ScalarType::Long, "row");
  check_vector(col, ScalarType::Long, "col");
  check_vector(rev_row, ScalarType::Long, "rev_row");
  check_vector(rev_col, ScalarType::Long, "rev_col");
  const int64_t size = row.numel(), rev_size = rev_row.numel();
  check(col.numel() == size, "row and col must have the same length, got ", size, " and ", col.numel());
  check(rev_col.numel() == rev_size, "rev_row and rev_col must have the same length, got ", rev_size, " and ",
        rev_col.numel());
  check(size < kMost - rev_size, "there must be fewer than ", kMost, " edges, got ", size, " and ", rev_size);
  check(edge_id.has_value() == rev_edge_id.has_value(), "edge_id and rev_edge_id must both be given or both be None");
  if (edge_id) {
    check_vector(*edge_id, ScalarType::Long, "edge_id");
    check_vector(*rev_edge_id, ScalarType::Long, "rev_edge_id");
    check(edge_id->numel() == size, "edge_id must have ", size, " entries, got ", edge_id->numel());
    check(rev_edge_id->numel() == rev_size, "rev_edge_id must have ", rev_size, " entries, got ", rev_edge_id->numel());
  }
  largest_of(row, "row");
  largest_of(rev_col, "rev_col");
  const int64_t num_targets = std::max(largest_of(col, "col"), largest_of(rev_row, "rev_row")) + 1;

  static thread_local Scratch scratch;
  Scratch& s = scratch;
  list(s.forward, int64_data(row), int64_data(col), size, num_targets, 0);
  list(s.reversed, int64_data(rev_col), int64_data(rev_row), rev_size, num_targets, size);
  s.row.reserve(size + rev_size);
  s.col.reserve(size + rev_size);
  if (edge_id) s.edge.reserve(size + rev_size);
  int32_t* out_row = s.row.data();
  int32_t* out_col = s.col.data();
  int64_t* out_edge = s.edge.data();
  const int64_t* id = edge_id ? int64_data(*edge_id) : nullptr;
  const int64_t* rev_id = edge_id ? int64_data(*rev_edge_id) : nullptr;
  const int32_t* offset = s.forward.offset.data();
  const int32_t* rev_offset = s.reversed.offset.data();
  Entry* const entries = s.forward.entries.data();
  Entry* const rev_entries = s.reversed.entries.data();
  const Entry* const all_reversed = rev_entries + rev_size;
  int64_t at = 0;
  for (int64_t t = 0; t < num_targets; ++t) {
    const Entry *a = entries + offset[t], *b = rev_entries + rev_offset[t];
    const Entry *a_end = entries + offset[t + 1], *b_end = rev_entries + rev_offset[t + 1];
    sort(entries + offset[t], entries + offset[t + 1]);
    sort(rev_entries + rev_offset[t], rev_entries + rev_offset[t + 1]);
    int64_t last = -1;
    while (a < a_end || b < b_end) {
      const bool is_reversed = a == a_end || (b < b_end && b->source < a->source);
      const Entry next = is_reversed ? *b : *a;
      (is_reversed ? b : a) += 1;
      at += next.source != last;  // of edges with the same ends, the last one's id counts
      last = next.source;
      out_row[at - 1] = next.source;
      out_col[at - 1] = static_cast<int32_t>(t);
      if (id == nullptr) continue;
      out_edge[at - 1] = is_reversed ? rev_id[next.position - size] : id[next.position];
      if (is_reversed && b + kAhead < all_reversed) prefetch_read(&rev_id[b[kAhead].position - size]);
    }
  }

  Tensor edge_index = torch::stable::empty({2, at}, ScalarType::Long);
  std::copy_n(out_row, at, mutable_int64_data(edge_index));
  std::copy_n(out_col, at, mutable_int64_data(edge_index) + at);
  Tensor out_id = new_vector(edge_id ? at : 0, ScalarType::Long);
  if (edge_id) std::copy_n(out_edge, at, mutable_int64_data(out_id));
  return {edge_index, out_id};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("to_bidirectional", TORCH_BOX(&to_bidirectional));
}

}  // namespace
}  // namespace salientpp
