// What the position of an edge leads to: its source, and its id.
#pragma once

#include <cstdint>

#include "memory.h"

namespace salientpp {

// The id is the position itself, or stands elsewhere.
template <class Index>
struct Sources {
  const Index* indices;
  static constexpr int64_t kBytes = sizeof(Index);
  void prefetch(int64_t position) const { prefetch_read(&indices[position]); }
  int64_t source(int64_t position) const { return indices[position]; }
  static int64_t id(int64_t position) { return position; }
};

// Both stand in one word, so that an edge misses the cache once for both.
struct Links {
  const uint64_t* links;
  static constexpr int64_t kBytes = sizeof(uint64_t);
  void prefetch(int64_t position) const { prefetch_read(&links[position]); }
  int64_t source(int64_t position) const { return static_cast<int64_t>(links[position] & 0xffffffffU); }
  int64_t id(int64_t position) const { return static_cast<int64_t>(links[position] >> 32); }
};

}  // namespace salientpp
