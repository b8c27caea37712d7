// Vertex inclusion probabilities (VIP) of several seed sets in one sweep over the edges, by the formulas of
// salientpp/vip/inclusion.py.
//
// Products are kept as complements, a <- a + y - a * y. This keeps the full relative precision of small
// probabilities and reaches 1 exactly. All parts of a vertex share a cache line, so an edge costs one line.
#include <algorithm>
#include <vector>

#include "check.h"
#include "memory.h"

namespace salientpp {
namespace {

constexpr int64_t kPrefetchAhead = 48;
constexpr int64_t kRunEdges = 512;
// With more vertices, four parts are swept at a time instead of eight, because a sweep holds 8 bytes per vertex and
// part.
constexpr int64_t kManyVertices = int64_t{1} << 25;
// Smaller work is not worth waking threads.
constexpr int64_t kParallelWork = 1 << 16;

double draw_probability(int64_t degree, int64_t fanout, bool replace) {
  if (degree == 0) return 0.0;
  if (fanout < 0) return 1.0;
  if (!replace) return std::min(1.0, static_cast<double>(fanout) / static_cast<double>(degree));
  double none = 1.0;
  const double miss = 1.0 - 1.0 / static_cast<double>(degree);
  double power = miss;
  for (int64_t e = fanout; e > 0; e /= 2, power *= power) {
    if (e & 1) none *= power;
  }
  return 1.0 - none;
}

inline float either(float a, float b) {
  return a + (b - a * b);
}

// Returns bounds of vertex ranges with about equal numbers of edges, so that threads finish together on skewed graphs.
std::vector<int64_t> equal_edge_ranges(const int64_t* indptr, int64_t num_vertices, int64_t num_ranges) {
  std::vector<int64_t> bounds{0};
  const int64_t num_edges = indptr[num_vertices];
  if (num_edges + num_vertices < kParallelWork) num_ranges = 1;
  for (int64_t r = 1; r < num_ranges; ++r) {
    // Vertices count too, because a range of isolated vertices is also work.
    const int64_t target = (num_edges + num_vertices) / num_ranges * r;
    int64_t low = bounds.back(), high = num_vertices;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indptr[middle] + middle < target)
        low = middle + 1;
      else
        high = middle;
    }
    bounds.push_back(low);
  }
  bounds.push_back(num_vertices);
  return bounds;
}

template <class F>
void over_ranges(const std::vector<int64_t>& bounds, const F& f) {
  torch::stable::parallel_for(0, static_cast<int64_t>(bounds.size()) - 1, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) f(bounds[static_cast<size_t>(r)], bounds[static_cast<size_t>(r + 1)]);
  });
}

struct Problem {
  const int64_t* indptr;      // in-lists; only their lengths are used
  const int64_t* out_indptr;  // for each u, the vertices that have u as a source; the sweep pulls from them
  int64_t num_vertices;
  const int64_t* seeds;
  const int64_t* seed_offsets;
  const std::vector<int64_t>& fanouts;
  int64_t batch_size;
  bool frontier, include_seeds, replace;
};

// Sweeps W parts at a time, from `first_part` on; writes rows [first_part, first_part + num_parts) of `out` [K, N].
template <int W, class Index>
void sweep(const Problem& problem, const Index* out_indices, int64_t first_part, int64_t num_parts, float* out) {
  const int64_t n = problem.num_vertices;
  const auto bounds =
      equal_edge_ranges(problem.out_indptr, n, 16 * static_cast<int64_t>(torch::stable::get_num_threads()));
  float seed_probability[W] = {};
  std::vector<uint8_t> is_seed(static_cast<size_t>(n), 0);  // bit k: the vertex is in the k-th seed set
  for (int64_t k = 0; k < num_parts; ++k) {
    const int64_t begin = problem.seed_offsets[first_part + k], end = problem.seed_offsets[first_part + k + 1];
    if (end > begin) {
      seed_probability[k] =
          static_cast<float>(std::min(1.0, static_cast<double>(problem.batch_size) / static_cast<double>(end - begin)));
    }
    for (int64_t i = begin; i < end; ++i)
      is_seed[static_cast<size_t>(problem.seeds[i])] |= static_cast<uint8_t>(1U << k);
  }
  const auto start = [&](int64_t v, int k) {
    return (is_seed[static_cast<size_t>(v)] >> k) & 1U ? seed_probability[k] : 0.0F;
  };
  const auto draw = [&](int64_t v, size_t hop) {
    return static_cast<float>(
        draw_probability(problem.indptr[v + 1] - problem.indptr[v], problem.fanouts[hop], problem.replace));
  };

  // weight[v] = t_h(v) * x_{h-1}(v): the probability that v is expanded at this hop and draws a given neighbour.
  std::vector<float, HugePageAllocator<float>> weight(static_cast<size_t>(n * W)), next(static_cast<size_t>(n * W));
  const size_t num_hops = problem.fanouts.size();
  over_ranges(bounds, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      const float t = num_hops > 0 ? draw(v, 0) : 0.0F;
      for (int k = 0; k < W; ++k) weight[static_cast<size_t>(v * W + k)] = t * start(v, k);
      for (int64_t k = 0; k < num_parts; ++k) {
        out[(first_part + k) * n + v] =
            !problem.frontier && problem.include_seeds ? start(v, static_cast<int>(k)) : 0.0F;
      }
    }
  });

  for (size_t hop = 0; hop < num_hops; ++hop) {
    over_ranges(bounds, [&](int64_t begin, int64_t end) {
      const float* x = weight.data();
      const int64_t last_edge = problem.out_indptr[end];
      for (int64_t u = begin; u < end; ++u) {
        float product[W] = {};
        const int64_t stop = problem.out_indptr[u + 1];
        for (int64_t e = problem.out_indptr[u]; e < stop;) {
          // Add in runs, so that the rounding errors of a hub's edges do not accumulate. Use two accumulators,
          // because each addition of a single chain would wait for the one before.
          const int64_t run_stop = std::min(stop, e + kRunEdges);
          float even[W] = {}, odd[W] = {};
          for (; e + 1 < run_stop; e += 2) {
            if (e + kPrefetchAhead + 1 < last_edge) {
              __builtin_prefetch(&x[static_cast<int64_t>(out_indices[e + kPrefetchAhead]) * W], 0, 3);
              __builtin_prefetch(&x[static_cast<int64_t>(out_indices[e + kPrefetchAhead + 1]) * W], 0, 3);
            }
            const float* a = &x[static_cast<int64_t>(out_indices[e]) * W];
            const float* b = &x[static_cast<int64_t>(out_indices[e + 1]) * W];
            for (int k = 0; k < W; ++k) even[k] = either(even[k], a[k]);
            for (int k = 0; k < W; ++k) odd[k] = either(odd[k], b[k]);
          }
          if (e < run_stop) {
            const float* a = &x[static_cast<int64_t>(out_indices[e]) * W];
            for (int k = 0; k < W; ++k) even[k] = either(even[k], a[k]);
            ++e;
          }
          for (int k = 0; k < W; ++k) product[k] = either(product[k], either(even[k], odd[k]));
        }
        const float t = hop + 1 < num_hops ? draw(u, hop + 1) : 0.0F;
        for (int k = 0; k < W; ++k) {
          const float p = product[k];
          float expanded = p;
          if (k < num_parts) {
            float& included = out[(first_part + k) * n + u];
            if (problem.frontier) {
              expanded = p * std::max(0.0F, 1.0F - (start(u, k) + included));
              included += expanded;
            } else {
              included = either(included, p);
            }
          }
          next[static_cast<size_t>(u * W + k)] = t * expanded;
        }
      }
    });
    weight.swap(next);
  }
  if (problem.frontier) {
    for (int64_t k = 0; k < num_parts; ++k) {
      for (int64_t v = 0; v < n; ++v) {
        float& included = out[(first_part + k) * n + v];
        if (problem.include_seeds) included += start(v, static_cast<int>(k));
        included = std::min(included, 1.0F);
      }
    }
  }
}

