// What follows a weighted operation: norm, sum, activation, pool and dropout; and back.
//
// Before the norm a value is y; after it z = a (y - mean) + b; then u = act(z).
#pragma once

#include "network.h"

enum { OTHER = 2 };       // template value of an activation: any but none and ReLU
enum { MAX_OF_FOUR = 3 }; // template value of a pool: 2 x 2

// Everything that a pass over a stage reads.
struct Pass {
  const Network& net;
  const Stage& s;
  StageMemory& m;
  Work& work;
  int index;
  uint64_t key;            // of its dropout

  const float* output_of(int stage) const {
    return stage == INPUT ? (float*)work.input : (float*)work.stages[stage]->out;
  }
  const float* y(int g, int c) const {
    if (s.op != NO_OP) return m.y_of(s, g, c);
    return output_of(s.from) + s.in_at + g * s.y_group + c * s.y_plane;
  }
  long coefficient(int g, int c) const {
    if (s.norm == NO_NORM) return 0;  // the same for all channels
    return ((s.norm == GROUP ? (long)g * s.channels : 0) + c) * LANES;
  }
  // Whether the largest of a window must be found among activations, not before them.
  bool ranks_outputs() const {
    return s.act == GELU || s.act == GELU_TANH || (s.act == LEAKY && s.slope < 0);
  }
  uint32_t drops_below() const { return (uint32_t)(s.dropout * 4294967296.0); }
  uint32_t place(int g, int c, int r, int q) const {
    return (((uint32_t)g * s.channels + c) * s.out_h + r) * s.out_w * LANES + q * LANES;
  }
};

// Half of 1 + tanh(0.798 (z + 0.0447 z^3)), without cancellation.
INLINE Vec gelu_share(Vec z) {
  Vec inner = all(0.79788456f) * fma(all(0.044715f) * z * z, z, z);
  return all(1.f) / (all(1.f) + exp_of(all(-2.f) * inner));
}

// Not inlined: the code of these is long, and most networks have ReLUs.
static __attribute__((noinline)) Vec other_act(Vec z, const Stage& s) {
  if (s.act == LEAKY) return where(z > all(0.f), z, z * all(s.slope));
  if (s.act == TANH) return tanh_of(z);
  if (s.act == GELU) {
    Vec below, density;
    normal(z, below, density);
    return z * below;
  }
  return z * gelu_share(z);
}

static __attribute__((noinline)) Vec other_act_back(Vec grad, Vec z, const Stage& s) {
  if (s.act == LEAKY) return where(z > all(0.f), grad, grad * all(s.slope));
  if (s.act == TANH) {
    Vec t = tanh_of(z);
    return grad * (all(1.f) - t * t);
  }
  if (s.act == GELU) {
    Vec below, density;
    normal(z, below, density);
    return grad * fma(z, density, below);
  }
  Vec share = gelu_share(z);
  Vec inner = all(2 * 0.79788456f) * fma(all(3 * 0.044715f) * z, z, all(1.f));
  return grad * fma(z * share * (all(1.f) - share), inner, share);
}

template <int ACT>
INLINE Vec act(Vec z, const Stage& s) {
  if (ACT == NO_ACT) return z;
  if (ACT == RELU) return where(~(z < all(0.f)), z);
  return other_act(z, s);
}

// The gradient before an activation, from the one after it.
template <int ACT>
INLINE Vec act_back(Vec grad, Vec z, const Stage& s) {
  if (ACT == NO_ACT) return grad;
  if (ACT == RELU) return where(z > all(0.f), grad);
  return other_act_back(grad, z, s);
}

// A channel of one group: its coefficients, and where its values are.
struct Channel {
  Vec a[HALVES], b[HALVES], mean[HALVES];
  const float *y, *aside;
  long aside_row;

