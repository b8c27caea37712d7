// Finds out, for each id of some coded lists, in which later list it comes next.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "ways/id_list.h"

namespace salientpp {
namespace {

// From the last list to the first, with what was seen last of each id. A stretch of ids at a time, so that this takes
// little memory, and a fast one.
std::vector<Tensor> link_lists(const std::vector<Tensor>& lists, int64_t heads, int64_t num_ids) {
  constexpr int64_t kStretch = int64_t{1} << 15;
  check_num_ids(num_ids);
  const auto size = static_cast<int64_t>(lists.size());
  check(heads >= 0 && heads <= size, "heads must be in [0, ", size, "], got ", heads);
  check(size < 1 << 15, "there may be fewer than 2^15 lists, got ", size);
  std::vector<ListReader> readers;
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

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("link_lists", TORCH_BOX(&link_lists));
}

}  // namespace
}  // namespace salientpp
