// Reduces groups of rows to their sum, mean or maximum, adding rows up as they come from memory. Rows may be multiplied
// by weights first; a mean still divides by the number of rows.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "check.h"
#include "memory.h"
#include "store/places.h"

namespace salientpp {
namespace {

enum Reduction : int64_t { kSum, kMean, kMax };

// out[i] = the reduction of size[i] rows, in order. `Wide` is the type of the sums.
template <class Value, class Wide, class Index>
void reduce(const Value* source, const Index* index, const Wide* weight, const std::vector<int64_t>& begin,
            int64_t columns, int64_t reduction, bool parallel, Value* out) {
  const auto num_groups = static_cast<int64_t>(begin.size()) - 1;
  const int64_t num_rows = begin.back();
  constexpr int64_t kLine = 64, kAhead = 16, kGrainBytes = int64_t{1} << 20;
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(Value));
  const int64_t per_group = std::max<int64_t>(1, num_rows / std::max<int64_t>(1, num_groups)) * row_bytes;
  const int64_t grain = std::max<int64_t>(1, parallel ? kGrainBytes / std::max<int64_t>(1, per_group) : num_groups);
  torch::stable::parallel_for(0, num_groups, grain, [&](int64_t first, int64_t last) {
    std::vector<Wide> total(static_cast<size_t>(columns));
    for (int64_t g = first; g < last; ++g) {
      const int64_t from = begin[static_cast<size_t>(g)], until = begin[static_cast<size_t>(g) + 1];
      for (int64_t k = from; k < until; ++k) {
        if (k + kAhead < num_rows) {
          const char* ahead = reinterpret_cast<const char*>(source + index[k + kAhead] * columns);
          for (int64_t b = 0; b < row_bytes; b += kLine) prefetch_read(ahead + b);
        }
        const Value* row = source + index[k] * columns;
        const Wide times = weight ? weight[k] : Wide{1};
        if (k == from) {
          for (int64_t c = 0; c < columns; ++c) total[static_cast<size_t>(c)] = times * static_cast<Wide>(row[c]);
        } else if (reduction == kMax) {
          for (int64_t c = 0; c < columns; ++c) {
            const auto value = times * static_cast<Wide>(row[c]);
            Wide& most = total[static_cast<size_t>(c)];
            most = value > most || value != value ? value : most;  // NaN stays
          }
        } else {
          for (int64_t c = 0; c < columns; ++c) total[static_cast<size_t>(c)] += times * static_cast<Wide>(row[c]);
        }
      }
      Value* to = out + g * columns;
      if (from == until) {
        std::fill(to, to + columns, static_cast<Value>(Wide{0}));
        continue;
      }
      const auto divisor = static_cast<Wide>(reduction == kMean ? until - from : 1);
      for (int64_t c = 0; c < columns; ++c) to[c] = static_cast<Value>(total[static_cast<size_t>(c)] / divisor);
    }
  });
}

void reduce_rows(const Tensor& source, const Tensor& source_index, const Tensor& size,
                 const std::optional<Tensor>& weight, const Tensor& out, int64_t reduction, bool parallel) {
  check_defined(source, "source");
  check_defined(out, "out");
  check_index_vector(source_index, "source_index");
  check_vector(size, ScalarType::Long, "size");
  check(reduction >= kSum && reduction <= kMax, "reduction must be 0 (sum), 1 (mean) or 2 (max), got ", reduction);
  const int64_t columns = check_kind(source, out);
  const int64_t num_groups = size.numel(), num_rows = source_index.numel();
  check(out.size(0) == num_groups, "out must have a row for each group, expected ", num_groups, ", got ", out.size(0));
  std::vector<int64_t> begin(static_cast<size_t>(num_groups) + 1);
  const int64_t* count = int64_data(size);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t before = begin[static_cast<size_t>(g)];
    check(count[g] >= 0 && count[g] <= num_rows - before, "size[", g, "] must be in [0, ", num_rows - before,
          "], the rows that are left, got ", count[g]);
    begin[static_cast<size_t>(g) + 1] = before + count[g];
  }
  check(begin.back() == num_rows, "size must add up to the number of rows, ", num_rows, ", got ", begin.back());
  if (weight) {
    check_vector(*weight, source.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float,
                 "weight");
    check(weight->numel() == num_rows, "weight must have an entry for each row, expected ", num_rows, ", got ",
          weight->numel());
  }
  check_apart(source, out);
  dispatch_index(source_index, [&](auto* index) {
    check_rows(index, num_rows, source.size(0), nullptr, 0);
    if (columns == 0 || num_groups == 0) return;
    dispatch_float(source, "source", [&]<class Value>(Value*) {
      using Wide = std::conditional_t<std::is_same_v<Value, double>, double, float>;
      reduce<Value, Wide>(static_cast<const Value*>(source.const_data_ptr()), index,
                          weight ? static_cast<const Wide*>(weight->const_data_ptr()) : nullptr, begin, columns,
                          reduction, parallel, static_cast<Value*>(out.mutable_data_ptr()));
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("reduce_rows", TORCH_BOX(&reduce_rows));
}

}  // namespace
}  // namespace salientpp
