// RMS and layer norm, of x or of x + residual, and their gradients.
//
// Rows are dealt out in runs. In the backward pass each run sums the gradients of weight
// and bias for itself, so everything is read from memory once.
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"
#include "../runs.h"

namespace jaxkern {
namespace JAXKERN_ISA {

inline float mean_of(const float* x, int64_t d) {
  F sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= d; i += 4 * lanes) {
    for (int c = 0; c < 4; ++c) sum[c] += load<F>(x + i + c * lanes);
  }
  for (; i < d; i += lanes) sum[0] += load_within<Float::f32>(x, i, d, 0);
  return sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)d;
}

// Mean of (x - mean)**2.
inline float mean_square(const float* x, int64_t d, float mean) {
  F sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= d; i += 4 * lanes) {
    for (int c = 0; c < 4; ++c) {
      const F y = load<F>(x + i + c * lanes) - mean;
      sum[c] += y * y;
    }
  }
  for (; i < d; i += lanes) {
    const F y = load_within<Float::f32>(x, i, d, mean) - mean;
    sum[0] += y * y;
  }
  return sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)d;
}

// to = x [+ residual] in float32.
template <Float type>
void sum_row(const Norm& p, int64_t row, float* to) {
  const int64_t first = row * p.d, end = first + p.d;
  for (int64_t i = first; i < end; i += lanes) {
    F y = load_within<type>(p.x, i, end, 0);
    if (p.residual) {
#define JAXKERN_CALL(type) load_within<type>(p.residual, i, end, 0)
      y += JAXKERN_BY_TYPE(p.residual_type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
    store_within<Float::f32>(y, to, i - first, p.d);
  }
}

inline void store_residual(const Norm& p, F value, int64_t i, int64_t end, void* to) {
#define JAXKERN_CALL(type) store_within<type>(value, to, i, end)
  JAXKERN_BY_TYPE(p.residual_type, JAXKERN_CALL);
#undef JAXKERN_CALL
}

template <Float type>
void norm_row(const Norm& p, int64_t row, float* x) {
  sum_row<type>(p, row, x);
  const float mean = p.centred ? mean_of(x, p.d) : 0;
  const float rstd = 1 / sqrtf(mean_square(x, p.d, mean) + p.eps);
  if (p.centred) p.mean[row] = mean;
  p.rstd[row] = rstd;
  const int64_t first = row * p.d, end = first + p.d;
  for (int64_t i = 0; i < p.d; i += lanes) {
    const F total = load_within<Float::f32>(x, i, p.d, 0);
    F y = (total - mean) * rstd;
    if (p.weight) y *= load_within<Float::f32>(p.weight, i, p.d, 0);
    if (p.bias) y += load_within<Float::f32>(p.bias, i, p.d, 0);
    store_within<type>(y, p.y, first + i, end);
    if (p.residual) store_residual(p, total, first + i, end, p.total);
  }
}

inline bool norm(const Norm& p, const Workers& workers) {
  const int64_t runs = num_runs(workers, p.rows, p.d);
  Flag failed;
  workers.for_each(runs, [&](int64_t run) {
    Scratch<float> x(p.d);
    if (!x.get()) {
      failed.set();
      return;
    }
    for (int64_t row = p.rows * run / runs; row < p.rows * (run + 1) / runs; ++row) {
#define JAXKERN_CALL(type) norm_row<type>(p, row, x.get())
      JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  });
  return !failed;
}

// With xhat = (x - mean) rstd and dxhat = dy weight:
// dx = rstd (dxhat - mean(dxhat) - xhat mean(dxhat xhat)), without the mean if not centred.
template <Float type>
void norm_gradient_row(const Norm& p, int64_t row, float* x, float* dweight, float* dbias) {
  sum_row<type>(p, row, x);
  const float mean = p.centred ? p.mean[row] : 0, rstd = p.rstd[row];
  const int64_t first = row * p.d, end = first + p.d;
  F sum = {}, along = {};
  for (int64_t i = 0; i < p.d; i += lanes) {
    // zero behind the row: nothing is added there
    const F xhat = (load_within<Float::f32>(x, i, p.d, mean) - mean) * rstd;
    const F dy = load_within<type>(p.dy, first + i, end, 0);
    const F dxhat = p.weight ? dy * load_within<Float::f32>(p.weight, i, p.d, 0) : dy;
    sum += dxhat;
    along += dxhat * xhat;
    if (p.weight) {
      store_within<Float::f32>(load_within<Float::f32>(dweight, i, p.d, 0) + dy * xhat,
                               dweight, i, p.d);
    }
    if (p.bias) {
      store_within<Float::f32>(load_within<Float::f32>(dbias, i, p.d, 0) + dy, dbias, i,
                               p.d);
    }
  }
  const float shift = p.centred ? sum_of_lanes(sum) / (float)p.d : 0;
  const float slope = sum_of_lanes(along) / (float)p.d;
  for (int64_t i = 0; i < p.d; i += lanes) {
    const F xhat = (load_within<Float::f32>(x, i, p.d, mean) - mean) * rstd;
    const F dy = load_within<type>(p.dy, first + i, end, 0);
    const F dxhat = p.weight ? dy * load_within<Float::f32>(p.weight, i, p.d, 0) : dy;
    F dx = rstd * (dxhat - shift - xhat * slope);
    if (p.residual) {
#define JAXKERN_CALL(type) load_within<type>(p.dtotal, first + i, end, 0)
      dx += JAXKERN_BY_TYPE(p.residual_type, JAXKERN_CALL);
#undef JAXKERN_CALL
      store_residual(p, dx, first + i, end, p.dresidual);
    }
    store_within<type>(dx, p.dx, first + i, end);
  }
}

inline bool norm_gradient(const Norm& p, const Workers& workers) {
  const int64_t runs = num_runs(workers, p.rows, p.d), width = 3 * p.d;
  Scratch<float> scratch(runs * width);  // of each run: a row, dweight, dbias
  if (!scratch.get()) return false;
  workers.for_each(runs, [&](int64_t run) {
    float* x = scratch.get() + run * width;
    memset(x, 0, (size_t)width * sizeof(float));
    for (int64_t row = p.rows * run / runs; row < p.rows * (run + 1) / runs; ++row) {
#define JAXKERN_CALL(type) norm_gradient_row<type>(p, row, x, x + p.d, x + 2 * p.d)
      JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  });
  for (int64_t i = 0; i < p.d; ++i) {
    float dweight = 0, dbias = 0;
    for (int64_t run = 0; run < runs; ++run) {
      dweight += scratch[run * width + p.d + i];
      dbias += scratch[run * width + 2 * p.d + i];
    }
    if (p.weight) p.dweight[i] = dweight;
    if (p.bias) p.dbias[i] = dbias;
  }
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
