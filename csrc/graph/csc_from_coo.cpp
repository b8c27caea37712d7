// Sorts edges in any order into lists by target.
//
// This is a stable counting sort: edges keep their order inside a list. If each edge went straight to its place among
// all vertices, it would miss the caches and the TLB. So the sort has two steps. The first step puts edges into buckets
// of neighbouring targets. There are so few buckets that the next free places of all of them stay in a cache. A bucket
// occupies the part of the outputs that its lists will fill. The second step sorts each bucket inside the cache.
// Besides the outputs, each thread takes the memory of the largest bucket. Edges that are in order already are copied.
#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "memory.h"

namespace salientpp {
namespace {

ScalarType index_dtype(int64_t num_vertices) {
  return num_vertices <= std::numeric_limits<int32_t>::max() ? ScalarType::Int : ScalarType::Long;
}

constexpr int64_t kBucketEdges = int64_t{1} << 16;  // 12 bytes each: they fit into a second-level cache
constexpr int64_t kMostBuckets = 1024;

// Number of edges that a thread takes at once, and the largest number of such chunks.
constexpr int64_t kChunkEdges = int64_t{1} << 18;
constexpr int64_t kMostChunks = 256;

// Between the steps, an entry of `edge_id` holds the edge's position in its lower bits. Above it is the target, counted
// from the first target of the bucket.
constexpr int kPositionBits = 40;
constexpr int kTargetBits = 63 - kPositionBits;
constexpr int64_t kPosition = (int64_t{1} << kPositionBits) - 1;

// A bucket is 2^bits vertices wide.
int bits_per_bucket(int64_t num_vertices, int64_t num_edges) {
  const int64_t most = std::clamp<int64_t>(num_edges / kBucketEdges, 1, kMostBuckets);
  int bits = 0;
  while (bits < kTargetBits && (num_vertices - 1) >> bits >= most) ++bits;
  return bits;
}

// Array of the edges' positions, or null. If linked, an entry also holds the source, in its lower half.
struct Ids {
  int64_t* edge_id;
  int shift;
  int64_t mask;

