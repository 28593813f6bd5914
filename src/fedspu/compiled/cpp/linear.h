// Linear layers. Weights are read where they are: a row of them for each output.
#pragma once

#include "convolution.h"
#include "sgd.h"

// Inputs, and in the backward pass outputs, at a time, so that they stay in the cache.
enum { BLOCK = 256, BLOCK_BACK = 64 };

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

// Sixteen inputs that train: where they are among the weights of an output.
struct Columns {
  long first;                          // of those that train
  long at[LANES];
  int count;
};

static Columns columns(const std::vector<int>& channels, int taps, long first) {
  Columns c{};
  c.first = first;
  const long total = (long)channels.size() * taps;
  c.count = std::min((long)LANES, total - first);
  for (int i = 0; i < LANES; i++) {
    const long k = std::min(first + i, total - 1);
    c.at[i] = (long)channels[k / taps] * taps + k % taps;
  }
  return c;
}

// The gradient of M inputs, of some groups: sums over outputs of weight * dy. Weights are
// read where they are: of each output, those of the inputs, which may be a row or not.
template <int M, int GROUPS, bool IS_ROW>
static void add_products_back(const float* weight, const long* output, const long* input,
                              const float* dy, long dy_step, int count, float* grad,
                              long grad_step, bool adds) {
  Vec sum[M][GROUPS][HALVES];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int v = 0; v < HALVES; v++)
        sum[m][g][v] = adds ? load(grad + g * grad_step + input[m] * LANES + v * WIDTH) : all(0.f);
  for (int o = 0; o < count; o++) {
    const float *row = weight + output[o], *first = row + input[0];
    Vec d[GROUPS][HALVES];
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int v = 0; v < HALVES; v++) d[g][v] = load(dy + g * dy_step + o * LANES + v * WIDTH);
    UNROLL for (int m = 0; m < M; m++) {
      Vec w = all(IS_ROW ? first[m] : row[input[m]]);
      UNROLL for (int g = 0; g < GROUPS; g++)
        UNROLL for (int v = 0; v < HALVES; v++) sum[m][g][v] = fma(w, d[g][v], sum[m][g][v]);
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int v = 0; v < HALVES; v++)
        store(grad + g * grad_step + input[m] * LANES + v * WIDTH, sum[m][g][v]);
}

template <bool IS_ROW>
static void gradient_below(const Stage& s, const Stage& below, const float* weight, int first,
                           int size, const float* dy, int begin, int count, float* grad,
                           int groups) {
  const bool adds = s.adds_below || begin > 0;
  const long *output = &s.outputs_back[begin], *input = &s.inputs_back[first];
  with_size<OUTPUTS>(size, [&](auto m) {
    int g = 0;
    for (; g + TILE <= groups; g += TILE)
      add_products_back<m, TILE, IS_ROW>(weight, output, input, dy + g * s.dy_group(),
                                         s.dy_group(), count, grad + g * below.grad_group,
                                         below.grad_group, adds);
    for (; g < groups; g++)
      add_products_back<m, 1, IS_ROW>(weight, output, input, dy + g * s.dy_group(), 0, count,
                                      grad + g * below.grad_group, 0, adds);
  });
}

static void gradient_below(const Stage& s, const Stage& below, StageMemory& m, StageMemory& to,
                           const float* weight, int groups) {
  const int need = s.need_.size();
  for (int begin = 0; begin < need; begin += BLOCK_BACK) {
    const int count = std::min((int)BLOCK_BACK, need - begin);
    const float* dy = m.dy + (long)begin * LANES;
    for (size_t b = 0; b < s.in_blocks.size.size(); b++) {
      const int first = s.in_blocks.first[b], size = s.in_blocks.size[b];
      if (s.inputs_back[first + size - 1] == s.inputs_back[first] + size - 1)
        gradient_below<true>(s, below, weight, first, size, dy, begin, count, to.grad, groups);
      else
        gradient_below<false>(s, below, weight, first, size, dy, begin, count, to.grad, groups);
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

// Calls use(row, columns, gradients) for every sixteen weights that train.
template <class Use>
static void weight_gradient(const Stage& s, StageMemory& m, Work& work, const float* in,
                            int groups, Use use) {
  const Split blocks(s.rows_.size(), OUTPUTS);
  const long taps = s.trained.size(), dy_group = s.dy_group();
  const long turned = (long)groups * LANES * LANES;
  for (long k = 0; k < taps; k += PANELS * LANES) {
    Columns columns_of[PANELS];
    int panels = 0;
    for (; panels < PANELS && k + panels * LANES < taps; panels++) {
      const Columns& c = columns_of[panels] = columns(s.cols_, s.taps_per_channel, k + panels * LANES);
      for (int g = 0; g < groups; g++) {
        const float* rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = in + g * s.in_group + c.at[i] * LANES;
        transpose16(rows, work.turned + panels * turned + g * LANES * LANES, LANES);
      }
    }
    for (size_t b = 0; b < blocks.size.size(); b++) {
      const float* dy[OUTPUTS];
      const int first = blocks.first[b], size = blocks.size[b];
      for (int i = 0; i < size; i++) dy[i] = m.dy + s.rows_[first + i] * s.dy_plane;
      for (int panel = 0; panel < panels; panel++) {
        float out[OUTPUTS * LANES] __attribute__((aligned(64)));
        with_size<OUTPUTS>(size, [&](auto n) {
          multiply_images<n>(dy, dy_group, work.turned + panel * turned, groups, out);
        });
        for (int i = 0; i < size; i++) use(first + i, columns_of[panel], out + i * LANES);
      }
    }
  }
}

// A step of SGD of some weights of the r-th output that trains.
static void step_columns(const Stage& s, float* weight, int r, const Columns& c,
                         const float* grad, float* moment, const Sgd& sgd) {
  weight += (long)s.need_[s.rows_[r]] * s.in_channels * s.taps_per_channel;
  if (c.at[c.count - 1] == c.at[0] + c.count - 1)
    return step_run(weight + c.at[0], grad, moment, c.count, 1, sgd);
  for (int i = 0; i < c.count; i++)
    step_run(weight + c.at[i], grad + i, moment ? moment + i : nullptr, 1, 1, sgd);
}