Tensor inclusion_probability(const Tensor& indptr, const Tensor& out_indptr, const Tensor& out_indices,
                             const Tensor& seeds, const Tensor& seed_offsets, const std::vector<int64_t>& fanouts,
                             int64_t batch_size, bool frontier, bool include_seeds, bool replace) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check_vector(out_indptr, ScalarType::Long, "out_indptr");
  check_index_vector(out_indices, "out_indices");
  check_vector(seeds, ScalarType::Long, "seeds");
  check_vector(seed_offsets, ScalarType::Long, "seed_offsets");
  check(indptr.numel() >= 1 && indptr.numel() == out_indptr.numel(),
        "indptr and out_indptr must have the same N + 1 entries, got ", indptr.numel(), " and ", out_indptr.numel());
  check(batch_size >= 1, "batch_size must be >= 1, got ", batch_size);
  for (size_t hop = 0; hop < fanouts.size(); ++hop) {
    check(fanouts[hop] >= -1, "fanouts[", hop, "] must be >= 0, or -1 for all neighbours, got ", fanouts[hop]);
  }
  const int64_t num_vertices = indptr.numel() - 1;
  check_offsets(out_indptr, out_indices.numel(), "out_indptr", "out_indices");
  check_offsets(indptr, out_indices.numel(), "indptr", "edges");
  dispatch_index(out_indices, [&](auto* targets) {
    uint64_t largest = 0;
    for (int64_t e = 0; e < out_indices.numel(); ++e) largest = std::max(largest, static_cast<uint64_t>(targets[e]));
    check(out_indices.numel() == 0 || largest < static_cast<uint64_t>(num_vertices), "out_indices must be in [0, ",
          num_vertices, "), got ", static_cast<int64_t>(largest));
  });
  const int64_t num_sets = seed_offsets.numel() - 1;
  check(num_sets >= 0, "seed_offsets must have K + 1 >= 1 entries, got 0");
  check_offsets(seed_offsets, seeds.numel(), "seed_offsets", "seeds");
  check_ids(int64_data(seeds), seeds.numel(), num_vertices, "seeds");

  Tensor out = torch::stable::empty({num_sets, num_vertices}, ScalarType::Float);
  auto* result = static_cast<float*>(out.mutable_data_ptr());
  const Problem problem{int64_data(indptr),
                        int64_data(out_indptr),
                        num_vertices,
                        int64_data(seeds),
                        int64_data(seed_offsets),
                        fanouts,
                        batch_size,
                        frontier,
                        include_seeds,
                        replace};
  dispatch_index(out_indices, [&](auto* targets) {
    for (int64_t part = 0; part < num_sets;) {
      const int64_t left = num_sets - part;
      const int64_t taken = std::min<int64_t>(left, num_vertices > kManyVertices ? 4 : 8);
      if (taken > 4)
        sweep<8>(problem, targets, part, taken, result);
      else if (taken > 2)
        sweep<4>(problem, targets, part, taken, result);
      else if (taken == 2)
        sweep<2>(problem, targets, part, taken, result);
      else
        sweep<1>(problem, targets, part, taken, result);
      part += taken;
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("inclusion_probability", TORCH_BOX(&inclusion_probability));
}

}  // namespace
}  // namespace salientpp