  Channel(const Pass& p, int g, int c) {
    const long at = p.coefficient(g, c);
    for (int v = 0; v < HALVES; v++) {
      a[v] = load(p.m.a + at + v * WIDTH);
      b[v] = load(p.m.b + at + v * WIDTH);
      mean[v] = load(p.m.mean + at + v * WIDTH);
    }
    y = p.y(g, c);
    aside = nullptr;
    aside_row = 0;
    if (p.s.add != NONE) {
      const Stage& other = p.net.stages[p.s.add];
      aside_row = other.out_row;
      aside = p.output_of(p.s.add) + g * other.out_group + c * other.out_plane + other.out_at;
    }
  }
  INLINE_MEMBER Vec normed(Vec y, int v) const { return fma(a[v], y - mean[v], b[v]); }
  INLINE_MEMBER Vec z(Vec y, int r, int q, int v) const {
    Vec z = normed(y, v);
    return aside ? z + load(aside + r * aside_row + q * LANES + v * WIDTH) : z;
  }
};

// Forward: the stage's output ---------------------------------------------------------

template <int ACT, int POOL>
static void apply(const Pass& p, int g) {
  const Stage& s = p.s;
  const int window_h = POOL == MAX_OF_FOUR ? 2 : s.window_h;
  const int window_w = POOL == MAX_OF_FOUR ? 2 : s.window_w;
  const int out_h = s.out_h, out_w = s.out_w;
  const long y_row = s.y_row, out_row = s.out_row;
  const bool ranks_outputs = p.ranks_outputs(), drops = s.dropout > 0;
  const float keeps = 1.f / (1.f - s.dropout);
  const uint32_t threshold = p.drops_below();
  for (int c = 0; c < s.channels; c++) {
    const Channel ch(p, g, c);
    float* out = p.m.out + g * s.out_group + c * s.out_plane + s.out_at;
    float* winner = nullptr;
    if (p.m.winner && s.slot[c] >= 0)
      winner = p.m.winner + (g * (long)s.need_.size() + s.slot[c]) * s.grad_plane;
    for (int r = 0; r < out_h; r++)
      for (int q = 0; q < out_w; q++)
        UNROLL for (int v = 0; v < HALVES; v++) {
          Vec u;
          if (POOL == NO_POOL) {
            Vec y = load(ch.y + r * y_row + q * LANES + v * WIDTH);
            u = act<ACT>(ch.z(y, r, q, v), s);
          } else if (POOL == AVERAGE) {
            u = all(0.f);
            for (int i = 0; i < window_h; i++)
              for (int j = 0; j < window_w; j++) {
                const int row = r * window_h + i, col = q * window_w + j;
                Vec y = load(ch.y + row * y_row + col * LANES + v * WIDTH);
                u += act<ACT>(ch.z(y, row, col, v), s);
              }
            u *= all(1.f / (window_h * window_w));
          } else {
            Vec best = all(-INFINITY), first = all(0.f);
            for (int i = 0; i < window_h; i++)
              for (int j = 0; j < window_w; j++) {
                Vec y = load(ch.y + (r * window_h + i) * y_row + (q * window_w + j) * LANES +
                             v * WIDTH);
                Vec z = ch.normed(y, v);
                if (ACT == OTHER && ranks_outputs) z = act<ACT>(z, s);
                if (i + j == 0) {
                  best = z;
                  first = y;
                  continue;
                }
                Mask wins = (z > best) | (z != z);
                best = where(wins, z, best);
                first = where(wins, y, first);
              }
            u = ACT == OTHER && ranks_outputs ? best : act<ACT>(best, s);
            if (winner) store(winner + (r * out_w + q) * LANES + v * WIDTH, first);
          }
          if (drops)
            u *= where(drawn(p.key, p.place(g, c, r, q) + v * WIDTH, threshold), all(keeps));
          store(out + r * out_row + q * LANES + v * WIDTH, u);
        }
  }
}

// Backward: the gradient of z ---------------------------------------------------------

// The gradient that arrived at a place of the output.
struct Arrived {
  const float* grad;
  bool drops;
  float keeps;
  uint32_t threshold;
  const Pass& p;
  int g, c;

  Arrived(const Pass& p, int g, int c) : p(p), g(g), c(c) {
    grad = p.m.grad + g * p.s.grad_group + c * p.s.grad_plane;
    drops = p.s.dropout > 0;
    keeps = 1.f / (1.f - p.s.dropout);
    threshold = p.drops_below();
  }
  INLINE_MEMBER Vec at(int r, int q, int v) const {
    Vec x = load(grad + ((long)r * p.s.out_w + q) * LANES + v * WIDTH);
    if (!drops) return x;
    return x * where(drawn(p.key, p.place(g, c, r, q) + v * WIDTH, threshold), all(keeps));
  }
};

