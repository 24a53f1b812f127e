// Rotates pairs of dims of each head by the angle of its token.
#pragma once
#include "../float_types.h"
#include "../memory.h"
#include "../runs.h"

namespace jaxkern {
namespace JAXKERN_ISA {

template <Float type>
inline void copy_elements(const void* x, int64_t begin, int64_t end, void* y) {
  const int64_t size = type == Float::f32 ? 4 : 2;
  memcpy(static_cast<char*>(y) + begin * size, static_cast<const char*>(x) + begin * size,
         (size_t)((end - begin) * size));
}

inline F swap_neighbours(F x) {
  typedef uint64_t Pairs __attribute__((vector_size(4 * lanes)));
  return (F)((Pairs)x << 32 | (Pairs)x >> 32);
}

// The head whose dims begin at a; the other side of a pair lies p.pair_offset behind.
template <Float type>
void rotate_halves(const Rope& p, const float* cos, const float* sin, int64_t a) {
  const int64_t b = a + p.pair_offset;
  for (int64_t i = 0; i < p.pairs; i += lanes) {
    const F c = load_within<Float::f32>(cos, i, p.pairs, 0);
    const F s = load_within<Float::f32>(sin, i, p.pairs, 0) * p.direction;
    const F x = load_within<type>(p.x, a + i, a + p.pairs, 0);
    const F y = load_within<type>(p.x, b + i, b + p.pairs, 0);
    store_within<type>(x * c - y * s, p.y, a + i, a + p.pairs);
    store_within<type>(y * c + x * s, p.y, b + i, b + p.pairs);
  }
  copy_elements<type>(p.x, a + p.pairs, b, p.y);
  copy_elements<type>(p.x, b + p.pairs, a + p.h, p.y);
}

// The same for neighbours, with both factors of every dim side by side.
template <Float type>
void rotate_neighbours(const Rope& p, const float* of_own, const float* of_other,
                       int64_t a) {
  const int64_t end = a + 2 * p.pairs;
  for (int64_t i = 0; i < 2 * p.pairs; i += lanes) {
    const F x = load_within<type>(p.x, a + i, end, 0);
    const F y = x * load<F>(of_own + i) + swap_neighbours(x) * load<F>(of_other + i);
    store_within<type>(y, p.y, a + i, end);
  }
  copy_elements<type>(p.x, end, a + p.h, p.y);
}

template <Float type>
void rotate_token(const Rope& p, int64_t token, float* factors, int64_t width) {
  const float *cos = p.cos + token * p.pairs, *sin = p.sin + token * p.pairs;
  for (int64_t i = 0; p.neighbours && i < p.pairs; ++i) {
    factors[2 * i] = factors[2 * i + 1] = cos[i];
    factors[width + 2 * i] = -p.direction * sin[i];
    factors[width + 2 * i + 1] = p.direction * sin[i];
  }
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t a = (token * p.n + n) * p.h;
    if (p.neighbours) rotate_neighbours<type>(p, factors, factors + width, a);
    else rotate_halves<type>(p, cos, sin, a);
  }
}

inline bool rope(const Rope& p, const Workers& workers) {
  const int64_t runs = num_runs(workers, p.tokens, p.n * p.h);
  const int64_t width = 2 * p.pairs + lanes;
  Flag failed;
  workers.for_each(runs, [&](int64_t run) {
    Scratch<float> factors(2 * width);
    if (!factors.get()) {
      failed.set();
      return;
    }
    memset(factors.get(), 0, (size_t)(2 * width) * sizeof(float));
    for (int64_t i = p.tokens * run / runs; i < p.tokens * (run + 1) / runs; ++i) {
#define JAXKERN_CALL(type) rotate_token<type>(p, i, factors.get(), width)
      JAXKERN_BY_TYPE(p.type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
