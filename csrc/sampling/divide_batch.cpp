// Divides a batch among the ranks of a host. salientpp/sampling/host_share.py describes a share.
//
// A table has the number of every vertex in every share: its own vertices, and the halo, to which edges of the share
// lead from other ranks' vertices. The first pass over the edges marks the halos. The second pass writes the edges of
// the shares.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "memory.h"
#include "sampling/buffer.h"

namespace salientpp {
namespace {

// Memory that a thread keeps between calls. It never influences a result.
struct DivideScratch {
  Buffer<uint8_t> needed;  // [n, ranks]: 1 if the rank has an edge from the vertex
  Buffer<int32_t> number;  // [n, ranks]: number of the vertex in the rank's share, if it is there
};

DivideScratch& divide_scratch() {
  static thread_local DivideScratch scratch;
  return scratch;
}

struct Division {
  const int64_t *node, *row, *col, *edge, *owner;  // edge may be null
  const std::vector<int64_t>&nodes_within, &edges_within;
  int64_t ranks, size;
  size_t num_limits;
  uint8_t* needed;
  int32_t* number;
  // Numbers within 0, 1, 2, ... hops: [ranks, limits], and by owner and receiver [ranks, ranks, limits].
  int64_t *own, *edges, *sent;

  size_t at(int64_t vertex, int64_t rank) const { return static_cast<size_t>(vertex * ranks + rank); }
  int64_t& of_rank(int64_t* counts, int64_t rank, size_t limit) const {
    return counts[static_cast<size_t>(rank) * num_limits + limit];
  }
  int64_t& of_pair(int64_t from, int64_t to, size_t limit) const { return of_rank(sent, from * ranks + to, limit); }
  int64_t num_own(int64_t rank) const { return of_rank(own, rank, num_limits - 1); }
  int64_t num_sent(int64_t from, int64_t to) const { return of_pair(from, to, num_limits - 1); }
};

// Calls visit(i) for the entries up to each limit, and then reached(limit).
template <class Visit, class Reached>
void visit_hops(const std::vector<int64_t>& limits, Visit&& visit, Reached&& reached) {
  int64_t i = 0;
  for (size_t limit = 0; limit < limits.size(); ++limit) {
    for (; i < limits[limit]; ++i) visit(i);
    reached(limit);
  }
}

void number_own(const Division& d) {
  std::vector<int64_t> count(static_cast<size_t>(d.ranks));
  visit_hops(
      d.nodes_within,
      [&](int64_t v) {
        const int64_t rank = d.owner[v];
        check(rank >= 0 && rank < d.ranks, "owner[", v, "] must be in [0, ", d.ranks, "), got ", rank);
        d.number[d.at(v, rank)] = static_cast<int32_t>(count[static_cast<size_t>(rank)]++);
      },
      [&](size_t limit) {
        for (int64_t rank = 0; rank < d.ranks; ++rank) d.of_rank(d.own, rank, limit) = count[static_cast<size_t>(rank)];
      });
}

// Calls visit(v, first, last) for the edges from `first` up to `last`, which lead to vertex v. Edges of
// one target mostly stand together, so this is far faster than to look the rank of each edge up.
template <class Visit>
void visit_targets(const Division& d, int64_t first, int64_t last, Visit&& visit) {
  while (first < last) {
    const int64_t v = d.col[first];
    int64_t end = first + 1;
    while (end < last && d.col[end] == v) ++end;
    visit(v, first, end);
    first = end;
  }
}

void mark_sources(const Division& d) {
  std::fill_n(d.needed, d.size * d.ranks, uint8_t{0});
  std::vector<int64_t> count(static_cast<size_t>(d.ranks));
  int64_t begin = 0;
  for (size_t limit = 0; limit < d.num_limits; ++limit) {
    visit_targets(d, begin, d.edges_within[limit], [&](int64_t v, int64_t first, int64_t last) {
      check(v >= 0 && v < d.size, "col[", first, "] must be in [0, ", d.size, "), got ", v);
      const int64_t rank = d.owner[v];
      count[static_cast<size_t>(rank)] += last - first;
      for (int64_t e = first; e < last; ++e) {
        const int64_t u = d.row[e];
        check(u >= 0 && u < d.size, "row[", e, "] must be in [0, ", d.size, "), got ", u);
        d.needed[d.at(u, rank)] = 1;
      }
    });
    begin = d.edges_within[limit];
    for (int64_t rank = 0; rank < d.ranks; ++rank) d.of_rank(d.edges, rank, limit) = count[static_cast<size_t>(rank)];
  }
}

// Calls found(v, from, to) for every vertex v of a rank `from` that the share of another rank `to` needs.
template <class Found>
void visit_needed(const Division& d, int64_t v, Found&& found) {
  const int64_t from = d.owner[v];
  for (int64_t to = 0; to < d.ranks; ++to)
    if (d.needed[d.at(v, to)] != 0 && to != from) found(v, from, to);
}

void count_sent(const Division& d) {
  std::vector<int64_t> count(static_cast<size_t>(d.ranks * d.ranks));
  visit_hops(
      d.nodes_within,
      [&](int64_t v) {
        visit_needed(d, v,
                     [&](int64_t, int64_t from, int64_t to) { ++count[static_cast<size_t>(from * d.ranks + to)]; });
      },
      [&](size_t limit) {
        for (int64_t pair = 0; pair < d.ranks * d.ranks; ++pair)
          d.of_rank(d.sent, pair, limit) = count[static_cast<size_t>(pair)];
      });
}

// Numbers the halos. Writes the rows that each selected rank sends; the pointers of other ranks are null.
void number_halos(const Division& d, const std::vector<int64_t*>& send) {
  std::vector<int64_t> in_halo(static_cast<size_t>(d.ranks * d.ranks)), in_send(in_halo.size());
  for (int64_t a = 0; a < d.ranks; ++a) {
    int64_t halo = d.num_own(a), sent = 0;
    for (int64_t b = 0; b < d.ranks; ++b) {
      in_halo[static_cast<size_t>(b * d.ranks + a)] = halo;  // rank a receives from b
      in_send[static_cast<size_t>(a * d.ranks + b)] = sent;
      halo += d.num_sent(b, a);
      sent += d.num_sent(a, b);
    }
  }
  for (int64_t v = 0; v < d.size; ++v)
    visit_needed(d, v, [&](int64_t, int64_t from, int64_t to) {
      const auto pair = static_cast<size_t>(from * d.ranks + to);
      d.number[d.at(v, to)] = static_cast<int32_t>(in_halo[pair]++);
      int64_t* out = send[static_cast<size_t>(from)];
      if (out != nullptr) out[in_send[pair]++] = d.number[d.at(v, from)];
    });
}

// The arrays of one share.
struct Out {
  int64_t *node = nullptr, *row = nullptr, *col = nullptr, *edge = nullptr;
};

void write_shares(const Division& d, std::vector<Out> out) {
  for (int64_t v = 0; v < d.size; ++v) {
    Out& share = out[static_cast<size_t>(d.owner[v])];
    if (share.node != nullptr) *share.node++ = d.node[v];
  }
  visit_targets(d, 0, d.edges_within.back(), [&](int64_t v, int64_t first, int64_t last) {
    const int64_t rank = d.owner[v], size = last - first;
    Out& share = out[static_cast<size_t>(rank)];
    if (share.row == nullptr) return;
    for (int64_t e = first; e < last; ++e) share.row[e - first] = d.number[d.at(d.row[e], rank)];
    std::fill_n(share.col, size, d.number[d.at(v, rank)]);
    share.row += size;
    share.col += size;
    if (d.edge == nullptr) return;
    std::copy_n(d.edge + first, size, share.edge);
    share.edge += size;
  });
}

void check_limits(const std::vector<int64_t>& limits, size_t num_limits, int64_t size, const char* name,
                  const char* entries) {
  check(!limits.empty() && limits.size() == num_limits, name, " must have one entry per number of hops, expected ",
        num_limits, ", got ", limits.size());
  int64_t before = 0;
  for (const int64_t limit : limits) {
    check(limit >= before, name, " must not decrease from 0, got ", limit, " after ", before);
    before = limit;
  }
  check(before == size, name, " must end with the number of ", entries, ", ", size, ", got ", before);
}

using Tensors = std::vector<Tensor>;

std::tuple<Tensors, Tensors, Tensors, Tensors, Tensors, Tensor, Tensor, Tensor> divide_batch(
    const Tensor& node, const Tensor& row, const Tensor& col, const std::optional<Tensor>& edge, const Tensor& owner,
    const std::vector<int64_t>& nodes_within, const std::vector<int64_t>& edges_within, int64_t ranks, int64_t place) {
  check_vector(node, ScalarType::Long, "node");
  check_vector(row, ScalarType::Long, "row");
  check_vector(col, ScalarType::Long, "col");
  check_vector(owner, ScalarType::Long, "owner");
  const int64_t size = node.numel(), num_edges = row.numel();
  check(owner.numel() == size, "owner must have one entry per vertex, expected ", size, ", got ", owner.numel());
  check(col.numel() == num_edges, "col must have one entry per edge, expected ", num_edges, ", got ", col.numel());
  if (edge) {
    check_vector(*edge, ScalarType::Long, "edge");
    check(edge->numel() == num_edges, "edge must have one entry per edge, expected ", num_edges, ", got ",
          edge->numel());
  }
  constexpr int64_t kMostRanks = 1 << 15;
  check(ranks >= 1 && ranks <= kMostRanks, "ranks must be in [1, ", kMostRanks, "], got ", ranks);
  check(place >= -1 && place < ranks, "place must be in [-1, ", ranks, "), got ", place);
  check(size < std::numeric_limits<int32_t>::max(), "a batch must have fewer than 2^31 - 1 vertices, got ", size);
  check_limits(nodes_within, nodes_within.size(), size, "nodes_within", "vertices");
  check_limits(edges_within, nodes_within.size(), num_edges, "edges_within", "edges");
  const auto num_limits = static_cast<int64_t>(nodes_within.size());
  const Tensor own = new_tensor<2>({ranks, num_limits}, ScalarType::Long);
  const Tensor edges = new_tensor<2>({ranks, num_limits}, ScalarType::Long);
  const Tensor sent = new_tensor<3>({ranks, ranks, num_limits}, ScalarType::Long);
  DivideScratch& scratch = divide_scratch();
  scratch.needed.reserve(size * ranks);
  scratch.number.reserve(size * ranks);
  const Division d{int64_data(node),
                   int64_data(row),
                   int64_data(col),
                   edge ? int64_data(*edge) : nullptr,
                   int64_data(owner),
                   nodes_within,
                   edges_within,
                   ranks,
                   size,
                   nodes_within.size(),
                   scratch.needed.data(),
                   scratch.number.data(),
                   mutable_int64_data(own),
                   mutable_int64_data(edges),
                   mutable_int64_data(sent)};
  number_own(d);
  mark_sources(d);
  count_sent(d);
  Tensors nodes, rows, cols, ids, sends;
  std::vector<Out> out(static_cast<size_t>(ranks));
  std::vector<int64_t*> send(out.size());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (place >= 0 && rank != place) continue;
    int64_t num_sent = 0;
    for (int64_t to = 0; to < ranks; ++to) num_sent += d.num_sent(rank, to);
    const int64_t in_share = d.of_rank(d.edges, rank, d.num_limits - 1);
    nodes.push_back(new_table(d.num_own(rank), ScalarType::Long));
    rows.push_back(new_table(in_share, ScalarType::Long));
    cols.push_back(new_table(in_share, ScalarType::Long));
    ids.push_back(new_table(edge ? in_share : 0, ScalarType::Long));
    sends.push_back(new_table(num_sent, ScalarType::Long));
    out[static_cast<size_t>(rank)] = {mutable_int64_data(nodes.back()), mutable_int64_data(rows.back()),
                                      mutable_int64_data(cols.back()), mutable_int64_data(ids.back())};
    send[static_cast<size_t>(rank)] = mutable_int64_data(sends.back());
  }
  number_halos(d, send);
  write_shares(d, out);
  return {nodes, rows, cols, ids, sends, own, edges, sent};
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("divide_batch", TORCH_BOX(&divide_batch));
}

}  // namespace
}  // namespace salientpp