// Adds up, for each image, the gradient of z, and its product with (y - mean).
template <int ACT, int POOL>
static void add_up(const Pass& p, int g) {
  const Stage& s = p.s;
  const int out_h = s.out_h, out_w = s.out_w;
  const int window_h = POOL == AVERAGE ? s.window_h : 1;
  const int window_w = POOL == AVERAGE ? s.window_w : 1;
  const float share = 1.f / (window_h * window_w);
  for (size_t n = 0; n < s.need_.size(); n++) {
    const int c = s.need_[n];
    const Channel ch(p, g, c);
    const Arrived arrived(p, g, c);
    const bool is_max = POOL == MAX || POOL == MAX_OF_FOUR;
    const float* y = is_max ? p.m.winner + (g * (long)s.need_.size() + n) * s.grad_plane : ch.y;
    const long y_row = is_max ? (long)out_w * LANES : s.y_row;
    Vec total[HALVES] = {}, moment[HALVES] = {};
    for (int r = 0; r < out_h; r++) {
      Vec t[HALVES] = {}, q2[HALVES] = {};
      for (int q = 0; q < out_w; q++)
        UNROLL for (int v = 0; v < HALVES; v++) {
          Vec grad = arrived.at(r, q, v);
          if (POOL == AVERAGE) grad *= all(share);
          for (int i = 0; i < window_h; i++)
            for (int j = 0; j < window_w; j++) {
              const int row = r * window_h + i, col = q * window_w + j;
              Vec value = load(y + row * y_row + col * LANES + v * WIDTH);
              Vec z = is_max ? ch.normed(value, v) : ch.z(value, row, col, v);
              Vec d = act_back<ACT>(grad, z, s);
              t[v] += d;
              q2[v] = fma(d, value - ch.mean[v], q2[v]);
            }
        }
      for (int v = 0; v < HALVES; v++) {
        total[v] += t[v];
        moment[v] += q2[v];
      }
    }
    for (int v = 0; v < HALVES; v++) {
      store(p.work.s1 + n * LANES + v * WIDTH, total[v]);
      store(p.work.s2 + n * LANES + v * WIDTH, moment[v]);
    }
  }
}

