// Scores of GATv2: score[k, h] is the sum over c of att[h, c] * leaky_relu(target_rows[i, h, c] + source_rows[s, h, c])
// for entry k of list i with source s. Sums of two rows are not stored; the backward pass computes them again.
#include "nn/lanes.h"
#include "nn/lists.h"

namespace salientpp {
namespace {

// terms = att * leaky_relu(a + b). A separate loop, so that the compiler can vectorise it.
template <class Wide, class Value>
void write_terms(Wide* __restrict terms, const Value* __restrict a, const Value* __restrict b,
                 const Value* __restrict att, Wide slope, int64_t size) {
  for (int64_t c = 0; c < size; ++c) {
    const Wide z = static_cast<Wide>(a[c]) + static_cast<Wide>(b[c]);
    const Wide rising = z > Wide{0} ? z : Wide{0}, falling = z > Wide{0} ? Wide{0} : z;  // selects, not branches
    terms[c] = static_cast<Wide>(att[c]) * (rising + slope * falling);
  }
}

Rows check_scores(const Tensor& target_rows, const Tensor& source_rows, const Tensor& att, int64_t num_targets) {
  check_defined(att, "att");
  check(att.dim() == 2 && att.is_contiguous(), "att must be contiguous with 2 dimensions, heads and columns");
  const Rows rows = rows_of(source_rows, std::max<int64_t>(att.size(0), 1), "source_rows");
  check(att.scalar_type() == source_rows.scalar_type(), "att must have the dtype of source_rows, ",
        source_rows.scalar_type(), ", got ", att.scalar_type());
  check(att.numel() == rows.size(), "att must have a value for each of ", rows.size(), " columns, got ", att.numel());
  check_alike(target_rows, source_rows, num_targets, "target_rows");
  return rows;
}

void check_grad(const Tensor& grad, const Tensor& att, int64_t num_entries) {
  check_defined(grad, "grad");
  check(grad.dim() == 2 && grad.is_contiguous() && grad.size(1) == att.size(0),
        "grad must be contiguous with 2 dimensions and ", att.size(0), " columns");
  check(grad.scalar_type() == att.scalar_type(), "grad must have dtype ", att.scalar_type(), ", got ",
        grad.scalar_type());
  check(grad.size(0) >= num_entries, "grad must have at least ", num_entries, " rows, got ", grad.size(0));
}

Tensor additive_scores(const Tensor& indptr, const Tensor& index, const Tensor& target_rows, const Tensor& source_rows,
                       const Tensor& att, double negative_slope) {
  const Lists lists = lists_of(indptr, num_entries_of(index, 0));
  const Rows rows = check_scores(target_rows, source_rows, att, lists.count);
  const Tensor out = new_tensor<2>({lists.num_entries(), att.size(0)}, source_rows.scalar_type());
  const int64_t size = rows.size(), num_entries = lists.num_entries(), heads = att.size(0);
  dispatch_float(source_rows, "source_rows", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    dispatch_numbers(index, [&](const auto& number) {
      Faults faults;
      const Value *targets = data_of<Value>(target_rows), *sources = data_of<Value>(source_rows),
                  *weight = data_of<Value>(att);
      const auto slope = static_cast<Wide>(negative_slope);
      Value* scores = mutable_data_of<Value>(out);
      for_each_whole_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, Wide* terms) {
        const int64_t first = lists.begin[i];
        const int64_t last = usable_end(number, first, lists.begin[i + 1], rows.count, false, faults);
        for (int64_t k = first; k < last; ++k) {
          prefetch_row(sources, number, k, num_entries, size, int64_t{0}, size);
          write_terms(terms, targets + i * size, sources + number[k] * size, weight, slope, size);
          for (int64_t h = 0; h < heads; ++h)
            scores[k * heads + h] = static_cast<Value>(
                sum_in_lanes<Wide>(h * rows.columns, (h + 1) * rows.columns, [&](int64_t c) { return terms[c]; }));
        }
      });
      faults.raise(number, rows.count, "index");
    });
  });
  return out;
}

// acc += g * (the slope at a + b), and att_acc += g * leaky_relu(a + b).
template <bool kWithAtt, class Wide, class Value>
void add_slopes(Wide* __restrict acc, [[maybe_unused]] Wide* __restrict att_acc, const Value* __restrict a,
                const Value* __restrict b, Wide g, Wide slope, int64_t from, int64_t to) {
  const Wide falling = g * slope;
  for (int64_t c = from; c < to; ++c) {
    const Wide z = static_cast<Wide>(a[c]) + static_cast<Wide>(b[c]);
    const Wide d = z > Wide{0} ? g : falling;
    acc[c] += d;
    if constexpr (kWithAtt) att_acc[c] += d * z;
  }
}

