// The largest or smallest values of the rows of each list, and their gradients. Equal values share a gradient, as in
// torch.scatter_reduce.
#include "nn/lists.h"

namespace salientpp {
namespace {

template <bool kLargest, class Wide, class Value>
void keep_extremes(Wide* __restrict acc, const Value* __restrict row, int64_t from, int64_t to) {
  for (int64_t c = from; c < to; ++c) {
    const auto value = static_cast<Wide>(row[c]);
    const bool beats = kLargest ? value > acc[c] : value < acc[c];
    acc[c] = beats | (value != value) ? value : acc[c];  // a NaN stays
  }
}

Tensor extreme_listed_rows(const Tensor& indptr, const std::optional<Tensor>& index, const Tensor& x, bool largest) {
  const Rows rows = rows_of(x, 1, "x");
  const Lists lists = lists_of(indptr, num_entries_of(index, rows.count));
  const Tensor out = new_rows(lists.count, x);
  const int64_t size = rows.size(), num_entries = lists.num_entries();
  dispatch_float(x, "x", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    dispatch_numbers(index, [&](const auto& number) {
      Faults faults;
      const Value* from_rows = data_of<Value>(x);
      Value* to_rows = mutable_data_of<Value>(out);
      for_each_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide* scratch) {
        const int64_t first = lists.begin[i];
        const int64_t last = usable_end(number, first, lists.begin[i + 1], rows.count, false, faults);
        Value* const row_out = to_rows + i * size;
        Wide* acc = scratch;
        if constexpr (std::is_same_v<Value, Wide>) acc = row_out;
        if (first == last) std::fill(acc + from, acc + to, Wide{0});
        for (int64_t k = first; k < last; ++k) {
          prefetch_row(from_rows, number, k, num_entries, size, from, to);
          const Value* row = from_rows + number[k] * size;
          if (k == first)
            for (int64_t c = from; c < to; ++c) acc[c] = static_cast<Wide>(row[c]);
          else if (largest)
            keep_extremes<true>(acc, row, from, to);
          else
            keep_extremes<false>(acc, row, from, to);
        }
        if constexpr (!std::is_same_v<Value, Wide>)
          for (int64_t c = from; c < to; ++c) row_out[c] = static_cast<Value>(acc[c]);
      });
      faults.raise(number, rows.count, "index");
    });
  });
  return out;
}

// acc += 1 where the value is the extreme.
template <class Wide, class Value>
void count_ties(Wide* __restrict acc, const Value* __restrict row, const Value* __restrict extreme, int64_t from,
                int64_t to) {
  for (int64_t c = from; c < to; ++c)
    acc[c] += static_cast<Wide>(row[c]) == static_cast<Wide>(extreme[c]) ? Wide{1} : Wide{0};
}

// The gradient of each extreme, divided by the number of values that equal it. torch.scatter_reduce also counts the
// zero that it starts from, even with include_self=False, so this does too; gradients equal PyG's.
Tensor share_ties(const Tensor& indptr, const std::optional<Tensor>& index, const Tensor& x, const Tensor& extreme,
                  const Tensor& grad) {
  const Rows rows = rows_of(x, 1, "x");
  const Lists lists = lists_of(indptr, num_entries_of(index, rows.count));
  check_alike(extreme, x, lists.count, "extreme");
  check_alike(grad, x, lists.count, "grad");
  const Tensor out = new_rows(lists.count, x);
  const int64_t size = rows.size(), num_entries = lists.num_entries();
  dispatch_float(x, "x", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    dispatch_numbers(index, [&](const auto& number) {
      Faults faults;
      const Value *from_rows = data_of<Value>(x), *extremes = data_of<Value>(extreme), *grads = data_of<Value>(grad);
      Value* to_rows = mutable_data_of<Value>(out);
      for_each_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide* ties) {
        const int64_t first = lists.begin[i];
        const int64_t last = usable_end(number, first, lists.begin[i + 1], rows.count, false, faults);
        const Value* top = extremes + i * size;
        for (int64_t c = from; c < to; ++c) ties[c] = static_cast<Wide>(top[c]) == Wide{0} ? Wide{1} : Wide{0};
        for (int64_t k = first; k < last; ++k) {
          prefetch_row(from_rows, number, k, num_entries, size, from, to);
          count_ties(ties, from_rows + number[k] * size, top, from, to);
        }
        for (int64_t c = from; c < to; ++c)
          to_rows[i * size + c] = static_cast<Value>(static_cast<Wide>(grads[i * size + c]) / ties[c]);
      });
      faults.raise(number, rows.count, "index");
    });
  });
  return out;
}

