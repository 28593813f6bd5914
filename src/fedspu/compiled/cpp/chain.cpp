// A chain of layers, forward and backward, in one call: the interface to Python.
#include "linear.h"
#include "map_norms.h"
#include "norms.h"
#include "rows.h"
#include "smooth.h"

// Input: [image][channel][row][column] -> groups of 16 images --------------------------

static void load_row(const float* const* image, long at, int count, float* to) {
  int i = 0;
  for (; i + 8 <= count; i += 8)
    for (int half = 0; half < LANES; half += 8)
      transpose8(image + half, at + i, to + i * LANES + half, LANES);
  for (; i < count; i++)
    for (int lane = 0; lane < LANES; lane++) to[i * LANES + lane] = image[lane][at + i];
}

static void load_input(const Network& net, Work& work, const float* images,
                       const int64_t* order, long n) {
  const long image = (long)net.channels * net.h * net.w;
  const long row = (long)(net.w + 2 * net.around_w) * LANES, plane = net.input_plane();
  for (long first = 0; first < n; first += LANES) {
    const float* from[LANES];
    for (int lane = 0; lane < LANES; lane++) {  // the last image fills a group up
      const long i = std::min(first + lane, n - 1);
      from[lane] = images + (order ? order[i] : i) * image;
    }
    float* group = work.input + first / LANES * net.channels * plane;
    for (int c = 0; c < net.channels; c++)
      for (int r = 0; r < net.h; r++) {
        float* to = group + c * plane + (r + net.around_h) * row + (long)net.around_w * LANES;
        load_row(from, ((long)c * net.h + r) * net.w, net.w, to);
      }
  }
  for (int lane = 0; lane < LANES; lane++)
    work.valid[lane / WIDTH][lane % WIDTH] = lane <= (n - 1) % LANES ? -1 : 0;
}

// Output: groups of 16 images <-> [image][value] ----------------------------------------

static void copy_output(const Network& net, Work& work, float* to, long n) {
  const Stage& s = net.last();
  const StageMemory& m = *work.stages.back();
  const long size = net.out_size(), map = (long)s.out_h * s.out_w;
  for (long i = 0; i < n; i++) {
    const float* from = m.out + i / LANES * s.out_group + i % LANES;
    for (long k = 0; k < size; k++) to[i * size + k] = from[k / map * s.out_plane + k % map * LANES];
  }
}

static void copy_gradient(const Network& net, Work& work, const float* from, long n) {
  const Stage& s = net.last();
  const long size = net.out_size(), groups = (n + LANES - 1) / LANES;
  float* to = work.stages.back()->grad;
  memset(to, 0, groups * s.grad_group * sizeof(float));
  for (long i = 0; i < n; i++)
    for (long k = 0; k < size; k++)
      to[i / LANES * s.grad_group + k * LANES + i % LANES] = from[i * size + k];
}

// The sum of the losses; the gradient of their mean goes where the backward pass begins.
// ``offsets``, one for each class, are added to the scores first, if there are any.
static double cross_entropy(const Network& net, Work& work, const int64_t* y,
                            const int64_t* order, long n, const float* offsets) {
  const Stage& s = net.last();
  StageMemory& m = *work.stages.back();
  const float share = 1.f / n;
  double loss = 0;
  for (long first = 0; first < n; first += LANES) {
    const float* z = m.out + first / LANES * s.out_group;
    float* d = m.grad + first / LANES * s.grad_group;
    const auto score = [&](int c, int v) {
      const Vec plain = load(z + c * LANES + v * WIDTH);
      return offsets ? plain + all(offsets[c]) : plain;
    };
    Vec top[HALVES], total[HALVES] = {};
    for (int v = 0; v < HALVES; v++) top[v] = score(0, v);
    for (int c = 1; c < s.channels; c++)
      for (int v = 0; v < HALVES; v++) top[v] = larger(top[v], score(c, v));
    for (int c = 0; c < s.channels; c++)
      for (int v = 0; v < HALVES; v++) {
        Vec e = exp_of(score(c, v) - top[v]);
        total[v] += e;
        store(d + c * LANES + v * WIDTH, e);
      }
    const bool is_last = first + LANES >= n;
    for (int v = 0; v < HALVES; v++) {
      Vec factor = all(share) / total[v];
      if (is_last) factor = where(work.valid[v], factor);
      for (int c = 0; c < s.channels; c++) {
        float* p = d + c * LANES + v * WIDTH;
        Vec e = load(p) * factor;
        store(p, is_last ? where(work.valid[v], e) : e);
      }
    }
    for (long i = first; i < std::min(n, first + LANES); i++) {
      const int lane = i - first;
      const long label = y[order ? order[i] : i];
      loss += std::log(total[lane / WIDTH][lane % WIDTH]) + top[lane / WIDTH][lane % WIDTH] -
              z[label * LANES + lane] - (offsets ? offsets[label] : 0.f);
      d[label * LANES + lane] -= share;
    }
  }
  return loss;
}

