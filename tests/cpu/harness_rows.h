// The part of harness.cc for losses, convolutions, softmax and rotations.
#pragma once
#include "../../jaxkern/cpu/simd.h"

struct Floats : Buffer {  // random ones, or those to be written, which begin as NaN
  enum Kind { random, result };
  Floats(int64_t n, Kind kind) : Buffer((size_t)n * 4) {
    for (int64_t i = 0; i < n; ++i) get()[i] = kind == random ? random_float() : NAN;
  }
  float* get() { return (float*)data; }
  float operator[](int64_t i) const { return ((float*)data)[i]; }
};

struct Worst {  // error, relative to 1 and to what it is compared with
  float error = 0;
  void add(float actual, double expected, double scale = 1) {
    const float e = (float)(fabs(actual - expected) / (scale + fabs(expected)));
    if (!(e <= error)) error = e;
  }
};

static float worst_loss(const Workers& workers, int64_t n, int64_t d, int64_t v, float cap) {
  Floats x(n * d, Floats::random), w(v * d, Floats::random);
  Floats lse(n, Floats::result), picked(n, Floats::result), total(n, Floats::result);
  Floats slope(n, Floats::random), on_label(n, Floats::random), on_every(n, Floats::random);
  Floats dx(n * d, Floats::result), dw(v * d, Floats::result);
  Buffer label((size_t)n * 4);
  for (int64_t t = 0; t < n; ++t) {
    ((int32_t*)label.data)[t] = (int32_t)(random_bits() % (v + 1)) - 1;
  }
  LinearCrossEntropy p = {};
  p.x = x.data, p.weight = w.data, p.label = (int32_t*)label.data;
  p.n = n, p.d = d, p.v = v, p.softcap = cap;
  p.lse = lse.get(), p.picked = picked.get(), p.total = total.get();
  p.slope = slope.get(), p.on_label = on_label.get(), p.on_every = on_every.get();
  p.dx = dx.data, p.dweight = dw.data;
  if (!JAXKERN_ISA::kernels.linear_cross_entropy(p, workers)) return NAN;
  if (!JAXKERN_ISA::kernels.linear_cross_entropy_gradient(p, workers)) return NAN;
  Worst worst;
  std::vector<double> dw64(v * d);
  for (int64_t t = 0; t < n; ++t) {
    std::vector<double> z(v), dx64(d);
    double sum = 0, all = 0;
    for (int64_t c = 0; c < v; ++c) {
      for (int64_t i = 0; i < d; ++i) z[c] += (double)x[t * d + i] * w[c * d + i];
      if (cap > 0) z[c] = cap * tanh(z[c] / cap);
      sum += exp(z[c]), all += z[c];
    }
    worst.add(lse[t], log(sum), (double)d);
    worst.add(picked[t], p.label[t] < 0 ? 0 : z[p.label[t]], (double)d);
    worst.add(total[t], all, (double)(d * v));
    for (int64_t c = 0; c < v; ++c) {
      double dz = slope[t] * exp(z[c]) / sum - on_every[t];
      if (c == p.label[t]) dz -= on_label[t];
      if (cap > 0) dz *= 1 - z[c] / cap * z[c] / cap;
      for (int64_t i = 0; i < d; ++i) {
        dx64[i] += dz * w[c * d + i], dw64[c * d + i] += dz * x[t * d + i];
      }
    }
    for (int64_t i = 0; i < d; ++i) worst.add(dx[t * d + i], dx64[i], (double)v);
  }
  for (int64_t i = 0; i < v * d; ++i) worst.add(dw[i], dw64[i], (double)n);
  return worst.error;
}

