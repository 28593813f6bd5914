// Batch norm and clamp in one, forward and backward, for models that are no chain: maps
// whose channels lie side by side, as rows of one value per channel.
//
// Several rows are one wide row, so that vectors fill it whatever the number of channels.
// No bit depends on the width of vectors.
#pragma once

#include "network.h"

typedef float One __attribute__((vector_size(4), may_alias));

template <class V>
INLINE V get(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void put(float* p, V v) {
  memcpy(p, &v, sizeof v);
}

// Calls use(i, vector) for places that follow one another: many at once, the last alone.
template <class Use>
INLINE void each(long count, Use use) {
  long i = 0;
  for (; i + WIDTH <= count; i += WIDTH) use(i, Vec{});
  for (; i < count; i++) use(i, One{});
}

struct MapNorm {
  long rows, channels, width;          // width: of a wide row
  const float* x;
  float low, high;                     // of the clamp
  std::vector<float> mean, a, b, deviation, rest;

  enum { LEAST = 64, AT_ONCE = 32 };   // values in a wide row; wide rows summed in float

  MapNorm(long rows, long channels, const float* x, float low, float high)
      : rows(rows), channels(channels), width(channels), x(x), low(low), high(high) {
    while (width % LANES || width < LEAST) width *= 2;
    for (auto* v : {&mean, &a, &b, &deviation, &rest}) v->resize(width);
  }
  long size() const { return rows * channels; }

  // A value for each channel, repeated for the rows of a wide one.
  template <class Value>
  void spread(std::vector<float>& to, Value value) const {
    for (long i = 0; i < width; i++) to[i] = i < channels ? (float)value(i) : to[i - channels];
  }

  // What the backward pass reads of the forward one: five numbers for each channel.
  void keep(float* to) const {
    for (auto* v : {&mean, &a, &b, &deviation, &rest}) to = std::copy_n(v->begin(), channels, to);
  }
  void recall(const float* from) {
    for (auto* v : {&mean, &a, &b, &deviation, &rest}) {
      spread(*v, [&](long c) { return from[c]; });
      from += channels;
    }
  }

  // The sums over all rows of two values: add(at, i, one, two) adds those at a place.
  template <class Add>
  void sum(std::vector<double>& first, std::vector<double>& second, Add add) const {
    std::vector<double> wide[2] = {std::vector<double>(width), std::vector<double>(width)};
    std::vector<float> sums[2] = {std::vector<float>(width), std::vector<float>(width)};
    float *one = sums[0].data(), *two = sums[1].data();
    for (long begin = 0; begin < size(); begin += AT_ONCE * width) {
      const long end = std::min(size(), begin + AT_ONCE * width);
      for (auto& s : sums) std::fill(s.begin(), s.end(), 0.f);
      long at = begin;
      for (; at + 4 * width <= end; at += 4 * width)
        each(width, [&](long i, auto vector) {
          auto s1 = get<decltype(vector)>(one + i), s2 = get<decltype(vector)>(two + i);
          UNROLL for (int r = 0; r < 4; r++) add(at + r * width, i, s1, s2);
          put(one + i, s1);
          put(two + i, s2);
        });
      for (; at < end; at += width)
        each(std::min(width, end - at), [&](long i, auto vector) {
          auto s1 = get<decltype(vector)>(one + i), s2 = get<decltype(vector)>(two + i);
          add(at, i, s1, s2);
          put(one + i, s1);
          put(two + i, s2);
        });
      for (int s = 0; s < 2; s++)
        for (long i = 0; i < width; i++) wide[s][i] += sums[s][i];
    }
    first.assign(channels, 0);
    second.assign(channels, 0);
    for (long i = 0; i < width; i++) {
      first[i % channels] += wide[0][i];
      second[i % channels] += wide[1][i];
    }
  }

  // Calls use(at, i, vector) for all places: the i-th of a wide row that begins at `at`.
  template <class Use>
  void all_places(Use use) const {
    for (long at = 0; at < size(); at += width)
      each(std::min(width, size() - at), [&](long i, auto vector) { use(at, i, vector); });
  }

  template <class V>
  INLINE_MEMBER V centred(long at, long i) const {
    return get<V>(x + at + i) - get<V>(&mean[i]);
  }
  template <class V>
  INLINE_MEMBER V normed(V centred, long i) const {
    return get<V>(&a[i]) * centred + get<V>(&b[i]);
  }
  // The gradient before the clamp.
  template <class V>
  INLINE_MEMBER V back(V centred, V grad, long i) const {
    const V z = normed(centred, i);
    return (z <= low) | (z >= high) ? V{} : grad;
  }
};

// Mean and variance of the batch; sums are of differences to the first rows' mean, against
// cancellation.
static void find_statistics(MapNorm& n, const float* weight, const float* bias, float eps,
                            float* running_mean, float* running_var, float momentum) {
  const long first = std::min(n.rows, (long)MapNorm::AT_ONCE);
  std::vector<float> shift(n.width);
  n.spread(shift, [&](long c) {
    double total = 0;
    for (long r = 0; r < first; r++) total += n.x[r * n.channels + c];
    return std::isfinite(total) ? total / first : 0;
  });
  std::vector<double> total, square;
  n.sum(total, square, [&](long at, long i, auto& one, auto& two) {
    typedef std::decay_t<decltype(one)> V;
    const V d = get<V>(n.x + at + i) - get<V>(&shift[i]);
    one += d;
    two += d * d;
  });
  std::vector<double> mean(n.channels), deviation(n.channels);
  for (long c = 0; c < n.channels; c++) {
    const double shifted = total[c] / n.rows;
    double variance = square[c] / n.rows - shifted * shifted;
    if (variance < 0) variance = 0;  // NaN stays
    mean[c] = shifted + shift[c];
    deviation[c] = 1 / std::sqrt(variance + eps);
    if (!running_mean) continue;
    running_mean[c] += momentum * (mean[c] - running_mean[c]);
    running_var[c] += momentum * (variance * n.rows / (n.rows - 1) - running_var[c]);
  }
  // What rounding takes from the mean matters where values differ by little.
  n.spread(n.mean, [&](long c) { return mean[c]; });
  n.spread(n.rest, [&](long c) { return std::isfinite(mean[c]) ? mean[c] - (float)mean[c] : 0; });
  n.spread(n.deviation, [&](long c) { return deviation[c]; });
  n.spread(n.a, [&](long c) { return weight[c] * deviation[c]; });
  n.spread(n.b, [&](long c) { return bias[c] - weight[c] * deviation[c] * n.rest[c]; });
}

static void norm_and_clamp(const MapNorm& n, float* y) {
  n.all_places([&](long at, long i, auto vector) {
    typedef decltype(vector) V;
    V z = n.normed(n.centred<V>(at, i), i);
    z = z < n.low ? n.low - V{} : z;  // NaN stays
    put(y + at + i, z > n.high ? n.high - V{} : z);
  });
}

// The gradients of weight, bias and x, from the one of the clamp's output.
static void norm_back(const MapNorm& n, const float* grad, float* d_x, float* d_weight,
                      float* d_bias) {
  std::vector<double> total, moment;
  n.sum(total, moment, [&](long at, long i, auto& one, auto& two) {
    typedef std::decay_t<decltype(one)> V;
    const V centred = n.centred<V>(at, i), d = n.back(centred, get<V>(grad + at + i), i);
    one += d;
    two += d * centred;
  });
  for (long c = 0; c < n.channels; c++) {
    moment[c] = (moment[c] - total[c] * n.rest[c]) * n.deviation[c];
    d_weight[c] = moment[c];
    d_bias[c] = total[c];
  }
  std::vector<float> sa(n.width), sb(n.width);
  n.spread(sa, [&](long c) { return -(double)n.a[c] * n.deviation[c] * moment[c] / n.rows; });
  n.spread(sb, [&](long c) { return -(double)n.a[c] * total[c] / n.rows - (double)sa[c] * n.rest[c]; });
  n.all_places([&](long at, long i, auto vector) {
    typedef decltype(vector) V;
    const V centred = n.centred<V>(at, i), d = n.back(centred, get<V>(grad + at + i), i);
    put(d_x + at + i, get<V>(&n.a[i]) * d + (get<V>(&sa[i]) * centred + get<V>(&sb[i])));
  });
}

extern "C" {

// Returns 0, or 1 if there is not enough memory.
int map_norm_forward(long rows, long channels, const float* x, const float* weight,
                     const float* bias, float* running_mean, float* running_var, float momentum,
                     float eps, float low, float high, float* kept, float* y) try {
  MapNorm n(rows, channels, x, low, high);
  find_statistics(n, weight, bias, eps, running_mean, running_var, momentum);
  n.keep(kept);
  norm_and_clamp(n, y);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

int map_norm_backward(long rows, long channels, const float* x, const float* kept, float low,
                      float high, const float* grad, float* d_x, float* d_weight,
                      float* d_bias) try {
  MapNorm n(rows, channels, x, low, high);
  n.recall(kept);
  norm_back(n, grad, d_x, d_weight, d_bias);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
}
