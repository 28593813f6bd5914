// Convolutions: sums over the taps of a kernel, for up to six outputs at a time.
#pragma once

#include "network.h"

#define FOR_SIZE(size, CALL)   \
  switch (size) {              \
    case 1: CALL(1); break;    \
    case 2: CALL(2); break;    \
    case 3: CALL(3); break;    \
    case 4: CALL(4); break;    \
    case 5: CALL(5); break;    \
    default: CALL(6);          \
  }

// A map as a sum over taps: weights[tap][output], offsets of the taps in the input.
struct TapSum {
  const float* weights;
  const float* begin;                  // values at which the outputs' sums start, or null
  const float* in;
  const long* offset;
  int taps, rows, cols;
  long in_row, in_col, out_row, out_col;
  bool adds;                           // to what is there
};

template <int M>
static void sum_taps(const TapSum& t, float* const* out) {
  for (int r = 0; r < t.rows; r++)
    for (int c = 0; c < t.cols; c++) {
      const float* in = t.in + r * t.in_row + c * t.in_col;
      const long at = r * t.out_row + c * t.out_col;
      Vec sum[M][HALVES];
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
          sum[m][v] = t.adds ? load(out[m] + at + v * WIDTH) : all(t.begin ? t.begin[m] : 0.f);
      const float* weights = t.weights;
      const long* offset = t.offset;
      for (int k = 0; k < t.taps; k++, weights += M) {
        const float* x = in + offset[k];
        Vec low = load(x), high = load(x + WIDTH);
        UNROLL for (int m = 0; m < M; m++) {
          Vec w = all(weights[m]);
          sum[m][0] = fma(w, low, sum[m][0]);
          sum[m][1] = fma(w, high, sum[m][1]);
        }
      }
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < HALVES; v++) store(out[m] + at + v * WIDTH, sum[m][v]);
    }
}

static void sum_taps(const TapSum& t, float* const* out, int size) {
#define CALL(n) sum_taps<n>(t, out)
  FOR_SIZE(size, CALL)
#undef CALL
}

// Forward -----------------------------------------------------------------------------

static void pack(const Stage& s, StageMemory& m, const float* weight) {
  float* to = m.packed;
  const long taps = s.offset.size();
  for (size_t b = 0; b < s.out_blocks.size.size(); b++)
    for (long k = 0; k < taps; k++)
      for (int i = 0; i < s.out_blocks.size[b]; i++)
        *to++ = weight[(s.out_blocks.first[b] + i) * taps + k];
}

static void convolve(const Stage& s, StageMemory& m, const float* in, const float* bias, int g) {
  TapSum t{};
  t.weights = m.packed;
  t.in = in + g * s.in_group + s.in_at;
  t.offset = s.offset.data();
  t.taps = s.offset.size();
  t.rows = s.h;
  t.cols = s.w;
  t.in_row = s.stride_h * s.in_row;
  t.in_col = (long)s.stride_w * LANES;
  t.out_row = s.y_row;
  t.out_col = LANES;
  for (size_t b = 0; b < s.out_blocks.size.size(); b++) {
    const int first = s.out_blocks.first[b], size = s.out_blocks.size[b];
    float* out[6];
    for (int i = 0; i < size; i++) out[i] = m.y_of(s, g, first + i);
    t.begin = bias ? bias + first : nullptr;
    sum_taps(t, out, size);
    t.weights += (long)t.taps * size;
  }
}

// The gradient of the input -----------------------------------------------------------

static void pack_back(const Stage& s, const Stage& below, StageMemory& m, const float* weight) {
  float* to = m.packed_back;
  for (const Taps& t : s.taps)
    for (size_t b = 0; b < s.in_blocks.size.size(); b++)
      for (long at : t.weight)
        for (int i = 0; i < s.in_blocks.size[b]; i++)
          *to++ = weight[at + (long)below.need_[s.in_blocks.first[b] + i] * s.taps_per_channel];
}

static void convolve_back(const Stage& s, const Stage& below, StageMemory& m, float* grad,
                          int g) {
  TapSum t{};
  t.weights = m.packed_back;
  t.in = m.dy + g * s.dy_group();
  t.in_row = (long)s.dy_w * LANES;
  t.in_col = LANES;
  t.out_row = (long)s.in_w * s.stride_h * LANES;
  t.out_col = (long)s.stride_w * LANES;
  t.adds = s.adds_below;
  for (const Taps& taps : s.taps) {
    t.offset = taps.offset.data();
    t.taps = taps.offset.size();
    t.rows = (s.in_h - taps.row + s.stride_h - 1) / s.stride_h;
    t.cols = (s.in_w - taps.col + s.stride_w - 1) / s.stride_w;
    for (size_t b = 0; b < s.in_blocks.size.size(); b++) {
      const int first = s.in_blocks.first[b], size = s.in_blocks.size[b];
      float* out[6];
      for (int i = 0; i < size; i++)
        out[i] = grad + below.need_[first + i] * below.grad_plane +
                 ((long)taps.row * s.in_w + taps.col) * LANES;
      sum_taps(t, out, size);
      t.weights += (long)t.taps * size;
    }
  }
}