static float worst_conv(const Workers& workers, int64_t t, int64_t d, int64_t w, bool all) {
  const int64_t b = 2, past = w - 1, n = b * t * d;
  Floats x(n, Floats::random), state(b * past * d, Floats::random);
  Floats weight(d * w, Floats::random), bias(d, Floats::random), dy(n, Floats::random);
  Floats y(n, Floats::result), dx(n, Floats::result), dstate(b * past * d, Floats::result);
  Floats dw(d * w, Floats::result), dbias(d, Floats::result);
  Buffer segment((size_t)(b * t) * 4);
  int32_t* ids = (int32_t*)segment.data;
  for (int64_t i = 0; i < b * t; ++i) ids[i] = (int32_t)(random_bits() % 2);
  CausalConv p = {};
  p.x = x.data, p.weight = weight.get(), p.b = b, p.t = t, p.d = d, p.w = w, p.silu = all;
  p.y = y.data, p.dy = dy.data, p.dx = dx.data, p.dweight = dw.get();
  if (all) {
    p.state = state.data, p.dstate = dstate.data, p.segment = ids;
    p.bias = bias.get(), p.dbias = dbias.get();
  }
  if (!JAXKERN_ISA::kernels.causal_conv(p, workers)) return NAN;
  if (!JAXKERN_ISA::kernels.causal_conv_gradient(p, workers)) return NAN;
  Worst worst;
  std::vector<double> dinput(b * (past + t) * d), dw64(d * w), dbias64(d);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t c = i % d, token = i / d % t, seq = i / d / t;
    double z = all ? bias[c] : 0;
    std::vector<double> seen(w);
    for (int64_t j = 0; j < w; ++j) {
      const int64_t at = token + j - past;
      if (all && ids[seq * t + (at < 0 ? 0 : at)] != ids[seq * t + token]) continue;
      seen[j] = at >= 0 ? x[(seq * t + at) * d + c]
                : all   ? state[(seq * past + past + at) * d + c]
                        : 0;
      z += weight[c * w + j] * seen[j];
    }
    const double s = 1 / (1 + exp(-z)), dz = dy[i] * (all ? s * (1 + z * (1 - s)) : 1);
    worst.add(y[i], all ? z * s : z, (double)w);
    dbias64[c] += dz;
    for (int64_t j = 0; j < w; ++j) {
      const int64_t at = token + j - past;
      if (all && ids[seq * t + (at < 0 ? 0 : at)] != ids[seq * t + token]) continue;
      dw64[c * w + j] += dz * seen[j];
      dinput[(seq * (past + t) + token + j) * d + c] += dz * weight[c * w + j];
    }
  }
  for (int64_t i = 0; i < b * (past + t) * d; ++i) {
    const int64_t c = i % d, at = i / d % (past + t) - past, seq = i / d / (past + t);
    if (at >= 0) worst.add(dx[(seq * t + at) * d + c], dinput[i], (double)w);
    else if (all) worst.add(dstate[(seq * past + past + at) * d + c], dinput[i], (double)w);
  }
  for (int64_t i = 0; i < d * w; ++i) worst.add(dw[i], dw64[i], (double)t);
  for (int64_t i = 0; i < d && all; ++i) worst.add(dbias[i], dbias64[i], (double)t);
  return worst.error;
}

static float worst_softmax(const Workers& workers, int64_t rows, int64_t s, bool masked) {
  Floats x(rows * s, Floats::random), dy(rows * s, Floats::random);
  Floats y(rows * s, Floats::result), dx(rows * s, Floats::result);
  Buffer mask((size_t)(rows * s));
  for (int64_t i = 0; i < rows * s; ++i) mask.data[i] = (char)(random_bits() % 2);
  Softmax p = {x.data, dy.data, Float::f32, masked ? (uint8_t*)mask.data : nullptr,
               rows, s, 4.0f, y.data, dx.data};
  if (!JAXKERN_ISA::kernels.softmax(p, workers)) return NAN;
  if (!JAXKERN_ISA::kernels.softmax_gradient(p, workers)) return NAN;
  Worst worst;
  for (int64_t r = 0; r < rows; ++r) {
    double total = 0, mean = 0;
    for (int64_t i = r * s; i < (r + 1) * s; ++i) {
      total += masked && !mask.data[i] ? 0 : exp(4.0 * x[i]);
    }
    for (int64_t i = r * s; i < (r + 1) * s; ++i) {
      worst.add(y[i], masked && !mask.data[i] ? 0 : exp(4.0 * x[i]) / total, 0.1);
      mean += (double)y[i] * dy[i];
    }
    for (int64_t i = r * s; i < (r + 1) * s; ++i) worst.add(dx[i], 4.0 * y[i] * (dy[i] - mean));
  }
  return worst.error;
}

static float worst_rope(const Workers& workers, int64_t h, int64_t pairs, int64_t offset) {
  const int64_t t = 5, n = 3;  // offset 0: neighbours
  Floats x(t * n * h, Floats::random), y(t * n * h, Floats::result);
  Floats cos(t * pairs, Floats::random), sin(t * pairs, Floats::random);
  Rope p = {x.data, Float::f32, cos.get(), sin.get(), t, n, h, pairs,
            offset ? offset : pairs, !offset, -1.0f, y.data};
  if (!JAXKERN_ISA::kernels.rope(p, workers)) return NAN;
  Worst worst;
  for (int64_t head = 0; head < t * n; ++head) {
    std::vector<double> expected(h);
    for (int64_t i = 0; i < h; ++i) expected[i] = x[head * h + i];
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t a = offset ? i : 2 * i, b = offset ? i + offset : 2 * i + 1;
      const double c = cos[head / n * pairs + i], s = -sin[head / n * pairs + i];
      expected[a] = x[head * h + a] * c - x[head * h + b] * s;
      expected[b] = x[head * h + b] * c + x[head * h + a] * s;
    }
    for (int64_t i = 0; i < h; ++i) worst.add(y[head * h + i], expected[i]);
  }
  return worst.error;
}

