// The vertices of a batch whose edges come from elsewhere: a hop joins drawn sources to them, and an induced subgraph
// keeps the edges between them.
//
// Both operators get the vertices of the batch so far and build the map of the sampler again, so they keep no state
// between calls. A hop has the same result as in sample_typed_neighbors.cpp.
#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

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
struct JoinScratch {
  std::vector<VertexType> types;
  Block block;
  Buffer<int64_t> edge;
  Buffer<int32_t> row;
};

JoinScratch& thread_scratch() {
  static thread_local JoinScratch scratch;
  return scratch;
}

void check_num_trees(int64_t num_trees) {
  check(num_trees >= 0 && num_trees < HashMap::kMaxLocalIds, "num_trees must be in [0, 2^31), got ", num_trees);
}

// Sets the vertices of a type, and room for `num_more` others. `num_vertices` is >= 0.
void set_vertices(VertexType& type, int64_t num_vertices, const Tensor& n_id, const Tensor* tree, int64_t num_trees,
                  int64_t num_more, const char* name, const char* tree_name) {
  check_vector(n_id, ScalarType::Long, name);
  const int64_t size = n_id.numel();
  check(size < HashMap::kMaxLocalIds && num_more < HashMap::kMaxLocalIds - size, "a batch must hold fewer than ",
        HashMap::kMaxLocalIds, " vertices; use a smaller batch_size or smaller fanouts");
  const int64_t* id = int64_data(n_id);
  check_ids(id, size, num_vertices, name);
  type.num_vertices = num_vertices;
  type.n_id.clear();
  type.tree.clear();
  type.n_id.reserve(size + num_more);
  std::copy_n(id, size, type.n_id.data());
  type.n_id.set_size(size);
  if (tree == nullptr) return;
  check_vector(*tree, ScalarType::Long, tree_name);
  check(tree->numel() == size, tree_name, " must have one entry per vertex, expected ", size, ", got ", tree->numel());
  const int64_t* number = int64_data(*tree);
  check_ids(number, size, num_trees, tree_name);
  type.tree.reserve(size + num_more);
  std::copy_n(number, size, type.tree.data());
  type.tree.set_size(size);
}

// The edges of a hop over one relation.
struct DrawnEdges {
  size_t source_type, target_type;
  const int64_t* count;  // per vertex of the frontier, the number of its edges
  const int64_t* source;
  int64_t size;
};

// Joins the sources of a relation to the vertices of their type, and writes their local ids.
void join_relation(JoinScratch& s, const DrawnEdges& drawn, int64_t first, int64_t end, int64_t* row) {
  VertexType& source = s.types[drawn.source_type];
  const int32_t* tree_of = s.types[drawn.target_type].tree.data();  // stays, because there is room for all new vertices
  Block& block = s.block;
  with_map(source, [&](auto& map) {
    if constexpr (requires { map.table(0); }) {
      int64_t at = 0;
      for (block.first = first; block.first < end; block.first += kBlockVertices) {
        block.size = std::min(kBlockVertices, end - block.first);
        std::copy_n(drawn.count + (block.first - first), block.size, block.count.begin());
        insert_in_trees(source, map, Drawn{}, drawn.source + at, block, tree_of + block.first, end - block.first, false,
                        row + at);
        for (int64_t i = 0; i < block.size; ++i) at += block.count[i];
      }
    } else {
      constexpr int64_t kPiece = 4096;  // edges; a hash map that had room for all edges would be too sparse
      for (int64_t at = 0; at < drawn.size; at += kPiece) {
        const int64_t size = std::min(kPiece, drawn.size - at);
        map.reserve(source.n_id.size() + size);
        source.n_id.set_size(find_sources<true, true>(map.inserter(), source.num_vertices, Drawn{}, size,
                                                      drawn.source + at, row + at, source.n_id.data(),
                                                      source.n_id.size()));
      }
    }
  });
}

