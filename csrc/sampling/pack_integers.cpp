// Packs several tensors into one tensor of bytes, and integers in the narrowest dtype that holds all of their section.
//
// A first pass finds the widths. A second writes the sections to their places, without temporaries. packets.py reads
// what is written here.
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "check.h"
#include "memory.h"

namespace salientpp {
namespace {

// Dtypes of a section: uint8, uint16, int32, int64, and bytes that are no integers.
enum Code : int64_t { kByte, kShort, kInt, kLong, kBytes, kNumCodes };

constexpr int64_t kAligned = 8;  // sections begin at multiples of this number of bytes
constexpr std::array<int64_t, kNumCodes> kWidth{1, 2, 4, 8, 1};

struct Section {
  const Tensor* data;
  const int64_t* count;  // per list, the number of its entries; null: there are no lists
  const int64_t* base;   // per list
  int64_t num_lists;
  Code code;

  int64_t bytes() const { return data->numel() * kWidth[code]; }
};

int64_t padded(int64_t bytes) {
  return (bytes + kAligned - 1) / kAligned * kAligned;
}

// Calls f with each integer, less the base of its list. Corrupt numbers may overflow, so the difference is unsigned.
template <class F>
void for_each_integer(const Section& section, F&& f) {
  const int64_t* value = int64_data(*section.data);
  if (section.count == nullptr) {
    for (int64_t k = 0, size = section.data->numel(); k < size; ++k) f(static_cast<uint64_t>(value[k]));
    return;
  }
  for (int64_t i = 0; i < section.num_lists; ++i) {
    const auto base = static_cast<uint64_t>(section.base[i]);
    for (int64_t k = 0; k < section.count[i]; ++k) f(static_cast<uint64_t>(value[k]) - base);
    value += section.count[i];
  }
}

Code code_of(const Section& section) {
  constexpr uint64_t kHalf = uint64_t{1} << 31;
  uint64_t bits = 0, moved = 0;  // a number is in [-2^31, 2^31) if it has 32 bits after 2^31 is added
  for_each_integer(section, [&](uint64_t value) {
    bits |= value;
    moved |= value + kHalf;
  });
  if (bits < 1 << 8) return kByte;
  if (bits < 1 << 16) return kShort;
  return moved < 2 * kHalf ? kInt : kLong;
}

Section checked_section(const Tensor& data, const std::optional<Tensor>& count, const std::optional<Tensor>& base,
                        size_t at) {
  check_defined(data, "section");
  const auto dtype = data.scalar_type();
  check(dtype == ScalarType::Byte || dtype == ScalarType::Long, "section must have dtype uint8 or int64, got ", dtype);
  check_vector(data, dtype, "section");
  check(count.has_value() == base.has_value(), "count and base must be given both or not at all, for section ", at);
  Section section{&data, nullptr, nullptr, 0, kBytes};
  if (count) {
    check(dtype == ScalarType::Long, "a section with lists must have dtype int64, got ", dtype);
    check_vector(*count, ScalarType::Long, "count");
    check_vector(*base, ScalarType::Long, "base");
    section.count = int64_data(*count);
    section.base = int64_data(*base);
    section.num_lists = count->numel();
    check(base->numel() == section.num_lists, "base[", at, "] must have one entry per list, expected ",
          section.num_lists, ", got ", base->numel());
    int64_t left = data.numel();
    for (int64_t i = 0; i < section.num_lists; ++i) {
      check(section.count[i] >= 0 && section.count[i] <= left, "count[", at, "] must be >= 0 and have the sum ",
            data.numel(), ", the number of entries, got ", section.count[i], " at list ", i);
      left -= section.count[i];
    }
    check(left == 0, "count[", at, "] must have the sum ", data.numel(), ", the number of entries, got ",
          data.numel() - left);
  }
  if (dtype == ScalarType::Long) section.code = code_of(section);
  return section;
}

template <class T>
void write_as(const Section& section, uint8_t* to) {
  T* out = reinterpret_cast<T*>(to);
  for_each_integer(section, [&](uint64_t value) { *out++ = static_cast<T>(value); });
}

void write_section(const Section& section, uint8_t* to) {
  if (section.code == kByte) write_as<uint8_t>(section, to);
  if (section.code == kShort) write_as<uint16_t>(section, to);
  if (section.code == kInt) write_as<int32_t>(section, to);
  if (section.code == kLong) write_as<int64_t>(section, to);
  const int64_t bytes = section.bytes();
  if (section.code == kBytes && bytes > 0) std::memcpy(to, section.data->const_data_ptr(), static_cast<size_t>(bytes));
  std::fill(to + bytes, to + padded(bytes), uint8_t{0});
}

Tensor pack_integers(const std::vector<Tensor>& section, const std::vector<std::optional<Tensor>>& count,
                     const std::vector<std::optional<Tensor>>& base) {
  const size_t number = section.size();
  check(count.size() == number && base.size() == number, "count and base must have one entry per section, ", number);
  std::vector<Section> sections;
  std::vector<int64_t> header{static_cast<int64_t>(number)};
  int64_t bytes = static_cast<int64_t>(number + 1) * kAligned;
  for (size_t i = 0; i < number; ++i) {
    sections.push_back(checked_section(section[i], count[i], base[i], i));
    header.push_back(section[i].numel() * kNumCodes + sections[i].code);
    bytes += padded(sections[i].bytes());
  }
  const Tensor packet = new_table(bytes, ScalarType::Byte);
  auto* to = static_cast<uint8_t*>(packet.mutable_data_ptr());
  std::memcpy(to, header.data(), header.size() * kAligned);
  to += header.size() * kAligned;
  for (const Section& each : sections) {
    write_section(each, to);
    to += padded(each.bytes());
  }
  return packet;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("pack_integers", TORCH_BOX(&pack_integers));
}

}  // namespace
}  // namespace salientpp