static float worst_state_space(const Workers& workers, int64_t t, int64_t h, int64_t size,
                               bool zeros) {
  const int64_t r = 2, k = 2, group = 2, n = k * group, tokens = r * t;
  Floats x(tokens * n * h, Floats::random), step(tokens * n, Floats::random);
  Floats decay(tokens * n, Floats::random), state(r * n * h * size, Floats::random);
  Floats b(tokens * k * size, Floats::random), c(tokens * k * size, Floats::random);
  Floats y(tokens * n * h, Floats::result), after(r * n * h * size, Floats::result);
  const StateSpace p = {x.get(), step.get(), decay.get(), b.get(), c.get(),
                        zeros ? nullptr : state.get(), y.get(), after.get(),
                        r, t, k, group, h, size};
  if (!JAXKERN_ISA::kernels.state_space(p, workers)) return NAN;
  Worst worst;
  for (int64_t row = 0; row < r * n * h; ++row) {
    const int64_t head = row / h % n;
    std::vector<double> s(size);
    for (int64_t j = 0; j < size && !zeros; ++j) s[j] = state[row * size + j];
    for (int64_t i = row / h / n * t; i < (row / h / n + 1) * t; ++i) {
      const int64_t at = i * n + head, shared = (i * k + head / group) * size;
      double read = 0;
      for (int64_t j = 0; j < size; ++j) {
        s[j] = decay[at] * s[j] + (double)step[at] * x[at * h + row % h] * b[shared + j];
        read += s[j] * c[shared + j];
      }
      worst.add(y[at * h + row % h], read, (double)size);
    }
    for (int64_t j = 0; j < size; ++j) worst.add(after[row * size + j], s[j]);
  }
  return worst.error;
}

// Of e**x for x in [-87, 88], in units of the last place; NaN if a special value is wrong.
static float worst_exponential() {
  using namespace JAXKERN_ISA;
  float special[lanes] = {-88, -INFINITY, 0, NAN};
  const F y = exp_of(load<F>(special));
  for (float low : {-100.0f, -200.0f, -1e10f, -1e30f}) {  // where the exponent wraps
    if (exp_of(broadcast(low))[0] != 0) return NAN;
  }
  if (y[0] != 0 || y[1] != 0 || y[2] != 1 || y[3] == y[3]) return NAN;
  if (exp_below(broadcast(INFINITY))[0] != exp_below(broadcast(88.0f))[0]) return NAN;
  Worst worst;
  for (int i = 0; i < 200000; ++i) {
    const float x = -87 + 175 * ((float)i / 200000);
    const double e = exp((double)x);
    // an ulp: 2**-23 of the power of two below
    worst.add((float)((exp_of(broadcast(x))[0] - e) / ldexp(1, ilogb(e) - 23)), 0);
  }
  return worst.error;
}

static void print_rows(const Workers& workers) {
  const float ulps = worst_exponential();
  printf("exponential, beyond the 2 units that simd.h states: %g\n",
         ulps <= 2 ? 0 : (double)ulps);
  for (int64_t n : {1, 50}) {
    for (int64_t d : {1, 53}) {
      for (int64_t v : {3, 1100}) {  // one block of classes, and several
        for (float cap : {0.f, 2.f}) {
          printf("loss n=%d d=%d v=%d softcap=%g %g\n", (int)n, (int)d, (int)v, cap,
                 worst_loss(workers, n, d, v, cap));
        }
      }
    }
  }
  for (int64_t t : {1, 9, 70}) {
    for (int64_t d : {1, 35, 600}) {
      for (int64_t w : {1, 4, 5}) {
        for (bool all : {false, true}) {
          printf("conv t=%d d=%d w=%d all=%d %g\n", (int)t, (int)d, (int)w, all,
                 worst_conv(workers, t, d, w, all));
        }
      }
    }
  }
  for (int64_t t : {1, 7}) {
    for (int64_t h : {1, 23}) {
      for (int64_t size : {1, 35, 64}) {
        for (bool zeros : {false, true}) {
          printf("state_space t=%d h=%d size=%d zeros=%d %g\n", (int)t, (int)h, (int)size,
                 zeros, worst_state_space(workers, t, h, size, zeros));
        }
      }
    }
  }
  for (int64_t rows : {1, 90}) {
    for (int64_t s : {1, 35, 5000}) {
      for (bool masked : {false, true}) {
        printf("softmax rows=%d s=%d masked=%d %g\n", (int)rows, (int)s, masked,
               worst_softmax(workers, rows, s, masked));
      }
    }
  }
  for (int64_t h : {2, 46, 128}) {
    for (int64_t pairs : {h / 2, (h + 7) / 8}) {
      for (int64_t offset : {(int64_t)0, h / 2}) {
        printf("rope h=%d pairs=%d offset=%d %g\n", (int)h, (int)pairs, (int)offset,
               worst_rope(workers, h, pairs, offset));
      }
    }
  }
}
