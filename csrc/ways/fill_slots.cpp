// Lets the first slots hold some rows, with no batch known.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "check.h"
#include "ways/slots.h"

namespace salientpp {
namespace {

void fill_slots(const Tensor& ids, const Tensor& prior, const Tensor& slot_id, const Tensor& slot_key,
                const Tensor& table) {
  check_vector(ids, ScalarType::Long, "ids");
  check_vector(prior, ScalarType::Float, "prior");
  const int64_t size = ids.numel();
  const int64_t* id = int64_data(ids);
  const auto* chance = static_cast<const float*>(prior.const_data_ptr());
  check_num_ids(prior.numel());
  for (int64_t i = 0; i < size; ++i)
    check(id[i] >= 0 && id[i] < prior.numel(), "ids[", i, "] must be in [0, ", prior.numel(), "), got ", id[i]);
  with_slots(slot_id, slot_key, table, [&](auto slots) {
    check(size <= slots.num_slots, "there may be at most as many ids as the ", slots.num_slots, " slots, got ", size);
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

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("fill_slots", TORCH_BOX(&fill_slots));
}

}  // namespace
}  // namespace salientpp
