// Neighbour lists that a part holds, and the calls' lists among them. `indptr` has a row for each list of the part, so
// a list is given by its row and not by its vertex.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "check.h"
#include "sampling/typed_batch.h"
#include "sampling/typed_hop.h"

namespace salientpp::typed {
namespace {

struct HeldLists {
  const int64_t* indptr;
  int64_t num_edges;
  const Tensor* time;  // [num_edges], in list order; null if no entry is hidden
  int64_t size;        // number of lists that are asked for
  const int64_t* place;
  const int64_t *tree, *now, *since;  // per list that is asked for, or null
};

inline const Tensor* of_edges(const std::optional<Tensor>& given, int64_t num_edges, const char* name) {
  if (!given) return nullptr;
  check(given->numel() == num_edges, name, " must have one entry per edge, expected ", num_edges, ", got ",
        given->numel());
  return &*given;
}

inline const int64_t* of_lists(const std::optional<Tensor>& given, int64_t size, const char* name) {
  if (!given) return nullptr;
  check_vector(*given, ScalarType::Long, name);
  check(given->numel() == size, name, " must have one entry per list, expected ", size, ", got ", given->numel());
  return int64_data(*given);
}

inline HeldLists checked_lists(const Tensor& indptr, const Tensor& indices, const std::optional<Tensor>& edge_time,
                               const Tensor& place, const std::optional<Tensor>& tree, const std::optional<Tensor>& now,
                               const std::optional<Tensor>& since) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  check_index_vector(indices, "indices");
  check_vector(place, ScalarType::Long, "place");
  if (edge_time) check_index_vector(*edge_time, "edge_time");
  const int64_t num_edges = indices.numel(), size = place.numel();
  check_ids(int64_data(place), size, indptr.numel() - 1, "place");
  const Tensor* time = of_edges(edge_time, num_edges, "edge_time");
  const int64_t* of_seed = of_lists(now, size, "now");
  check(!since || now, "since needs now, because a time window ends with the seed's time");
  return {int64_data(indptr),           num_edges, of_seed == nullptr ? nullptr : time, size, int64_data(place),
          of_lists(tree, size, "tree"), of_seed,   of_lists(since, size, "since")};
}

// Sets the block to the visible entries of the lists from `first` on, and prefetches for the next block.
inline void find_visible(Block& block, const HeldLists& lists, int64_t first) {
  read_bounds(block, lists.indptr, lists.num_edges, lists.place + first, lists.size - first, "row");
  if (lists.time == nullptr) return;
  std::copy_n(lists.now + first, block.size, block.now.begin());
  if (lists.since != nullptr) std::copy_n(lists.since + first, block.size, block.since.begin());
  keep_visible_entries(block, lists.since != nullptr, *lists.time);
}

}  // namespace
}  // namespace salientpp::typed
