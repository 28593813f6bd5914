// What a network is, and the memory that a step needs.
//
// A stage is one weighted operation, or none, and what follows it, in this order: norm,
// sum with an earlier stage, activation, pool, dropout. Maps are stored as
// [group of 16 images][channel][row][column][image], so one vector instruction does the
// same for many images, and no kernel size or stride needs code of its own.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "vectors.h"

enum Op { NO_OP, CONVOLUTION, LINEAR };
enum Norm { NO_NORM, BATCH, RUNNING, GROUP };
enum Act { NO_ACT, RELU, LEAKY, TANH, GELU, GELU_TANH };
enum Pool { NO_POOL, MAX, AVERAGE };
enum { INPUT = -1, NONE = -2 };

extern "C" {
// A stage as Python describes it (network.py has the same fields in the same order).
struct Description {
  int32_t op, from, add;               // from, add: an earlier stage, INPUT or NONE
  int32_t in_channels, in_h, in_w;     // of its input
  int32_t channels, h, w;              // after the operation
  int32_t kernel_h, kernel_w, stride_h, stride_w;
  int32_t pad_h, pad_w, dilation_h, dilation_w;
  int32_t norm, num_groups, act;
  int32_t pool, window_h, window_w;
  int32_t goes_back;                   // whether the backward pass reaches it
  int32_t num_need, num_rows, num_cols;
  const int32_t* need;                 // outputs that carry gradient
  const int32_t* rows;                 // outputs that train, as positions in need
  const int32_t* cols;                 // inputs (channels) that train
  float slope, dropout, eps, momentum;
};
// The values of a stage's parameters, and where their gradients go (null: not wanted).
struct Tensors {
  float *weight, *bias, *scale, *shift, *mean, *variance;
  float *d_weight, *d_bias, *d_scale, *d_shift;
};
struct Sgd {
  float lr, momentum, decay, clip;     // clip 0: none
};
}

struct Arena {  // memory that the caller gives; without any, what is needed is counted
  float* memory = nullptr;
  long used = 0;
};

struct Buffer {  // floats of an arena, aligned for vectors
  float* at = nullptr;
  void make(Arena& arena, long count) {
    const long size = (std::max(count, 1L) + LANES - 1) / LANES * LANES;
    if (arena.memory) at = arena.memory + arena.used;
#ifdef SEPARATE_BUFFERS  // for sanitizers, which then see every step outside of one
    if (arena.memory) at = (float*)aligned_alloc(64, size * sizeof(float));
#endif
    arena.used += size;
  }
  operator float*() const { return at; }
};

struct Split {  // a number of things as blocks of nearly equal size
  std::vector<int> first, size;
  Split() = default;
  Split(int count, int most) {
    int blocks = (count + most - 1) / most;
    for (int i = 0, at = 0; i < blocks; i++) {
      size.push_back(count / blocks + (i < count % blocks));
      first.push_back(at);
      at += size.back();
    }
  }
};

// Where one pixel of the gradient below comes from: the taps of inputs whose row and
// column have the same rest when divided by the strides.
struct Taps {
  int row, col;
  std::vector<long> offset;            // in the gradient of the output
  std::vector<long> weight;            // of input channel 0
};

struct Stage : Description {
  std::vector<int> need_, rows_, cols_;
  std::vector<int> slot;               // channel -> its position in need, or -1, -2, ...
  int out_h, out_w;                    // after the pool
  int around_h = 0, around_w = 0;      // padding around its output, for its readers
  bool adds_below = false;             // the gradient below was begun by a later stage
  bool adds_aside = false;             // the same for the stage that it adds
  bool is_read_back = false;           // whether any later stage sends gradient to it
  int readers = 0, adders = 0;         // how many stages read it, and add it
  bool feeds_linear = false;           // then its maps follow one another without gaps
  bool feeds_large = false;            // a linear layer that is large
  // Its input, as stored by the stage before.
  long in_group, in_plane, in_row, in_at;
  // Its values before the norm.
  long y_group, y_plane, y_row;
  long out_group, out_plane, out_row, out_at, grad_plane, grad_group;
  int taps_per_channel;
  std::vector<long> offset;            // of every weight of an output, in the input
  std::vector<long> trained;           // the weights of an output that train
  std::vector<std::pair<long, long>> runs;  // the same: first and number of neighbours
  Split out_blocks, in_blocks;
  std::vector<long> outputs_back;      // a linear layer: where the weights of what needs
  std::vector<long> inputs_back;       // gradient are, and which inputs need it below
  std::vector<Taps> taps;
  int before_h, before_w, dy_h, dy_w;  // zeros before dY, and its size with zeros
  long dy_plane, dy_at;

