// Linear layers. Weights are read where they are: a row of them for each output.
#pragma once

#include "convolution.h"

enum { BLOCK = 256 };  // inputs at a time, so that they stay in the cache

// M outputs of some groups, of which each is a step after the one before.
template <int M, int GROUPS>
static void add_products(const float* weight, long features, const float* x, long x_step,
                         int count, float* y, long y_step) {
  Vec sum[M][GROUPS][HALVES];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int v = 0; v < HALVES; v++)
        sum[m][g][v] = load(y + g * y_step + m * LANES + v * WIDTH);
  for (int k = 0; k < count; k++) {
    Vec in[GROUPS][HALVES];
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int v = 0; v < HALVES; v++) in[g][v] = load(x + g * x_step + k * LANES + v * WIDTH);
    UNROLL for (int m = 0; m < M; m++) {
      Vec w = all(weight[m * features + k]);
      UNROLL for (int g = 0; g < GROUPS; g++)
        UNROLL for (int v = 0; v < HALVES; v++) sum[m][g][v] = fma(w, in[g][v], sum[m][g][v]);
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int v = 0; v < HALVES; v++)
        store(y + g * y_step + m * LANES + v * WIDTH, sum[m][g][v]);
}

static void multiply_weights(const Stage& s, StageMemory& m, const float* in,
                             const Tensors& t, int groups) {
  const int features = s.in_channels * s.taps_per_channel;
  for (int g = 0; g < groups; g++)
    for (int o = 0; o < s.channels; o++)
      for (int v = 0; v < HALVES; v++)
        store(m.y + g * s.y_group + o * LANES + v * WIDTH, all(t.bias ? t.bias[o] : 0.f));
  for (int k = 0; k < features; k += BLOCK) {
    const int count = std::min((int)BLOCK, features - k);
    for (size_t b = 0; b < s.out_blocks.size.size(); b++) {
      const int first = s.out_blocks.first[b];
      const float* weight = t.weight + (long)first * features + k;
      with_size<OUTPUTS>(s.out_blocks.size[b], [&](auto n) {
        const float* x = in + (long)k * LANES;
        float* y = m.y + first * LANES;
        int g = 0;
        for (; g + TILE <= groups; g += TILE)
          add_products<n, TILE>(weight, features, x + g * s.in_group, s.in_group, count,
                                y + g * s.y_group, s.y_group);
        for (; g < groups; g++)
          add_products<n, 1>(weight, features, x + g * s.in_group, 0, count, y + g * s.y_group, 0);
      });
    }
  }
}

// Sixteen inputs of a layer: where they are among its weights.
struct Columns {
  long at[LANES];
  int count;
  bool is_row;                         // whether they follow one another, all sixteen
};

static Columns columns(const std::vector<int>& channels, int taps, long first) {
  Columns c{};
  const long total = (long)channels.size() * taps;
  c.count = std::min((long)LANES, total - first);
  for (int i = 0; i < LANES; i++) {
    const long k = std::min(first + i, total - 1);
    c.at[i] = (long)channels[k / taps] * taps + k % taps;
  }
  c.is_row = c.count == LANES && c.at[LANES - 1] == c.at[0] + LANES - 1;
  return c;
}

