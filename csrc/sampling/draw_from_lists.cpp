// Draws one hop of a batch from the lists of a part, for a batch whose other lists are elsewhere.
//
// The lists are given by rows of `indptr`, and their vertices by global ids. A draw is keyed as in
// sample_typed_neighbors.cpp, so that the owner of a list draws what a process with the whole graph draws. The hop ends
// in join_drawn.cpp, where the drawn sources become vertices of the batch.
//
// The bounds of all lists are found first, so that draws are written to the outputs directly. Both passes go through
// the lists in blocks, and prefetch as the sampler does.
#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "check.h"
#include "memory.h"
#include "sampling/buffer.h"
#include "sampling/held_lists.h"
#include "sampling/lists.h"
#include "sampling/typed_batch.h"
#include "sampling/typed_hop.h"

namespace salientpp::typed {
namespace {

// Memory that a thread keeps between calls. It never influences a result.
struct DrawScratch {
  Draws draws;
  Block block;
  Buffer<int64_t> begin, end;  // per list, the bounds of the part to draw from
};

const Tensor* checked_weight(const std::optional<Tensor>& weight, int64_t num_edges, bool shared) {
  if (!weight) return nullptr;
  check(!shared, "shared draws are uniform; pass edge_weight=None");
  check_defined(*weight, "edge_weight");
  const auto dtype = weight->scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::Double,
        "edge_weight must have dtype float32 or float64, got ", dtype);
  check_vector(*weight, dtype, "edge_weight");
  return of_edges(weight, num_edges, "edge_weight");
}

// Finds the bounds to draw from and the numbers of draws; returns the sum of these.
int64_t find_bounds(DrawScratch& s, const HeldLists& lists, int64_t fanout, bool replace, bool last, int64_t* count) {
  Block& block = s.block;
  s.begin.reserve(lists.size);
  s.end.reserve(lists.size);
  int64_t num_edges = 0;
  for (int64_t first = 0; first < lists.size; first += kBlockVertices) {
    find_visible(block, lists, first);
    num_edges += count_draws(block, fanout, replace, last);
    check(num_edges < std::numeric_limits<int64_t>::max() / 16, "too many draws; use fewer lists or a smaller fanout");
    std::copy_n(block.begin.begin(), block.size, s.begin.data() + first);
    std::copy_n(block.end.begin(), block.size, s.end.data() + first);
    std::copy_n(block.count.begin(), block.size, count + first);
  }
  return num_edges;
}

// Writes the drawn positions and the sources there. Not inlined, because the address of the thread's scratch memory
// would be looked up repeatedly.
template <class Sources>
[[gnu::noinline]] void draw_all(DrawScratch& s, const HeldLists& lists, const int64_t* vertex, const Tensor* weight,
                                const Sources sources, int64_t fanout, uint64_t key, uint64_t shared_key,
                                const Options& options, const int64_t* count, int64_t* position, int64_t* source) {
  Block& block = s.block;
  for (int64_t first = 0; first < lists.size; first += kBlockVertices) {
    block.size = std::min(kBlockVertices, lists.size - first);
    std::copy_n(s.begin.data() + first, block.size, block.begin.begin());
    std::copy_n(s.end.data() + first, block.size, block.end.begin());
    std::copy_n(count + first, block.size, block.count.begin());
    int64_t num_edges = 0;
    for (int64_t i = 0; i < block.size; ++i) num_edges += block.count[i];
    draw_block(s.draws, block, vertex + first, lists.tree == nullptr ? nullptr : lists.tree + first, weight, sources,
               fanout, key, shared_key, options, position);
    for (int64_t k = 0; k < num_edges; ++k) source[k] = sources.source(position[k]);
    position += num_edges;
    source += num_edges;
  }
}

std::tuple<Tensor, Tensor, Tensor> draw_from_lists(const Tensor& indptr, const Tensor& indices,
                                                   const std::optional<Tensor>& edge_weight,
                                                   const std::optional<Tensor>& edge_time, const Tensor& place,
                                                   const Tensor& vertex, const std::optional<Tensor>& tree,
                                                   const std::optional<Tensor>& now, int64_t fanout, int64_t batch_key,
                                                   int64_t hop, int64_t relation, int64_t source_type, bool replace,
                                                   bool last, bool shared, const std::optional<Tensor>& since) {
  check(!shared || !replace, "shared draws are without replacement; pass replace=False");
  check(fanout >= -1 && fanout <= std::numeric_limits<int32_t>::max(),
        "fanout must be in [0, 2^31), or -1 for all neighbours, got ", fanout);
  check(hop >= 0 && relation >= 0 && source_type >= 0, "hop, relation and source_type must be >= 0, got ", hop, ", ",
        relation, " and ", source_type);
  const HeldLists lists = checked_lists(indptr, indices, edge_time, place, tree, now, since);
  const Tensor* weight = checked_weight(edge_weight, lists.num_edges, shared);
  const int64_t* of_vertex = of_lists(vertex, lists.size, "vertex");
  const auto batch = static_cast<uint64_t>(batch_key);
  const uint64_t key = relation_key(batch, hop, static_cast<size_t>(relation));
  const uint64_t shared_key = shared_key_of(batch, static_cast<size_t>(source_type));
  static thread_local DrawScratch scratch;
  DrawScratch& s = scratch;
  const Tensor count = new_table(lists.size, ScalarType::Long);
  const bool from_end = last && lists.now != nullptr && fanout >= 0;
  const int64_t num_edges = find_bounds(s, lists, fanout, replace, from_end, mutable_int64_data(count));
  const Tensor source = new_table(num_edges, ScalarType::Long), position = new_table(num_edges, ScalarType::Long);
  const Options options{replace, lists.tree != nullptr, last, false, shared};
  if (num_edges > 0) {
    dispatch_index(indices, [&]<class Index>(const Index* ids) {
      draw_all(s, lists, of_vertex, weight, Sources<Index>{ids}, fanout, key, shared_key, options, int64_data(count),
               mutable_int64_data(position), mutable_int64_data(source));
    });
  }
  return {count, source, position};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("draw_from_lists", TORCH_BOX(&draw_from_lists));
}

}  // namespace
}  // namespace salientpp::typed