// The gradient of y, into dy: a (gradient of z) + sa (y - mean) + sb, the last two only
// with a norm over the batch or over channels.
template <int ACT, int POOL, bool NORMS>
static void make_dy(const Pass& p, int g, bool is_last) {
  const Stage& s = p.s;
  const int h = s.h, w = s.w, out_h = s.out_h, out_w = s.out_w;
  const int window_h = POOL == MAX_OF_FOUR ? 2 : s.window_h;
  const int window_w = POOL == MAX_OF_FOUR ? 2 : s.window_w;
  const bool ranks_outputs = p.ranks_outputs();
  const long y_row = s.y_row, dy_row = (long)s.dy_w * LANES;
  const float share = 1.f / (window_h * window_w);
  Mask valid[HALVES];
  for (int v = 0; v < HALVES; v++) valid[v] = is_last ? p.work.valid[v] : Mask{} - 1;
  const Stage* other = s.add >= 0 && p.net.stages[s.add].goes_back ? &p.net.stages[s.add] : nullptr;
  for (size_t n = 0; n < s.need_.size(); n++) {
    const int c = s.need_[n];
    const Channel ch(p, g, c);
    const Arrived arrived(p, g, c);
    float* dy = p.m.dy + g * s.dy_group() + n * s.dy_plane + s.dy_at;
    float* aside = nullptr;
    if (other && other->slot[c] >= 0)
      aside = p.work.stages[s.add]->grad + g * other->grad_group + c * other->grad_plane;
    Vec sa[HALVES], sb[HALVES];
    for (int v = 0; v < HALVES; v++) {
      sa[v] = NORMS ? load(p.m.sa + p.coefficient(g, c) + v * WIDTH) : all(0.f);
      sb[v] = NORMS ? load(p.m.sb + p.coefficient(g, c) + v * WIDTH) : all(0.f);
    }
    auto place = [&](int row, int col, int v, Vec y, Vec d) {  // d: the gradient of z
      if (aside) {
        float* to = aside + ((long)row * w + col) * LANES + v * WIDTH;
        store(to, s.adds_aside ? load(to) + d : d);
      }
      Vec rest = NORMS ? fma(sa[v], y - ch.mean[v], sb[v]) : all(0.f);
      store(dy + row * dy_row + col * LANES + v * WIDTH, where(valid[v], fma(ch.a[v], d, rest)));
    };
    if (POOL == NO_POOL) {
      for (int r = 0; r < h; r++)
        for (int q = 0; q < w; q++)
          UNROLL for (int v = 0; v < HALVES; v++) {
            Vec y = load(ch.y + r * y_row + q * LANES + v * WIDTH);
            place(r, q, v, y, act_back<ACT>(arrived.at(r, q, v), ch.z(y, r, q, v), s));
          }
      continue;
    }
    const float* winner = nullptr;
    if (POOL != AVERAGE) winner = p.m.winner + (g * (long)s.need_.size() + n) * s.grad_plane;
    for (int r = 0; r < out_h; r++)
      for (int q = 0; q < out_w; q++)
        UNROLL for (int v = 0; v < HALVES; v++) {
          Vec grad = arrived.at(r, q, v), best = all(0.f);
          Mask left = Mask{} - 1;
          if (POOL == AVERAGE) {
            grad *= all(share);
          } else {
            best = ch.normed(load(winner + ((long)r * out_w + q) * LANES + v * WIDTH), v);
            grad = act_back<ACT>(grad, best, s);
            if (ACT == OTHER && ranks_outputs) best = act<ACT>(best, s);
          }
          for (int i = 0; i < window_h; i++)
            for (int j = 0; j < window_w; j++) {
              const int row = r * window_h + i, col = q * window_w + j;
              Vec y = load(ch.y + row * y_row + col * LANES + v * WIDTH);
              if (POOL == AVERAGE) {
                place(row, col, v, y, act_back<ACT>(grad, ch.z(y, row, col, v), s));
                continue;
              }
              Vec z = ch.normed(y, v);
              if (ACT == OTHER && ranks_outputs) z = act<ACT>(z, s);
              Mask wins = left & (z == best);  // the first of equals
              left = left & ~wins;
              place(row, col, v, y, where(wins, grad));
            }
        }
    for (int r = 0; r < h; r++)  // what no window reads
      for (int q = r < out_h * window_h ? out_w * window_w : 0; q < w; q++)
        UNROLL for (int v = 0; v < HALVES; v++)
          place(r, q, v, load(ch.y + r * y_row + q * LANES + v * WIDTH), all(0.f));
  }
}

// Which template --------------------------------------------------------------------

#define BY_POOL(ACT, CALL)                                                    \
  if (p.s.pool == NO_POOL) CALL(ACT, NO_POOL);                                \
  else if (p.s.pool == AVERAGE) CALL(ACT, AVERAGE);                           \
  else if (p.s.window_h == 2 && p.s.window_w == 2) CALL(ACT, MAX_OF_FOUR);    \
  else CALL(ACT, MAX);
#define BY_ACT(CALL)                                                          \
  if (p.s.act == NO_ACT) { BY_POOL(NO_ACT, CALL) }                            \
  else if (p.s.act == RELU) { BY_POOL(RELU, CALL) }                           \
  else { BY_POOL(OTHER, CALL) }

static void apply(const Pass& p, int g) {
#define CALL(A, P) apply<A, P>(p, g)
  BY_ACT(CALL)
#undef CALL
}

static void add_up(const Pass& p, int g) {
#define CALL(A, P) add_up<A, P>(p, g)
  BY_ACT(CALL)
#undef CALL
}

static void make_dy(const Pass& p, int g, bool is_last) {
  if (p.s.norm == BATCH || p.s.norm == GROUP) {
#define CALL(A, P) make_dy<A, P, true>(p, g, is_last)
    BY_ACT(CALL)
#undef CALL
  } else {
#define CALL(A, P) make_dy<A, P, false>(p, g, is_last)
    BY_ACT(CALL)
#undef CALL
  }
}
