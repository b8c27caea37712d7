#include <utility>

#include "check.h"
#include "random.h"

namespace salientpp {
namespace {

// Returns a uniformly random order of 0, ..., size - 1 (Fisher and Yates), a pure function of the key.
Tensor permutation(int64_t size, int64_t key) {
  check(size >= 0, "size must be >= 0, got ", size);
  Tensor out = new_vector(size, ScalarType::Long);
  int64_t* order = mutable_int64_data(out);
  for (int64_t i = 0; i < size; ++i) order[i] = i;
  Stream stream(mix64(static_cast<uint64_t>(key)));
  for (int64_t i = size - 1; i > 0; --i) std::swap(order[i], order[stream.below(static_cast<uint64_t>(i) + 1)]);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CompositeExplicitAutograd, m) {
  m.impl("permutation", TORCH_BOX(&permutation));
}

}  // namespace
}  // namespace salientpp
