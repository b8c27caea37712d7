#include <algorithm>
#include <cstring>

#include "check.h"
#include "memory.h"
#include "store/places.h"
#include "store/read_ahead.h"

namespace salientpp {
namespace {

// out[out_index[i]] = source[source_index[i]], rows moved as bytes; out_index absent means i.
void gather_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
                 const std::optional<Tensor>& out_index, bool parallel) {
  check_defined(source, "source");
  check_defined(out, "out");
  check_index_vector(source_index, "source_index");
  check(source.dim() >= 1 && out.dim() == source.dim(),
        "source and out must have the same number of dimensions >= 1, got ", source.dim(), " and ", out.dim());
  check(source.scalar_type() == out.scalar_type(), "out must have the dtype of source, expected ", source.scalar_type(),
        ", got ", out.scalar_type());
  check(source.is_contiguous() && out.is_contiguous(), "source and out must be contiguous");
  int64_t row_bytes = source.element_size();
  for (int64_t d = 1; d < source.dim(); ++d) {
    check(source.size(d) == out.size(d), "out must have rows of the same shape as source, expected size ",
          source.size(d), " in dimension ", d, ", got ", out.size(d));
    row_bytes *= source.size(d);
  }
  const int64_t num_rows = source_index.numel();
  const int64_t source_rows = source.size(0);
  const int64_t out_rows = out.size(0);
  const int64_t* target = check_places(num_rows, out, out_index);
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t source_bytes = source_rows * row_bytes, out_bytes = out_rows * row_bytes;
  check_apart(from, source_bytes, to, out_bytes);

  dispatch_index(source_index, [&](auto* index) {
    check_rows(index, num_rows, source_rows, target, out_rows);
    if (row_bytes == 0) return;  // then there may be no memory to copy from or to
    const auto copy = [&](int64_t first, int64_t last, auto bytes) {
      constexpr int64_t kLine = 64, kWide = 2048, kCachedBytes = int64_t{1} << 20;
      const int64_t ahead =
          row_bytes <= kLine ? 64 : 16;  // so many misses a core must have under way, in one row or in several
      // A store to a line that is in no cache waits for it to be read, also where rows are written in order: what
      // fetches lines ahead by itself follows the reads, which jump; but within rows of several kilobytes it keeps up.
      const bool writes_miss = out_bytes > kCachedBytes && row_bytes <= kWide && (target || row_bytes > kLine);
      for (int64_t i = first; i < last; ++i) {
        if (i + ahead < last) {
          const char* row = from + index[i + ahead] * row_bytes;
          for (int64_t b = 0; b < row_bytes; b += kLine) prefetch_read(row + b);
          if (writes_miss) {
            char* place = to + (target ? target[i + ahead] : i + ahead) * row_bytes;
            for (int64_t b = 0; b < row_bytes; b += kLine) prefetch_write(place + b);
          }
        }
        std::memcpy(to + (target ? target[i] : i) * row_bytes, from + index[i] * row_bytes,
                    static_cast<size_t>(bytes()));
      }
    };
    const auto copy_range = [&](int64_t first, int64_t last) {
      switch (row_bytes) {  // a constant length turns memcpy into plain loads and stores
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
    for_rows_at(from, source_rows, row_bytes, index, num_rows, grain, copy_range);
  });
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
}

}  // namespace
}  // namespace salientpp
