// The backward passes of gates (an activation times something) and of RMS norms; and clamps
// that keep one bit per value. For models that are no chain: PyTorch runs the rest.
//
// No bit depends on the width of vectors, or on where values lie in memory.
#pragma once

#include <algorithm>
#include <vector>

#include "map_norms.h"
#include "pointwise.h"

enum Smooth { OF_SILU, OF_GELU, OF_GELU_TANH };

// An activation's value, and its slope.
template <int KIND>
INLINE void smooth_at(Vec z, Vec& value, Vec& slope) {
  if (KIND == OF_GELU) {
    Vec below, density;
    normal(z, below, density);
    value = z * below;
    slope = fma(z, density, below);
    return;
  }
  const Vec one = all(1.f);
  const Vec share = KIND == OF_SILU ? one / (one + exp_of(-z)) : gelu_share(z);
  Vec inner = one;  // the slope of what is inside of the exponential
  if (KIND == OF_GELU_TANH) inner = all(2 * 0.79788456f) * fma(all(3 * 0.044715f) * z, z, one);
  value = z * share;
  slope = fma(value * (one - share), inner, share);
}

// Calls use(first, count) for places that follow one another: WIDTH at once, or the rest.
template <class Use>
INLINE void in_vectors(long n, Use use) {
  long i = 0;
  for (; i + WIDTH <= n; i += WIDTH) use(i, (long)WIDTH);
  if (i < n) use(i, n - i);
}
INLINE Vec get_some(const float* p, long count) {
  Vec v{};
  if (count == WIDTH) return get<Vec>(p);
  memcpy(&v, p, 4 * count);
  return v;
}
INLINE void put_some(float* p, Vec v, long count) {
  if (count == WIDTH) return put(p, v);
  memcpy(p, &v, 4 * count);
}

// A bit for each place of a mask, lowest first, and back.
INLINE unsigned bits_of(Mask m) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)m);
#elif defined(__AVX__) && !defined(__AVX512F__)
  return (unsigned)_mm256_movemask_ps((__m256)m);
#else
  unsigned found = 0;
  for (int i = 0; i < WIDTH; i++) found |= (m[i] & 1u) << i;
  return found;
#endif
}
INLINE Mask mask_of(unsigned bits) {
  Mask each = Mask{} + (int32_t)bits;
  static const int32_t ones[] __attribute__((aligned(64))) = {
      1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return (each & *(const Mask*)ones) != 0;
}

// The gradients of both factors of act(x) * other.
template <int KIND>
static void back_of_gate(long n, const float* x, const float* other, const float* grad,
                         float* d_x, float* d_other) {
  in_vectors(n, [&](long i, long count) {
    Vec value, slope, d = get_some(grad + i, count);
    smooth_at<KIND>(get_some(x + i, count), value, slope);
    put_some(d_other + i, d * value, count);
    put_some(d_x + i, d * get_some(other + i, count) * slope, count);
  });
}

// An RMS norm's backward pass: y = weight * (x * scale), with one scale for each row.
struct RmsNorm {
  long rows, width;
  const float *x, *weight, *scale, *grad;

  enum { AT_ONCE = 32 };  // rows that are summed in float

  // The sum of weight * grad * x over a row: 64 sums side by side, whatever the width.
  INLINE_MEMBER float dot(long row) const {
    const float *g = grad + row * width, *v = x + row * width;
    Vec sums[4 * HALVES] = {};
    long i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) UNROLL for (int s = 0; s < 4 * HALVES; s++) {
        const long at = i + s * WIDTH;
        sums[s] = fma(get<Vec>(g + at) * get<Vec>(weight + at), get<Vec>(v + at), sums[s]);
      }
    Vec total[HALVES];
    for (int h = 0; h < HALVES; h++)
      total[h] = (sums[h] + sums[HALVES + h]) + (sums[2 * HALVES + h] + sums[3 * HALVES + h]);
    float found = sum(total);
    for (; i < width; i++) found += g[i] * weight[i] * v[i];
    return found;
  }

  // The gradient of a row, and what it adds to the gradient of the weight.
  INLINE_MEMBER void row_back(long row, float* d_x, float* d_weight) const {
    const float r = scale[row], slope = -r * r * r * dot(row) / width;
    const float *g = grad + row * width, *v = x + row * width;
    float* to = d_x + row * width;
    each(width, [&](long i, auto vector) {
      typedef decltype(vector) V;
      const V here = get<V>(v + i), d = get<V>(g + i);
      put(to + i, (d * get<V>(weight + i)) * r + here * slope);
      put(d_weight + i, get<V>(d_weight + i) + d * (here * r));
    });
  }

  void back(float* d_x, float* d_weight) const {
    std::vector<double> total(width);
    std::vector<float> sums(width);
    for (long row = 0; row < rows; row++) {
      row_back(row, d_x, sums.data());
      if ((row + 1) % AT_ONCE && row + 1 < rows) continue;
      for (long i = 0; i < width; i++) total[i] += sums[i];
      std::fill(sums.begin(), sums.end(), 0.f);
    }
    std::copy(total.begin(), total.end(), d_weight);
  }
};

extern "C" {

// The gradients of both factors of act(x) * other, n values each; act is SiLU (0), GELU (1)
// or GELU by tanh (2).
void gate_backward(int kind, long n, const float* x, const float* other, const float* grad,
                   float* d_x, float* d_other) {
  auto back = kind == OF_SILU   ? back_of_gate<OF_SILU>
              : kind == OF_GELU ? back_of_gate<OF_GELU>
                                : back_of_gate<OF_GELU_TANH>;
  back(n, x, other, grad, d_x, d_other);
}

// Returns 0, or 1 if there is not enough memory.
int rms_backward(long rows, long width, const float* x, const float* weight, const float* scale,
                 const float* grad, float* d_x, float* d_weight) try {
  RmsNorm{rows, width, x, weight, scale, grad}.back(d_x, d_weight);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// n values clamped, and a bit for each, lowest first: whether it is strictly inside.
void clamp_forward(long n, const float* x, float low, float high, float* y, uint8_t* bits) {
  in_vectors(n, [&](long i, long count) {
    Vec v = get_some(x + i, count);
    v = where(v < all(low), all(low), v);  // NaN stays
    v = where(v > all(high), all(high), v);
    put_some(y + i, v, count);
    const unsigned inside = bits_of((v > all(low)) & (v < all(high))) & ((1u << count) - 1);
    for (long byte = 0; 8 * byte < count; byte++) bits[i / 8 + byte] = (uint8_t)(inside >> 8 * byte);
  });
}

// The gradient of n clamped values.
void clamp_backward(long n, const uint8_t* bits, const float* grad, float* d_x) {
  in_vectors(n, [&](long i, long count) {
    unsigned inside = 0;
    for (long byte = 0; 8 * byte < count; byte++) inside |= (unsigned)bits[i / 8 + byte] << 8 * byte;
    put_some(d_x + i, where(mask_of(inside), get_some(grad + i, count)), count);
  });
}
}
