// Reads ahead the rows of a mapped file that is not entirely in memory.
//
// A thread that touches a missing page waits for that page alone. The system also reads neighbouring pages, which are
// useless if rows are read at random. So if some rows are missing, the pages of the next thousands of rows are
// requested at once, and the disk serves the requests in parallel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "check.h"

namespace salientpp {

// Memory that holds rows.
struct Piece {
  const char* from;
  int64_t bytes;
};

// Calls range(first, last) on pieces of [0, num_rows), in parallel. Row i starts at row(i), in one of `sources`.
template <class Row>
class ReadAhead {
 public:
  ReadAhead(const std::vector<Piece>& sources, int64_t row_bytes, const Row& row, int64_t num_rows)
      : sources_(sources), row_bytes_(row_bytes), row_(row), num_rows_(num_rows) {}

  template <class F>
  void over(int64_t grain, const F& range) const {
#ifdef __linux__
    if (is_on_disk()) {
      ++readers();
      advise_all(MADV_RANDOM);
      ask(0, kRows, grain);
      for (int64_t first = 0; first < num_rows_; first += kRows) {
        ask(first + kRows, first + 2 * kRows, grain);
        torch::stable::parallel_for(first, std::min(num_rows_, first + kRows), grain, range);
      }
      // A later sequential reader needs the neighbouring pages. While other threads read at random, such pages would
      // displace those that were requested. So the last thread restores the advice.
      if (--readers() == 0) advise_all(MADV_NORMAL);
      return;
    }
#endif
    torch::stable::parallel_for(0, num_rows_, grain, range);
  }

#ifdef __linux__
 private:
  // Number of rows requested ahead. With pages of 4 KB this is 64 MB of the page cache, more than disks do at a time.
  static constexpr int64_t kRows = 1 << 14;
  // Asking the system whether a page is in memory takes a quarter of a microsecond. For sources smaller than
  // kLeastBytes this does not pay: waiting for them costs little, or they are soon in memory.
  static constexpr int64_t kRowsPerLook = 256, kMostLooks = 16, kLeastBytes = int64_t{1} << 26;

  // Number of threads that read at random. No lock, because a forked child would find it locked.
  static std::atomic<int>& readers() {
    static std::atomic<int> number = 0;
    return number;
  }

  static uintptr_t page() {
    static const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return size;
  }

  // Returns the pages of a row: the address of the first page, and the bytes of all.
  std::pair<uintptr_t, uintptr_t> pages(int64_t i) const {
    const auto row = reinterpret_cast<uintptr_t>(row_(i));
    const uintptr_t begin = row & ~(page() - 1), end = row + static_cast<uintptr_t>(row_bytes_);
    return {begin, (end - begin + page() - 1) & ~(page() - 1)};
  }

  bool is_on_disk() const {
    int64_t bytes = 0;
    for (const Piece& source : sources_) bytes += source.bytes;
    if (bytes < kLeastBytes) return false;
    const int64_t looks = std::min(kMostLooks, num_rows_ / kRowsPerLook);
    for (int64_t look = 0; look < looks; ++look) {
      unsigned char there = 1;
      if (mincore(reinterpret_cast<void*>(pages(num_rows_ / looks * look).first), page(), &there) == 0 && !(there & 1U))
        return true;
    }
    return false;
  }

  void ask(int64_t first, int64_t last, int64_t grain) const {
    torch::stable::parallel_for(first, std::max(first, std::min(num_rows_, last)), grain,
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t i = begin; i < end; ++i) {
                                    const auto [start, size] = pages(i);
                                    madvise(reinterpret_cast<void*>(start), size, MADV_WILLNEED);
                                  }
                                });
  }

  void advise_all(int advice) const {
    for (const Piece& source : sources_) {
      const auto from = reinterpret_cast<uintptr_t>(source.from), begin = from & ~(page() - 1);
      if (source.bytes > 0)
        madvise(reinterpret_cast<void*>(begin), from + static_cast<uintptr_t>(source.bytes) - begin, advice);
    }
  }
#endif

 private:
  const std::vector<Piece>& sources_;
  int64_t row_bytes_;
  const Row& row_;
  int64_t num_rows_;
};

}  // namespace salientpp
