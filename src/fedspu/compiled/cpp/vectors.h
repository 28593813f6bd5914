// Vectors of floats, and what is done to them. A group has 16 images: one vector with
// AVX-512, two halves otherwise.
//
// Products and sums are fused only where fma() says so (the flag -ffp-contract=off keeps
// the compiler from choosing), and what is summed over images is summed in the same order
// for any width, so that a result does not depend on compiler, flags or width.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
enum { WIDTH = 16 };
#else
enum { WIDTH = 8 };
#endif
enum { LANES = 16, HALVES = LANES / WIDTH };

// What is computed at once, so that sums fill most of the registers (32 or 16).
enum { TILE = HALVES == 1 ? 2 : 1 };      // columns of a map, or groups of images
enum { OUTPUTS = HALVES == 1 ? 12 : 6 };  // for each of them
enum { ROWS = HALVES == 1 ? 3 : 4 };      // outputs, for the gradient of their weights
constexpr int taps_at_once(int rows) {    // inputs of such an output
  return HALVES == 1 ? 9 : rows == 1 ? 8 : 12 / rows;
}

typedef float Vec __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t Mask __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint32_t Word __attribute__((vector_size(4 * WIDTH), may_alias));
typedef float Eight __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t EightInts __attribute__((vector_size(32)));

INLINE Vec all(float a) { return a - Vec{}; }
INLINE Vec where(Mask m, Vec a, Vec b = Vec{}) { return m ? a : b; }
INLINE Vec load(const float* p) { return *(const Vec*)p; }
INLINE void store(float* p, Vec a) { *(Vec*)p = a; }

INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Keeps a loaded value in a register: otherwise it is loaded again for each product.
INLINE void keep(Vec& a) {
#if defined(__AVX512F__)
  asm("" : "+v"(a));
#elif defined(__AVX__)
  asm("" : "+x"(a));
#else
  (void)a;
#endif
}

// The sum over the images of a group.
INLINE float sum(const Vec (&a)[HALVES]) {
  const Eight *half = (const Eight*)a, s = half[0] + half[1];
  float s0 = s[0] + s[4], s1 = s[1] + s[5], s2 = s[2] + s[6], s3 = s[3] + s[7];
  return (s0 + s2) + (s1 + s3);
}

INLINE float sum(const float* group) {
  Vec a[HALVES];
  for (int v = 0; v < HALVES; v++) a[v] = load(group + v * WIDTH);
  return sum(a);
}

// As in PyTorch: NaN if either is NaN.
INLINE Vec larger(Vec a, Vec b) { return where((b > a) | (b != b), b, a); }

INLINE Vec round_off(Vec a) {  // to whole numbers, for |a| < 2^22
  Vec big = all(12582912.f);
  return (a + big) - big;
}

// e^x, to about 1 ulp; 0 below -87, infinite above 88.7, NaN stays (Cephes).
INLINE Vec exp_of(Vec x) {
  Mask low = x < all(-87.3f), high = x > all(88.7f);
  Vec c = where(low | high, all(0.f), x);
  Vec n = round_off(c * all(1.44269504f));
  Vec r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), c));
  Vec p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p * r, r, r) + all(1.f);
  Mask e = __builtin_convertvector(n, Mask) + 127;
  p = p * (Vec)(e << 23);
  p = where(low, all(0.f), where(high, all(INFINITY), p));
  return where(x != x, x, p);
}

// tanh, to a few ulp: x + x^3 P(x^2) near zero, 1 - 2 / (e^2x + 1) elsewhere (Cephes).
INLINE Vec tanh_of(Vec x) {
  Vec size = (Vec)((Mask)x & 0x7fffffff), s = x * x;
  Vec p = all(-5.70498872745e-3f);
  p = fma(p, s, all(2.06390887954e-2f));
  p = fma(p, s, all(-5.37397155531e-2f));
  p = fma(p, s, all(1.33314422036e-1f));
  p = fma(p, s, all(-3.33332819422e-1f));
  Vec small = fma(p * s, x, x);
  Vec large = all(1.f) - all(2.f) / (exp_of(size + size) + all(1.f));
  large = (Vec)((Mask)large | ((Mask)x & (int32_t)0x80000000));
  return where(x != x, x, where(size < all(0.625f), small, large));
}

// The share of a normal distribution below x, to about 1e-7 of itself on both sides (a
// Chebyshev fit of erfc), and its density; together they give GELU and its slope.
INLINE void normal(Vec x, Vec& below, Vec& density) {
  Vec size = (Vec)((Mask)x & 0x7fffffff) * all(0.70710678f);
  Vec t = all(1.f) / fma(size, all(0.5f), all(1.f));
  Vec p = all(0.17087277f);
  p = fma(p, t, all(-0.82215223f));
  p = fma(p, t, all(1.48851587f));
  p = fma(p, t, all(-1.13520398f));
  p = fma(p, t, all(0.27886807f));
  p = fma(p, t, all(-0.18628806f));
  p = fma(p, t, all(0.09678418f));
  p = fma(p, t, all(0.37409196f));
  p = fma(p, t, all(1.00002368f));
  p = fma(p, t, all(-1.26551223f));
  Vec tail = all(0.5f) * t * exp_of(fma(-size, size, p));
  below = where(x > all(0.f), all(1.f) - tail, tail);
  density = all(0.39894228f) * exp_of(all(-0.5f) * x * x);
}

// Whether each of some values is kept: with the same key, always the same ones.
INLINE Mask drawn(uint64_t key, uint32_t first, uint32_t threshold) {
  static const uint32_t numbers[] __attribute__((aligned(64))) = {0, 1, 2,  3,  4,  5,  6,  7,
                                                                  8, 9, 10, 11, 12, 13, 14, 15};
  Word h = *(const Word*)numbers + (first + (uint32_t)key);
  for (int i = 0; i < 2; i++) {
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    h = (h ^ (h >> 16)) ^ (uint32_t)(key >> 32);
  }
  return (Mask)(h >= threshold);
}

// Transposes 8 x 8 floats: out[j][i] = in[i][j].
INLINE void transpose8(const float* const* in, long at, float* out, long step) {
  Eight r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = *(const Eight*)(in[i] + at);
#if defined(__clang__) || __GNUC__ >= 12
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, EightInts{__VA_ARGS__})
#endif
  for (int i = 0; i < 8; i += 2) {
    t[i] = MIX(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = MIX(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = MIX(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] = MIX(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    *(Eight*)(out + i * step) = MIX(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *(Eight*)(out + (i + 4) * step) = MIX(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#undef MIX
}

// Transposes 16 x 16 floats, from rows anywhere.
static void transpose16(const float* const* in, float* out, long step) {
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8) transpose8(in + i, j, out + j * step + i, step);
}