// Gradients of target_rows [T, ...] and of att. The gradient of att is added up in a fixed number of pieces.
std::tuple<Tensor, Tensor> additive_scores_by_target(const Tensor& indptr, const Tensor& index,
                                                     const Tensor& target_rows, const Tensor& source_rows,
                                                     const Tensor& att, double negative_slope, const Tensor& grad) {
  const Lists lists = lists_of(indptr, num_entries_of(index, 0));
  const Rows rows = check_scores(target_rows, source_rows, att, lists.count);
  const int64_t size = rows.size(), num_entries = lists.num_entries(), heads = att.size(0);
  check_grad(grad, att, num_entries);
  const Tensor out = new_rows(lists.count, source_rows), att_out = new_rows(heads, att);
  dispatch_float(source_rows, "source_rows", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    dispatch_numbers(index, [&](const auto& number) {
      Faults faults;
      constexpr int64_t kParts = 64;
      const Value *targets = data_of<Value>(target_rows), *sources = data_of<Value>(source_rows),
                  *weight = data_of<Value>(att), *grads = data_of<Value>(grad);
      const auto slope = static_cast<Wide>(negative_slope);
      Value* to_rows = mutable_data_of<Value>(out);
      const std::vector<int64_t> ends = cut_lists(lists, kParts);
      std::vector<Wide> parts(static_cast<size_t>(kParts * size));
      torch::stable::parallel_for(0, kParts, 1, [&](int64_t first_part, int64_t last_part) {
        std::vector<Wide> acc(static_cast<size_t>(size)), att_acc(static_cast<size_t>(size));
        for (int64_t part = first_part; part < last_part; ++part) {
          std::fill(att_acc.begin(), att_acc.end(), Wide{0});
          for (int64_t i = ends[static_cast<size_t>(part)]; i < ends[static_cast<size_t>(part) + 1]; ++i) {
            const int64_t first = lists.begin[i];
            const int64_t last = usable_end(number, first, lists.begin[i + 1], rows.count, false, faults);
            std::fill(acc.begin(), acc.end(), Wide{0});
            for (int64_t k = first; k < last; ++k) {
              prefetch_row(sources, number, k, num_entries, size, int64_t{0}, size);
              const Value *a = targets + i * size, *b = sources + number[k] * size;
              for (int64_t h = 0; h < heads; ++h)
                add_slopes<true>(acc.data(), att_acc.data(), a, b, static_cast<Wide>(grads[k * heads + h]), slope,
                                 h * rows.columns, (h + 1) * rows.columns);
            }
            for (int64_t c = 0; c < size; ++c)
              to_rows[i * size + c] = static_cast<Value>(acc[static_cast<size_t>(c)] * static_cast<Wide>(weight[c]));
          }
          std::copy(att_acc.begin(), att_acc.end(), parts.begin() + part * size);
        }
      });
      Value* att_to = mutable_data_of<Value>(att_out);
      for (int64_t c = 0; c < size; ++c) {
        Wide sum{0};
        for (int64_t part = 0; part < kParts; ++part) sum += parts[static_cast<size_t>(part * size + c)];
        att_to[c] = static_cast<Value>(sum);
      }
      faults.raise(number, rows.count, "index");
    });
  });
  return {out, att_out};
}

// The gradient of source_rows, over the lists by source.
Tensor additive_scores_by_source(const Tensor& indptr, const Tensor& target, const Tensor& place,
                                 const Tensor& target_rows, const Tensor& source_rows, const Tensor& att,
                                 double negative_slope, const Tensor& grad) {
  check_vector(target, ScalarType::Int, "target");
  check_vector(place, ScalarType::Int, "place");
  const Lists lists = lists_of(indptr, target.numel());
  check(place.numel() == target.numel(), "place must have an entry for each target, expected ", target.numel(),
        ", got ", place.numel());
  const Rows rows = check_scores(target_rows, source_rows, att, 0);
  check(lists.count == rows.count, "source_rows must have a row for each of ", lists.count, " lists, got ", rows.count);
  check_grad(grad, att, 0);
  const Tensor out = new_rows(lists.count, source_rows);
  const int64_t size = rows.size(), num_entries = lists.num_entries(), heads = att.size(0);
  const int64_t num_targets = target_rows.size(0), num_places = grad.size(0);
  const Numbers<int32_t> number{data_of<int32_t>(target)}, at{data_of<int32_t>(place)};
  Faults faults, place_faults;
  dispatch_float(source_rows, "source_rows", [&]<class Value>(Value*) {
    using Wide = WideOf<Value>;
    const Value *targets = data_of<Value>(target_rows), *sources = data_of<Value>(source_rows),
                *weight = data_of<Value>(att), *grads = data_of<Value>(grad);
    const auto slope = static_cast<Wide>(negative_slope);
    Value* to_rows = mutable_data_of<Value>(out);
    for_each_list<Wide>(lists, size, sizeof(Value), [&](int64_t i, int64_t from, int64_t to, Wide* acc) {
      const int64_t first = lists.begin[i];
      int64_t last = usable_end(number, first, lists.begin[i + 1], num_targets, true, faults);
      last = usable_end(at, first, last, num_places, false, place_faults);
      std::fill(acc + from, acc + to, Wide{0});
      for (int64_t k = first; k < last; ++k) {
        prefetch_row(targets, number, k, num_entries, size, from, to);
        const Value *a = targets + number[k] * size, *b = sources + i * size, *g = grads + at[k] * heads;
        for_each_head(rows, from, to, [&](int64_t h, int64_t begin, int64_t end) {
          add_slopes<false>(acc, static_cast<Wide*>(nullptr), a, b, static_cast<Wide>(g[h]), slope, begin, end);
        });
      }
      for (int64_t c = from; c < to; ++c)
        to_rows[i * size + c] = static_cast<Value>(acc[c] * static_cast<Wide>(weight[c]));
    });
  });
  faults.raise(number, num_targets, "target");
  place_faults.raise(at, num_places, "place");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("additive_scores", TORCH_BOX(&additive_scores));
  m.impl("additive_scores_by_target", TORCH_BOX(&additive_scores_by_target));
  m.impl("additive_scores_by_source", TORCH_BOX(&additive_scores_by_source));
}

}  // namespace
}  // namespace salientpp
