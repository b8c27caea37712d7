// Rows in fewer bytes, written and read back. Formats are half and brain floats, and integers
// of 8 or 4 bits with a scale and an offset. salientpp/store/narrow.py defines the formats.
//
// The arithmetic uses 32-bit floats, one operation at a time (the build forbids fused operations). Nothing depends on
// an order that a compiler may choose. So every CPU writes and reads the same bits.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "memory.h"
#include "store/places.h"
#include "store/read_ahead.h"

namespace salientpp {
namespace {

enum Format : int64_t { kFloat16, kBrain16, kInt8, kInt4, kNumFormats };

// If the values of a row differ by less than this, the row counts as constant. Below this limit, reciprocals and
// products would leave the range of normal numbers, and some processors flush these to zero.
constexpr float kLeast = 1e-30F;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Layout of a row of `columns` values: scale and offset of each block of columns, codes, and zero padding to a multiple
// of 4 bytes.
struct Layout {
  int64_t format, columns, block;

  Layout(int64_t format_, int64_t columns_, int64_t block_)
      : format(format_), columns(columns_), block(block_ == 0 ? columns_ : block_) {
    check(format >= 0 && format < kNumFormats, "format must be in [0, ", int64_t{kNumFormats}, "), got ", format);
    check(block_ >= 0 && block_ % 2 == 0, "block must be even and >= 0, got ", block_);
    check(block_ == 0 || format >= kInt8, "block is only for integer formats, got ", block_, " with format ", format);
  }
  int64_t num_blocks() const { return columns == 0 ? 1 : (columns + block - 1) / block; }
  int64_t header_bytes() const { return format < kInt8 ? 0 : 8 * num_blocks(); }
  int64_t code_bytes() const { return format < kInt8 ? 2 * columns : format == kInt4 ? (columns + 1) / 2 : columns; }
  int64_t row_bytes() const { return (header_bytes() + code_bytes() + 3) / 4 * 4; }
};

// --- 16 bits ---------------------------------------------------------------------------------------------

// Compilers vectorise loops over the functions below, because none of them branches: both results are computed, and one
// is selected by a bit mask.
uint32_t pick(bool first, uint32_t one, uint32_t other) {
  const uint32_t mask = 0U - static_cast<uint32_t>(first);
  return (one & mask) | (other & ~mask);
}

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}
float with_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

uint16_t to_brain(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<uint16_t>(pick((bits & 0x7FFFFFFFU) > 0x7F800000U, 0x7FC0U, nearest));
}

float from_brain(uint16_t code) {
  return with_bits(static_cast<uint32_t>(code) << 16);
}

uint16_t to_half(float value) {
  return torch::headeronly::detail::fp16_ieee_from_fp32_value(value);
}

float from_half(uint16_t code) {
  return torch::headeronly::detail::fp16_ieee_to_fp32_value(code);
}

template <class Convert>
void encode_16(const float* values, int64_t columns, uint8_t* to, Convert convert) {
  for (int64_t c = 0; c < columns; ++c) {
    const uint16_t code = convert(values[c]);
    std::memcpy(to + 2 * c, &code, 2);
  }
}

template <class Convert>
void decode_16(const uint8_t* from, int64_t columns, float* values, Convert convert) {
  for (int64_t c = 0; c < columns; ++c) {
    uint16_t code;
    std::memcpy(&code, from + 2 * c, 2);
    values[c] = convert(code);
  }
}

// --- ranges ----------------------------------------------------------------------------------------------

struct Range {
  float low, high;
  bool finite;
};

// Four numbers. An operation applies to each of them.
using Four = float __attribute__((vector_size(16)));

// Returns the smallest and largest of at least one value. The smaller of two zeros would depend on the order, so zeros
// become +0.
Range range_of(const float* values, int64_t size) {
  Four low = Four{} + values[0], high = low, trouble{};
  int64_t i = 0;
  for (; i + 4 <= size; i += 4) {
    Four four;
    std::memcpy(&four, values + i, sizeof(Four));
    low = four < low ? four : low;
    high = four > high ? four : high;
    trouble += four * 0.0F;  // NaN if a value is not finite
  }
  for (; i < size; ++i) {
    low[0] = std::min(low[0], values[i]);
    high[0] = std::max(high[0], values[i]);
    trouble[0] += values[i] * 0.0F;
  }
  Range range{low[0], high[0], true};
  for (int lane = 0; lane < 4; ++lane) {
    range.low = std::min(range.low, low[lane]);
    range.high = std::max(range.high, high[lane]);
    range.finite = range.finite && trouble[lane] == 0.0F;
  }
  range.low += 0.0F;
  range.high += 0.0F;
  return range;
}

// --- integers --------------------------------------------------------------------------------------------

struct Steps {
  float scale, offset;
};

// Returns the codes of one block, each the nearest of 0 ... levels.
Steps encode_block(const float* values, int64_t size, int32_t levels, uint8_t* code) {
  Steps steps{0.0F, 0.0F};
  float times = 0.0F;
  if (size > 0) {
    const Range range = range_of(values, size);
    const float width = range.high - range.low;
    if (!range.finite || !(width <= std::numeric_limits<float>::max())) {
      steps = {kNaN, kNaN};
    } else {
      steps.offset = range.low;
      if (width >= kLeast) {
        steps.scale = width / static_cast<float>(levels);
        times = static_cast<float>(levels) / width;
      }
    }
  }
  if (times == 0.0F) {
    std::fill(code, code + size, uint8_t{0});
    return steps;
  }
  for (int64_t i = 0; i < size; ++i)
    code[i] = static_cast<uint8_t>(static_cast<int32_t>((values[i] - steps.offset) * times + 0.5F));
  return steps;
}

void decode_block(const uint8_t* code, int64_t size, Steps steps, float* values) {
  for (int64_t i = 0; i < size; ++i)
    values[i] = static_cast<float>(static_cast<int32_t>(code[i])) * steps.scale + steps.offset;
}

// Packs two codes per byte; the code of the even column is in the lower half.
void pack(const uint8_t* code, int64_t columns, uint8_t* to) {
  for (int64_t i = 0; i < columns / 2; ++i) to[i] = static_cast<uint8_t>(code[2 * i] | (code[2 * i + 1] << 4));
  if (columns % 2 != 0) to[columns / 2] = code[columns - 1];
}

void unpack(const uint8_t* from, int64_t columns, uint8_t* code) {
  for (int64_t i = 0; i < columns / 2; ++i) {
    code[2 * i] = from[i] & 15U;
    code[2 * i + 1] = from[i] >> 4;
  }
  if (columns % 2 != 0) code[columns - 1] = from[columns / 2] & 15U;
}

// --- rows ------------------------------------------------------------------------------------------------

// Encodes and decodes rows, one at a time. Each thread has its own.
class Coder {
 public:
  explicit Coder(const Layout& layout) : layout_(layout), codes_(static_cast<size_t>(layout.columns)) {}

