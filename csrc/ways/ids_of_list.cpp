// Gives the ids of a coded list.
#include <algorithm>
#include <vector>

#include "check.h"
#include "ways/id_list.h"

namespace salientpp {
namespace {

Tensor ids_of_list(const Tensor& list, int64_t num_ids) {
  check_num_ids(num_ids);
  std::vector<int64_t> ids;
  ListReader(list, num_ids, "list").until(num_ids, [&](int64_t id) { ids.push_back(id); });
  Tensor out = new_vector(static_cast<int64_t>(ids.size()), ScalarType::Long);
  std::copy(ids.begin(), ids.end(), mutable_int64_data(out));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("ids_of_list", TORCH_BOX(&ids_of_list));
}

}  // namespace
}  // namespace salientpp