// A pass over all stages ----------------------------------------------------------------

static uint64_t mixed(uint64_t key) {  // splitmix64
  key += 0x9e3779b97f4a7c15u;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
  return key ^ (key >> 31);
}

static Pass pass_of(const Network& net, Work& work, int l, uint64_t key) {
  return Pass{net, net.stages[l], *work.stages[l], work, l, mixed(key + l)};
}

// What depends on the weights only.
static void prepare(const Network& net, Work& work, const Tensors* tensors) {
  for (size_t l = 0; l < net.stages.size(); l++) {
    const Stage& s = net.stages[l];
    if (s.op == CONVOLUTION) pack(s, *work.stages[l], tensors[l].weight);
    begin_norm(s, *work.stages[l], tensors[l]);
  }
}

static void finish_output(const Pass& p, int g) {
  const Stage& s = p.s;
  for (int c = 0; c < s.channels && (s.around_h || s.around_w); c++)
    clear_around(p.m.out + g * s.out_group + c * s.out_plane, s.out_h, s.out_w, s.around_h,
                 s.around_w, s.out_h + 2 * s.around_h, s.out_w + 2 * s.around_w);
  apply(p, g);
}

static void forward(const Network& net, Work& work, const Tensors* tensors, long n, uint64_t key) {
  const int groups = (n + LANES - 1) / LANES;
  for (size_t l = 0; l < net.stages.size(); l++) {
    const Stage& s = net.stages[l];
    const Tensors& t = tensors[l];
    const Pass p = pass_of(net, work, l, key);
    const float* in = p.output_of(s.from);
    if (s.op == LINEAR) multiply_weights(s, p.m, in, t, groups);
    for (int g = 0; g < groups; g++) {
      if (s.op == CONVOLUTION) convolve(s, p.m, in, t.bias, g);
      if (s.norm == BATCH) add_statistics(p, g, g == groups - 1);
      if (s.norm == GROUP) norm_groups(p, t, g);
      if (s.norm != BATCH) finish_output(p, g);  // at once, while y is in the cache
    }
    if (s.norm == BATCH) {
      finish_statistics(p, t, n);
      for (int g = 0; g < groups; g++) finish_output(p, g);
    }
  }
}

// Without an operation, the gradient of the stage below is dY itself.
static void pass_through(const Stage& s, const Stage& below, StageMemory& m, float* grad) {
  for (int c : below.need_)
    for (long i = 0; i < below.grad_plane; i += WIDTH) {
      float* to = grad + c * below.grad_plane + i;
      Vec x = load(m.dy + s.slot[c] * s.dy_plane + i);
      store(to, s.adds_below ? load(to) + x : x);
    }
}

static void backward(const Network& net, Work& work, const Tensors* tensors, long n, uint64_t key,
                     const Update* update = nullptr) {
  const int groups = (n + LANES - 1) / LANES;
  for (int l = (int)net.stages.size() - 1; l >= 0; l--) {
    const Stage& s = net.stages[l];
    if (!s.goes_back) continue;
    const Tensors& t = tensors[l];
    const Pass p = pass_of(net, work, l, key);
    const Stage* below = s.from >= 0 && net.stages[s.from].goes_back ? &net.stages[s.from] : nullptr;
    const float* in = p.output_of(s.from);

    // The norm's gradients, or the bias's.
    std::fill(p.m.total.begin(), p.m.total.end(), 0);
    std::fill(p.m.square.begin(), p.m.square.end(), 0);
    if (s.norm == BATCH || s.norm == RUNNING || (s.norm == NO_NORM && t.d_bias)) {
      for (int g = 0; g < groups; g++) {
        add_up(p, g);
        add_norm_gradients(p, t, g);
      }
      finish_norm_gradients(p, t, n);
    }

    // The weights' gradients, and the one of the stage below.
    if (s.op == CONVOLUTION) std::fill_n(p.m.weight_sums(), s.num_trained(), 0);
    if (s.op == CONVOLUTION && below) {
      pack_back(s, *below, p.m, t.weight);
      for (size_t i = 0; i < s.need_.size() && !s.replaces_y(); i++)
        clear_around(p.m.dy + i * s.dy_plane, s.h, s.w, s.before_h, s.before_w, s.dy_h, s.dy_w);
    }
    for (int g = 0; g < groups; g++) {
      if (s.norm == GROUP) {
        add_up(p, g);
        add_norm_gradients(p, t, g);
      }
      make_dy(p, g, g == groups - 1);
      add_bias_gradient(p, t, g);
      float* grad = below ? work.stages[s.from]->grad + g * below->grad_group : nullptr;
      if (s.op == CONVOLUTION) {
        if (t.d_weight) add_weight_gradient(s, p.m, in, g);
        if (below) convolve_back(s, *below, p.m, grad, g);
      } else if (s.op == NO_OP && below) {
        pass_through(s, *below, p.m, grad);
      }
    }
    if (s.norm == GROUP)
      for (size_t r = 0; r < s.rows_.size(); r++) {
        if (t.d_scale) t.d_scale[r] = p.m.square[s.rows_[r]];
        if (t.d_shift) t.d_shift[r] = p.m.total[s.rows_[r]];
      }
    if (s.op == CONVOLUTION && t.d_weight)
      std::copy_n(p.m.weight_sums(), s.num_trained(), t.d_weight);
    if (s.op == LINEAR) {
      const bool steps = update && update->is_at_once(s);
      float* moment = steps && update->moments ? update->moments[l].d_weight : nullptr;
      auto below_it = [&] {
        if (below) gradient_below(s, *below, p.m, *work.stages[s.from], t.weight, groups);
      };
      if (steps) below_it();  // before the weights change; otherwise it may overwrite `in`
      if (t.d_weight)
        weight_gradient(s, p.m, work, in, groups, [&](int r, const Columns& c, const float* grad) {
          const long at = r * (long)s.trained.size() + c.first;
          if (!steps) memcpy(t.d_weight + at, grad, c.count * sizeof(float));
          else step_columns(s, t.weight, r, c, grad, moment ? moment + at : nullptr, update->sgd);
        });
      if (!steps) below_it();
    }
  }
}

