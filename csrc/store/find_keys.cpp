// Finds keys among sorted keys. A key has one or more columns, whose values are compared as bytes.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "memory.h"

namespace salientpp {
namespace {

// Values of a column: rows of equal width, or stretches of bytes between offsets.
struct KeyColumn {
  const char* bytes;
  const int64_t* offset;  // null: values of equal width
  int64_t width;          // of all bytes, if the column has offsets

  KeyColumn(const Tensor& values, const std::optional<Tensor>& offsets, int64_t num_keys, const char* name,
            const char* offsets_name)
      : offset(nullptr) {
    check_defined(values, name);
    check(values.scalar_type() == ScalarType::Byte && values.is_contiguous(), name, " must be contiguous uint8");
    check(values.dim() == (offsets ? 1 : 2), name, " must have ", offsets ? 1 : 2, " dimensions, got ", values.dim());
    bytes = static_cast<const char*>(values.const_data_ptr());
    width = offsets ? values.numel() : values.size(1);
    if (offsets) {
      check_vector(*offsets, ScalarType::Long, offsets_name);
      offset = int64_data(*offsets);
    }
    const int64_t rows = offsets ? offsets->numel() - 1 : values.size(0);
    check(rows == num_keys, name, " must have ", num_keys, " values, got ", rows);
  }

  // Whether the value of a key lies inside the bytes.
  bool holds(int64_t key) const {
    return !offset || (0 <= offset[key] && offset[key] <= offset[key + 1] && offset[key + 1] <= width);
  }
  const char* begin(int64_t key) const { return bytes + (offset ? offset[key] : key * width); }
  size_t size(int64_t key) const { return static_cast<size_t>(offset ? offset[key + 1] - offset[key] : width); }

  // The memory that tells where a value lies, or the value.
  void prefetch_place(int64_t key) const {
    prefetch_read(offset ? static_cast<const void*>(offset + key) : begin(key));
  }
  void prefetch_value(int64_t key) const {
    if (offset && holds(key)) prefetch_read(begin(key));
  }
};

std::vector<KeyColumn> open_columns(const std::vector<Tensor>& values,
                                    const std::vector<std::optional<Tensor>>& offsets, int64_t num_keys,
                                    const char* name, const char* offsets_name) {
  check(values.size() == offsets.size(), name, " must have offsets or None for each column, got ", offsets.size(),
        " for ", values.size(), " columns");
  std::vector<KeyColumn> columns;
  for (size_t c = 0; c < values.size(); ++c) columns.emplace_back(values[c], offsets[c], num_keys, name, offsets_name);
  return columns;
}

// Looks up wanted keys [from, until). Returns false if an offset or a cell points outside its array.
template <class Cell>
bool find(const std::vector<KeyColumn>& stored, const std::vector<KeyColumn>& wanted, const Cell* cells,
          int64_t num_cells, int64_t num_keys, const int64_t* hash, uint64_t first, int64_t shift, int64_t from,
          int64_t until, int64_t* out) {
  constexpr int64_t kBlock = 64;  // keys whose memory is on its way at the same time
  std::array<int64_t, kBlock> cell;
  for (int64_t block = from; block < until; block += kBlock) {
    const int64_t size = std::min(kBlock, until - block);
    for (int64_t i = 0; i < size; ++i) {
      const uint64_t at = (static_cast<uint64_t>(hash[block + i]) - first) >> shift;
      cell[static_cast<size_t>(i)] = at < static_cast<uint64_t>(num_cells) ? static_cast<int64_t>(at) : -1;
      prefetch_read(cells + std::max<int64_t>(cell[static_cast<size_t>(i)], 0));
    }
    for (int64_t i = 0; i < size; ++i) {
      int64_t& c = cell[static_cast<size_t>(i)];
      if (c < 0) continue;
      if (cells[c] < 0 || cells[c] > cells[c + 1] || cells[c + 1] > num_keys) return false;
      if (cells[c] == cells[c + 1]) {
        c = -1;
        continue;
      }
      for (const KeyColumn& column : stored) column.prefetch_place(cells[c]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const int64_t c = cell[static_cast<size_t>(i)];
      if (c < 0) continue;
      for (const KeyColumn& column : stored) column.prefetch_value(cells[c]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const int64_t c = cell[static_cast<size_t>(i)], row = block + i;
      int64_t found = -1;
      for (int64_t key = c < 0 ? 0 : cells[c]; c >= 0 && found < 0 && key < cells[c + 1]; ++key) {
        bool is_equal = true;
        for (size_t k = 0; k < stored.size() && is_equal; ++k) {
          if (!stored[k].holds(key) || !wanted[k].holds(row)) return false;
          const size_t bytes = stored[k].size(key);
          is_equal = bytes == wanted[k].size(row) &&
                     (bytes == 0 || std::memcmp(stored[k].begin(key), wanted[k].begin(row), bytes) == 0);
        }
        if (is_equal) found = key;
      }
      out[row] = found;
    }
  }
  return true;
}

// out[i] = the first stored key that equals wanted key i, or -1. Stored keys ascend by hash: cells[c] is the first
// whose hash is at least first + (c << shift), and the last cell is the number of keys.
Tensor find_keys(const Tensor& hash, const Tensor& cells, int64_t first, int64_t shift,
                 const std::vector<Tensor>& stored, const std::vector<std::optional<Tensor>>& stored_offsets,
                 const std::vector<Tensor>& wanted, const std::vector<std::optional<Tensor>>& wanted_offsets,
                 int64_t num_keys) {
  check_vector(hash, ScalarType::Long, "hash");
  check_index_vector(cells, "cells");
  check(cells.numel() >= 1, "cells must have at least 1 entry, got 0");
  check(shift >= 0 && shift < 64, "shift must be in [0, 64), got ", shift);
  check(num_keys >= 0, "num_keys must be >= 0, got ", num_keys);
  check(!stored.empty() && stored.size() == wanted.size(),
        "stored and wanted must have the same columns, at least 1, got ", stored.size(), " and ", wanted.size());
  const int64_t size = hash.numel();
  const auto own = open_columns(stored, stored_offsets, num_keys, "stored", "stored_offsets");
  const auto asked = open_columns(wanted, wanted_offsets, size, "wanted", "wanted_offsets");
  Tensor out = new_vector(size, ScalarType::Long);
  int64_t* place = mutable_int64_data(out);
  std::atomic<bool> is_inside{true};
  dispatch_index(cells, [&](auto* cell) {
    constexpr int64_t kGrain = 1 << 13;
    torch::stable::parallel_for(0, size, kGrain, [&](int64_t from, int64_t until) {
      if (!find(own, asked, cell, cells.numel() - 1, num_keys, int64_data(hash), static_cast<uint64_t>(first), shift,
                from, until, place))
        is_inside = false;
    });
  });
  check(is_inside,
        "cells must ascend from 0 to num_keys, and stored_offsets and wanted_offsets to the number of bytes");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("find_keys", TORCH_BOX(&find_keys));
}

}  // namespace
}  // namespace salientpp
