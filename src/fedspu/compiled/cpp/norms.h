// Batch norm and group norm: statistics of the forward pass, gradients of the backward.
#pragma once

#include "pointwise.h"

static void fill(float* to, float value) {
  for (int i = 0; i < LANES; i++) to[i] = value;
}

// Before any group of a batch: coefficients that do not depend on it.
static void begin_norm(const Stage& s, StageMemory& m, const Tensors& t) {
  for (int c = 0; c < s.channels; c++) {
    m.total[c] = m.square[c] = 0;
    if (s.norm != RUNNING && (s.norm != NO_NORM || c > 0)) continue;
    const bool runs = s.norm == RUNNING;
    const float deviation = runs ? 1 / std::sqrt((double)t.variance[c] + s.eps) : 1;
    fill(m.mean + c * LANES, runs ? t.mean[c] : 0);
    fill(m.deviation + c * LANES, deviation);
    fill(m.a + c * LANES, runs && t.scale ? t.scale[c] * deviation : deviation);
    fill(m.b + c * LANES, runs && t.shift ? t.shift[c] : 0);
  }
}

// Sums of (y - shift) and its square; shift is about as large as y, against cancellation.
static void add_statistics(const Pass& p, int g, bool is_last) {
  const Stage& s = p.s;
  Vec count[HALVES];
  for (int v = 0; v < HALVES; v++)
    count[v] = is_last ? where(p.work.valid[v], all(1.f)) : all(1.f);
  for (int c = 0; c < s.channels; c++) {
    const float* y = p.y(g, c);
    if (g == 0) {  // the mean of the first row: one value alone may be far off
      Vec first[HALVES] = {}, number[HALVES] = {};
      for (int i = 0; i < s.w; i++)
        for (int v = 0; v < HALVES; v++) {
          first[v] = fma(load(y + i * LANES + v * WIDTH), count[v], first[v]);
          number[v] += count[v];
        }
      const float mean = sum(first) / sum(number);
      p.m.shift[c] = std::isfinite(mean) ? mean : 0;
    }
    const Vec shift = all(p.m.shift[c]);
    double total = 0, square = 0;
    for (int r = 0; r < s.h; r++) {
      Vec t[HALVES] = {}, q[HALVES] = {};
      const float* row = y + r * s.y_row;
      for (int i = 0; i < s.w; i++)
        UNROLL for (int v = 0; v < HALVES; v++) {
          Vec d = (load(row + i * LANES + v * WIDTH) - shift) * count[v];
          t[v] += d;
          q[v] = fma(d, d, q[v]);
        }
      total += sum(t);
      square += sum(q);
    }
    p.m.total[c] += total;
    p.m.square[c] += square;
  }
}

static void finish_statistics(const Pass& p, const Tensors& t, long images) {
  const Stage& s = p.s;
  const double count = (double)images * s.h * s.w;
  for (int c = 0; c < s.channels; c++) {
    const double shifted = p.m.total[c] / count;
    double variance = p.m.square[c] / count - shifted * shifted;
    if (variance < 0) variance = 0;  // NaN stays
    const double mean = shifted + p.m.shift[c], deviation = 1 / std::sqrt(variance + s.eps);
    const double a = (t.scale ? t.scale[c] : 1.f) * deviation;
    // What rounding takes from the mean matters where values differ by little.
    p.m.rest[c] = std::isfinite(mean) ? mean - (float)mean : 0;
    fill(p.m.mean + c * LANES, mean);
    fill(p.m.deviation + c * LANES, deviation);
    fill(p.m.a + c * LANES, a);
    fill(p.m.b + c * LANES, (t.shift ? t.shift[c] : 0) - a * p.m.rest[c]);
    if (t.mean) {
      t.mean[c] += s.momentum * (mean - t.mean[c]);
      t.variance[c] += s.momentum * (variance * count / (count - 1) - t.variance[c]);
    }
  }
}

