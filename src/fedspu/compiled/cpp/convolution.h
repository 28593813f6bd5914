// Convolutions: sums over the taps of a kernel, for some outputs at a time.
#pragma once

#include <type_traits>

#include "network.h"

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

// Calls use(size) with the size, 1 to MOST, as a constant.
template <int MOST, class Use>
INLINE void with_size(int size, Use use) {
  if constexpr (MOST > 1)
    if (size < MOST) return with_size<MOST - 1>(size, use);
  use(std::integral_constant<int, MOST>());
}

enum { STRIP = 4 };                    // rows at a time

// M outputs at some neighbouring columns.
template <int M, int COLS>
INLINE void sum_tile(const TapSum& t, const float* in, float* const* out, long at) {
  Vec sum[M][COLS][HALVES];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int c = 0; c < COLS; c++)
      UNROLL for (int v = 0; v < HALVES; v++)
        sum[m][c][v] = t.adds ? load(out[m] + at + c * t.out_col + v * WIDTH)
                              : all(t.begin ? t.begin[m] : 0.f);
  const float* weights = t.weights;
  const long* offset = t.offset;
  for (int k = 0; k < t.taps; k++, weights += M) {
    const float* from = in + offset[k];
    Vec x[COLS][HALVES];
    UNROLL for (int c = 0; c < COLS; c++)
      UNROLL for (int v = 0; v < HALVES; v++) x[c][v] = load(from + c * t.in_col + v * WIDTH);
    UNROLL for (int m = 0; m < M; m++) {
      Vec w = all(weights[m]);
      UNROLL for (int c = 0; c < COLS; c++)
        UNROLL for (int v = 0; v < HALVES; v++) sum[m][c][v] = fma(w, x[c][v], sum[m][c][v]);
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int c = 0; c < COLS; c++)
      UNROLL for (int v = 0; v < HALVES; v++)
        store(out[m] + at + c * t.out_col + v * WIDTH, sum[m][c][v]);
}

template <int M>
static void sum_taps(const TapSum& t, float* const* out) {
  for (int r = 0; r < t.rows; r++) {
    const float* in = t.in + r * t.in_row;
    const long at = r * t.out_row;
    int c = 0;
    for (; c + TILE <= t.cols; c += TILE)
      sum_tile<M, TILE>(t, in + c * t.in_col, out, at + c * t.out_col);
    for (; c < t.cols; c++) sum_tile<M, 1>(t, in + c * t.in_col, out, at + c * t.out_col);
  }
}

// Sums for all blocks of outputs, a few rows at a time, so that the rows they read stay in
// the cache from block to block. use(b, out) says where the outputs of block b are.
template <class Use>
static void sum_rows(TapSum& t, const Split& blocks, Use use) {
  const float *in = t.in, *weights = t.weights;
  const int rows = t.rows;
  for (int r = 0; r < rows; r += STRIP) {
    t.in = in + r * t.in_row;
    t.rows = std::min((int)STRIP, rows - r);
    t.weights = weights;
    for (size_t b = 0; b < blocks.size.size(); b++) {
      float* out[OUTPUTS];
      use(b, out);
      for (int i = 0; i < blocks.size[b]; i++) out[i] += r * t.out_row;
      with_size<OUTPUTS>(blocks.size[b], [&](auto m) { sum_taps<m>(t, out); });
      t.weights += (long)t.taps * blocks.size[b];
    }
  }
  t.in = in;
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
  sum_rows(t, s.out_blocks, [&](int b, float** out) {
    const int first = s.out_blocks.first[b], size = s.out_blocks.size[b];
    for (int i = 0; i < size; i++) out[i] = m.y_of(s, g, first + i);
    t.begin = bias ? bias + first : nullptr;
  });
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
    sum_rows(t, s.in_blocks, [&](int b, float** out) {
      const int first = s.in_blocks.first[b], size = s.in_blocks.size[b];
      for (int i = 0; i < size; i++)
        out[i] = grad + below.need_[first + i] * below.grad_plane +
                 ((long)taps.row * s.in_w + taps.col) * LANES;
    });
  }
}

// The gradient of the weights ---------------------------------------------------------

// sums[a][b] += dy[a] * x[b], over rows and columns, for each image of a half.
template <int A, int B>
static __attribute__((noinline)) void multiply(const float* const* dy, long dy_row,
                                               const float* const* x, long x_row, long x_col,
                                               int rows, int cols, int half, float* sums) {
  Vec sum[A][B];
  sums += half * WIDTH;
  UNROLL for (int a = 0; a < A; a++)
    UNROLL for (int b = 0; b < B; b++) sum[a][b] = load(sums + (a * B + b) * LANES);
  for (int r = 0; r < rows; r++) {
    const float *d[A], *p[B];
    UNROLL for (int a = 0; a < A; a++) d[a] = dy[a] + r * dy_row + half * WIDTH;
    UNROLL for (int b = 0; b < B; b++) p[b] = x[b] + r * x_row + half * WIDTH;
    for (int c = 0; c < cols; c++) {
      const long at = (long)c * LANES, from = c * x_col;
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
    UNROLL for (int b = 0; b < B; b++) store(sums + (a * B + b) * LANES, sum[a][b]);
}

static const long CACHE = 16384;       // bytes of dY that are read again and again

// Adds one group's part of the weight gradient, for A outputs that train.
template <int A>
static void add_weight_gradient(const Stage& s, StageMemory& m, const float* in, int g, int first) {
  constexpr int B = taps_at_once(A);
  const long taps = s.trained.size();
  const long x_row = s.stride_h * s.in_row, x_col = (long)s.stride_w * LANES;
  const long dy_row = (long)s.dy_w * LANES;
  const int step = std::max(1L, CACHE / (A * s.w * LANES * 4L));
  memset(m.sums, 0, (taps + B - 1) / B * B * A * LANES * sizeof(float));
  for (int r = 0; r < s.h; r += step) {
    const int rows = std::min(step, s.h - r);
    const float *dy[A], *x[B];
    for (int i = 0; i < A; i++)
      dy[i] = m.dy + g * s.dy_group() + s.rows_[first + i] * s.dy_plane + s.dy_at + r * dy_row;
    float* sums = m.sums;
    for (long k = 0; k < taps; k += B, sums += A * B * LANES) {
      for (int j = 0; j < B; j++)
        x[j] = in + g * s.in_group + s.in_at + s.offset[s.trained[std::min(k + j, taps - 1)]] +
               r * x_row;
      for (int v = 0; v < HALVES; v++)
        multiply<A, B>(dy, dy_row, x, x_row, x_col, rows, s.w, v, sums);
    }
  }
  const float* sums = m.sums;
  for (long k = 0; k < taps; k += B)
    for (int i = 0; i < A; i++)
      for (int j = 0; j < B; j++, sums += LANES)
        if (k + j < taps) m.weight_sums()[(first + i) * taps + k + j] += sum(sums);
}

static void add_weight_gradient(const Stage& s, StageMemory& m, const float* in, int g) {
  const Split blocks(s.rows_.size(), ROWS);
  for (size_t b = 0; b < blocks.size.size(); b++)
    with_size<ROWS>(blocks.size[b],
                    [&](auto a) { add_weight_gradient<a>(s, m, in, g, blocks.first[b]); });
}