  void encode(const float* values, uint8_t* to) {
    const int64_t columns = layout_.columns, header = layout_.header_bytes();
    const int64_t used = header + layout_.code_bytes();
    std::memset(to + used, 0, static_cast<size_t>(layout_.row_bytes() - used));
    switch (layout_.format) {
      case kFloat16:
        return encode_16(values, columns, to, to_half);
      case kBrain16:
        return encode_16(values, columns, to, to_brain);
      default:
        break;
    }
    const bool packed = layout_.format == kInt4;
    uint8_t* code = packed ? codes_.data() : to + header;
    for (int64_t block = 0; block < layout_.num_blocks(); ++block) {
      const int64_t first = block * layout_.block, size = std::min(layout_.block, columns - first);
      const Steps steps = encode_block(values + first, size, packed ? 15 : 255, code + first);
      std::memcpy(to + 8 * block, &steps, 8);
    }
    if (packed) pack(code, columns, to + header);
  }

  void decode(const uint8_t* from, float* values) {
    const int64_t columns = layout_.columns, header = layout_.header_bytes();
    switch (layout_.format) {
      case kFloat16:
        return decode_16(from, columns, values, from_half);
      case kBrain16:
        return decode_16(from, columns, values, from_brain);
      default:
        break;
    }
    const uint8_t* code = from + header;
    if (layout_.format == kInt4) {
      unpack(code, columns, codes_.data());
      code = codes_.data();
    }
    for (int64_t block = 0; block < layout_.num_blocks(); ++block) {
      const int64_t first = block * layout_.block, size = std::min(layout_.block, columns - first);
      Steps steps;
      std::memcpy(&steps, from + 8 * block, 8);
      decode_block(code + first, size, steps, values + first);
    }
  }