// The interface -------------------------------------------------------------------------

extern "C" {

void* chain_new(const Description* stages, int count, int channels, int h, int w) try {
  std::unique_ptr<Network> net(new Network);
  net->channels = channels;
  net->h = h;
  net->w = w;
  lay_out(*net, stages, count);
  return net.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

void chain_free(void* net) { delete (Network*)net; }

// How many floats a work space for this many images takes.
long chain_work_size(const void* net, int max_images, int trains) try {
  Work work;
  Arena arena;
  make_memory(*(const Network*)net, work, arena, (max_images + LANES - 1) / LANES, trains);
  return arena.used;
} catch (const std::bad_alloc&) {
  return -1;
}

// A work space in the caller's memory, which must be aligned to 64 bytes.
void* chain_work_new(const void* net, int max_images, int trains, float* memory) try {
  std::unique_ptr<Work> work(new Work);
  Arena arena{memory, 0};
  make_memory(*(const Network*)net, *work, arena, (max_images + LANES - 1) / LANES, trains);
  const Network& of = *(const Network*)net;  // zeros around the images, once and for all
  memset(work->input, 0, work->max_groups * of.channels * of.input_plane() * sizeof(float));
  return work.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

void chain_work_free(void* work) { delete (Work*)work; }

// The output for n images, one row each; keeps what chain_backward reads.
void chain_forward(const void* given, void* space, const Tensors* tensors, const float* images,
                   long n, uint64_t key, float* out) {
  const Network& net = *(const Network*)given;
  Work& work = *(Work*)space;
  prepare(net, work, tensors);
  load_input(net, work, images, nullptr, n);
  forward(net, work, tensors, n, key);
  copy_output(net, work, out, n);
}

// The gradients of what trains, from the gradient of the output.
void chain_backward(const void* given, void* space, const Tensors* tensors, const float* grad,
                    long n, uint64_t key) {
  const Network& net = *(const Network*)given;
  Work& work = *(Work*)space;
  copy_gradient(net, work, grad, n);
  backward(net, work, tensors, n, key);
}

// One step of SGD on the mean cross-entropy of each batch; returns the sum of all losses.
// Batch i has the examples order[starts[i]] to order[starts[i + 1] - 1]. ``offsets`` may
// be null.
double chain_epoch(const void* given, void* space, const Tensors* tensors,
                   const Tensors* moments, const float* images, const int64_t* y,
                   const int64_t* order, const int64_t* starts, long batches, const Sgd* sgd,
                   uint64_t key, const float* offsets) {
  const Network& net = *(const Network*)given;
  Work& work = *(Work*)space;
  double loss = 0;
  for (long i = 0; i < batches; i++) {
    const int64_t* here = order + starts[i];
    const long n = starts[i + 1] - starts[i];
    const uint64_t own = mixed(key + i);
    prepare(net, work, tensors);
    load_input(net, work, images, here, n);
    forward(net, work, tensors, n, own);
    loss += cross_entropy(net, work, y, here, n, offsets);
    const Update update{*sgd, moments};
    backward(net, work, tensors, n, own, &update);
    take_step(net, tensors, update);
  }
  return loss;
}

// The output for any number of images, as many at a time as the work space holds.
void chain_judge(const void* given, void* space, const Tensors* tensors, const float* images,
                 long n, float* out) {
  const Network& net = *(const Network*)given;
  Work& work = *(Work*)space;
  const long image = (long)net.channels * net.h * net.w;
  const long most = (long)work.max_groups * LANES;
  prepare(net, work, tensors);
  for (long first = 0; first < n; first += most) {
    const long here = std::min(n - first, most);
    load_input(net, work, images + first * image, nullptr, here);
    forward(net, work, tensors, here, 0);
    copy_output(net, work, out + first * net.out_size(), here);
  }
}
}
