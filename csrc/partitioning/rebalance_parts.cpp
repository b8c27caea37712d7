// Moves vertices between parts until no part exceeds a limit, then lowers the cut within the limits.
//
// Every vertex adds C loads to its part, and every load has a limit. The excess of part p under constraint c is
//
//     excess(p, c) = max(0, load(p, c) - limit(c)) / limit(c).
//
// A balancing move must lower the sum of excesses, and no excess may rise above the worst excess at the start. So if no
// part has room under all constraints, a move may slightly overload another constraint, and a later move repairs this:
// an exchange of unlike vertices in two steps. Among the allowed moves, the move with the least cut per removed excess
// goes first. The gains of its neighbours are updated in a heap, after Fiduccia and Mattheyses (DAC 1982).
#include <algorithm>
#include <limits>
#include <optional>
#include <queue>
#include <vector>

#include "check.h"
#include "graph/csc.h"
#include "partitioning/part_loads.h"

namespace salientpp {
namespace {

// A balancing pass moves a vertex at most once, so the number of passes bounds the work in hard cases.
constexpr int kMaxPasses = 16;
// Smaller improvements are rounding errors.
constexpr double kLeastGain = 1e-12;
// Limit of the total weight of all edges.
constexpr int64_t kMostWeight = int64_t{1} << 61;

template <class Index>
class Rebalancer : PartLoads {
 public:
  Rebalancer(const int64_t* indptr, const Index* indices, const EdgeWeights& edge_weights, int64_t num_parts,
             const Tensor& weights, const Tensor& limits, int64_t* part)
      : PartLoads(num_parts, weights, limits, part),
        indptr_(indptr),
        indices_(indices),
        edge_weights_(edge_weights),
        links_(static_cast<size_t>(num_parts), 0) {
    for (int64_t p = 0; p < k_; ++p) ceiling_ = std::max(ceiling_, worst_excess(p));
  }

  // Gives every empty part the vertex with the fewest links to its own part, unless that would empty another part.
  void fill_empty_parts() {
    std::vector<int64_t> empty;
    for (int64_t p = 0; p < k_; ++p) {
      if (size(p) == 0) empty.push_back(p);
    }
    if (empty.empty()) return;
    std::vector<std::pair<int64_t, int64_t>> candidates;  // (links into the own part, vertex)
    for (int64_t v = 0; v < n_; ++v) {
      if (size(part_[v]) > 1) candidates.emplace_back(internal_links(v), v);
    }
    std::sort(candidates.begin(), candidates.end());
    size_t next = 0;
    for (const auto& [links, v] : candidates) {
      if (next == empty.size()) return;
      if (size(part_[v]) > 1) move(v, empty[next++]);
    }
  }

  // Makes one pass over the vertices of overloaded parts; returns true if any moved.
  bool balance() {
    std::vector<uint8_t> overloaded(static_cast<size_t>(k_), 0);
    bool any = false;
    for (int64_t p = 0; p < k_; ++p) any |= (overloaded[static_cast<size_t>(p)] = worst_excess(p) > 0.0);
    if (!any) return false;

    constexpr double kOut = std::numeric_limits<double>::infinity();
    std::vector<double> key(static_cast<size_t>(n_), kOut);  // kOut: no candidate, or already done in this pass
    std::vector<Move> best(static_cast<size_t>(n_));
    std::vector<Entry> entries;
    for (int64_t v = 0; v < n_; ++v) {
      if (!overloaded[static_cast<size_t>(part_[v])]) continue;
      const Move found = best_balancing_move(v);
      if (found.target < 0) continue;
      best[static_cast<size_t>(v)] = found;
      key[static_cast<size_t>(v)] = found.key();
      entries.push_back({found.key(), v});
    }
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap(std::greater<Entry>(), std::move(entries));

    bool moved = false;
    while (!heap.empty()) {
      const auto [stored, v] = heap.top();
      heap.pop();
      double& current = key[static_cast<size_t>(v)];
      if (stored != current) continue;  // replaced by a later entry, or already done
      const Move found = best_balancing_move(v);
      if (found.target < 0) {
        current = kOut;
        continue;
      }
      // Loads change with every move, so the stored key is a guess. A vertex that is no longer first queues again.
      if (found.key() > stored && !heap.empty() && heap.top() < Entry{found.key(), v}) {
        best[static_cast<size_t>(v)] = found;
        current = found.key();
        heap.push({current, v});
        continue;
      }
      current = kOut;
      const int64_t source = part_[v];
      move(v, found.target);
      moved = true;
      for (int64_t e = indptr_[v]; e < indptr_[v + 1]; ++e) {
        const int64_t u = indices_[e];
        double& waiting = key[static_cast<size_t>(u)];
        if (waiting == kOut || part_[u] != source) continue;
        // u has one link less to its own part, and one more to the new part of v. The guess stays exact unless another
        // target becomes better.
        Move& guess = best[static_cast<size_t>(u)];
        guess.cost -= edge_weights_[e] * (guess.target == found.target ? 2 : 1);
        waiting = guess.key();
        heap.push({waiting, u});
      }
    }
    return moved;
  }

