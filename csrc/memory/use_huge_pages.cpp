// Huge pages for arrays that other code has allocated and filled.
#include "memory.h"

#include <cstdio>
#include <fstream>
#include <string>

namespace salientpp {
namespace {

// True if the page at `address` belongs to no file. Huge pages of a file would read megabytes that were not requested.
[[maybe_unused]] bool is_anonymous(uintptr_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0, inode = 0;
    const bool read = std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %lu", &begin, &end, &inode) == 3;
    if (read && begin <= address && address < end) return inode == 0;
  }
  return false;
}

void use_huge_pages(const Tensor& tensor) {
#ifdef __linux__
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it
#endif
  if (!tensor.is_contiguous()) return;
  const auto data = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t begin = (data + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end =
      (data + static_cast<size_t>(tensor.numel()) * static_cast<size_t>(tensor.element_size())) & ~(kHugePage - 1);
  if (begin >= end || !is_anonymous(begin)) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
#endif
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("use_huge_pages", TORCH_BOX(&use_huge_pages));
}

}  // namespace
}  // namespace salientpp