  // Whether its gradient is stored where its output was: by then nobody reads that.
  bool shares_memory() const { return readers == 1 && adders == 0 && !feeds_large; }
  // Whether its weights do not stay in the cache from one use to the next.
  bool is_large() const { return op == LINEAR && (long)channels * in_channels * in_h * in_w >= 1 << 18; }
  // Whether dY is stored where y was: place by place, it is the last to read it.
  bool replaces_y() const {
    if (op == LINEAR) return (int)need_.size() == channels;
    return op == CONVOLUTION && dy_plane == y_plane;
  }
  // Linear layers need dY of all groups at once, others of one after the other.
  long dy_group() const {
    return op == LINEAR || replaces_y() ? (long)need_.size() * dy_plane : 0;
  }
  // Whether channels without gradient are stored apart, and only while they are needed.
  bool has_others() const { return op == CONVOLUTION && (int)need_.size() < channels; }
  long coefficients(int groups) const {  // in floats, of its norm
    if (norm == NO_NORM) return LANES;
    return (long)channels * LANES * (norm == GROUP ? groups : 1);
  }
  long num_trained() const { return (long)rows_.size() * trained.size(); }
};

// A plane's size for kernels that step from channel to channel: with a power of two, all
// channels would fall on the same lines of the cache.
static long spread(long plane) {
  long lines = plane / LANES;
  while (lines % 8 != 5) lines++;
  return lines * LANES;
}

struct Network {
  int channels, h, w;                  // of its input
  int around_h = 0, around_w = 0;
  bool feeds_linear = false;
  std::vector<Stage> stages;

  const Stage& last() const { return stages.back(); }
  long out_size() const { return (long)last().channels * last().out_h * last().out_w; }
  long input_plane() const {
    const long plane = (long)(h + 2 * around_h) * (w + 2 * around_w) * LANES;
    return feeds_linear ? plane : spread(plane);
  }
};

struct StageMemory {
  Buffer y, others, out, grad, winner, dy, packed, packed_back, sums;
  Buffer a, b, mean, deviation, sa, sb;  // 16 for each channel, of each group if need be
  Buffer d_weight;                       // doubles
  std::vector<double> total, square, rest;
  std::vector<float> shift;

  double* weight_sums() const { return (double*)(float*)d_weight; }
  float* y_of(const Stage& s, int g, int c) const {  // a channel before the norm
    if (!s.has_others()) return y + g * s.y_group + c * s.y_plane;
    const long need = s.need_.size();
    if (s.slot[c] >= 0) return y + (g * need + s.slot[c]) * s.y_plane;
    return others + (g * (s.channels - need) - 1 - s.slot[c]) * s.y_plane;
  }
};

enum { PANELS = 16 };  // at most, of sixteen inputs, whose weights' gradients are found together

struct Work {
  int max_groups;
  bool trains;
  std::vector<std::unique_ptr<StageMemory>> stages;
  Buffer input, turned;
  Buffer s1, s2;                         // of one stage: sums for its norm's backward pass
  Mask valid[HALVES];                    // images of the last group
};

static int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

static void lay_out_convolution(Stage& s) {
  s.before_h = s.before_w = 0;
  int after_h = 0, after_w = 0;
  for (int pass = 0; pass < 2; pass++) {  // first how many zeros are needed, then where
    if (pass) {
      s.dy_h = s.before_h + s.h + after_h;
      s.dy_w = s.before_w + s.w + after_w;
      s.dy_plane = (long)s.dy_h * s.dy_w * LANES;
      if (s.dy_plane != s.y_plane) s.dy_plane = spread(s.dy_plane);
    }
    for (int r = 0; r < std::min(s.stride_h, s.in_h); r++)
      for (int c = 0; c < std::min(s.stride_w, s.in_w); c++) {
        Taps t{r, c, {}, {}};
        int rows = (s.in_h - r + s.stride_h - 1) / s.stride_h;
        int cols = (s.in_w - c + s.stride_w - 1) / s.stride_w;
        for (size_t o = 0; o < s.need_.size(); o++)
          for (int i = 0; i < s.kernel_h; i++)
            for (int j = 0; j < s.kernel_w; j++) {
              int y = r + s.pad_h - i * s.dilation_h, x = c + s.pad_w - j * s.dilation_w;
              int at_y = floor_div(y, s.stride_h), at_x = floor_div(x, s.stride_w);
              if (y != at_y * s.stride_h || x != at_x * s.stride_w) continue;
              if (!pass) {
                s.before_h = std::max(s.before_h, -at_y);
                s.before_w = std::max(s.before_w, -at_x);
                after_h = std::max(after_h, rows + at_y - s.h);
                after_w = std::max(after_w, cols + at_x - s.w);
                continue;
              }
              const long row = s.before_h + at_y;
              t.offset.push_back(o * s.dy_plane + (row * s.dy_w + s.before_w + at_x) * LANES);
              t.weight.push_back((long)s.need_[o] * s.in_channels * s.taps_per_channel +
                                 i * s.kernel_w + j);
            }
        if (pass) s.taps.push_back(t);
      }
  }
}

