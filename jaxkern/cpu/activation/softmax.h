// Masked softmax of rows, and its gradient. A row stays in the first caches between its
// passes, so that memory is read and written once.
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"
#include "../runs.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t summed_at_once = 128 * lanes;  // in float32, such sums in double

// All ones where mask[i ...] keeps an element; n is where the mask ends.
inline I kept_lanes(const uint8_t* mask, int64_t i, int64_t n) {
  typedef uint8_t Bytes __attribute__((vector_size(lanes)));
  Bytes bytes = {};
  if (i + lanes <= n) bytes = load<Bytes>(mask + i);
  else for (int64_t j = 0; i + j < n; ++j) bytes[j] = mask[i + j];
  return __builtin_convertvector(bytes, I) != 0;
}

template <Float type>
void softmax_row(const Softmax& p, int64_t row, float* z) {
  const int64_t begin = row * p.s, end = begin + p.s;
  F most = broadcast(-INFINITY);
  for (int64_t i = 0; i < p.s; i += lanes) {
    F x = load_within<type>(p.x, begin + i, end, 0) * p.scale;
    if (p.mask) x = kept_lanes(p.mask, begin + i, end) ? x : broadcast(-INFINITY);
    else if (i + lanes > p.s) {
      for (int64_t j = p.s - i; j < lanes; ++j) x[j] = -INFINITY;
    }
    most = x > most ? x : most;
    store(z + i, x);
  }
  const float highest = max_of_lanes(most), top = highest == -INFINITY ? 0 : highest;
  double total = 0;
  for (int64_t first = 0; first < p.s; first += summed_at_once) {
    const int64_t stop = first + summed_at_once < p.s ? first + summed_at_once : p.s;
    F sum = {};
    for (int64_t i = first; i < stop; i += lanes) {
      const F y = exp_of(load<F>(z + i) - top);
      sum += y;
      store(z + i, y);
    }
    total += sum_of_lanes(sum);
  }
  const float inverse = total == 0 ? 1 : (float)(1 / total);
  for (int64_t i = 0; i < p.s; i += lanes) {
    store_within<type>(load<F>(z + i) * inverse, p.y, begin + i, end);
  }
}

// dx = scale y (dy - sum(y dy))
template <Float type>
void softmax_gradient_row(const Softmax& p, int64_t row) {
  const int64_t begin = row * p.s, end = begin + p.s;
  double total = 0;
  for (int64_t first = begin; first < end; first += summed_at_once) {
    const int64_t stop = first + summed_at_once < end ? first + summed_at_once : end;
    F sum = {};
    for (int64_t i = first; i < stop; i += lanes) {
      sum += load_within<type>(p.y, i, end, 0) * load_within<type>(p.dy, i, end, 0);
    }
    total += sum_of_lanes(sum);
  }
  const float mean = (float)total;
  for (int64_t i = begin; i < end; i += lanes) {
    const F y = load_within<type>(p.y, i, end, 0), dy = load_within<type>(p.dy, i, end, 0);
    store_within<type>(p.scale * y * (dy - mean), p.dx, i, end);
  }
}

inline bool softmax(const Softmax& p, const Workers& workers) {
  const int64_t runs = num_runs(workers, p.rows, p.s);
  Flag failed;
  workers.for_each(runs, [&](int64_t run) {
    Scratch<float> z(p.s + lanes);
    if (!z.get()) {
      failed.set();
      return;
    }
    for (int64_t row = p.rows * run / runs; row < p.rows * (run + 1) / runs; ++row) {
#define JAXKERN_CALL(type) softmax_row<type>(p, row, z.get())
      JAXKERN_BY_TYPE(p.type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  });
  return !failed;
}

inline bool softmax_gradient(const Softmax& p, const Workers& workers) {
  const int64_t runs = num_runs(workers, p.rows, p.s);
  workers.for_each(runs, [&](int64_t run) {
    for (int64_t row = p.rows * run / runs; row < p.rows * (run + 1) / runs; ++row) {
#define JAXKERN_CALL(type) softmax_gradient_row<type>(p, row)
      JAXKERN_BY_TYPE(p.type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  });
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
