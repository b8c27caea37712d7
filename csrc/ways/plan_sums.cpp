// Decides which rows of a batch come whole from other parts, and which are replaced by sums that their owners compute.
//
// An edge of the deepest hop takes part if the row of its source would be fetched. The edges from one owner's vertices
// into one target are a group. The sum of a group can be sent instead of the rows of its sources. Every edge must be
// served, by the row of its source or by the sum of its group. This is a vertex cover of least weight in a bipartite
// graph.
//
// A row takes `row_bytes` and an id. A sum takes `row_bytes`, its size, and `source_bytes` (an id, and a weight if
// there are weights) for each edge that it serves: each edge whose source is not sent. A source that is sent saves
// these bytes. So the weight of source s is row_bytes + id_bytes - source_bytes * degree(s), and the weight of a group
// is row_bytes + id_bytes.
//
// Each owner's part of the graph is a separate problem. Three solutions are compared, and the first of the cheapest is
// taken, so sums are never worse than rows:
//   * every row;
//   * greedy: an edge that is not served yet is served by the end that serves more edges per weight;
//   * local ratio: each edge lowers the remaining weights of its two ends by the smaller of them, and ends without
//     remaining weight serve. The result has at most twice the least weight (Bar-Yehuda and Even, 1985).
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"

namespace salientpp {
namespace {

// Edges by one of their ends: the edges of end v are edge[begin[v]] to edge[begin[v + 1] - 1], in order.
struct Lists {
  std::vector<int32_t> begin, edge;

  Lists(const std::vector<int32_t>& end_of, int64_t num_ends)
      : begin(static_cast<size_t>(num_ends) + 1), edge(end_of.size()) {
    for (const int32_t v : end_of) ++begin[static_cast<size_t>(v) + 1];
    for (size_t v = 1; v < begin.size(); ++v) begin[v] += begin[v - 1];
    std::vector<int32_t> at(begin.begin(), begin.end() - 1);
    for (size_t k = 0; k < end_of.size(); ++k)
      edge[static_cast<size_t>(at[static_cast<size_t>(end_of[k])]++)] = static_cast<int32_t>(k);
  }
  int64_t degree(size_t v) const { return begin[v + 1] - begin[v]; }
  template <class F>
  void each(size_t v, F&& f) const {
    for (int32_t i = begin[v]; i < begin[v + 1]; ++i) f(static_cast<size_t>(edge[static_cast<size_t>(i)]));
  }
};

// The edges to serve. Sources are the vertices of the deepest hop, numbered by their place in it.
struct Cut {
  std::vector<int32_t> source, group;  // the ends of each edge
  std::vector<int32_t> place;          // place of each edge among the given edges
  std::vector<int64_t> target;         // target of each group
  std::vector<int32_t> owner;          // owner of each group
};

// A solution: the rows of sources and the sums of groups that are sent.
struct Choice {
  std::vector<uint8_t> row, sum;
};

struct Problem {
  const Cut& cut;
  Lists by_source, by_group;
  std::vector<int64_t> weight;  // weight of each source
  int64_t group_weight;

  Problem(const Cut& edges, int64_t num_sources, int64_t row_bytes, int64_t id_bytes, int64_t source_bytes)
      : cut(edges),
        by_source(edges.source, num_sources),
        by_group(edges.group, static_cast<int64_t>(edges.target.size())),
        weight(static_cast<size_t>(num_sources)),
        group_weight(row_bytes + id_bytes) {
    for (size_t s = 0; s < weight.size(); ++s) weight[s] = group_weight - source_bytes * by_source.degree(s);
  }
  size_t source_of(size_t edge) const { return static_cast<size_t>(cut.source[edge]); }
  size_t group_of(size_t edge) const { return static_cast<size_t>(cut.group[edge]); }

  Choice rows() const { return {std::vector<uint8_t>(weight.size(), 1), std::vector<uint8_t>(cut.target.size(), 0)}; }

  Choice greedy() const {
    Choice choice{std::vector<uint8_t>(weight.size(), 0), std::vector<uint8_t>(cut.target.size(), 0)};
    std::vector<int64_t> open_of_source(weight.size()), open_of_group(cut.target.size());
    for (size_t s = 0; s < weight.size(); ++s) open_of_source[s] = by_source.degree(s);
    for (size_t g = 0; g < cut.target.size(); ++g) open_of_group[g] = by_group.degree(g);
    const auto send_row = [&](size_t s) {
      choice.row[s] = 1;
      by_source.each(s, [&](size_t edge) { --open_of_group[group_of(edge)]; });
    };
    for (size_t s = 0; s < weight.size(); ++s)
      if (weight[s] <= 0) send_row(s);
    for (size_t edge = 0; edge < cut.source.size(); ++edge) {
      const size_t s = source_of(edge), g = group_of(edge);
      if (choice.row[s] || choice.sum[g]) continue;
      if (open_of_group[g] * weight[s] < open_of_source[s] * group_weight) {
        send_row(s);
      } else {
        choice.sum[g] = 1;
        by_group.each(g, [&](size_t served) { --open_of_source[source_of(served)]; });
      }
    }
    return choice;
  }