// Group norm: statistics of each image by itself, over the channels of each group.
static void norm_groups(const Pass& p, const Tensors& t, int g) {
  const Stage& s = p.s;
  const int width = s.channels / s.num_groups;
  const float count = (float)width * s.h * s.w;
  for (int first = 0; first < s.channels; first += width) {
    for (int v = 0; v < HALVES; v++) {
      Vec mean = load(p.y(g, first) + v * WIDTH), variance = all(0.f);
      for (int pass = 0; pass < 2; pass++) {  // the second knows the mean
        Vec total = all(0.f), square = all(0.f);
        for (int c = first; c < first + width; c++)
          for (int r = 0; r < s.h; r++) {
            const float* row = p.y(g, c) + r * s.y_row + v * WIDTH;
            Vec t1 = all(0.f), t2 = all(0.f);
            for (int i = 0; i < s.w; i++) {
              Vec d = load(row + i * LANES) - mean;
              t1 += d;
              t2 = fma(d, d, t2);
            }
            total += t1;
            square += t2;
          }
        Vec rest = total / all(count);
        variance = square / all(count) - rest * rest;
        mean += rest;
      }
      variance = where(~(variance < all(0.f)), variance);
      Vec deviation = variance;
      for (int i = 0; i < WIDTH; i++) deviation[i] = 1 / std::sqrt((double)variance[i] + s.eps);
      for (int c = first; c < first + width; c++) {
        const long at = p.coefficient(g, c) + v * WIDTH;
        store(p.m.mean + at, mean);
        store(p.m.deviation + at, deviation);
        store(p.m.a + at, deviation * all(t.scale ? t.scale[c] : 1.f));
        store(p.m.b + at, all(t.shift ? t.shift[c] : 0.f));
      }
    }
  }
}

// Backward ----------------------------------------------------------------------------

// One group's part of the gradients of scale and shift; for group norm also sa and sb.
static void add_norm_gradients(const Pass& p, const Tensors& t, int g) {
  const Stage& s = p.s;
  const int need = s.need_.size();
  for (int n = 0; n < need; n++) {
    const long at = p.coefficient(g, s.need_[n]);
    Vec moment[HALVES];
    for (int v = 0; v < HALVES; v++)
      moment[v] = load(p.work.s2 + n * LANES + v * WIDTH) * load(p.m.deviation + at + v * WIDTH);
    p.m.total[n] += sum(p.work.s1 + n * LANES);
    p.m.square[n] += sum(moment);
  }
  if (s.norm != GROUP) return;
  const int width = s.channels / s.num_groups;
  const Vec count = all((float)width * s.h * s.w);
  for (int first = 0; first < s.channels; first += width)
    for (int v = 0; v < HALVES; v++) {
      const long at = p.coefficient(g, first) + v * WIDTH;
      const Vec deviation = load(p.m.deviation + at);
      Vec m1 = all(0.f), m2 = all(0.f);
      for (int c = first; c < first + width; c++)
        if (s.slot[c] >= 0) {
          const long from = s.slot[c] * LANES + v * WIDTH;
          const Vec scale = all(t.scale ? t.scale[c] : 1.f);
          m1 = fma(scale, load(p.work.s1 + from), m1);
          m2 = fma(scale, load(p.work.s2 + from), m2);
        }
      for (int c = first; c < first + width; c++) {
        const long to = p.coefficient(g, c) + v * WIDTH;
        store(p.m.sb + to, -(m1 / count) * deviation);
        store(p.m.sa + to, -(m2 / count) * deviation * deviation * deviation);
      }
    }
}

static void finish_norm_gradients(const Pass& p, const Tensors& t, long images) {
  const Stage& s = p.s;
  const double count = (double)images * s.h * s.w;
  for (size_t n = 0; n < s.need_.size() && s.norm == BATCH; n++) {
    const long at = (long)s.need_[n] * LANES;
    const double a = p.m.a[at], deviation = p.m.deviation[at], rest = p.m.rest[s.need_[n]];
    p.m.square[n] -= p.m.total[n] * deviation * rest;
    const double sa = -a * deviation * p.m.square[n] / count;
    fill(p.m.sa + at, sa);
    fill(p.m.sb + at, -a * p.m.total[n] / count - sa * rest);
  }
  for (size_t r = 0; r < s.rows_.size(); r++) {
    const int n = s.rows_[r];
    if (t.d_scale) t.d_scale[r] = p.m.square[n];
    if (t.d_shift) t.d_shift[r] = p.m.total[n];
    if (!t.d_bias) continue;
    if (s.norm == BATCH) t.d_bias[r] = 0;  // the norm takes every bias away again
    else t.d_bias[r] = p.m.total[n] * (s.norm == RUNNING ? p.m.a[(long)s.need_[n] * LANES] : 1);
  }
}

// With a group norm the gradient of a bias is that of all its values.
static void add_bias_gradient(const Pass& p, const Tensors& t, int g) {
  const Stage& s = p.s;
  if (s.norm != GROUP || !t.d_bias) return;
  for (size_t r = 0; r < s.rows_.size(); r++) {
    Vec total[HALVES] = {};
    for (int i = 0; i < s.h; i++)
      for (int j = 0; j < s.w; j++)
        for (int v = 0; v < HALVES; v++)
          total[v] += load(p.m.dy + g * s.dy_group() + s.rows_[r] * s.dy_plane + s.dy_at +
                        ((long)i * s.dy_w + j) * LANES + v * WIDTH);
    t.d_bias[r] = (g ? t.d_bias[r] : 0) + sum(total);
  }
}
