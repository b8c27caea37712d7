// Edge lists: groups the edges of a batch by target, groups them by source, and adds self-loops. Each operator runs in
// one thread, because the threads of a loader call it.
#include <limits>

#include "nn/lists.h"

namespace salientpp {
namespace {

// Returns the row pointers of edges grouped by target. Empty if targets do not ascend or an id is out of range.
Tensor group_by_target(const Tensor& source, const Tensor& target, int64_t num_sources, int64_t num_targets) {
  check_vector(source, ScalarType::Long, "source");
  check_vector(target, ScalarType::Long, "target");
  const int64_t num_edges = target.numel();
  check(source.numel() == num_edges, "source must have an entry for each target, expected ", num_edges, ", got ",
        source.numel());
  check(num_sources >= 0 && num_targets >= 0, "num_sources and num_targets must be >= 0, got ", num_sources, " and ",
        num_targets);
  const int64_t *from = int64_data(source), *to = int64_data(target);
  // Ids that are out of range, and targets that descend, set the highest bit of `wrong`. The subtractions may wrap
  // around.
  using Word = uint64_t;
  const auto outside = [](int64_t id, int64_t num_ids) {
    return static_cast<Word>(id) | (static_cast<Word>(num_ids) - 1 - static_cast<Word>(id));
  };
  Word wrong = 0;
  for (int64_t e = 0; e < num_edges; ++e) wrong |= outside(from[e], num_sources) | outside(to[e], num_targets);
  for (int64_t e = 1; e < num_edges; ++e) wrong |= static_cast<Word>(to[e]) - static_cast<Word>(to[e - 1]);
  if (wrong >> 63) return new_vector(0, ScalarType::Long);
  const Tensor indptr = new_vector(num_targets + 1, ScalarType::Long);
  int64_t* begin = mutable_int64_data(indptr);
  std::fill(begin, begin + num_targets + 1, 0);
  for (int64_t e = 0; e < num_edges; ++e) begin[to[e] + 1] = e + 1;  // the last edge of a target remains
  for (int64_t t = 0; t < num_targets; ++t) begin[t + 1] = std::max(begin[t], begin[t + 1]);
  return indptr;
}

void check_small(int64_t size, const char* name) {
  check(size <= std::numeric_limits<int32_t>::max(), name, " must be < 2**31, got ", size);
}

std::tuple<Tensor, Tensor, Tensor> group_by_source(const Tensor& indptr, const Tensor& source, int64_t num_sources) {
  check_index_vector(source, "source");
  const Lists lists = lists_of(indptr, source.numel());
  check(num_sources >= 0, "num_sources must be >= 0, got ", num_sources);
  const int64_t num_edges = lists.num_entries();
  check_small(num_edges, "the number of edges");
  check_small(lists.count, "the number of targets");
  const Tensor out_indptr = new_vector(num_sources + 1, ScalarType::Long);
  const Tensor out_target = new_vector(num_edges, ScalarType::Int), out_place = new_vector(num_edges, ScalarType::Int);
  int64_t* begin = mutable_int64_data(out_indptr);
  auto *target = mutable_data_of<int32_t>(out_target), *place = mutable_data_of<int32_t>(out_place);
  dispatch_index(source, [&](const auto* from) {
    std::vector<int32_t> next(static_cast<size_t>(num_sources) + 1);
    for (int64_t e = 0; e < num_edges; ++e) {
      check(from[e] >= 0 && from[e] < num_sources, "source[", e, "] must be in [0, ", num_sources, "), got ", from[e]);
      ++next[static_cast<size_t>(from[e])];
    }
    int32_t sum = 0;
    for (int64_t s = 0; s < num_sources; ++s) {
      begin[s] = sum;
      sum += std::exchange(next[static_cast<size_t>(s)], sum);
    }
    begin[num_sources] = sum;
    for (int64_t t = 0; t < lists.count; ++t)
      for (int64_t p = lists.begin[t]; p < lists.begin[t + 1]; ++p) {
        const int32_t to = next[static_cast<size_t>(from[p])]++;
        target[to] = static_cast<int32_t>(t);
        place[to] = static_cast<int32_t>(p);
      }
  });
  return {out_indptr, out_target, out_place};
}

// Removes every loop s == t, and adds one at the end of each list. The edge of the new loop is the last one removed.
std::tuple<Tensor, Tensor, Tensor> add_self_loops(const Tensor& indptr, const Tensor& source,
                                                  const std::optional<Tensor>& edge) {
  check_index_vector(source, "source");
  const Lists lists = lists_of(indptr, source.numel());
  const int64_t num_edges = lists.num_entries();
  check_small(num_edges + lists.count, "the number of edges");
  if (edge) {
    check_vector(*edge, ScalarType::Int, "edge");
    check(edge->numel() >= num_edges, "edge must have an entry for each of ", num_edges, " edges, got ", edge->numel());
  }
  const int32_t* edge_of = edge ? data_of<int32_t>(*edge) : nullptr;
  const Tensor out_indptr = new_vector(lists.count + 1, ScalarType::Long);
  int64_t* begin = mutable_int64_data(out_indptr);
  Tensor out_source, out_edge;
  dispatch_index(source, [&](const auto* from) {
    begin[0] = 0;
    for (int64_t t = 0; t < lists.count; ++t) {
      int64_t kept = 1;
      for (int64_t p = lists.begin[t]; p < lists.begin[t + 1]; ++p) {
        check(from[p] >= 0 && from[p] <= std::numeric_limits<int32_t>::max(), "source[", p,
              "] must be in [0, 2**31), got ", from[p]);
        kept += from[p] != t;
      }
      begin[t + 1] = begin[t] + kept;
    }
    out_source = new_vector(begin[lists.count], ScalarType::Int);
    out_edge = new_vector(begin[lists.count], ScalarType::Int);
    auto *to = mutable_data_of<int32_t>(out_source), *edge_to = mutable_data_of<int32_t>(out_edge);
    for (int64_t t = 0, k = 0; t < lists.count; ++t) {
      int32_t loop = -1;
      for (int64_t p = lists.begin[t]; p < lists.begin[t + 1]; ++p) {
        const int32_t e = edge_of ? edge_of[p] : static_cast<int32_t>(p);
        if (from[p] == t) {
          loop = e;
          continue;
        }
        to[k] = static_cast<int32_t>(from[p]);
        edge_to[k++] = e;
      }
      to[k] = static_cast<int32_t>(t);
      edge_to[k++] = loop;
    }
  });
  return {out_indptr, out_source, out_edge};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("group_by_target", TORCH_BOX(&group_by_target));
  m.impl("group_by_source", TORCH_BOX(&group_by_source));
  m.impl("add_self_loops", TORCH_BOX(&add_self_loops));
}

}  // namespace
}  // namespace salientpp