template <class Wide, class Value>
void add_shares(Wide* __restrict acc, const Value* __restrict row, const Value* __restrict extreme,
                const Value* __restrict share, int64_t from, int64_t to) {
  for (int64_t c = from; c < to; ++c) {
    const auto part = static_cast<Wide>(share[c]);  // always loaded, so that the loop has no branch
    acc[c] += static_cast<Wide>(row[c]) == static_cast<Wide>(extreme[c]) ? part : Wide{0};
  }
}

// The gradient of each row of x. A target in the row's list adds its share if the row has the extreme value of that
// target.
Tensor pass_ties(const Tensor& indptr, const Tensor& target, const Tensor& x, const Tensor& extreme,
                 const Tensor& share) {
  const Rows rows = rows_of(x, 1, "x");
  check_vector(target, ScalarType::Int, "target");
  const Lists lists = lists_of(indptr, target.numel());
  check(lists.count == rows.count, "x must have a row for each of ", lists.count, " lists, got ", rows.count);
  check_alike(extreme, x, 0, "extreme");
  check_alike(share, x, extreme.size(0), "share");
  const Tensor out = new_rows(lists.count, x);
  const int64_t size = rows.size(), num_entries = lists.num_entries(), num_targets = extreme.size(0);
  const Numbers<int32_t> number{data_of<int32_t>(target)};
  Faults faults;
  dispatch_float(x, "x", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    const Value *from_rows = data_of<Value>(x), *extremes = data_of<Value>(extreme), *shares = data_of<Value>(share);
    Value* to_rows = mutable_data_of<Value>(out);
    for_each_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide* acc) {
      const int64_t first = lists.begin[i];
      const int64_t last = usable_end(number, first, lists.begin[i + 1], num_targets, true, faults);
      std::fill(acc + from, acc + to, Wide{0});
      for (int64_t k = first; k < last; ++k) {
        prefetch_row(extremes, number, k, num_entries, size, from, to);
        prefetch_row(shares, number, k, num_entries, size, from, to);
        add_shares(acc, from_rows + i * size, extremes + number[k] * size, shares + number[k] * size, from, to);
      }
      for (int64_t c = from; c < to; ++c) to_rows[i * size + c] = static_cast<Value>(acc[c]);
    });
  });
  faults.raise(number, num_targets, "target");
  return out;
}

// The same for values of edges: entry k of list i gets the share of target i if it has the target's extreme value.
Tensor pass_ties_to_entries(const Tensor& indptr, const Tensor& values, const Tensor& extreme, const Tensor& share) {
  const Rows rows = rows_of(values, 1, "values");
  const Lists lists = lists_of(indptr, rows.count);
  check_alike(extreme, values, lists.count, "extreme");
  check_alike(share, values, lists.count, "share");
  const Tensor out = new_rows(lists.num_entries(), values);
  const int64_t size = rows.size();
  dispatch_float(values, "values", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    const Value *value = data_of<Value>(values), *extremes = data_of<Value>(extreme), *shares = data_of<Value>(share);
    Value* to_rows = mutable_data_of<Value>(out);
    for_each_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide*) {
      for (int64_t k = lists.begin[i]; k < lists.begin[i + 1]; ++k)
        for (int64_t c = from; c < to; ++c) {
          const Value part = shares[i * size + c];
          const bool same = static_cast<Wide>(value[k * size + c]) == static_cast<Wide>(extremes[i * size + c]);
          to_rows[k * size + c] = same ? part : Value{};
        }
    });
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("extreme_listed_rows", TORCH_BOX(&extreme_listed_rows));
  m.impl("share_ties", TORCH_BOX(&share_ties));
  m.impl("pass_ties", TORCH_BOX(&pass_ties));
  m.impl("pass_ties_to_entries", TORCH_BOX(&pass_ties_to_entries));
}

}  // namespace
}  // namespace salientpp
