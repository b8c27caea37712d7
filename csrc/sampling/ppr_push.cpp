// Approximate personalised PageRank of single vertices, by forward push, and the vertices with the largest scores.
//
// A walk starts at a seed. At each vertex it ends with probability alpha, or goes to an entry of the vertex's list,
// drawn uniformly. At an empty list it ends. The score of a vertex approximates the probability that the walk ends
// there. A residual is the probability of walks that are not settled yet. A push of a vertex settles the share alpha
// of its residual, and spreads the rest over its list. A vertex is pushed while its residual is more than epsilon times
// the length of its list, first in, first out. The seed is pushed at least once. This is the method of Andersen, Chung
// and Lang (FOCS 2006), with walks that are not lazy.
//
// Seeds are independent, so threads divide them. The sums of a seed depend only on the lists and their order.
#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "random.h"

namespace salientpp {
namespace {

// Lists of all vertices, or of some: then `ids` has their vertices, ascending, and `degree` the lengths of all lists.
template <class Index, class Degree>
struct PushLists {
  const int64_t* indptr;
  const Index* indices;
  const int64_t* ids;
  const Degree* degree;  // null: list v belongs to vertex v, and the lengths are those in indptr
  int64_t num_lists, num_edges, num_vertices;

  int64_t length(int64_t v) const { return degree == nullptr ? indptr[v + 1] - indptr[v] : int64_t{degree[v]}; }

  // The number of the vertex's list, or -1 if it is not there.
  int64_t place(int64_t v) const {
    if (degree == nullptr) return v;
    const int64_t* at = std::lower_bound(ids, ids + num_lists, v);
    return at != ids + num_lists && *at == v ? at - ids : -1;
  }
};

struct Touched {
  int64_t id, length;
  double score, residual;
  bool is_queued;
};

// Memory that a thread keeps between seeds: the vertices that walks of one seed reach.
class Reached {
 public:
  void clear() {
    // In reverse, so that no vertex is searched past a slot that is empty already.
    for (; !vertices_.empty(); vertices_.pop_back()) table_[slot_of(vertices_.back().id)] = 0;
    queue_.clear();
    head_ = 0;
    // The memory of a large neighbourhood is not kept.
    if (table_.size() > kLargeTable) table_.assign(kSmallTable, 0);
  }

  // The position of a vertex, which is added if it is new. `length` is called for new ones.
  template <class Length>
  size_t find(int64_t id, Length&& length) {
    if (2 * (vertices_.size() + 1) > table_.size()) grow();
    const size_t slot = slot_of(id);
    if (table_[slot] == 0) {
      vertices_.push_back({id, length(id), 0.0, 0.0, false});
      table_[slot] = static_cast<uint32_t>(vertices_.size());
    }
    return table_[slot] - 1;
  }

  Touched& operator[](size_t position) { return vertices_[position]; }
  const std::vector<Touched>& all() const { return vertices_; }