 private:
  Layout layout_;
  std::vector<uint8_t> codes_;
};

// Returns a row of any float dtype as 32-bit floats; in `buffer` unless it has that dtype already.
const float* as_floats(const float* row, int64_t, float*) {
  return row;
}
template <class Wide>
const float* as_floats(const Wide* row, int64_t columns, float* buffer) {
  for (int64_t c = 0; c < columns; ++c) buffer[c] = static_cast<float>(row[c]);
  return buffer;
}

void from_floats(const float*, int64_t, float*) {}
template <class Wide>
void from_floats(const float* values, int64_t columns, Wide* row) {
  for (int64_t c = 0; c < columns; ++c) row[c] = static_cast<Wide>(values[c]);
}

// Returns the place to decode a row to: `row` itself if it holds 32-bit floats, otherwise `buffer`, from which
// from_floats converts it.
float* floats_at(float* row, float*) {
  return row;
}
template <class Wide>
float* floats_at(Wide*, float* buffer) {
  return buffer;
}

int64_t columns_of(const Tensor& rows) {
  int64_t columns = 1;
  for (int64_t d = 1; d < rows.dim(); ++d) columns *= rows.size(d);
  return columns;
}

void check_encoded(const Tensor& rows, const Layout& layout, const char* name) {
  check(rows.dim() == 2 && rows.scalar_type() == ScalarType::Byte, name,
        " must hold encoded rows, uint8 with 2 dimensions, got ", rows.scalar_type(), " with ", rows.dim());
  check(rows.size(1) == layout.row_bytes(), name, " must have rows of ", layout.row_bytes(), " bytes, got ",
        rows.size(1));
}

// Calls row(coder, buffer, from, to) for every row, with its index in the source and its place.
template <class Row>
void for_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
              const std::optional<Tensor>& out_index, const Layout& layout, int64_t source_bytes, int64_t out_bytes,
              Row row) {
  check_index_vector(source_index, "source_index");
  check(source.is_contiguous() && out.is_contiguous(), "source and out must be contiguous");
  const int64_t num_rows = source_index.numel();
  const int64_t* target = check_places(num_rows, out, out_index);
  const char* from = static_cast<const char*>(source.const_data_ptr());
  const char* to = static_cast<const char*>(out.mutable_data_ptr());
  check_apart(source, out);
  dispatch_index(source_index, [&](auto* index) {
    check_rows(index, num_rows, source.size(0), target, out.size(0));
    if (layout.row_bytes() == 0) return;  // there may be no memory to read or write
    const auto range = [&](int64_t first, int64_t last) {
      Coder coder(layout);
      std::vector<float> buffer(static_cast<size_t>(layout.columns));
      constexpr int64_t kAhead = 16, kLine = 64, kWide = 2048;
      for (int64_t i = first; i < last; ++i) {
        if (i + kAhead < last) {
          const char* next = from + index[i + kAhead] * source_bytes;
          for (int64_t b = 0; b < source_bytes; b += kLine) prefetch_read(next + b);
          const char* place = to + (target ? target[i + kAhead] : i + kAhead) * out_bytes;
          for (int64_t b = 0; b < std::min(out_bytes, kWide); b += kLine) prefetch_write(place + b);
        }
        row(coder, buffer.data(), static_cast<int64_t>(index[i]), target ? target[i] : i);
      }
    };
    constexpr int64_t kGrainBytes = int64_t{1} << 19;
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, source_bytes + out_bytes));
    const std::vector<Piece> rows{{from, source.size(0) * source_bytes}};
    const auto row_at = [&](int64_t i) { return from + index[i] * source_bytes; };
    ReadAhead(rows, source_bytes, row_at, num_rows).over(grain, range);
  });
}

