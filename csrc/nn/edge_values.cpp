// Values of edges: the row of each edge's target, the product of its two rows, and the softmax over each target's
// edges.
#include <cmath>

#include "nn/lanes.h"
#include "nn/lists.h"

namespace salientpp {
namespace {

// out[k] = x[i] for every entry k of list i.
Tensor spread_rows(const Tensor& indptr, const Tensor& x) {
  const Rows rows = rows_of(x, 1, "x");
  const Lists lists = lists_of(indptr, INT64_MAX);
  check(rows.count >= lists.count, "x must have a row for each of ", lists.count, " lists, got ", rows.count);
  const Tensor out = new_rows(lists.num_entries(), x);
  const int64_t size = rows.size();
  dispatch_float(x, "x", [&]<class Value>(Value*) {
    const Value* row = data_of<Value>(x);
    Value* to_rows = mutable_data_of<Value>(out);
    for_each_list<char>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, char*) {
      for (int64_t k = lists.begin[i]; k < lists.begin[i + 1]; ++k)
        std::copy(row + i * size + from, row + i * size + to, to_rows + k * size + from);
    });
  });
  return out;
}

// out[k, h] = the sum over c of target_rows[i, h, c] * source_rows[index[k], h, c].
Tensor dot_listed_rows(const Tensor& indptr, const Tensor& index, const Tensor& target_rows, const Tensor& source_rows,
                       int64_t heads) {
  const Rows rows = rows_of(source_rows, heads, "source_rows");
  const Lists lists = lists_of(indptr, num_entries_of(index, 0));
  check_alike(target_rows, source_rows, lists.count, "target_rows");
  const Tensor out = new_tensor<2>({lists.num_entries(), heads}, source_rows.scalar_type());
  const int64_t size = rows.size(), num_entries = lists.num_entries();
  dispatch_float(source_rows, "source_rows", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    dispatch_numbers(index, [&](const auto& number) {
      Faults faults;
      const Value *targets = data_of<Value>(target_rows), *sources = data_of<Value>(source_rows);
      Value* scores = mutable_data_of<Value>(out);
      for_each_whole_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, Wide*) {
        const int64_t first = lists.begin[i];
        const int64_t last = usable_end(number, first, lists.begin[i + 1], rows.count, false, faults);
        const Value* a = targets + i * size;
        for (int64_t k = first; k < last; ++k) {
          prefetch_row(sources, number, k, num_entries, size, int64_t{0}, size);
          const Value* b = sources + number[k] * size;
          for (int64_t h = 0; h < heads; ++h)
            scores[k * heads + h] =
                static_cast<Value>(sum_in_lanes<Wide>(h * rows.columns, (h + 1) * rows.columns, [&](int64_t c) {
                  return static_cast<Wide>(a[c]) * static_cast<Wide>(b[c]);
                }));
        }
      });
      faults.raise(number, rows.count, "index");
    });
  });
  return out;
}

// Softmax as in PyG, separately per head: out[k] = exp(scores[k] - largest of the list) / (sum of the list + 1e-16).
Tensor softmax_of_lists(const Tensor& indptr, const Tensor& scores) {
  const Rows rows = rows_of(scores, 1, "scores");
  const Lists lists = lists_of(indptr, rows.count);
  check(lists.num_entries() == rows.count, "scores must have a row for each of ", lists.num_entries(), " entries, got ",
        rows.count);
  const Tensor out = new_rows(rows.count, scores);
  const int64_t size = rows.size();
  dispatch_float(scores, "scores", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    constexpr Wide kLeast{1e-16};
    const Value* score = data_of<Value>(scores);
    Value* to_rows = mutable_data_of<Value>(out);
    for_each_list<Wide>(lists, size, 16 * sizeof(Wide), [&](int64_t i, int64_t from, int64_t to, Wide*) {
      const int64_t first = lists.begin[i], last = lists.begin[i + 1];
      for (int64_t h = from; h < to && first < last; ++h) {
        auto most = static_cast<Wide>(score[first * size + h]);
        for (int64_t k = first + 1; k < last; ++k) {
          const auto value = static_cast<Wide>(score[k * size + h]);
          most = value > most || value != value ? value : most;
        }
        const auto exponential = [&](int64_t k) { return std::exp(static_cast<Wide>(score[k * size + h]) - most); };
        Wide sum = kLeast;
        if constexpr (std::is_same_v<Value, Wide>) {
          for (int64_t k = first; k < last; ++k) sum += to_rows[k * size + h] = exponential(k);
          for (int64_t k = first; k < last; ++k) to_rows[k * size + h] /= sum;
        } else {  // round a narrow value only once
          for (int64_t k = first; k < last; ++k) sum += exponential(k);
          for (int64_t k = first; k < last; ++k) to_rows[k * size + h] = static_cast<Value>(exponential(k) / sum);
        }
      }
    });
  });
  return out;
}

// The gradient of the scores: out * (grad - the sum over the list of out * grad).
Tensor softmax_of_lists_backward(const Tensor& indptr, const Tensor& out, const Tensor& grad) {
  const Rows rows = rows_of(out, 1, "out");
  const Lists lists = lists_of(indptr, rows.count);
  check(lists.num_entries() == rows.count, "out must have a row for each of ", lists.num_entries(), " entries, got ",
        rows.count);
  check_alike(grad, out, rows.count, "grad");
  const Tensor result = new_rows(rows.count, out);
  const int64_t size = rows.size();
  dispatch_float(out, "out", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    const Value *share = data_of<Value>(out), *grads = data_of<Value>(grad);
    Value* to_rows = mutable_data_of<Value>(result);
    for_each_list<Wide>(lists, size, 2 * sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide* sum) {
      std::fill(sum + from, sum + to, Wide{0});
      for (int64_t k = lists.begin[i]; k < lists.begin[i + 1]; ++k)
        for (int64_t h = from; h < to; ++h)
          sum[h] += static_cast<Wide>(share[k * size + h]) * static_cast<Wide>(grads[k * size + h]);
      for (int64_t k = lists.begin[i]; k < lists.begin[i + 1]; ++k)
        for (int64_t h = from; h < to; ++h)
          to_rows[k * size + h] = static_cast<Value>(static_cast<Wide>(share[k * size + h]) *
                                                     (static_cast<Wide>(grads[k * size + h]) - sum[h]));
    });
  });
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("spread_rows", TORCH_BOX(&spread_rows));
  m.impl("dot_listed_rows", TORCH_BOX(&dot_listed_rows));
  m.impl("softmax_of_lists", TORCH_BOX(&softmax_of_lists));
  m.impl("softmax_of_lists_backward", TORCH_BOX(&softmax_of_lists_backward));
}

}  // namespace
}  // namespace salientpp