// Works out every size and offset. Throws nothing but bad_alloc; Python has checked it all.
static void lay_out(Network& net, const Description* given, int count) {
  net.stages.resize(count);
  for (int l = 0; l < count; l++) {
    Stage& s = net.stages[l];
    (Description&)s = given[l];
    s.need_.assign(s.need, s.need + s.num_need);
    s.rows_.assign(s.rows, s.rows + s.num_rows);
    s.cols_.assign(s.cols, s.cols + s.num_cols);
    s.slot.assign(s.channels, -1);
    for (int i = 0; i < s.num_need; i++) s.slot[s.need_[i]] = i;
    for (int c = 0, others = 0; c < s.channels; c++)
      if (s.slot[c] < 0) s.slot[c] = -++others;
    s.out_h = s.pool ? s.h / s.window_h : s.h;
    s.out_w = s.pool ? s.w / s.window_w : s.w;
    if (s.op == CONVOLUTION) {
      int& around_h = s.from == INPUT ? net.around_h : net.stages[s.from].around_h;
      int& around_w = s.from == INPUT ? net.around_w : net.stages[s.from].around_w;
      around_h = std::max(around_h, (int)s.pad_h);
      around_w = std::max(around_w, (int)s.pad_w);
    }
  }
  for (int l = count - 1; l >= 0; l--) {  // who begins each gradient, who adds to it
    Stage& s = net.stages[l];
    if (!s.goes_back) continue;
    if (s.add >= 0 && net.stages[s.add].goes_back) {
      s.adds_aside = net.stages[s.add].is_read_back;
      net.stages[s.add].is_read_back = true;
    }
    if (s.from >= 0 && net.stages[s.from].goes_back) {
      s.adds_below = net.stages[s.from].is_read_back;
      net.stages[s.from].is_read_back = true;
    }
  }
  for (const Stage& s : net.stages) {
    if (s.from >= 0) net.stages[s.from].readers++;
    if (s.op == LINEAR)
      (s.from >= 0 ? net.stages[s.from].feeds_linear : net.feeds_linear) = true;
    if (s.from >= 0 && s.is_large()) net.stages[s.from].feeds_large = true;
    if (s.add >= 0) net.stages[s.add].adders++;
  }
  for (int l = 0; l < count; l++) {
    Stage& s = net.stages[l];
    int around_h = s.from == INPUT ? net.around_h : net.stages[s.from].around_h;
    int around_w = s.from == INPUT ? net.around_w : net.stages[s.from].around_w;
    s.in_row = (long)(s.in_w + 2 * around_w) * LANES;
    s.in_plane = s.from == INPUT ? net.input_plane() : net.stages[s.from].out_plane;
    s.in_group = s.in_channels * s.in_plane;
    s.in_at = (around_h - s.pad_h) * s.in_row + (around_w - s.pad_w) * LANES;
    s.y_row = (long)s.w * LANES;
    s.y_plane = s.h * s.y_row;
    s.y_group = s.channels * s.y_plane;
    if (s.op == NO_OP) {  // reads its input where it is
      s.y_row = s.in_row;
      s.y_plane = s.in_plane;
      s.y_group = s.in_group;
    }
    s.out_row = (long)(s.out_w + 2 * s.around_w) * LANES;
    s.out_plane = (s.out_h + 2 * s.around_h) * s.out_row;
    if (!s.feeds_linear && l + 1 < count) s.out_plane = spread(s.out_plane);
    s.out_group = s.channels * s.out_plane;
    s.out_at = s.around_h * s.out_row + s.around_w * LANES;
    s.grad_plane = (long)s.out_h * s.out_w * LANES;
    s.grad_group = s.shares_memory() ? s.out_group : s.channels * s.grad_plane;
    s.taps_per_channel = s.op == CONVOLUTION ? s.kernel_h * s.kernel_w
                         : s.op == LINEAR    ? s.in_h * s.in_w
                                             : 0;
    for (int c : s.cols_)
      for (int t = 0; t < s.taps_per_channel; t++)
        s.trained.push_back((long)c * s.taps_per_channel + t);
    for (long at : s.trained) {
      if (s.runs.empty() || at != s.runs.back().first + s.runs.back().second)
        s.runs.push_back({at, 0});
      s.runs.back().second++;
    }
    if (s.op == CONVOLUTION) {
      for (int c = 0; c < s.in_channels; c++)
        for (int i = 0; i < s.kernel_h; i++)
          for (int j = 0; j < s.kernel_w; j++)
            s.offset.push_back(c * s.in_plane + i * s.dilation_h * s.in_row +
                               (long)j * s.dilation_w * LANES);
    }
    s.out_blocks = Split(s.channels, OUTPUTS);
    s.before_h = s.before_w = 0;
    s.dy_h = s.h;
    s.dy_w = s.w;
    s.dy_plane = (long)s.h * s.w * LANES;
    if (s.goes_back && s.op == CONVOLUTION && s.from >= 0 &&
        net.stages[s.from].goes_back) {
      lay_out_convolution(s);
      s.in_blocks = Split(net.stages[s.from].need_.size(), OUTPUTS);
    }
    if (s.goes_back && s.op == LINEAR && s.from >= 0 && net.stages[s.from].goes_back) {
      for (int o : s.need_) s.outputs_back.push_back((long)o * s.in_channels * s.taps_per_channel);
      for (int c : net.stages[s.from].need_)
        for (int t = 0; t < s.taps_per_channel; t++)
          s.inputs_back.push_back((long)c * s.taps_per_channel + t);
      s.in_blocks = Split(s.inputs_back.size(), OUTPUTS);
    }
    s.dy_at = ((long)s.before_h * s.dy_w + s.before_w) * LANES;
  }
}