void encode_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
                 const std::optional<Tensor>& out_index, int64_t format, int64_t block) {
  check_defined(source, "source");
  check_defined(out, "out");
  check(source.dim() >= 1, "source must have at least 1 dimension");
  const Layout layout(format, columns_of(source), block);
  check_encoded(out, layout, "out");
  dispatch_float(source, "source", [&]<class Wide>(Wide*) {
    const auto* from = static_cast<const Wide*>(source.const_data_ptr());
    auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
    const int64_t columns = layout.columns, row_bytes = layout.row_bytes();
    for_rows(source, source_index, out, out_index, layout, columns * source.element_size(), row_bytes,
             [=](Coder& coder, float* buffer, int64_t row, int64_t place) {
               coder.encode(as_floats(from + row * columns, columns, buffer), to + place * row_bytes);
             });
  });
}

void decode_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
                 const std::optional<Tensor>& out_index, int64_t format, int64_t block) {
  check_defined(source, "source");
  check_defined(out, "out");
  check(out.dim() >= 1, "out must have at least 1 dimension");
  const Layout layout(format, columns_of(out), block);
  check_encoded(source, layout, "source");
  dispatch_float(out, "out", [&]<class Wide>(Wide*) {
    const auto* from = static_cast<const uint8_t*>(source.const_data_ptr());
    auto* to = static_cast<Wide*>(out.mutable_data_ptr());
    const int64_t columns = layout.columns, row_bytes = layout.row_bytes();
    for_rows(source, source_index, out, out_index, layout, row_bytes, columns * out.element_size(),
             [=](Coder& coder, float* buffer, int64_t row, int64_t place) {
               Wide* values = to + place * columns;
               float* floats = floats_at(values, buffer);
               coder.decode(from + row * row_bytes, floats);
               from_floats(floats, columns, values);
             });
  });
}

void round_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
                const std::optional<Tensor>& out_index, int64_t format, int64_t block) {
  check_defined(source, "source");
  check_defined(out, "out");
  check(source.dim() >= 1 && out.dim() >= 1, "source and out must have at least 1 dimension");
  const Layout layout(format, columns_of(source), block);
  check(source.scalar_type() == out.scalar_type() && columns_of(out) == layout.columns,
        "out must have the dtype of source and rows of the same size, expected ", source.scalar_type(), " of ",
        layout.columns, ", got ", out.scalar_type(), " of ", columns_of(out));
  dispatch_float(source, "source", [&]<class Wide>(Wide*) {
    const auto* from = static_cast<const Wide*>(source.const_data_ptr());
    auto* to = static_cast<Wide*>(out.mutable_data_ptr());
    const int64_t columns = layout.columns, bytes = columns * source.element_size();
    const auto row_bytes = static_cast<size_t>(layout.row_bytes());
    for_rows(source, source_index, out, out_index, layout, bytes, bytes,
             [=](Coder& coder, float* buffer, int64_t row, int64_t place) {
               static thread_local std::vector<uint8_t> encoded;
               if (encoded.size() < row_bytes) encoded.resize(row_bytes);
               coder.encode(as_floats(from + row * columns, columns, buffer), encoded.data());
               Wide* values = to + place * columns;
               float* floats = floats_at(values, buffer);
               coder.decode(encoded.data(), floats);
               from_floats(floats, columns, values);
             });
  });
}

STABLE_TORCH_LIBRARY_IMPL(salientpp, CPU, m) {
  m.impl("encode_rows", TORCH_BOX(&encode_rows));
  m.impl("decode_rows", TORCH_BOX(&decode_rows));
  m.impl("round_rows", TORCH_BOX(&round_rows));
}

}  // namespace
}  // namespace salientpp
