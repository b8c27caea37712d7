// Lists of rows: helpers shared by the products over grouped edges.
//
// Edges are grouped by target, so the edges into target t are one list of places. The transposed lists group the same
// places by source. A product writes one row for each list, so threads share no output and need no atomics.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "check.h"
#include "memory.h"
#include "store/places.h"

namespace salientpp {

// Type in which values are added up.
template <class Value>
using WideOf = std::conditional_t<std::is_same_v<Value, double>, double, float>;

template <class Value>
const Value* data_of(const Tensor& tensor) {
  return static_cast<const Value*>(tensor.const_data_ptr());
}

template <class Value>
Value* mutable_data_of(const Tensor& tensor) {
  return static_cast<Value*>(tensor.mutable_data_ptr());
}

// List i has the entries [begin[i], begin[i + 1]).
struct Lists {
  const int64_t* begin;
  int64_t count;

  int64_t num_entries() const { return begin[count]; }
};

// Raises unless the lists lie within `num_entries` entries. They may leave entries at the end unused.
inline Lists lists_of(const Tensor& indptr, int64_t num_entries) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  const Lists lists{int64_data(indptr), indptr.numel() - 1};
  check(lists.begin[0] == 0, "indptr must start at 0, got ", lists.begin[0]);
  for (int64_t i = 0; i < lists.count; ++i)
    check(lists.begin[i] <= lists.begin[i + 1], "indptr must not decrease, got ", lists.begin[i + 1], " after ",
          lists.begin[i]);
  check(lists.num_entries() <= num_entries, "indptr must end at most at the number of entries, ", num_entries, ", got ",
        lists.num_entries());
  return lists;
}

// Rows [n, heads, columns], or [n, columns] with one head. Other dimensions are columns too.
struct Rows {
  int64_t count, heads, columns;

  int64_t size() const { return heads * columns; }
};

inline Rows rows_of(const Tensor& tensor, int64_t heads, const char* name) {
  check_defined(tensor, name);
  check(tensor.dim() >= 1, name, " must have at least 1 dimension, got 0");
  check(tensor.is_contiguous(), name, " must be contiguous");
  int64_t size = 1;
  for (int64_t d = 1; d < tensor.dim(); ++d) size *= tensor.size(d);
  check(heads > 0 && size % heads == 0, name, " must have rows that divide into ", heads, " heads, got ", size,
        " values");
  return {tensor.size(0), heads, size / heads};
}

inline void check_alike(const Tensor& tensor, const Tensor& like, int64_t num_rows, const char* name) {
  check_defined(tensor, name);
  check(tensor.scalar_type() == like.scalar_type(), name, " must have dtype ", like.scalar_type(), ", got ",
        tensor.scalar_type());
  check(tensor.is_contiguous(), name, " must be contiguous");
  check(tensor.dim() == like.dim(), name, " must have ", like.dim(), " dimensions, got ", tensor.dim());
  check(tensor.size(0) >= num_rows, name, " must have at least ", num_rows, " rows, got ", tensor.size(0));
  for (int64_t d = 1; d < like.dim(); ++d)
    check(tensor.size(d) == like.size(d), name, " must have size ", like.size(d), " in dimension ", d, ", got ",
          tensor.size(d));
}

// An uninitialised tensor of `num_rows` rows like those of `like`. Large ones ask for huge pages.
inline Tensor new_rows(int64_t num_rows, const Tensor& like) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim())), strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) {
    sizes[d] = d == 0 ? num_rows : like.size(static_cast<int64_t>(d));
    strides[d] = stride;
  }
  AtenTensorHandle made = nullptr;
  const auto error =
      aoti_torch_empty_strided(like.dim(), sizes.data(), strides.data(), static_cast<int32_t>(like.scalar_type()),
                               aoti_torch_device_type_cpu(), 0, &made);
  if (error != AOTI_TORCH_SUCCESS)
    fail("cannot allocate a tensor of ", stride, " entries of dtype ", like.scalar_type());
  Tensor tensor(made);
  advise_huge_pages(tensor.const_data_ptr(), static_cast<size_t>(stride * like.element_size()));
  return tensor;
}

// Row number of each entry. Without `index`, entry k is row k.
template <class Index>
struct Numbers {
  const Index* index;

  int64_t operator[](int64_t k) const { return static_cast<int64_t>(index[k]); }
};

template <>
struct Numbers<void> {
  int64_t operator[](int64_t k) const { return k; }
};

// Calls f with the row numbers that `index` holds.
template <class F>
void dispatch_numbers(const std::optional<Tensor>& index, F&& f) {
  if (!index) return f(Numbers<void>{});
  if (index->scalar_type() == ScalarType::Int) return f(Numbers<int32_t>{data_of<int32_t>(*index)});
  return f(Numbers<int64_t>{data_of<int64_t>(*index)});
}

inline int64_t num_entries_of(const std::optional<Tensor>& index, int64_t without) {
  if (!index) return without;
  check_index_vector(*index, "index");
  return index->numel();
}

// Records, from any thread, that an entry is out of range. An exception must not leave a thread.
class Faults {
 public:
  void note(int64_t entry) {
    int64_t first = first_.load(std::memory_order_relaxed);
    while (entry < first && !first_.compare_exchange_weak(first, entry, std::memory_order_relaxed)) {
    }
  }

  template <class Index>
  void raise(const Index& index, int64_t num_rows, const char* name) const {
    const int64_t first = first_.load(std::memory_order_relaxed);
    if (first == kNone) return;
    fail(name, "[", first, "] must be in [0, ", num_rows, "), got ", index[first]);
  }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  std::atomic<int64_t> first_{kNone};
};