// The gradient of the weights ---------------------------------------------------------

// sums[a][b] += dy[a] * x[b], over rows, columns and images.
template <int A, int B>
static __attribute__((noinline)) void multiply(const float* const* dy, long dy_row,
                                               const float* const* x, long x_row, long x_col,
                                               int rows, int cols, float* sums) {
  Vec sum[A][B];
  UNROLL for (int a = 0; a < A; a++)
    UNROLL for (int b = 0; b < B; b++) sum[a][b] = load(sums + (a * B + b) * WIDTH);
  for (int r = 0; r < rows; r++) {
    const float *d[A], *p[B];
    UNROLL for (int a = 0; a < A; a++) d[a] = dy[a] + r * dy_row;
    UNROLL for (int b = 0; b < B; b++) p[b] = x[b] + r * x_row;
    for (int c = 0; c < cols; c++)
      UNROLL for (int v = 0; v < HALVES; v++) {
        const long at = (long)c * LANES + v * WIDTH, from = c * x_col + v * WIDTH;
        if (A <= B) {
          Vec left[A];
          UNROLL for (int a = 0; a < A; a++) {
            left[a] = load(d[a] + at);
            keep(left[a]);
          }
          UNROLL for (int b = 0; b < B; b++) {
            Vec right = load(p[b] + from);
            if (A > 1) keep(right);
            UNROLL for (int a = 0; a < A; a++) sum[a][b] = fma(left[a], right, sum[a][b]);
          }
        } else {
          Vec right[B];
          UNROLL for (int b = 0; b < B; b++) {
            right[b] = load(p[b] + from);
            keep(right[b]);
          }
          UNROLL for (int a = 0; a < A; a++) {
            Vec left = load(d[a] + at);
            keep(left);
            UNROLL for (int b = 0; b < B; b++) sum[a][b] = fma(left, right[b], sum[a][b]);
          }
        }
      }
  }
  UNROLL for (int a = 0; a < A; a++)
    UNROLL for (int b = 0; b < B; b++) store(sums + (a * B + b) * WIDTH, sum[a][b]);
}

static const int TAPS_AT_ONCE[5] = {0, 8, 6, 4, 3};  // for 1 to 4 outputs
static const long CACHE = 16384;                     // bytes of dY that are read again and again

// Adds one group's part of the weight gradient.
static void add_weight_gradient(const Stage& s, StageMemory& m, const float* in, int g) {
  const Split blocks(s.rows_.size(), 4);
  const long taps = s.trained.size();
  const long x_row = s.stride_h * s.in_row, x_col = (long)s.stride_w * LANES;
  const long dy_row = (long)s.dy_w * LANES;
  for (size_t b = 0; b < blocks.size.size(); b++) {
    const int size = blocks.size[b], at_once = TAPS_AT_ONCE[size];
    const int step = std::max(1L, CACHE / (size * s.w * LANES * 4L));
    const long used = (taps + at_once - 1) / at_once * at_once * size * WIDTH;
    memset(m.sums, 0, used * sizeof(float));
    for (int r = 0; r < s.h; r += step) {
      const int rows = std::min(step, s.h - r);
      const float *dy[4], *x[8];
      for (int i = 0; i < size; i++)
        dy[i] = m.dy + g * s.dy_group() + s.rows_[blocks.first[b] + i] * s.dy_plane + s.dy_at +
                r * dy_row;
      float* sums = m.sums;
      for (long k = 0; k < taps; k += at_once, sums += size * at_once * WIDTH) {
        for (int j = 0; j < at_once; j++)
          x[j] = in + g * s.in_group + s.in_at + s.offset[s.trained[std::min(k + j, taps - 1)]] +
                 r * x_row;
        if (size == 4) multiply<4, 3>(dy, dy_row, x, x_row, x_col, rows, s.w, sums);
        else if (size == 3) multiply<3, 4>(dy, dy_row, x, x_row, x_col, rows, s.w, sums);
        else if (size == 2) multiply<2, 6>(dy, dy_row, x, x_row, x_col, rows, s.w, sums);
        else multiply<1, 8>(dy, dy_row, x, x_row, x_col, rows, s.w, sums);
      }
    }
    const float* sums = m.sums;
    for (long k = 0; k < taps; k += at_once)
      for (int i = 0; i < size; i++)
        for (int j = 0; j < at_once; j++, sums += WIDTH)
          if (k + j < taps) m.weight_sums()[(blocks.first[b] + i) * taps + k + j] += sum(load(sums));
  }
}
