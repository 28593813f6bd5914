// Work on many rows in one call: examples made of bytes, and a server's sums.
#pragma once

#include <cstdint>

// One axis of a block: a list of positions below `size`, or all of them; `stride` is how
// far apart they lie.
struct Along {
  const int64_t* positions;  // null: all
  int64_t count, size, stride;

  int64_t at(long i) const { return (positions ? positions[i] : i) * stride; }

  bool is_inside() const {
    for (long i = 0; positions && i < count; i++)
      if (positions[i] < 0 || positions[i] >= size) return false;
    return true;
  }
};

// The entries of a tensor for which there are values: the product of two axes, and of
// `width` entries that follow one another.
struct Block {
  const float* values;
  int64_t start;  // of the tensor, in the row of all tensors
  Along first, second;
  int64_t width;
};

static void add_entries(const float* values, long count, double weight, const double* before,
                        double* moved, double* weights) {
  for (long i = 0; i < count; i++) {
    moved[i] += ((double)values[i] - before[i]) * weight;
    weights[i] += weight;
  }
}

extern "C" {

// out[i] = (x[rows[i]] / 255 - mean) / deviation, for each channel of `plane` bytes.
void scale_rows(const uint8_t* x, const int64_t* rows, long count, long channels, long plane,
                const float* mean, const float* deviation, float* out) {
  const long size = channels * plane;
  for (long i = 0; i < count; i++) {
    if (i + 1 < count)  // rows lie far apart
      for (long at = 0; at < size; at += 64) __builtin_prefetch(x + rows[i + 1] * size + at);
    for (long c = 0; c < channels; c++) {
      const uint8_t* from = x + rows[i] * size + c * plane;
      float* to = out + i * size + c * plane;
      const float m = mean[c], d = deviation[c];
      for (long j = 0; j < plane; j++) to[j] = (from[j] / 255.0f - m) / d;
    }
  }
}

// Adds weight * (value - before) to `moved`, and the weight to `weights`. Returns 0; or 1,
// with nothing added, if a position lies outside of its tensor.
int add_blocks(const Block* blocks, long count, double weight, const double* before,
               double* moved, double* weights) {
  for (long b = 0; b < count; b++)
    if (!blocks[b].first.is_inside() || !blocks[b].second.is_inside()) return 1;
  for (long b = 0; b < count; b++) {
    const Block& block = blocks[b];
    const float* values = block.values;
    for (long i = 0; i < block.first.count; i++)
      for (long j = 0; j < block.second.count; j++, values += block.width) {
        const int64_t at = block.start + block.first.at(i) + block.second.at(j);
        add_entries(values, block.width, weight, before + at, moved + at, weights + at);
      }
  }
  return 0;
}
}
