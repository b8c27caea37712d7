#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "memory.h"
#include "store/places.h"
#include "store/read_ahead.h"

namespace salientpp {
namespace {

Piece memory_of(const Tensor& rows) {
  const auto bytes = static_cast<int64_t>(rows.numel() * rows.element_size());
  return {static_cast<const char*>(rows.const_data_ptr()), bytes};
}

// Copies the rows that begin at row(i), in one of `sources`, to their places (null: in order).
template <class Row>
void move_rows(const std::vector<Piece>& sources, const Row& row, int64_t num_rows, int64_t row_bytes,
               const Tensor& out, const int64_t* target, bool parallel) {
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t out_bytes = out.size(0) * row_bytes;
  const bool streams = kCanStream && target && out_bytes >= kStreamedBytes && row_bytes % kStreamedLine == 0 &&
                       reinterpret_cast<uintptr_t>(to) % kStreamedLine == 0;
  const auto copy = [&](int64_t first, int64_t last, auto bytes) {
    constexpr int64_t kLine = 64, kNarrow = 512, kWide = 1024, kWidest = 3072, kCachedBytes = int64_t{1} << 20;
    // A core needs this number of cache misses under way, in one row or in several. The lines of more rows would evict
    // each other from the nearest cache if rows are wide. The hardware prefetcher handles the widest rows by itself.
    const int64_t ahead = row_bytes <= kLine ? 64 : row_bytes <= kNarrow ? 16 : row_bytes <= kWidest ? 2 : 0;
    // A store to an uncached line waits until the line is read, so lines are prefetched for writing, even if rows are
    // written in order. The hardware prefetcher is misled by the reads, which jump. It helps only within rows of
    // several kilobytes.
    const bool writes_miss =
        !streams && out_bytes > kCachedBytes && row_bytes <= kWide && (target || row_bytes > kLine);
    for (int64_t i = first; i < last; ++i) {
      if (ahead > 0 && i + ahead < last) {
        const char* next = row(i + ahead);
        for (int64_t b = 0; b < row_bytes; b += kLine) prefetch_read(next + b);
        if (writes_miss) {
          char* place = to + (target ? target[i + ahead] : i + ahead) * row_bytes;
          for (int64_t b = 0; b < row_bytes; b += kLine) prefetch_write(place + b);
        }
      }
      char* place = to + (target ? target[i] : i) * row_bytes;
      if (streams)
        stream_lines(place, row(i), bytes());
      else
        std::memcpy(place, row(i), static_cast<size_t>(bytes()));
    }
    if (streams) end_streaming();
  };
  const auto copy_range = [&](int64_t first, int64_t last) {
    switch (row_bytes) {  // a constant size turns memcpy into plain loads and stores
      case 1:
        return copy(first, last, [] { return 1; });
      case 2:
        return copy(first, last, [] { return 2; });
      case 4:
        return copy(first, last, [] { return 4; });
      case 8:
        return copy(first, last, [] { return 8; });
      case 256:
        return copy(first, last, [] { return 256; });
      case 512:
        return copy(first, last, [] { return 512; });
      default:
        return copy(first, last, [&] { return row_bytes; });
    }
  };
  constexpr int64_t kGrainBytes = int64_t{1} << 20;
  const int64_t grain = std::max<int64_t>(1, parallel ? kGrainBytes / std::max<int64_t>(1, row_bytes) : num_rows);
  ReadAhead(sources, row_bytes, row, num_rows).over(grain, copy_range);
}

// out[out_index[i]] = source[source_index[i]], with rows copied as bytes; without out_index, row i goes to place i.
void gather_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
                 const std::optional<Tensor>& out_index, bool parallel) {
  check_defined(source, "source");
  check_defined(out, "out");
  check_index_vector(source_index, "source_index");
  const int64_t row_bytes = check_kind(source, out) * source.element_size();
  const int64_t num_rows = source_index.numel();
  const int64_t* target = check_places(num_rows, out, out_index);
  check_apart(source, out);
  const Piece from = memory_of(source);
  dispatch_index(source_index, [&](auto* index) {
    check_rows(index, num_rows, source.size(0), target, out.size(0));
    if (row_bytes == 0) return;  // there may be no memory to copy from or to
    const auto row = [from = from.from, index, row_bytes](int64_t i) { return from + index[i] * row_bytes; };
    move_rows({from}, row, num_rows, row_bytes, out, target, parallel);
  });
}

// Copies rows of several tensors, which are numbered as if they were concatenated.
void gather_joined_rows(const std::vector<Tensor>& sources, const Tensor& source_index, const Tensor& out,
                        const std::optional<Tensor>& out_index, bool parallel) {
  check(!sources.empty(), "sources must have at least one tensor, got none");
  check_defined(out, "out");
  check_index_vector(source_index, "source_index");
  int64_t row_bytes = 0;
  std::vector<Piece> pieces;
  std::vector<int64_t> first_row{0};
  // For each piece, the address from which row numbers lead to its rows. It is kept as a number, because it lies in no
  // object.
  std::vector<uintptr_t> origin;
  for (const Tensor& source : sources) {
    check_defined(source, "a tensor of sources");
    row_bytes = check_kind(source, out) * source.element_size();
    check_apart(source, out);
    const Piece from = memory_of(source);
    pieces.push_back(from);
    origin.push_back(reinterpret_cast<uintptr_t>(from.from) - static_cast<uintptr_t>(first_row.back() * row_bytes));
    first_row.push_back(first_row.back() + source.size(0));
  }
  const int64_t num_rows = source_index.numel();
  const int64_t* target = check_places(num_rows, out, out_index);
  dispatch_index(source_index, [&](auto* index) {
    check_rows(index, num_rows, first_row.back(), target, out.size(0));
    if (row_bytes == 0) return;
    const auto row = [&](int64_t i) {
      const auto piece = static_cast<size_t>(owner_of(index[i], first_row.data(), static_cast<int64_t>(pieces.size())));
      return reinterpret_cast<const char*>(origin[piece] + static_cast<uintptr_t>(index[i] * row_bytes));
    };
    move_rows(pieces, row, num_rows, row_bytes, out, target, parallel);
  });
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("gather_joined_rows", TORCH_BOX(&gather_joined_rows));
}

}  // namespace
}  // namespace salientpp
