// Reads rows of a file in blocks, in file order, with several threads.
//
// A disk serves many requests at the same time, and a request for a few pages takes hardly longer than one for a page.
// So neighbouring rows become one block, and each thread waits for one block at a time.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

namespace salientpp {
namespace {

// Blocks begin and end at multiples of kPage, as files that are opened without the page cache require.
constexpr int64_t kPage = 4096;
// A block grows up to this size. Disks read no faster in larger ones.
constexpr int64_t kMostBytes = int64_t{1} << 18;

// Bytes [begin, end) of the file, of which [first, last) of the wanted rows lie in it.
struct Block {
  int64_t begin, end, first, last;
};

// Divides ascending rows into blocks. Pages between two rows are read too, if they are at most `gap` bytes.
std::vector<Block> blocks_of(const int64_t* row, int64_t num_rows, int64_t offset, int64_t row_bytes, int64_t gap) {
  std::vector<Block> blocks;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t from = offset + row[i] * row_bytes, begin = from / kPage * kPage;
    const int64_t end = (from + row_bytes + kPage - 1) / kPage * kPage;
    if (!blocks.empty() && begin <= blocks.back().end + gap && end - blocks.back().begin <= kMostBytes) {
      blocks.back().end = std::max(blocks.back().end, end);
      blocks.back().last = i + 1;
    } else {
      blocks.push_back({begin, end, i, i + 1});
    }
  }
  return blocks;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

class Reader {
 public:
  Reader(int file, int64_t offset, int64_t row_bytes, const int64_t* row, char* out, const int64_t* target,
         std::vector<Block> blocks)
      : file_(file),
        offset_(offset),
        row_bytes_(row_bytes),
        row_(row),
        out_(out),
        target_(target),
        blocks_(std::move(blocks)) {
    for (const Block& block : blocks_) largest_ = std::max(largest_, block.end - block.begin);
  }

  void run(int64_t num_threads) {
    num_threads = std::min(num_threads, static_cast<int64_t>(blocks_.size()));
    for (int64_t t = 0; t < num_threads; ++t) {
      memory_.emplace_back(std::aligned_alloc(kPage, static_cast<size_t>(largest_)));
      check(memory_.back() != nullptr, "cannot allocate ", largest_, " bytes to read a block of a file");
    }
    std::vector<std::thread> threads;
    // The main thread of Python must receive the signals of the process, Ctrl-C among them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    try {
      for (int64_t t = 1; t < num_threads; ++t)
        threads.emplace_back([this, t] { work(memory_[static_cast<size_t>(t)].get()); });
    } catch (const std::system_error&) {
      // The system has no more threads: those that began do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (num_threads > 0) work(memory_[0].get());
    for (std::thread& thread : threads) thread.join();
  }

  // Bytes read; and the first byte of the earliest block that could not be read, with the system's error. -1: none.
  Tensor result() const { return vector_of(std::vector<int64_t>{bytes_, failed_at_, error_}); }

 private:
  void work(void* memory) {
    for (size_t b = next_++; b < blocks_.size() && failed_at_ < 0; b = next_++) {
      const Block& block = blocks_[b];
      // The last page of a file may be incomplete.
      const int64_t needed = offset_ + (row_[block.last - 1] + 1) * row_bytes_ - block.begin;
      int64_t got = 0;
      while (got < needed) {
        const ssize_t more = pread(file_, static_cast<char*>(memory) + got,
                                   static_cast<size_t>(block.end - block.begin - got), block.begin + got);
        if (more < 0 && errno == EINTR) continue;
        if (more <= 0) {
          fail_at(block.begin + got, more < 0 ? errno : 0);
          return;
        }
        got += more;
        if (got < needed && got % kPage != 0) {  // the end of the file; reading on would begin within a page
          fail_at(block.begin + got, 0);
          return;
        }
      }
      bytes_ += got;
      for (int64_t i = block.first; i < block.last; ++i)
        std::memcpy(out_ + (target_ ? target_[i] : i) * row_bytes_,
                    static_cast<char*>(memory) + (offset_ + row_[i] * row_bytes_ - block.begin),
                    static_cast<size_t>(row_bytes_));
    }
  }

  void fail_at(int64_t byte, int error) {
    const std::lock_guard<std::mutex> lock(failing_);
    if (failed_at_ >= 0 && failed_at_ <= byte) return;
    error_ = error;
    failed_at_ = byte;
  }

  int file_;
  int64_t offset_, row_bytes_;
  const int64_t* row_;
  char* out_;
  const int64_t* target_;
  std::vector<Block> blocks_;
  int64_t largest_ = 0;
  std::vector<std::unique_ptr<void, Free>> memory_;
  std::atomic<size_t> next_ = 0;
  std::atomic<int64_t> bytes_ = 0, failed_at_ = -1;
  int64_t error_ = 0;
  std::mutex failing_;
};

// out[out_index[i]] = row source_index[i] of the file; without out_index, row i goes to place i.
Tensor read_rows(int64_t file, int64_t offset, int64_t num_rows, const Tensor& source_index, const Tensor& out,
                 const std::optional<Tensor>& out_index, int64_t gap, int64_t num_threads) {
  check_vector(source_index, ScalarType::Long, "source_index");
  check_defined(out, "out");
  check(out.dim() == 2 && out.scalar_type() == ScalarType::Byte && out.is_contiguous(),
        "out must be contiguous uint8 [O, row bytes]");
  check(file >= 0 && file <= std::numeric_limits<int>::max(), "file must be an open descriptor, got ", file);
  check(offset >= 0 && gap >= 0 && num_threads >= 1, "offset and gap must be >= 0 and num_threads >= 1, got ", offset,
        ", ", gap, " and ", num_threads);
  const int64_t size = source_index.numel(), row_bytes = out.size(1);
  const int64_t* row = int64_data(source_index);
  for (int64_t i = 0; i < size; ++i) {
    check(row[i] >= 0 && row[i] < num_rows, "source_index[", i, "] must be in [0, ", num_rows, "), got ", row[i]);
    check(i == 0 || row[i - 1] <= row[i], "source_index must not decrease, got ", row[i], " after ",
          row[i > 0 ? i - 1 : 0]);
  }
  const int64_t* target = nullptr;
  if (out_index) {
    check_vector(*out_index, ScalarType::Long, "out_index");
    check(out_index->numel() == size, "out_index must have ", size, " entries, got ", out_index->numel());
    target = int64_data(*out_index);
    check_ids(target, size, out.size(0), "out_index");
  } else {
    check(out.size(0) >= size, "out must have at least ", size, " rows, got ", out.size(0));
  }
  if (row_bytes == 0) return vector_of(std::vector<int64_t>{0, -1, 0});
  Reader reader(static_cast<int>(file), offset, row_bytes, row, static_cast<char*>(out.mutable_data_ptr()), target,
                blocks_of(row, size, offset, row_bytes, gap));
  reader.run(num_threads);
  return reader.result();
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("read_rows", TORCH_BOX(&read_rows));
}

}  // namespace
}  // namespace salientpp
