// Plain SGD with momentum and weight decay, of what trains.
#pragma once

#include "network.h"

typedef std::vector<std::pair<long, long>> Runs;

struct Parameter {  // what trains of it: some rows, and some runs of each
  float *value, *grad, *moment;
  long row;
  const Runs* runs;
  long count;                          // of what trains of a row
};

template <class Use>
static void each_parameter(const Network& net, const Tensors* tensors, const Tensors* moments,
                           Use use) {
  static const Runs one{{0, 1}};
  for (size_t l = 0; l < net.stages.size(); l++) {
    const Stage& s = net.stages[l];
    const Tensors &t = tensors[l], m = moments ? moments[l] : Tensors{};
    const long row = (long)s.in_channels * s.taps_per_channel;
    if (t.d_weight)
      use(s, Parameter{t.weight, t.d_weight, m.d_weight, row, &s.runs, (long)s.trained.size()});
    if (t.d_bias) use(s, Parameter{t.bias, t.d_bias, m.d_bias, 1, &one, 1});
    if (t.d_scale) use(s, Parameter{t.scale, t.d_scale, m.d_scale, 1, &one, 1});
    if (t.d_shift) use(s, Parameter{t.shift, t.d_shift, m.d_shift, 1, &one, 1});
  }
}

static void step_run(float* __restrict w, const float* __restrict grad, float* __restrict moment,
                     long count, float factor, const Sgd& sgd) {
  const float lr = sgd.lr, decay = sgd.decay, momentum = sgd.momentum;
  if (moment)
    for (long k = 0; k < count; k++) {
      moment[k] = momentum * moment[k] + (factor * grad[k] + decay * w[k]);
      w[k] -= lr * moment[k];
    }
  else
    for (long k = 0; k < count; k++) w[k] -= lr * (factor * grad[k] + decay * w[k]);
}

// Large weights take their step as soon as their gradient is known, while it is in the
// cache; but not if gradients are clipped, which is known only when all of them are.
struct Update {
  const Sgd& sgd;
  const Tensors* moments;              // or null
  bool is_at_once(const Stage& s) const { return s.is_large() && !(sgd.clip > 0); }
};

static void take_step(const Network& net, const Tensors* tensors, const Update& update) {
  const Sgd& sgd = update.sgd;
  const Tensors* moments = update.moments;
  float factor = 1;
  if (sgd.clip > 0) {
    double square = 0;
    each_parameter(net, tensors, moments, [&](const Stage& s, const Parameter& p) {
      for (long i = 0; i < (long)s.rows_.size() * p.count; i++)
        square += (double)p.grad[i] * p.grad[i];
    });
    const double bound = sgd.clip / (std::sqrt(square) + 1e-6);
    factor = bound > 1 ? 1 : bound;  // NaN stays
  }
  each_parameter(net, tensors, moments, [&](const Stage& s, const Parameter& p) {
    if (p.runs == &s.runs && update.is_at_once(s)) return;
    for (size_t r = 0; r < s.rows_.size(); r++) {
      long at = r * p.count;
      for (const auto& run : *p.runs) {
        step_run(p.value + s.need_[s.rows_[r]] * p.row + run.first, p.grad + at,
                 p.moment ? p.moment + at : nullptr, run.second, factor, sgd);
        at += run.second;
      }
    }
  });
}