  // Makes one sweep over all vertices. Each moves to the part that it has most links to, if that breaks no limit.
  // Returns true if any moved.
  bool refine() {
    bool moved = false;
    for (int64_t v = 0; v < n_; ++v) {
      const int64_t from = part_[v];
      if (size(from) == 1) continue;
      count_links(v);
      int64_t target = -1;
      for (const int64_t q : touched_) {
        if (q == from || links(q) <= links(from)) continue;
        if (target >= 0 && (links(q) < links(target) || (links(q) == links(target) && q > target))) continue;
        if (fits(v, q)) target = q;
      }
      forget_links();
      if (target < 0) continue;
      move(v, target);
      moved = true;
    }
    return moved;
  }

 private:
  struct Move {
    int64_t target = -1;
    int64_t cost = 0;   // increase of the cut by the move
    double gain = 0.0;  // excess that the move removes, > 0
    // Moves that lower the cut come first, then moves with the least cut per removed excess.
    double key() const {
      const auto c = static_cast<double>(cost);
      return cost > 0 ? c / gain : c * gain;
    }
  };
  using Entry = std::pair<double, int64_t>;  // key, vertex; ties go to the smaller id

  int64_t& links(int64_t p) { return links_[static_cast<size_t>(p)]; }

  double excess(int64_t c, int64_t total) const {
    if (total <= limits_[c]) return 0.0;
    return static_cast<double>(total - limits_[c]) / static_cast<double>(std::max<int64_t>(limits_[c], 1));
  }

  double worst_excess(int64_t p) {
    double worst = 0.0;
    for (int64_t c = 0; c < num_constraints_; ++c) worst = std::max(worst, excess(c, load(p, c)));
    return worst;
  }

  bool fits(int64_t v, int64_t q) {
    for (int64_t c = 0; c < num_constraints_; ++c) {
      if (weight(v, c) > 0 && load(q, c) + weight(v, c) > limits_[c]) return false;
    }
    return true;
  }

  // Returns how full v would make part q; used to break ties.
  double fill(int64_t v, int64_t q) {
    double fullest = 0.0;
    for (int64_t c = 0; c < num_constraints_; ++c) {
      fullest = std::max(fullest, static_cast<double>(load(q, c) + weight(v, c)) /
                                      static_cast<double>(std::max<int64_t>(limits_[c], 1)));
    }
    return fullest;
  }

  void count_links(int64_t v) {
    for (int64_t e = indptr_[v]; e < indptr_[v + 1]; ++e) {
      if (indices_[e] == v) continue;  // a self-loop moves with its vertex
      const int64_t p = part_[indices_[e]];
      if (links(p) == 0) touched_.push_back(p);
      links(p) += edge_weights_[e];
    }
  }

  void forget_links() {
    for (const int64_t p : touched_) links(p) = 0;
    touched_.clear();
  }

  int64_t internal_links(int64_t v) {
    count_links(v);
    const int64_t count = links(part_[v]);
    forget_links();
    return count;
  }