// out[m] = sum over k of a[k][m] * b[k], for M images.
template <int M>
static void multiply_panel(const float* a, const float* b, int count, float* out) {
  Vec sum[M][HALVES] = {};
  for (int k = 0; k < count; k++) {
    Vec row[HALVES];
    UNROLL for (int v = 0; v < HALVES; v++) row[v] = load(b + k * LANES + v * WIDTH);
    UNROLL for (int m = 0; m < M; m++) {
      Vec x = all(a[k * LANES + m]);
      UNROLL for (int v = 0; v < HALVES; v++) sum[m][v] = fma(x, row[v], sum[m][v]);
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int v = 0; v < HALVES; v++) store(out + m * LANES + v * WIDTH, sum[m][v]);
}

static void gradient_below(const Stage& s, const Stage& below, StageMemory& m,
                           StageMemory& to, Work& work, const float* weight, int groups) {
  const int taps = s.taps_per_channel, need = s.need_.size();
  const long features = (long)s.in_channels * taps, dy_group = s.dy_group();
  float aside[LANES * LANES] __attribute__((aligned(64)));
  for (long k = 0; k < (long)below.need_.size() * taps; k += LANES) {
    const Columns c = columns(below.need_, taps, k);
    for (int o = 0; o < need; o++) {
      float* panel = work.panel + o * LANES;
      const float* row = weight + s.need_[o] * features;
      if (c.is_row) memcpy(panel, row + c.at[0], LANES * sizeof(float));
      else for (int i = 0; i < LANES; i++) panel[i] = row[c.at[i]];
    }
    for (int g = 0; g < groups; g++) {
      const float* dy = m.dy + g * dy_group;
      if (HALVES == 1) {
        multiply_panel<16>(dy, work.panel, need, work.tile);
      } else {
        multiply_panel<6>(dy, work.panel, need, work.tile);
        multiply_panel<5>(dy + 6, work.panel, need, work.tile + 6 * LANES);
        multiply_panel<5>(dy + 11, work.panel, need, work.tile + 11 * LANES);
      }
      float* grad = to.grad + g * below.grad_group;
      const float* rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = work.tile + i * LANES;
      if (c.is_row && !s.adds_below) {
        transpose16(rows, grad + c.at[0] * LANES, LANES);
        continue;
      }
      transpose16(rows, aside, LANES);
      for (int i = 0; i < c.count; i++)
        for (int v = 0; v < HALVES; v++) {
          float* p = grad + c.at[i] * LANES + v * WIDTH;
          Vec x = load(aside + i * LANES + v * WIDTH);
          store(p, s.adds_below ? load(p) + x : x);
        }
    }
  }
}

// The gradient of sixteen weights of M outputs: dy[m][image] * x[image][weight].
template <int M>
static void multiply_images(const float* const* dy, long dy_group, const float* x, int groups,
                            float* out) {
  Vec sum[M][HALVES] = {};
  for (int g = 0; g < groups; g++, x += LANES * LANES)
    for (int k = 0; k < LANES; k++) {
      Vec row[HALVES];
      UNROLL for (int v = 0; v < HALVES; v++) row[v] = load(x + k * LANES + v * WIDTH);
      UNROLL for (int m = 0; m < M; m++) {
        Vec d = all(dy[m][g * dy_group + k]);
        UNROLL for (int v = 0; v < HALVES; v++) sum[m][v] = fma(d, row[v], sum[m][v]);
      }
    }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int v = 0; v < HALVES; v++) store(out + m * LANES + v * WIDTH, sum[m][v]);
}

static void weight_gradient(const Stage& s, StageMemory& m, Work& work, const float* in,
                            float* d_weight, int groups) {
  const Split blocks(s.rows_.size(), OUTPUTS);
  const long taps = s.trained.size(), dy_group = s.dy_group();
  for (long k = 0; k < taps; k += LANES) {
    const Columns c = columns(s.cols_, s.taps_per_channel, k);
    for (int g = 0; g < groups; g++) {
      const float* rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = in + g * s.in_group + c.at[i] * LANES;
      transpose16(rows, work.turned + g * LANES * LANES, LANES);
    }
    for (size_t b = 0; b < blocks.size.size(); b++) {
      const float* dy[OUTPUTS];
      const int first = blocks.first[b], size = blocks.size[b];
      for (int i = 0; i < size; i++) dy[i] = m.dy + s.rows_[first + i] * s.dy_plane;
      float out[OUTPUTS * LANES] __attribute__((aligned(64)));
      with_size<OUTPUTS>(size, [&](auto n) {
        multiply_images<n>(dy, dy_group, work.turned, groups, out);
      });
      for (int i = 0; i < size; i++)
        memcpy(d_weight + (first + i) * taps + k, out + i * LANES, c.count * sizeof(float));
    }
  }
}
