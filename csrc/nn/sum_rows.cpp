// The sum or mean of the rows of each list, gathered and added up in one pass. Entries may have one weight per head.
#include "nn/lists.h"

namespace salientpp {
namespace {

// acc += w * row, for one row or four at once; rows are added in their order.
template <bool kWeighted, class Wide, class Value>
void add_row(Wide* __restrict acc, const Value* __restrict row, Wide w, int64_t from, int64_t to) {
  for (int64_t c = from; c < to; ++c) acc[c] += kWeighted ? w * static_cast<Wide>(row[c]) : static_cast<Wide>(row[c]);
}

template <bool kWeighted, class Wide, class Value>
void add_rows(Wide* __restrict acc, const Value* const* rows, const Wide* w, int64_t from, int64_t to) {
  const Value* __restrict a = rows[0], * __restrict b = rows[1], * __restrict c = rows[2], * __restrict d = rows[3];
  const Wide p = w[0], q = w[1], r = w[2], s = w[3];
  for (int64_t j = from; j < to; ++j) {
    if constexpr (kWeighted)
      acc[j] = (((acc[j] + p * static_cast<Wide>(a[j])) + q * static_cast<Wide>(b[j])) + r * static_cast<Wide>(c[j])) +
               s * static_cast<Wide>(d[j]);
    else
      acc[j] = (((acc[j] + static_cast<Wide>(a[j])) + static_cast<Wide>(b[j])) + static_cast<Wide>(c[j])) +
               static_cast<Wide>(d[j]);
  }
}

template <bool kWeighted, class Value, class Index>
void sum_rows(const Lists& lists, const Index& number, const Numbers<int32_t>& place, const Rows& rows, const Value* x,
              const Value* weight, int64_t num_weights, bool mean, bool prefix, Value* out, Faults& faults,
              Faults& place_faults) {
  using Wide = WideOf<Value>;
  constexpr int64_t kRows = 4;
  const int64_t size = rows.size(), num_entries = lists.num_entries();
  for_each_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide* scratch) {
    const int64_t first = lists.begin[i];
    int64_t last = usable_end(number, first, lists.begin[i + 1], rows.count, prefix, faults);
    Value* const row_out = out + i * size;
    Wide* acc = scratch;
    if constexpr (std::is_same_v<Value, Wide>) acc = row_out;
    const auto weight_of = [&](int64_t k) { return weight + (place.index ? place[k] : k) * rows.heads; };
    if constexpr (kWeighted)
      if (place.index) last = usable_end(place, first, last, num_weights, false, place_faults);
    std::fill(acc + from, acc + to, Wide{0});
    int64_t k = first;
    for (; k + kRows <= last; k += kRows) {
      const Value* row[kRows];
      for (int64_t j = 0; j < kRows; ++j) {
        prefetch_row(x, number, k + j, num_entries, size, from, to);
        row[j] = x + number[k + j] * size;
      }
      for_each_head(rows, from, to, [&](int64_t h, int64_t begin, int64_t end) {
        Wide w[kRows] = {};
        if constexpr (kWeighted)
          for (int64_t j = 0; j < kRows; ++j) w[j] = static_cast<Wide>(weight_of(k + j)[h]);
        add_rows<kWeighted>(acc, row, w, begin, end);
      });
    }
    for (; k < last; ++k) {
      prefetch_row(x, number, k, num_entries, size, from, to);
      const Value* row = x + number[k] * size;
      for_each_head(rows, from, to, [&](int64_t h, int64_t begin, int64_t end) {
        Wide w{};
        if constexpr (kWeighted) w = static_cast<Wide>(weight_of(k)[h]);
        add_row<kWeighted>(acc, row, w, begin, end);
      });
    }
    if (mean && last > first) {
      const auto divisor = static_cast<Wide>(last - first);
      for (int64_t c = from; c < to; ++c) acc[c] /= divisor;
    }
    if constexpr (!std::is_same_v<Value, Wide>)
      for (int64_t c = from; c < to; ++c) row_out[c] = static_cast<Value>(acc[c]);
  });
}

Tensor sum_listed_rows(const Tensor& indptr, const std::optional<Tensor>& index, const std::optional<Tensor>& place,
                       const Tensor& x, const std::optional<Tensor>& weight, bool mean, bool prefix) {
  check_defined(x, "x");
  check(x.dim() >= 1, "x must have at least 1 dimension, got 0");
  const Lists lists = lists_of(indptr, num_entries_of(index, x.size(0)));
  int64_t heads = 1;
  if (weight) {
    check_defined(*weight, "weight");
    check(weight->dim() == 1 || weight->dim() == 2, "weight must have 1 or 2 dimensions, got ", weight->dim());
    check(weight->is_contiguous(), "weight must be contiguous");
    check(weight->scalar_type() == x.scalar_type(), "weight must have the dtype of x, ", x.scalar_type(), ", got ",
          weight->scalar_type());
    if (weight->dim() == 2) heads = weight->size(1);
    check(weight->dim() == 1 || (x.dim() >= 2 && x.size(1) == heads), "weight must have a column for each head of x");
    check(place || weight->size(0) >= lists.num_entries(), "weight must have an entry for each of ",
          lists.num_entries(), " entries, got ", weight->size(0));
  }
  if (place) {
    check_vector(*place, ScalarType::Int, "place");
    check(place->numel() >= lists.num_entries(), "place must have an entry for each of ", lists.num_entries(),
          " entries, got ", place->numel());
  }
  if (heads == 0) return new_rows(lists.count, x);
  const Rows rows = rows_of(x, heads, "x");
  const Tensor out = new_rows(lists.count, x);
  if (rows.size() == 0) return out;
  dispatch_float(x, "x", [&]<class Value>(Value*) {
    dispatch_numbers(index, [&](const auto& number) {
      Faults faults, place_faults;
      const Numbers<int32_t> at{place ? data_of<int32_t>(*place) : nullptr};
      if (weight)
        sum_rows<true>(lists, number, at, rows, data_of<Value>(x), data_of<Value>(*weight), weight->size(0), mean,
                       prefix, mutable_data_of<Value>(out), faults, place_faults);
      else
        sum_rows<false>(lists, number, at, rows, data_of<Value>(x), static_cast<const Value*>(nullptr), 0, mean, prefix,
                        mutable_data_of<Value>(out), faults, place_faults);
      faults.raise(number, rows.count, "index");
      place_faults.raise(at, weight ? weight->size(0) : 0, "place");
    });
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("sum_listed_rows", TORCH_BOX(&sum_listed_rows));
}

}  // namespace
}  // namespace salientpp