  Choice local_ratio() const {
    std::vector<int64_t> left(weight), left_of_group(cut.target.size(), group_weight);
    for (size_t edge = 0; edge < cut.source.size(); ++edge) {
      int64_t &a = left[source_of(edge)], &b = left_of_group[group_of(edge)];
      const int64_t both = std::min(a, b);
      if (both > 0) a -= both, b -= both;
    }
    Choice choice{std::vector<uint8_t>(left.size()), std::vector<uint8_t>(left_of_group.size())};
    for (size_t s = 0; s < left.size(); ++s) choice.row[s] = left[s] <= 0;
    for (size_t g = 0; g < left_of_group.size(); ++g) choice.sum[g] = left_of_group[g] <= 0;
    return choice;
  }

  // Drops each row whose edges are all served by sums. Replaces each sum by rows if the missing rows of its edges cost
  // no more.
  void trim(Choice& choice) const {
    for (size_t s = 0; s < weight.size(); ++s) {
      if (!choice.row[s] || weight[s] <= 0) continue;
      bool all = true;
      by_source.each(s, [&](size_t edge) { all = all && choice.sum[group_of(edge)]; });
      choice.row[s] = !all;
    }
    std::vector<size_t> served;
    for (size_t g = 0; g < cut.target.size(); ++g) {
      if (!choice.sum[g]) continue;
      int64_t rows = 0;
      served.clear();
      by_group.each(g, [&](size_t edge) {
        const size_t s = source_of(edge);
        if (choice.row[s]) return;
        choice.row[s] = 1;  // set it now, because an edge may occur twice
        served.push_back(s);
        rows += weight[s];
      });
      if (rows <= group_weight) {
        choice.sum[g] = 0;
      } else {
        for (const size_t s : served) choice.row[s] = 0;
      }
    }
  }
};

// Returns the weight of a choice for each owner.
std::vector<int64_t> weights_of(const Problem& problem, const Choice& choice, const int64_t* owner, size_t num_parts) {
  std::vector<int64_t> total(num_parts);
  for (size_t s = 0; s < problem.weight.size(); ++s)
    if (choice.row[s] && problem.by_source.degree(s) > 0) total[static_cast<size_t>(owner[s])] += problem.weight[s];
  for (size_t g = 0; g < choice.sum.size(); ++g)
    if (choice.sum[g]) total[static_cast<size_t>(problem.cut.owner[g])] += problem.group_weight;
  return total;
}

Choice cheapest(const Problem& problem, const int64_t* owner, size_t num_parts) {
  Choice best = problem.rows();
  std::vector<int64_t> least = weights_of(problem, best, owner, num_parts);
  for (Choice other : {problem.greedy(), problem.local_ratio()}) {
    problem.trim(other);
    const std::vector<int64_t> total = weights_of(problem, other, owner, num_parts);
    const auto is_better = [&](size_t part) { return total[part] < least[part]; };
    for (size_t s = 0; s < other.row.size(); ++s)
      if (owner[s] >= 0 && is_better(static_cast<size_t>(owner[s]))) best.row[s] = other.row[s];
    for (size_t g = 0; g < other.sum.size(); ++g)
      if (is_better(static_cast<size_t>(problem.cut.owner[g]))) best.sum[g] = other.sum[g];
    for (size_t part = 0; part < num_parts; ++part) least[part] = std::min(least[part], total[part]);
  }
  return best;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_sums(
    const Tensor& row, const Tensor& col, const Tensor& owner, int64_t first, int64_t num_parts, int64_t row_bytes,
    int64_t id_bytes, int64_t source_bytes) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1, kMostParts = int64_t{1} << 20, kMostIdBytes = 64;
  check_vector(row, ScalarType::Long, "row");
  check_vector(col, ScalarType::Long, "col");
  check_vector(owner, ScalarType::Long, "owner");
  check(row.numel() == col.numel(), "row and col must have one entry per edge, got ", row.numel(), " and ",
        col.numel());
  check(row.numel() <= kMost && owner.numel() <= kMost, "a hop must have fewer than 2^31 edges and vertices, got ",
        row.numel(), " and ", owner.numel());
  check(first >= 0 && first <= kMost, "first must be in [0, 2^31), got ", first);
  check(num_parts >= 1 && num_parts <= kMostParts, "num_parts must be in [1, ", kMostParts, "], got ", num_parts);
  check(row_bytes >= 0 && row_bytes <= kMost, "row_bytes must be in [0, 2^31), got ", row_bytes);
  check(id_bytes >= 0 && id_bytes <= kMostIdBytes, "id_bytes must be in [0, ", kMostIdBytes, "], got ", id_bytes);
  check(source_bytes >= 0 && source_bytes <= kMostIdBytes, "source_bytes must be in [0, ", kMostIdBytes, "], got ",
        source_bytes);
  const int64_t num_edges = row.numel(), num_sources = owner.numel(), num_vertices = first + num_sources;
  const int64_t *from = int64_data(row), *to = int64_data(col), *owner_of = int64_data(owner);
  const auto parts = static_cast<size_t>(num_parts);
  for (int64_t s = 0; s < num_sources; ++s)
    check(owner_of[s] >= -1 && owner_of[s] < num_parts, "owner[", s, "] must be in [-1, ", num_parts, "), got ",
          owner_of[s]);
  for (int64_t k = 0; k < num_edges; ++k) {
    check(from[k] >= 0 && from[k] < num_vertices, "row[", k, "] must be in [0, ", num_vertices, "), got ", from[k]);
    check(to[k] >= 0 && to[k] < first, "col[", k, "] must be in [0, ", first, "), got ", to[k]);
    check(k == 0 || to[k] >= to[k - 1], "col must not decrease, got ", to[k], " after ", to[k - 1]);
  }

  const auto is_fetched = [&](int64_t vertex) { return vertex >= first && owner_of[vertex - first] >= 0; };
  Cut cut;
  std::vector<int64_t> last_target(parts, -1);  // target of the last group of each part so far
  std::vector<int32_t> last_group(parts);
  for (int64_t k = 0; k < num_edges; ++k) {
    if (!is_fetched(from[k])) continue;
    const auto part = static_cast<size_t>(owner_of[from[k] - first]);
    if (last_target[part] != to[k]) {
      last_target[part] = to[k];
      last_group[part] = static_cast<int32_t>(cut.target.size());
      cut.target.push_back(to[k]);
      cut.owner.push_back(static_cast<int32_t>(part));
    }
    cut.source.push_back(static_cast<int32_t>(from[k] - first));
    cut.group.push_back(last_group[part]);
    cut.place.push_back(static_cast<int32_t>(k));
  }
  const Problem problem(cut, num_sources, row_bytes, id_bytes, source_bytes);
  Choice choice = cheapest(problem, owner_of, parts);

  std::vector<int64_t> kept_vertex, number(static_cast<size_t>(num_sources), -1);
  for (int64_t s = 0; s < num_sources; ++s) {
    const auto at = static_cast<size_t>(s);
    // A vertex without edges here cannot be replaced by a sum.
    if (owner_of[s] < 0 || choice.row[at] || problem.by_source.degree(at) == 0) {
      number[at] = first + static_cast<int64_t>(kept_vertex.size());
      kept_vertex.push_back(s);
    }
  }
  std::vector<int64_t> kept_edge, kept_row;
  for (int64_t k = 0; k < num_edges; ++k) {
    const int64_t source = from[k] < first ? from[k] : number[static_cast<size_t>(from[k] - first)];
    if (source < 0) continue;
    kept_edge.push_back(k);
    kept_row.push_back(source);
  }
  // Order the sums by owner, then by target.
  std::vector<int64_t> groups(parts), sources(parts), size(cut.target.size());
  for (size_t g = 0; g < size.size(); ++g) {
    if (!choice.sum[g]) continue;
    problem.by_group.each(g, [&](size_t edge) { size[g] += choice.row[problem.source_of(edge)] ? 0 : 1; });
    ++groups[static_cast<size_t>(cut.owner[g])];
    sources[static_cast<size_t>(cut.owner[g])] += size[g];
  }
  std::vector<int64_t> group_at(parts), source_at(parts);
  for (size_t part = 1; part < parts; ++part) {
    group_at[part] = group_at[part - 1] + groups[part - 1];
    source_at[part] = source_at[part - 1] + sources[part - 1];
  }
  std::vector<int64_t> target(static_cast<size_t>(group_at.back() + groups.back())), group_size(target.size()),
      summed_edge(static_cast<size_t>(source_at.back() + sources.back()));
  for (size_t g = 0; g < size.size(); ++g) {
    if (!choice.sum[g]) continue;
    const auto part = static_cast<size_t>(cut.owner[g]);
    const auto at = static_cast<size_t>(group_at[part]++);
    target[at] = cut.target[g];
    group_size[at] = size[g];
    problem.by_group.each(g, [&](size_t edge) {
      if (!choice.row[problem.source_of(edge)]) summed_edge[static_cast<size_t>(source_at[part]++)] = cut.place[edge];
    });
  }
  return {vector_of(kept_vertex), vector_of(kept_edge),   vector_of(kept_row), vector_of(target),
          vector_of(group_size),  vector_of(summed_edge), vector_of(groups),   vector_of(sources)};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("plan_sums", TORCH_BOX(&plan_sums));
}

}  // namespace
}  // namespace salientpp