  Ids(int64_t* ids, bool linked) : edge_id(ids), shift(linked ? 32 : 0), mask(linked ? -1 : 0) {}
  void set(int64_t slot, int64_t position, int64_t source) const {
    edge_id[slot] = position << shift | (source & mask);
  }
};

// Copies edges [first, last), which are in order. Writes the entries of `indptr` for their targets and before them.
template <class Id, class Index>
void copy_edges(const Id* from, const Id* to, int64_t first, int64_t last, int64_t* indptr, Index* indices,
                const Ids& ids) {
  int64_t vertex = first == 0 ? 0 : to[first - 1] + int64_t{1};
  for (int64_t e = first; e < last; ++e) {
    for (; vertex <= to[e]; ++vertex) indptr[vertex] = e;
    indices[e] = static_cast<Index>(from[e]);
  }
  if (ids.edge_id == nullptr) return;
  for (int64_t e = first; e < last; ++e) ids.set(e, e, from[e]);
}

// Counts the edges [first, last) of each bucket; returns true if they are in order.
//
// Throws std::runtime_error if an id is out of range.
template <class Id>
bool count_edges(const Id* from, const Id* to, int64_t first, int64_t last, int64_t num_vertices, int bits,
                 int64_t* size) {
  bool is_sorted = true;
  for (int64_t e = first; e < last; ++e) {
    check(from[e] >= 0 && from[e] < num_vertices, "edge_index[0, ", e, "] must be in [0, ", num_vertices, "), got ",
          from[e]);
    check(to[e] >= 0 && to[e] < num_vertices, "edge_index[1, ", e, "] must be in [0, ", num_vertices, "), got ", to[e]);
    ++size[to[e] >> bits];
    is_sorted &= to[e] >= to[e == 0 ? 0 : e - 1];
  }
  return is_sorted;
}

template <class Id, class Index>
void sort_edges(const Id* from, const Id* to, int64_t num_vertices, int64_t num_edges, int64_t* indptr, Index* indices,
                const Ids& ids, bool parallel) {
  const int bits = bits_per_bucket(num_vertices, num_edges);
  const int64_t width = int64_t{1} << bits;
  const int64_t num_buckets = (num_vertices + width - 1) >> bits;
  // Each chunk of the edges has its own places in every bucket, so that threads can fill buckets at the same time.
  const int64_t num_chunks = std::clamp<int64_t>(num_edges / kChunkEdges, 1, kMostChunks);
  const auto chunk_begin = [&](int64_t chunk) {
    return num_edges / num_chunks * chunk + std::min(chunk, num_edges % num_chunks);
  };
  const auto for_chunks = [&](const auto& f) {
    torch::stable::parallel_for(0, num_chunks, parallel ? 1 : num_chunks, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) f(chunk, chunk_begin(chunk), chunk_begin(chunk + 1));
    });
  };
  std::vector<int64_t> place(num_chunks * num_buckets, 0);  // numbers of edges, later the place of the next edge
  std::vector<char> is_sorted(num_chunks, false);
  std::vector<std::exception_ptr> failure(num_chunks);
  for_chunks([&](int64_t chunk, int64_t first, int64_t last) {
    try {
      is_sorted[chunk] = count_edges(from, to, first, last, num_vertices, bits, place.data() + chunk * num_buckets);
    } catch (...) {
      failure[chunk] = std::current_exception();
    }
  });
  for (const auto& of_chunk : failure)  // rethrow the first of several
    if (of_chunk) std::rethrow_exception(of_chunk);
  if (std::all_of(is_sorted.begin(), is_sorted.end(), [](char is) { return is; })) {
    for_chunks([&](int64_t, int64_t first, int64_t last) { copy_edges(from, to, first, last, indptr, indices, ids); });
    const int64_t rest = num_edges == 0 ? 0 : to[num_edges - 1] + int64_t{1};
    std::fill(indptr + rest, indptr + num_vertices + 1, num_edges);
    return;
  }
  check(ids.edge_id != nullptr,
        "is_sorted=True, but edge_index is not sorted by target (row 1); leave is_sorted=False");
  std::vector<int64_t> begin(num_buckets + 1, num_edges);
  int64_t sum = 0;
  for (int64_t b = 0; b < num_buckets; ++b) {
    begin[b] = sum;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) sum += std::exchange(place[chunk * num_buckets + b], sum);
  }

  int64_t* const edge_id = ids.edge_id;
  for_chunks([&](int64_t chunk, int64_t first, int64_t last) {
    int64_t* const next = place.data() + chunk * num_buckets;
    for (int64_t e = first; e < last; ++e) {
      const int64_t slot = next[to[e] >> bits]++;
      indices[slot] = static_cast<Index>(from[e]);
      edge_id[slot] = static_cast<int64_t>(to[e] & (width - 1)) << kPositionBits | e;
    }
  });

  const int64_t grain = parallel ? std::max<int64_t>(1, num_buckets * kChunkEdges / num_edges) : num_buckets;
  torch::stable::parallel_for(0, num_buckets, grain, [&](int64_t some, int64_t end) {
    int64_t largest = 0;
    for (int64_t b = some; b < end; ++b) largest = std::max(largest, begin[b + 1] - begin[b]);
    const auto sources = std::make_unique_for_overwrite<Index[]>(largest);
    const auto keys = std::make_unique_for_overwrite<int64_t[]>(largest);
    std::vector<int64_t> next;
    for (int64_t b = some; b < end; ++b) {
      const int64_t first = b << bits, last = std::min(first + width, num_vertices), size = begin[b + 1] - begin[b];
      std::copy_n(indices + begin[b], size, sources.get());
      std::copy_n(edge_id + begin[b], size, keys.get());
      next.assign(last - first, 0);
      for (int64_t i = 0; i < size; ++i) ++next[keys[i] >> kPositionBits];
      int64_t slot = begin[b];
      for (int64_t v = first; v < last; ++v) {
        indptr[v] = slot;
        slot += std::exchange(next[v - first], slot);
      }
      for (int64_t i = 0; i < size; ++i) {
        slot = next[keys[i] >> kPositionBits]++;
        indices[slot] = sources[i];
        ids.set(slot, keys[i] & kPosition, sources[i]);
      }
    }
  });
  indptr[num_vertices] = num_edges;
}

std::tuple<Tensor, Tensor, Tensor> csc_from_coo(const Tensor& source, const Tensor& target, int64_t num_vertices,
                                                bool linked, bool is_sorted, bool parallel) {
  check_index_vector(source, "source");
  check_vector(target, source.scalar_type(), "target");
  const int64_t num_edges = source.numel();
  check(target.numel() == num_edges, "target must have one entry per edge, expected ", num_edges, ", got ",
        target.numel());
  check(num_edges <= kPosition, "there must be at most 2^", kPositionBits, " - 1 edges, got ", num_edges);
  check(num_vertices >= 0, "num_vertices must be >= 0, got ", num_vertices);
  check(num_vertices < std::numeric_limits<int64_t>::max(), "num_vertices must be < 2^63 - 1, got ", num_vertices);
  constexpr int64_t kMostLinked = std::numeric_limits<int32_t>::max();
  check(!linked || (num_vertices <= kMostLinked && num_edges <= kMostLinked),
        "linked needs fewer than 2^31 vertices and edges, got ", num_vertices, " and ", num_edges);

  Tensor indptr = new_table(num_vertices + 1, ScalarType::Long);
  Tensor indices = new_table(num_edges, index_dtype(num_vertices));
  Tensor edge_id = new_table(is_sorted ? 0 : num_edges, ScalarType::Long);
  const Ids ids(is_sorted ? nullptr : mutable_int64_data(edge_id), linked);
  dispatch_index(source, [&]<class Id>(const Id* from) {
    dispatch_index(indices, [&]<class Index>(const Index*) {
      sort_edges(from, static_cast<const Id*>(target.const_data_ptr()), num_vertices, num_edges,
                 mutable_int64_data(indptr), static_cast<Index*>(indices.mutable_data_ptr()), ids, parallel);
    });
  });
  return {indptr, indices, edge_id};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("csc_from_coo", TORCH_BOX(&csc_from_coo));
}

}  // namespace
}  // namespace salientpp
