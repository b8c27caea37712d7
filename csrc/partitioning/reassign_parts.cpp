// Moves vertices to parts where they cost less, alone or as swaps of two, within the limits of the parts.
//
// A vertex v in part k costs cost(k, v). The gain of a move is a difference of two costs, independent of other
// vertices. The caller's costs are exact only to first order, so a round moves few vertices, largest gain first. A move
// that would overload its part is made as a swap. The partner is in that part and in the same seed sets, has the
// largest gain in the other direction, and costs less than the move gains.
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "check.h"
#include "partitioning/part_loads.h"

namespace salientpp {
namespace {

// Number of vertices considered for a swap. The first that has not moved and whose loads fit is taken.
constexpr int64_t kMostTried = 32;

struct Candidate {
  float gain;
  int64_t vertex;
  // Largest gain first; ties go to the lower id.
  bool operator<(const Candidate& other) const {
    return gain != other.gain ? gain > other.gain : vertex < other.vertex;
  }
};

class Reassigner : PartLoads {
 public:
  Reassigner(const float* cost, int64_t num_parts, const Tensor& weights, const Tensor& limits, int64_t* part)
      : PartLoads(num_parts, weights, limits, part), cost_(cost), moved_(static_cast<size_t>(n_), false) {}

  void run(int64_t most_moves) {
    find_partners(std::max<int64_t>(kMostTried, most_moves / k_));
    std::vector<Candidate> wishes;
    for (int64_t v = 0; v < n_; ++v) {
      float best = 0.0F;
      for (int64_t b = 0; b < k_; ++b) best = std::max(best, gain(v, b));
      if (best > 0.0F) wishes.push_back({best, v});
    }
    std::sort(wishes.begin(), wishes.end());
    std::vector<Candidate> targets;
    int64_t moves = 0;
    for (const auto& wish : wishes) {
      if (moves >= most_moves) return;
      const int64_t v = wish.vertex;
      if (moved_[static_cast<size_t>(v)]) continue;
      targets.clear();
      for (int64_t b = 0; b < k_; ++b) {
        if (gain(v, b) > 0.0F) targets.push_back({gain(v, b), b});
      }
      std::sort(targets.begin(), targets.end());
      for (const auto& [gained, target] : targets) {
        const int64_t made = go(v, target, gained);
        moves += made;
        if (made) break;
      }
    }
  }

 private:
  struct Partners {
    std::vector<Candidate> list;
    size_t next = 0;
  };

  float gain(int64_t v, int64_t to) const { return cost_[part_[v] * n_ + v] - cost_[to * n_ + v]; }

  // Returns the set of constraints that v counts under. A swap of two vertices of one class hardly changes these loads.
  uint64_t class_of(int64_t v) const {
    uint64_t found = 0;
    for (int64_t c = 0; c < num_constraints_; ++c) found |= uint64_t{weight(v, c) > 0} << (c & 63);
    return found;
  }

  // For every two parts and class, finds the vertices that gain most by moving from the one part to the other.
  void find_partners(int64_t most) {
    std::map<std::pair<int64_t, uint64_t>, std::vector<int64_t>> members;
    for (int64_t v = 0; v < n_; ++v) members[{part_[v], class_of(v)}].push_back(v);
    for (const auto& [group, vertices] : members) {
      const auto kept = static_cast<std::ptrdiff_t>(std::min<int64_t>(most, static_cast<int64_t>(vertices.size())));
      std::vector<Candidate> all(vertices.size());
      for (int64_t b = 0; b < k_; ++b) {
        if (b == group.first) continue;
        std::transform(vertices.begin(), vertices.end(), all.begin(),
                       [&](int64_t v) { return Candidate{gain(v, b), v}; });
        std::partial_sort(all.begin(), all.begin() + kept, all.end());
        partners_[{group.first * k_ + b, group.second}].list.assign(all.begin(), all.begin() + kept);
      }
    }
  }

  // Moves v, alone or as a swap, and returns the number of vertices that moved.
  int64_t go(int64_t v, int64_t target, float gained) {
    const int64_t from = part_[v];
    bool fits = size(from) > 1;
    for (int64_t c = 0; fits && c < num_constraints_; ++c)
      fits = weight(v, c) == 0 || load(target, c) + weight(v, c) <= limits_[c];
    if (fits) {
      move(v, target);
      return 1;
    }
    const auto found = partners_.find({target * k_ + from, class_of(v)});
    if (found == partners_.end()) return 0;
    auto& [list, next] = found->second;
    while (next < list.size() && moved_[static_cast<size_t>(list[next].vertex)]) ++next;
    int64_t tried = 0;
    for (size_t i = next; i < list.size() && tried < kMostTried; ++i) {
      if (moved_[static_cast<size_t>(list[i].vertex)]) continue;
      if (gained + list[i].gain <= 0.0F) return 0;
      ++tried;
      if (!can_swap(v, list[i].vertex)) continue;
      move(list[i].vertex, from);
      move(v, target);
      return 2;
    }
    return 0;
  }

  // True if the swap keeps every load within its limit. A load that exceeds its limit already must not grow.
  bool can_swap(int64_t v, int64_t u) {
    for (int64_t c = 0; c < num_constraints_; ++c) {
      const int64_t more = weight(v, c) - weight(u, c);
      const int64_t heavier = more > 0 ? part_[u] : part_[v];
      if (more != 0 && load(heavier, c) + std::abs(more) > limits_[c]) return false;
    }
    return true;
  }

  void move(int64_t v, int64_t to) {
    PartLoads::move(v, to);
    moved_[static_cast<size_t>(v)] = true;
  }

  const float* cost_;  // [K, N]
  std::vector<bool> moved_;
  std::map<std::pair<int64_t, uint64_t>, Partners> partners_;
};

Tensor reassign_parts(const Tensor& cost, const Tensor& assignment, const Tensor& weights, const Tensor& limits,
                      int64_t most_moves) {
  check_defined(cost, "cost");
  check(cost.dim() == 2 && cost.scalar_type() == ScalarType::Float && cost.is_contiguous(),
        "cost must be a contiguous tensor of dtype Float and 2 dimensions, parts by vertices, got dtype ",
        cost.scalar_type(), " and ", cost.dim(), " dimensions");
  check_vector(assignment, ScalarType::Long, "assignment");
  check_vector(limits, ScalarType::Long, "limits");
  const int64_t num_parts = cost.size(0), num_vertices = assignment.numel();
  check(num_parts >= 1 && num_parts < (int64_t{1} << 31), "cost must have 1 to 2^31 - 1 rows, got ", num_parts);
  check(cost.size(1) == num_vertices, "assignment must have one entry per column of cost, expected ", cost.size(1),
        ", got ", num_vertices);
  check(most_moves >= 0, "most_moves must be >= 0, got ", most_moves);
  const auto* costs = static_cast<const float*>(cost.const_data_ptr());
  for (int64_t i = 0; i < cost.numel(); ++i) {
    check(std::isfinite(costs[i]), "cost[", i / num_vertices, ", ", i % num_vertices, "] must be finite, got ",
          costs[i]);
  }
  check_loads(assignment, weights, limits, num_parts);
  Tensor out = new_vector(num_vertices, ScalarType::Long);
  std::copy_n(int64_data(assignment), num_vertices, mutable_int64_data(out));
  Reassigner(costs, num_parts, weights, limits, mutable_int64_data(out)).run(most_moves);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("reassign_parts", TORCH_BOX(&reassign_parts));
}

}  // namespace
}  // namespace salientpp