  void enqueue(size_t position) {
    vertices_[position].is_queued = true;
    queue_.push_back(static_cast<uint32_t>(position));
  }
  bool has_next() const { return head_ < queue_.size(); }
  size_t next() {
    const size_t position = queue_[head_++];
    if (head_ > kLargeTable && 2 * head_ > queue_.size()) {
      queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
    vertices_[position].is_queued = false;
    return position;
  }

 private:
  static constexpr size_t kSmallTable = size_t{1} << 10, kLargeTable = size_t{1} << 20;

  // The slot that holds the vertex, or the empty one for it.
  size_t slot_of(int64_t id) const {
    const size_t mask = table_.size() - 1;
    size_t slot = mix64(static_cast<uint64_t>(id)) & mask;
    while (table_[slot] != 0 && vertices_[table_[slot] - 1].id != id) slot = (slot + 1) & mask;
    return slot;
  }

  void grow() {
    table_.assign(std::max(kSmallTable, 2 * table_.size()), 0);
    for (size_t position = 0; position < vertices_.size(); ++position)
      table_[slot_of(vertices_[position].id)] = static_cast<uint32_t>(position + 1);
  }

  std::vector<Touched> vertices_;
  std::vector<uint32_t> table_ = std::vector<uint32_t>(kSmallTable);  // position + 1; 0 means empty
  std::vector<uint32_t> queue_;                                       // positions, each at most once from head_ on
  size_t head_ = 0;
};

enum class Fault { none, id, offsets, size };

// Pushes from one seed. Appends the vertices whose lists are needed and missing.
template <class Lists>
Fault push_from(Reached& reached, const Lists& lists, int64_t seed, double alpha, double epsilon,
                std::vector<int64_t>& missing) {
  const auto length = [&](int64_t v) { return lists.length(v); };
  reached.clear();
  const size_t first = reached.find(seed, length);
  reached[first].residual = 1.0;
  reached.enqueue(first);
  while (reached.has_next()) {
    const size_t position = reached.next();
    const Touched vertex = reached[position];
    if (vertex.length == 0) {
      reached[position].score += vertex.residual;
      reached[position].residual = 0.0;
      continue;
    }
    const int64_t place = lists.place(vertex.id);
    if (place < 0) {
      missing.push_back(vertex.id);
      reached[position].is_queued = true;  // so that it is not queued again
      continue;
    }
    const int64_t begin = lists.indptr[place], end = lists.indptr[place + 1];
    if (begin < 0 || end > lists.num_edges || end - begin != vertex.length) return Fault::offsets;
    reached[position].score += alpha * vertex.residual;
    reached[position].residual = 0.0;
    const double share = (1.0 - alpha) * vertex.residual / static_cast<double>(vertex.length);
    for (int64_t edge = begin; edge < end; ++edge) {
      const int64_t id = lists.indices[edge];
      if (id < 0 || id >= lists.num_vertices) return Fault::id;
      if (reached.all().size() >= std::numeric_limits<uint32_t>::max() - 1) return Fault::size;
      const size_t to = reached.find(id, length);
      Touched& target = reached[to];
      if (target.length < 0) return Fault::offsets;
      target.residual += share;
      if (!target.is_queued && target.residual > epsilon * static_cast<double>(target.length)) reached.enqueue(to);
    }
  }
  return Fault::none;
}

// Writes the k vertices with the largest scores, in this order; equal scores in the order of ids.
int64_t write_largest(const Reached& reached, int64_t k, std::vector<std::pair<double, int64_t>>& scored, int64_t* id,
                      double* score) {
  scored.clear();
  for (const Touched& vertex : reached.all())
    if (vertex.score > 0.0) scored.emplace_back(-vertex.score, vertex.id);
  const int64_t size = std::min(k, static_cast<int64_t>(scored.size()));
  std::partial_sort(scored.begin(), scored.begin() + size, scored.end());
  for (int64_t i = 0; i < size; ++i) {
    score[i] = -scored[static_cast<size_t>(i)].first;
    id[i] = scored[static_cast<size_t>(i)].second;
  }
  return size;
}

template <class Lists>
std::tuple<Tensor, Tensor, Tensor, Tensor> push_all(const Lists& lists, const Tensor& seeds, double alpha,
                                                    double epsilon, int64_t k, bool parallel) {
  const int64_t size = seeds.numel();
  const int64_t* seed = int64_data(seeds);
  check_ids(seed, size, lists.num_vertices, "seeds");
  const Tensor id = new_tensor<2>({size, k}, ScalarType::Long), score = new_tensor<2>({size, k}, ScalarType::Double);
  const Tensor count = new_vector(size, ScalarType::Long);
  int64_t* const ids = mutable_int64_data(id);
  auto* const scores = static_cast<double*>(score.mutable_data_ptr());
  std::fill_n(ids, size * k, int64_t{-1});
  std::fill_n(scores, size * k, 0.0);
  std::vector<int64_t> missing;
  std::mutex lock;
  std::atomic<Fault> fault{Fault::none};
  torch::stable::parallel_for(0, size, parallel ? 1 : std::max<int64_t>(1, size), [&](int64_t begin, int64_t end) {
    static thread_local Reached reached;
    std::vector<int64_t> unknown;
    std::vector<std::pair<double, int64_t>> scored;
    for (int64_t i = begin; i < end && fault == Fault::none; ++i) {
      const size_t before = unknown.size();
      const Fault found = push_from(reached, lists, seed[i], alpha, epsilon, unknown);
      if (found != Fault::none) fault = found;
      const bool complete = unknown.size() == before;
      mutable_int64_data(count)[i] = complete ? write_largest(reached, k, scored, ids + i * k, scores + i * k) : -1;
    }
    const std::lock_guard<std::mutex> guard(lock);
    missing.insert(missing.end(), unknown.begin(), unknown.end());
  });
  check(fault != Fault::id, "indices must be in [0, ", lists.num_vertices, "); one is not");
  check(fault != Fault::offsets, "indptr must hold the bounds of lists in indices, with the lengths in degree");
  check(fault != Fault::size, "walks of one seed reach 2^32 vertices; use a larger epsilon");
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return {id, score, count, vector_of(missing)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ppr_push(const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                                                    double alpha, double epsilon, int64_t k,
                                                    const std::optional<Tensor>& ids,
                                                    const std::optional<Tensor>& degree, bool parallel) {
  check_vector(indptr, ScalarType::Long, "indptr");
  check(indptr.numel() >= 1, "indptr must have N + 1 >= 1 entries, got 0");
  check_index_vector(indices, "indices");
  check_vector(seeds, ScalarType::Long, "seeds");
  check(alpha > 0.0 && alpha < 1.0, "alpha must be in (0, 1), got ", alpha);
  check(epsilon > 0.0, "epsilon must be > 0, got ", epsilon);
  check(k >= 1, "k must be >= 1, got ", k);
  check(ids.has_value() == degree.has_value(), "ids and degree must be given both or not at all");
  const int64_t num_lists = indptr.numel() - 1;
  const int64_t* held = nullptr;
  if (ids) {
    check_vector(*ids, ScalarType::Long, "ids");
    check(ids->numel() == num_lists, "ids must have one entry per list, expected ", num_lists, ", got ", ids->numel());
    held = int64_data(*ids);
    check_index_vector(*degree, "degree");
  }
  return dispatch_index(indices, [&]<class Index>(const Index* list) {
    return dispatch_index(degree ? *degree : indptr, [&]<class Degree>(const Degree* length) {
      const PushLists<Index, Degree> lists{int64_data(indptr),
                                           list,
                                           held,
                                           degree && degree->numel() > 0 ? length : nullptr,
                                           num_lists,
                                           indices.numel(),
                                           degree ? degree->numel() : num_lists};
      return push_all(lists, seeds, alpha, epsilon, k, parallel);
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("ppr_push", TORCH_BOX(&ppr_push));
}

}  // namespace
}  // namespace salientpp