DrawnEdges checked_edges(const Tensor& count, const Tensor& source, int64_t source_type, int64_t target_type,
                         size_t num_types, size_t at) {
  const auto in_range = [&](int64_t type) { return type >= 0 && static_cast<size_t>(type) < num_types; };
  check(in_range(source_type) && in_range(target_type), "source_type and target_type must be in [0, ", num_types, ")");
  check_vector(count, ScalarType::Long, "count");
  check_vector(source, ScalarType::Long, "source");
  int64_t left = source.numel();
  const int64_t* number = int64_data(count);
  for (int64_t i = 0; i < count.numel(); ++i) {
    check(number[i] >= 0 && number[i] <= left, "count[", at, "] must be >= 0 and have the sum ", source.numel(),
          ", the number of sources, got ", number[i], " at place ", i);
    left -= number[i];
  }
  check(left == 0, "count[", at, "] must have the sum ", source.numel(), ", the number of sources, got ",
        source.numel() - left);
  return {static_cast<size_t>(source_type), static_cast<size_t>(target_type), number, int64_data(source),
          source.numel()};
}

// Returns room for the edges of a relation, int64 [2, e], after the edges that `before` holds.
Tensor with_earlier_edges(const Tensor* before, int64_t num_drawn, size_t at) {
  int64_t size = 0;
  if (before != nullptr) {
    check_defined(*before, "edge_index");
    check(before->scalar_type() == ScalarType::Long, "edge_index must have dtype int64, got ", before->scalar_type());
    check(before->dim() == 2 && before->size(0) == 2, "edge_index[", at, "] must have shape [2, e]");
    check(before->is_contiguous(), "edge_index must be contiguous");
    size = before->size(1);
  }
  const Tensor edges = new_large_tensor<2>({2, size + num_drawn}, ScalarType::Long);
  if (size > 0) {
    std::copy_n(int64_data(*before), size, mutable_int64_data(edges));
    std::copy_n(int64_data(*before) + size, size, mutable_int64_data(edges) + size + num_drawn);
  }
  return edges;
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> join_drawn(
    const std::vector<Tensor>& n_id, const std::vector<Tensor>& tree, const std::vector<int64_t>& first,
    const std::vector<Tensor>& count, const std::vector<Tensor>& source, const std::vector<int64_t>& source_type,
    const std::vector<int64_t>& target_type, const std::vector<int64_t>& num_vertices, int64_t num_trees,
    int64_t map_budget_bytes, const std::vector<Tensor>& edge_index) {
  const size_t num_types = n_id.size(), num_relations = count.size();
  const bool has_trees = !tree.empty();
  check(first.size() == num_types && num_vertices.size() == num_types && (!has_trees || tree.size() == num_types),
        "first, num_vertices and, with trees, tree must have one entry per vertex type, ", num_types);
  check(source.size() == num_relations && source_type.size() == num_relations && target_type.size() == num_relations,
        "source, source_type and target_type must have one entry per relation, ", num_relations);
  check(edge_index.empty() || edge_index.size() == num_relations,
        "edge_index must be empty or have one entry per relation, ", num_relations, ", got ", edge_index.size());
  check_num_trees(num_trees);
  JoinScratch& s = thread_scratch();
  // Loaders of several graphs may take turns, so the memory of the other types stays.
  if (s.types.size() < num_types) s.types.resize(num_types);
  std::vector<DrawnEdges> drawn;
  std::vector<int64_t> num_drawn(num_types, 0);
  for (size_t r = 0; r < num_relations; ++r) {
    drawn.push_back(checked_edges(count[r], source[r], source_type[r], target_type[r], num_types, r));
    num_drawn[drawn[r].source_type] += drawn[r].size;
  }
  std::vector<int64_t> frontier_end(num_types);
  const bool fit = !has_trees && stamps_fit(num_vertices, map_budget_bytes);
  for (size_t t = 0; t < num_types; ++t) {
    VertexType& type = s.types[t];
    check(num_vertices[t] >= 0, "num_vertices[", t, "] must be >= 0, got ", num_vertices[t]);
    set_vertices(type, num_vertices[t], n_id[t], has_trees ? &tree[t] : nullptr, num_trees, num_drawn[t], "n_id",
                 "tree");
    frontier_end[t] = type.n_id.size();
    check(first[t] >= 0 && first[t] <= frontier_end[t], "first[", t, "] must be in [0, ", frontier_end[t], "], got ",
          first[t]);
    if (num_drawn[t] == 0) continue;  // the map would not be read
    const int64_t most = frontier_end[t] + std::min(num_drawn[t], num_vertices[t]);
    type.map_kind = map_kind_of(has_trees, num_vertices[t], fit, most);
    fill_map(type, num_trees);
  }
  std::vector<Tensor> out_n_id, out_tree, out_edges;
  for (size_t r = 0; r < num_relations; ++r) {
    const int64_t begin = first[drawn[r].target_type], end = frontier_end[drawn[r].target_type];
    check(count[r].numel() == end - begin, "count[", r, "] must have one entry per vertex of the frontier, expected ",
          end - begin, ", got ", count[r].numel());
    out_edges.push_back(with_earlier_edges(edge_index.empty() ? nullptr : &edge_index[r], drawn[r].size, r));
    if (drawn[r].size == 0) continue;
    int64_t* row_end = mutable_int64_data(out_edges[r]) + out_edges[r].size(1);
    int64_t* col_end = row_end + out_edges[r].size(1);
    join_relation(s, drawn[r], begin, end, row_end - drawn[r].size);
    repeat_places(drawn[r].count, end - begin, col_end - drawn[r].size, col_end, begin);
  }
  for (size_t t = 0; t < num_types; ++t) {
    out_n_id.push_back(copy_of(s.types[t].n_id));
    if (has_trees) out_tree.push_back(copy_of(s.types[t].tree));
  }
  return {out_n_id, out_tree, out_edges};
}

// Finds the edges whose source is in the map, and the number of them in each list.
template <class Map, class Lists>
[[gnu::noinline]] void find_between(JoinScratch& s, const Map& map, const HeldLists& held, const Lists lists,
                                    int64_t num_sources, int64_t* count) {
  Block& block = s.block;
  for (int64_t first = 0; first < held.size; first += kBlockVertices) {
    find_visible(block, held, first);
    for (int64_t i = 0; i < block.size; ++i) {
      lists.prefetch(block.begin[i]);
      lists.prefetch(block.end[i]);
    }
    for (int64_t i = 0; i < block.size; ++i) {
      const int64_t begin = block.begin[i], end = block.end[i], before = s.edge.size();
      s.edge.reserve(before + end - begin);
      s.row.reserve(before + end - begin);
      const auto find = [&](const auto& ids) {
        return find_edges(ids, lists, begin, end, num_sources, s.edge.data() + before, s.row.data() + before);
      };
      if constexpr (requires { map.table(0); })
        count[first + i] = find(map.table(static_cast<int32_t>(held.tree[first + i])));
      else
        count[first + i] = find(map);
      s.edge.set_size(before + count[first + i]);
      s.row.set_size(before + count[first + i]);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> edges_between(const Tensor& indptr, const Tensor& indices,
                                                 const std::optional<Tensor>& edge_time, const Tensor& place,
                                                 const std::optional<Tensor>& tree, const std::optional<Tensor>& now,
                                                 const Tensor& member, const std::optional<Tensor>& member_tree,
                                                 int64_t num_sources, int64_t num_trees, int64_t map_budget_bytes,
                                                 const std::optional<Tensor>& since) {
  const HeldLists held = checked_lists(indptr, indices, edge_time, place, tree, now, since);
  check(tree.has_value() == member_tree.has_value(), "tree and member_tree must be given both or not at all");
  check(num_sources >= 0, "num_sources must be >= 0, got ", num_sources);
  check_num_trees(num_trees);
  if (tree) check_ids(held.tree, held.size, num_trees, "tree");
  JoinScratch& s = thread_scratch();
  if (s.types.empty()) s.types.resize(1);
  VertexType& type = s.types[0];
  set_vertices(type, num_sources, member, member_tree ? &*member_tree : nullptr, num_trees, 0, "member", "member_tree");
  const bool fit = !tree && stamps_fit({num_sources}, map_budget_bytes);
  type.map_kind = map_kind_of(tree.has_value(), num_sources, fit, member.numel());
  fill_map(type, num_trees);
  s.edge.clear();
  s.row.clear();
  const Tensor count = new_table(place.numel(), ScalarType::Long);
  with_map(type, [&](auto& map) {
    dispatch_index(indices, [&]<class Index>(const Index* ids) {
      find_between(s, map, held, Sources<Index>{ids}, num_sources, mutable_int64_data(count));
    });
  });
  return {count, copy_of(s.row), copy_of(s.edge)};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("join_drawn", TORCH_BOX(&join_drawn));
  m.impl("edges_between", TORCH_BOX(&edges_between));
}

}  // namespace
}  // namespace salientpp::typed