static void make_memory(const Network& net, Work& work, Arena& arena, int groups, bool trains) {
  work.max_groups = groups;
  work.trains = trains;
  work.input.make(arena, groups * net.channels * net.input_plane());
  for (const Stage& s : net.stages) {  // what does not depend on the images
    work.stages.emplace_back(new StageMemory);
    StageMemory& m = *work.stages.back();
    for (Buffer* b : {&m.a, &m.b, &m.mean, &m.deviation}) b->make(arena, s.coefficients(groups));
    m.total.resize(s.channels);
    m.square.resize(s.channels);
    m.rest.resize(s.channels);
    m.shift.resize(s.channels);
    if (s.op == CONVOLUTION) m.packed.make(arena, s.channels * (long)s.offset.size());
  }
  size_t widest = 0;
  for (const Stage& s : net.stages) widest = std::max(widest, s.need_.size());
  if (trains) {
    for (Buffer* b : {&work.s1, &work.s2}) b->make(arena, widest * LANES);
    long panels = 0;
    for (const Stage& s : net.stages)
      if (s.op == LINEAR) panels = std::max(panels, ((long)s.trained.size() + LANES - 1) / LANES);
    work.turned.make(arena, std::min(panels, (long)PANELS) * groups * LANES * LANES);
  }
  long most = 0;
  for (size_t l = 0; l < net.stages.size(); l++) {
    const Stage& s = net.stages[l];
    StageMemory& m = *work.stages[l];
    const long need = s.need_.size();
    m.out.make(arena, groups * s.out_group);
    if (s.op != NO_OP) m.y.make(arena, groups * (s.has_others() ? need * s.y_plane : s.y_group));
    if (trains && s.goes_back) {
      if (s.shares_memory()) m.grad = m.out;
      else m.grad.make(arena, groups * s.grad_group);
      if (s.pool == MAX) m.winner.make(arena, groups * need * s.grad_plane);
      if (s.replaces_y()) m.dy = m.y;
      else m.dy.make(arena, (s.op == LINEAR ? groups : 1) * need * s.dy_plane);
      for (Buffer* b : {&m.sa, &m.sb}) b->make(arena, s.coefficients(groups));
      if (s.op == CONVOLUTION) {
        const long below = s.from >= 0 ? net.stages[s.from].need_.size() : 0;
        m.packed_back.make(arena, need * s.taps_per_channel * below);
        m.sums.make(arena, ROWS * (s.trained.size() + taps_at_once(1)) * LANES);
        m.d_weight.make(arena, 2 * s.num_trained());
      }
    }
    if (s.has_others()) {  // later stages come to lie where these were
      const long used = arena.used;
      m.others.make(arena, groups * (s.channels - need) * s.y_plane);
      most = std::max(most, arena.used);
      arena.used = used;
    }
  }
  arena.used = std::max(arena.used, most);
}

// Zeros around maps of h rows and w columns, stored with `before` zeros and more after.
static void clear_around(float* plane, int h, int w, int before_h, int before_w, int all_h,
                         int all_w) {
  const long row = (long)all_w * LANES, size = sizeof(float);
  memset(plane, 0, before_h * row * size);
  memset(plane + (before_h + h) * row, 0, (all_h - before_h - h) * row * size);
  for (int r = before_h; r < before_h + h; r++) {
    memset(plane + r * row, 0, (long)before_w * LANES * size);
    memset(plane + r * row + (long)(before_w + w) * LANES, 0,
           (long)(all_w - before_w - w) * LANES * size);
  }
}
