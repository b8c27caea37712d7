// Replacement of libtorch's parallel_for under ThreadSanitizer: the same contract on plain threads.
//
// libtorch uses an OpenMP library that was not compiled with the sanitizer. The sanitizer does not see how this library
// starts its threads and waits for them, and reports every use of the caller's variables as a race. These functions are
// preloaded instead of libtorch's, so only real races are reported. They run four threads on any machine.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace {
constexpr int64_t kThreads = 4;
}

extern "C" {

int32_t torch_get_num_threads(uint32_t* num_threads) {
  *num_threads = static_cast<uint32_t>(kThreads);
  return 0;
}

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*f)(int64_t, int64_t, void*), void* context) {
  if (begin >= end) return 0;
  const int64_t most = std::max<int64_t>(1, (end - begin) / std::max<int64_t>(1, grain_size));
  const int64_t num_chunks = std::min(kThreads, most);
  const int64_t chunk = (end - begin + num_chunks - 1) / num_chunks;
  std::vector<std::thread> threads;
  for (int64_t first = begin + chunk; first < end; first += chunk) {
    threads.emplace_back(f, first, std::min(first + chunk, end), context);
  }
  f(begin, std::min(begin + chunk, end), context);
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // extern "C"
