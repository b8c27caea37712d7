// Finds the nodes on the source's side of a minimum cut of a directed graph with capacities.
//
// Dinic's algorithm. Each phase computes the distance of every node to the sink in the residual graph. It then pushes
// flow along shortest paths until none is left. A node's next arc to try is kept between paths of a phase. After a push
// the search goes on before the first arc that the push filled.
//
// Of all minimum cuts, the one with the fewest nodes on the source's side is returned: those that the source reaches in
// the last residual graph. Capacities are floats, so an arc counts as full if 1e-12 of the largest finite capacity is
// left.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"

namespace salientpp {
namespace {

// Arc positions are int32, and every arc has a reverse.
constexpr int64_t kMostArcs = int64_t{1} << 30;
constexpr int64_t kMostNodes = std::numeric_limits<int32_t>::max();

// Arcs by tail: those of node v are the positions begin[v] to begin[v + 1] - 1.
struct Residual {
  std::vector<int32_t> begin, head, reverse;
  std::vector<double> left;
  double least = 0;

  Residual(const int64_t* tail, const int64_t* head_of, const double* capacity, int64_t num_arcs, int64_t num_nodes)
      : begin(static_cast<size_t>(num_nodes) + 1),
        head(2 * static_cast<size_t>(num_arcs)),
        reverse(head.size()),
        left(head.size()) {
    const auto arcs = static_cast<size_t>(num_arcs);
    for (size_t k = 0; k < arcs; ++k) {
      ++begin[static_cast<size_t>(tail[k]) + 1];
      ++begin[static_cast<size_t>(head_of[k]) + 1];
      if (std::isfinite(capacity[k])) least = std::max(least, 1e-12 * capacity[k]);
    }
    for (size_t v = 1; v < begin.size(); ++v) begin[v] += begin[v - 1];
    std::vector<int32_t> at(begin.begin(), begin.end() - 1);
    for (size_t k = 0; k < arcs; ++k) {
      const int32_t forth = at[static_cast<size_t>(tail[k])]++, back = at[static_cast<size_t>(head_of[k])]++;
      set(forth, head_of[k], back, capacity[k]);
      set(back, tail[k], forth, 0);
    }
  }
  void set(int32_t arc, int64_t to, int32_t other, double size) {
    const auto at = static_cast<size_t>(arc);
    head[at] = static_cast<int32_t>(to);
    reverse[at] = other;
    left[at] = size;
  }
  size_t num_nodes() const { return begin.size() - 1; }
  size_t to(int32_t arc) const { return static_cast<size_t>(head[static_cast<size_t>(arc)]); }
  size_t from(int32_t arc) const { return to(reverse[static_cast<size_t>(arc)]); }
  bool is_open(int32_t arc) const { return left[static_cast<size_t>(arc)] > least; }
  void push(int32_t arc, double size) {
    left[static_cast<size_t>(arc)] -= size;
    left[static_cast<size_t>(reverse[static_cast<size_t>(arc)])] += size;
  }

  // Writes each node's number of open arcs from `start`, or to `start` if `backwards`; -1 if no path of them exists.
  void levels(size_t start, bool backwards, std::vector<int32_t>& level, std::vector<int32_t>& queue) const {
    std::fill(level.begin(), level.end(), -1);
    level[start] = 0;
    queue.assign(1, static_cast<int32_t>(start));
    for (size_t next = 0; next < queue.size(); ++next) {
      const auto v = static_cast<size_t>(queue[next]);
      for (int32_t arc = begin[v]; arc < begin[v + 1]; ++arc) {
        if (level[to(arc)] >= 0 || !is_open(backwards ? reverse[static_cast<size_t>(arc)] : arc)) continue;
        level[to(arc)] = level[v] + 1;
        queue.push_back(head[static_cast<size_t>(arc)]);
      }
    }
  }

  // Pushes flow along paths on which `level`, the distance to the sink, falls by one with each arc.
  void block(size_t source, size_t sink, const std::vector<int32_t>& level, std::vector<int32_t>& next) {
    std::copy(begin.begin(), begin.end() - 1, next.begin());
    std::vector<int32_t> path;
    size_t v = source;
    while (true) {
      if (v == sink) {
        v = push_along(path);
        continue;
      }
      int32_t& arc = next[v];
      while (arc < begin[v + 1] && !(level[to(arc)] == level[v] - 1 && is_open(arc))) ++arc;
      if (arc < begin[v + 1]) {
        path.push_back(arc);
        v = to(arc);
      } else if (path.empty()) {
        return;
      } else {
        v = from(path.back());
        path.pop_back();
        ++next[v];
      }
    }
  }

  // Pushes what fits along the path. Shortens the path to the arcs before the first full one, and returns its end.
  size_t push_along(std::vector<int32_t>& path) {
    double size = std::numeric_limits<double>::infinity();
    for (const int32_t arc : path) size = std::min(size, left[static_cast<size_t>(arc)]);
    check(std::isfinite(size),
          "every cut has infinite capacity, because arcs of infinite capacity lead from source to "
          "sink");
    for (const int32_t arc : path) push(arc, size);
    size_t keep = 0;
    while (is_open(path[keep])) ++keep;
    const size_t end = from(path[keep]);
    path.resize(keep);
    return end;
  }
};

Tensor minimum_cut(const Tensor& tail, const Tensor& head, const Tensor& capacity, int64_t num_nodes, int64_t source,
                   int64_t sink) {
  check_vector(tail, ScalarType::Long, "tail");
  check_vector(head, ScalarType::Long, "head");
  check_vector(capacity, ScalarType::Double, "capacity");
  const int64_t num_arcs = tail.numel();
  check(head.numel() == num_arcs && capacity.numel() == num_arcs,
        "tail, head and capacity must have one entry per arc, got ", num_arcs, ", ", head.numel(), " and ",
        capacity.numel());
  check(num_arcs < kMostArcs, "the graph must have fewer than 2^30 arcs, got ", num_arcs);
  check(num_nodes >= 0 && num_nodes < kMostNodes, "num_nodes must be in [0, 2^31 - 1), got ", num_nodes);
  check(source >= 0 && source < num_nodes, "source must be in [0, ", num_nodes, "), got ", source);
  check(sink >= 0 && sink < num_nodes, "sink must be in [0, ", num_nodes, "), got ", sink);
  check(source != sink, "source and sink must be different nodes, got ", source, " for both");
  check_ids(int64_data(tail), num_arcs, num_nodes, "tail");
  check_ids(int64_data(head), num_arcs, num_nodes, "head");
  const auto* size = static_cast<const double*>(capacity.const_data_ptr());
  for (int64_t k = 0; k < num_arcs; ++k) check(size[k] >= 0, "capacity[", k, "] must be >= 0, got ", size[k]);

  Residual graph(int64_data(tail), int64_data(head), size, num_arcs, num_nodes);
  std::vector<int32_t> level(graph.num_nodes()), next(graph.num_nodes()), queue;
  const auto from = static_cast<size_t>(source), to = static_cast<size_t>(sink);
  while (true) {
    graph.levels(to, true, level, queue);
    if (level[from] < 0) break;
    graph.block(from, to, level, next);
  }
  graph.levels(from, false, level, queue);
  Tensor side = new_vector(num_nodes, ScalarType::Bool);
  auto* out = static_cast<bool*>(side.mutable_data_ptr());
  std::transform(level.begin(), level.end(), out, [](int32_t distance) { return distance >= 0; });
  return side;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("minimum_cut", TORCH_BOX(&minimum_cut));
}

}  // namespace
}  // namespace salientpp