  // Returns the best move of v that lowers the sum of excesses; its target is -1 if no move does.
  Move best_balancing_move(int64_t v) {
    const int64_t from = part_[v];
    Move best;
    if (size(from) == 1) return best;
    double relief = 0.0;
    for (int64_t c = 0; c < num_constraints_; ++c) {
      const double before = excess(c, load(from, c));
      if (before > 0.0) relief += before - excess(c, load(from, c) - weight(v, c));
    }
    if (relief < kLeastGain) return best;

    count_links(v);
    double best_fill = 0.0;
    for (int64_t q = 0; q < k_; ++q) {
      if (q == from) continue;
      double burden = 0.0, highest = 0.0;
      for (int64_t c = 0; c < num_constraints_; ++c) {
        if (weight(v, c) == 0) continue;
        const double after = excess(c, load(q, c) + weight(v, c));
        if (after == 0.0) continue;
        highest = std::max(highest, after);
        burden += after - excess(c, load(q, c));
      }
      const Move found{q, links(from) - links(q), relief - burden};
      if (found.gain < kLeastGain || highest > ceiling_) continue;
      const double key = found.key(), best_key = best.key();
      if (best.target >= 0 && key > best_key) continue;
      const double filled = fill(v, q);
      if (best.target >= 0 && key == best_key && filled >= best_fill) continue;
      best = found;
      best_fill = filled;
    }
    forget_links();
    return best;
  }

  const int64_t* indptr_;
  const Index* indices_;
  EdgeWeights edge_weights_;
  double ceiling_ = 0.0;                  // the worst excess at the start, which no move may exceed
  std::vector<int64_t> links_, touched_;  // links of the current vertex to each part; zero between uses
};

// Checks the arguments of this kernel that check_loads does not check.
template <class Index>
void check_edges(const int64_t* indptr, const Index* indices, const EdgeWeights& edge_weights, int64_t num_edges,
                 int64_t num_vertices) {
  check(indptr[0] == 0 && indptr[num_vertices] == num_edges, "indptr must run from 0 to the number of indices, ",
        num_edges, ", got ", indptr[0], " to ", indptr[num_vertices]);
  int64_t total = 0;
  for (int64_t v = 0; v < num_vertices; ++v) {
    check(indptr[v + 1] >= indptr[v], "indptr must not decrease, got indptr[", v, "] = ", indptr[v], " and indptr[",
          v + 1, "] = ", indptr[v + 1]);
  }
  check_ids(indices, num_edges, num_vertices, "indices");
  for (int64_t e = 0; edge_weights && e < num_edges; ++e) {
    check(edge_weights[e] >= 1, "edge_weights[", e, "] must be >= 1, got ", edge_weights[e]);
    // The cost of a move is a difference of two sums, and each edge can change it by twice its weight.
    check(!__builtin_add_overflow(total, edge_weights[e], &total) && total <= kMostWeight,
          "the edge weights sum to more than 2^61; scale them down");
  }
}

Tensor rebalance_parts(const Tensor& indptr, const Tensor& indices, const Tensor& assignment, const Tensor& weights,
                       const Tensor& limits, int64_t num_parts, int64_t sweeps,
                       const std::optional<Tensor>& edge_weights) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check_index_vector(indices, "indices");
  check_vector(assignment, ScalarType::Long, "assignment");
  check_vector(limits, ScalarType::Long, "limits");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  const int64_t num_vertices = indptr.numel() - 1;
  check(assignment.numel() == num_vertices, "assignment must have one entry per vertex, expected ", num_vertices,
        ", got ", assignment.numel());
  check(num_parts >= 1, "num_parts must be >= 1, got ", num_parts);
  check(num_parts < (int64_t{1} << 31), "num_parts must be < 2^31, got ", num_parts);
  check(sweeps >= 0, "sweeps must be >= 0, got ", sweeps);
  const EdgeWeights edge_weight(edge_weights, indices.numel(), "edge_weights");

  Tensor out = new_vector(num_vertices, ScalarType::Long);
  int64_t* part = mutable_int64_data(out);
  dispatch_index(indices, [&](auto* sources) {
    check_edges(int64_data(indptr), sources, edge_weight, indices.numel(), num_vertices);
    check_loads(assignment, weights, limits, num_parts);
    std::copy_n(int64_data(assignment), num_vertices, part);
    Rebalancer rebalancer(int64_data(indptr), sources, edge_weight, num_parts, weights, limits, part);
    rebalancer.fill_empty_parts();
    for (int pass = 0; pass < kMaxPasses && rebalancer.balance(); ++pass) {
    }
    for (int64_t sweep = 0; sweep < sweeps && rebalancer.refine(); ++sweep) {
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("rebalance_parts", TORCH_BOX(&rebalance_parts));
}

}  // namespace
}  // namespace salientpp
