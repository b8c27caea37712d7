// Notes in slots at which batch their rows are needed next.
#include <cstdint>
#include <vector>

#include "check.h"
#include "ways/id_list.h"
#include "ways/slots.h"

namespace salientpp {
namespace {

void note_uses(const Tensor& list, int64_t batch, int64_t num_ids, const Tensor& slot_id, const Tensor& slot_key,
               const Tensor& table) {
  check_num_ids(num_ids);
  static thread_local std::vector<int64_t> ids;
  ids.clear();
  // All of it before anything is written.
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

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("note_uses", TORCH_BOX(&note_uses));
}

}  // namespace
}  // namespace salientpp
