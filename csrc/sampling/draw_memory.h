// Remembers shared draws that may be needed again, so that lists of up to a thousand ids are not read twice. Inside a
// block of batches, a vertex draws the same whenever it is expanded. A batch that is known ahead is drawn twice.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "random.h"

namespace salientpp {

// The table has a fixed size. Each pair of a vertex and a count has one place, and a new entry overwrites the old one.
class DrawMemory {
 public:
  // `graph` is a number that no other graph has had; 0 turns the memory off.
  void begin_batch(uint64_t shared_key, uint64_t graph, int64_t num_vertices) {
    is_on_ = graph != 0;
    if (!is_on_) return;
    key_ = join_key(shared_key, graph);
    const auto wanted = std::bit_ceil(static_cast<uint64_t>(std::clamp(2 * num_vertices, int64_t{2}, kMostPlaces)));
    if (places_.size() < wanted) places_ = Places(wanted);
    shift_ = 64 - std::countr_zero(places_.size());
  }

  bool is_on() const { return is_on_; }
  void prefetch(int64_t vertex, int64_t count) const { prefetch_write(&places_[place(vertex, count)]); }

  // Returns the vertex's draws, counted from the beginning of its list; null if they are not known.
  const uint16_t* find(int64_t vertex, int64_t degree, int64_t count) const {
    const Place& found = places_[place(vertex, count)];
    // Compare the degree too: if an array was altered on disk, draws must not lead outside of it.
    const bool is_known = is_on_ && found.key == key_ && found.vertex == vertex && found.degree == degree;
    return is_known && found.count == count ? found.draws.data() : nullptr;
  }

  // Keeps a vertex's draws. To be called only for shared draws.
  void keep(int64_t vertex, int64_t begin, int64_t degree, int64_t count, const int64_t* draws) {
    if (!is_on_ || count > kMostCount) return;
    Place& to = places_[place(vertex, count)];
    to.key = key_;
    to.vertex = vertex;
    to.degree = static_cast<uint16_t>(degree);
    to.count = static_cast<uint16_t>(count);
    for (int64_t k = 0; k < count; ++k) to.draws[static_cast<size_t>(k)] = static_cast<uint16_t>(draws[k] - begin);
  }

 private:
  static constexpr int64_t kMostPlaces = int64_t{1} << 18;  // 16 MiB
  static constexpr int64_t kMostCount = 22;                 // number of draws that fit into a place

  struct Place {
    uint64_t key = 0;
    int64_t vertex = -1;
    uint16_t degree = 0, count = 0;
    std::array<uint16_t, kMostCount> draws;
  };
  static_assert(sizeof(Place) == 64);
  using Places = std::vector<Place, HugePageAllocator<Place>>;

  uint64_t place(int64_t vertex, int64_t count) const {
    return (static_cast<uint64_t>(vertex) * 64 + static_cast<uint64_t>(count)) * kGolden >> shift_;
  }

  Places places_ = Places(2);
  uint64_t key_ = 0;
  int shift_ = 63;
  bool is_on_ = false;
};

}  // namespace salientpp
