// Puts lists that come from several holders into one order.
//
// Entries may be narrow and relative to a base of their list, as they arrive in a packet. One pass widens them, adds
// the base and writes them to their places.
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "memory.h"
#include "sampling/buffer.h"

namespace salientpp {
namespace {

// The lists of one holder.
struct Group {
  const int64_t* position;  // per list, its place in the order; null: its number
  int64_t size;             // number of lists
  const int64_t* count;
  const Tensor* value;
  const int64_t* base;  // null: 0
  int64_t base_step;    // 0: all lists have the same base

  int64_t place(int64_t i) const { return position == nullptr ? i : position[i]; }
};

// Calls f with a pointer to the entries in their dtype.
template <class F>
void dispatch_entries(const Tensor& value, F&& f) {
  const void* data = value.const_data_ptr();
  const auto dtype = value.scalar_type();
  if (dtype == ScalarType::Byte) return f(static_cast<const uint8_t*>(data));
  if (dtype == ScalarType::UInt16) return f(static_cast<const uint16_t*>(data));
  if (dtype == ScalarType::Int) return f(static_cast<const int32_t*>(data));
  f(static_cast<const int64_t*>(data));
}

Group checked_group(const std::optional<Tensor>& position, const Tensor& count, const Tensor& value, const Tensor* base,
                    size_t at) {
  check_vector(count, ScalarType::Long, "count");
  check_defined(value, "value");
  const auto dtype = value.scalar_type();
  check(
      dtype == ScalarType::Byte || dtype == ScalarType::UInt16 || dtype == ScalarType::Int || dtype == ScalarType::Long,
      "value must have dtype uint8, uint16, int32 or int64, got ", dtype);
  check_vector(value, dtype, "value");
  const int64_t size = count.numel();
  Group group{nullptr, size, int64_data(count), &value, nullptr, 0};
  if (position) {
    check_vector(*position, ScalarType::Long, "position");
    check(position->numel() == size, "position[", at, "] must have one entry per list, expected ", size, ", got ",
          position->numel());
    group.position = int64_data(*position);
  }
  if (base != nullptr) {
    check_vector(*base, ScalarType::Long, "base");
    check(base->numel() == size || base->numel() == 1, "base[", at, "] must have 1 entry or one per list, expected ",
          size, ", got ", base->numel());
    group.base = int64_data(*base);
    group.base_step = base->numel() == size ? 1 : 0;
  }
  return group;
}

// Writes the lengths of a group's lists to their places.
void put_counts(const Group& group, int64_t size, int64_t* count, size_t at) {
  int64_t left = group.value->numel();
  for (int64_t i = 0; i < group.size; ++i) {
    const int64_t place = group.place(i), length = group.count[i];
    check(place >= 0 && place < size, "position[", at, "] must be in [0, ", size, "), got ", place, " for list ", i);
    check(count[place] < 0, "position[", at, "] must have places that no other list has, got ", place,
          " again for list ", i);
    check(length >= 0 && length <= left, "count[", at, "] must be >= 0 and have the sum ", group.value->numel(),
          ", the number of entries, got ", length, " at list ", i);
    left -= length;
    count[place] = length;
  }
  check(left == 0, "count[", at, "] must have the sum ", group.value->numel(), ", the number of entries, got ",
        group.value->numel() - left);
}

template <class T>
void put_entries(const Group& group, const T* value, const int64_t* begin, int64_t* out) {
  const auto widened = [](T entry, uint64_t base) {  // unsigned, because the sum of corrupt numbers may overflow
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(entry)) + base);
  };
  if (group.position == nullptr && group.base_step == 0) {
    const uint64_t base = group.base == nullptr ? 0 : static_cast<uint64_t>(*group.base);
    const int64_t size = group.value->numel();
    for (int64_t k = 0; k < size; ++k) out[k] = widened(value[k], base);
    return;
  }
  for (int64_t i = 0; i < group.size; ++i) {
    const uint64_t base = group.base == nullptr ? 0 : static_cast<uint64_t>(group.base[i * group.base_step]);
    int64_t* to = out + begin[group.place(i)];
    const int64_t length = group.count[i];
    for (int64_t k = 0; k < length; ++k) to[k] = widened(value[k], base);
    value += length;
  }
}

std::tuple<Tensor, Tensor> merge_lists(int64_t size, const std::vector<std::optional<Tensor>>& position,
                                       const std::vector<Tensor>& count, const std::vector<Tensor>& value,
                                       const std::vector<Tensor>& base) {
  check(size >= 0 && size < std::numeric_limits<int64_t>::max() / 16, "size must be in [0, 2^59), got ", size);
  const size_t num_groups = count.size();
  check(position.size() == num_groups && value.size() == num_groups && (base.empty() || base.size() == num_groups),
        "position, value and, if given, base must have one entry per group, ", num_groups);
  const Tensor out_count = new_table(size, ScalarType::Long);
  int64_t* length = mutable_int64_data(out_count);
  std::fill_n(length, size, -1);
  std::vector<Group> groups;
  int64_t num_entries = 0;
  for (size_t g = 0; g < num_groups; ++g) {
    groups.push_back(checked_group(position[g], count[g], value[g], base.empty() ? nullptr : &base[g], g));
    put_counts(groups[g], size, length, g);
    num_entries += value[g].numel();
  }
  static thread_local Buffer<int64_t> begin;
  begin.reserve(size);
  int64_t* first = begin.data();
  for (int64_t i = 0, at = 0; i < size; ++i) {
    length[i] = std::max<int64_t>(length[i], 0);  // no holder has the list
    first[i] = at;
    at += length[i];
  }
  const Tensor out = new_table(num_entries, ScalarType::Long);
  for (const Group& group : groups) {
    dispatch_entries(*group.value,
                     [&](const auto* entries) { put_entries(group, entries, first, mutable_int64_data(out)); });
  }
  return {out_count, out};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("merge_lists", TORCH_BOX(&merge_lists));
}

}  // namespace
}  // namespace salientpp