// Returns the end of the usable part of the list [from, until): its first number outside [0, num_rows). Such a number
// is recorded as a fault. With `prefix`, numbers ascend, and one that is too large ends the list without a fault.
template <class Index>
int64_t usable_end(const Index& number, int64_t from, int64_t until, int64_t num_rows, bool prefix, Faults& faults) {
  for (int64_t k = from; k < until; ++k) {
    if (number[k] >= 0 && number[k] < num_rows) continue;
    if (number[k] < 0 || !prefix) faults.note(k);
    return k;
  }
  return until;
}

// Prefetches the row of an entry that comes later.
constexpr int64_t kAhead = 8;

template <class Value, class Index>
void prefetch_row(const Value* rows, const Index& number, int64_t k, int64_t num_entries, int64_t row_size,
                  int64_t from, int64_t to) {
  if constexpr (!std::is_same_v<Index, Numbers<void>>) {
    constexpr int64_t kLine = 64;
    if (k + kAhead >= num_entries) return;
    const auto address =
        reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(number[k + kAhead] * row_size) * sizeof(Value);
    for (auto b = from * static_cast<int64_t>(sizeof(Value)); b < to * static_cast<int64_t>(sizeof(Value)); b += kLine)
      prefetch_read(reinterpret_cast<const char*>(address + static_cast<uintptr_t>(b)));
  }
}

constexpr int64_t kGrainBytes = int64_t{1} << 18;  // smaller work is not worth a thread

inline int64_t num_pieces(const Lists& lists, int64_t row_bytes) {
  const int64_t bytes = (lists.num_entries() + lists.count) * std::max<int64_t>(row_bytes, 1);
  return std::clamp<int64_t>(bytes / kGrainBytes, 1, torch::stable::get_num_threads());
}

// Returns the ends of `pieces` runs of lists with about equal work: an entry counts as much as a list. Entries of the
// lists in `apart`, ascending, do not count.
inline std::vector<int64_t> cut_lists(const Lists& lists, int64_t pieces, const std::vector<int64_t>& apart = {}) {
  const auto work = [&](int64_t i) {
    int64_t sum = lists.begin[i] + i;
    for (const int64_t a : apart) {
      if (a >= i) break;
      sum -= lists.begin[a + 1] - lists.begin[a];
    }
    return sum;
  };
  const int64_t total = work(lists.count);
  std::vector<int64_t> ends(static_cast<size_t>(pieces) + 1);
  for (int64_t p = 1; p < pieces; ++p) {
    const int64_t goal = total / pieces * p;
    int64_t low = ends[static_cast<size_t>(p) - 1], high = lists.count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (work(middle) < goal)
        low = middle + 1;
      else
        high = middle;
    }
    ends[static_cast<size_t>(p)] = low;
  }
  ends.back() = lists.count;
  return ends;
}

// Calls f(list, from, to, scratch) for every list, with columns [from, to) and `size` values of scratch. Each thread
// gets a share of the entries. A list longer than a thread's share is split by columns, so results do not depend on the
// number of threads.
template <class Scratch, class F>
void for_each_list(const Lists& lists, int64_t size, int64_t value_bytes, F&& f) {
  const int64_t pieces = num_pieces(lists, size * value_bytes);
  std::vector<int64_t> apart;
  if (pieces > 1) {
    constexpr int64_t kShares = 8;
    const int64_t most = std::max<int64_t>(lists.num_entries() / (pieces * kShares), 1);
    for (int64_t i = 0; i < lists.count; ++i)
      if (lists.begin[i + 1] - lists.begin[i] > most) apart.push_back(i);
  }
  const std::vector<int64_t> ends = cut_lists(lists, pieces, apart);
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t first, int64_t last) {
    std::vector<Scratch> scratch(static_cast<size_t>(size));
    const int64_t begin = ends[static_cast<size_t>(first)], end = ends[static_cast<size_t>(last)];
    auto next = std::lower_bound(apart.begin(), apart.end(), begin);
    for (int64_t i = begin; i < end; ++i) {
      if (next != apart.end() && *next == i)
        ++next;
      else
        f(i, int64_t{0}, size, scratch.data());
    }
  });
  constexpr int64_t kBlock = 16;
  for (const int64_t i : apart)
    torch::stable::parallel_for(0, (size + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
      std::vector<Scratch> scratch(static_cast<size_t>(size));
      f(i, first * kBlock, std::min(last * kBlock, size), scratch.data());
    });
}

// Calls f(list, scratch) for every list. Each thread gets a share of the entries.
template <class Scratch, class F>
void for_each_whole_list(const Lists& lists, int64_t size, int64_t value_bytes, F&& f) {
  const int64_t pieces = num_pieces(lists, size * value_bytes);
  const std::vector<int64_t> ends = cut_lists(lists, pieces);
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t first, int64_t last) {
    std::vector<Scratch> scratch(static_cast<size_t>(size));
    for (int64_t i = ends[static_cast<size_t>(first)]; i < ends[static_cast<size_t>(last)]; ++i) f(i, scratch.data());
  });
}

// Calls f(head, from, to) for the part of each head that is in the columns [from, to) of a row.
template <class F>
void for_each_head(const Rows& rows, int64_t from, int64_t to, F&& f) {
  if (from >= to) return;
  for (int64_t h = from / rows.columns; h * rows.columns < to; ++h)
    f(h, std::max(from, h * rows.columns), std::min(to, (h + 1) * rows.columns));
}

}  // namespace salientpp
