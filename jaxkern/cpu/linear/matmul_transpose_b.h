// y = x w^T with dense weights, which are read as they are: one, or each row's own expert.
//
// Vectors along the columns, 4 rows of w against up to 4 of x in registers, sums in
// float32. Neighbouring bfloat16 are two halves of 32 bits, a shift and a mask away from
// float32: x stands in the order in which they come out. Where both operands are
// bfloat16 and the machine multiplies pairs of them, that does it all.
#pragma once
#include "routes.h"
#include "x_rows.h"

#if defined(__AVX512VNNI__) && __has_include(<avx512bf16intrin.h>)
#define JAXKERN_PAIRS
#endif

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int w_rows_at_once = 4, x_rows_at_once = lanes == 8 ? 2 : 4;
constexpr int64_t x_bytes_at_once = 256 << 10;  // that stay in the second cache

// 2 * lanes elements of a row of d from element i on; zeros behind the end.
inline U load_pairs(const void* w, int64_t row, int64_t i, int64_t d) {
  const char* from = static_cast<const char*>(w) + 2 * (row + i);
  if (i + 2 * lanes <= d) return load<U>(from);
  U units = {};
  memcpy(&units, from, 2 * (d - i));
  return units;
}

template <int rows>
inline void store_sums(const F (*total)[w_rows_at_once], float* to) {
  constexpr int n = rows * w_rows_at_once;
  F all[n];
  memcpy(all, total, sizeof(all));
  if (n % lanes) {
    for (int i = 0; i < n; ++i) to[i] = sum_of_lanes(all[i]);
  } else {
    for (int i = 0; i < n; i += lanes) store(to + i, sums_of_lanes(all + i));
  }
}

// 2 * lanes elements as float32: of bfloat16 those at even places first.
template <Float type>
inline void load_two(const void* w, int64_t at, F* two) {
  if (type == Float::bf16) {
    const U pairs = load<U>(static_cast<const uint16_t*>(w) + at);
    two[0] = (F)(pairs << 16), two[1] = (F)(pairs & 0xffff0000);
  } else {
    two[0] = load_f32<type>(w, at), two[1] = load_f32<type>(w, at + lanes);
  }
}

// The same from element i on, zeros behind the end of a row of d.
template <Float type>
inline void load_last(const void* w, int64_t row, int64_t i, int64_t d, F* two) {
  if (type == Float::bf16) {
    const U last = load_pairs(w, row, i, d);
    return load_two<type>(&last, 0, two);
  }
  for (int half = 0; half < 2; ++half) {
    two[half] = load_within<type>(w, row + i + half * lanes, row + d, 0.0f);
  }
}

// sums[m][r] of `rows` rows of x and w_rows_at_once of w, at w_row.
template <Float type, int rows>
void multiply_rows(const float* const* x, const void* w, const int64_t* w_row, int64_t d,
                   float* sums) {
  const int64_t whole = d / (2 * lanes) * (2 * lanes);
  F total[rows][w_rows_at_once] = {};
  auto add = [&](int64_t i, auto load_w) {
    F value[w_rows_at_once][2];
#pragma GCC unroll 4
    for (int r = 0; r < w_rows_at_once; ++r) load_w(r, value[r]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int m = 0; m < rows; ++m) {
        const F xs = load<F>(x[m] + i + half * lanes);
#pragma GCC unroll 4
        for (int r = 0; r < w_rows_at_once; ++r) total[m][r] += value[r][half] * xs;
      }
    }
  };
  for (int64_t i = 0; i < whole; i += 2 * lanes) {
    add(i, [&](int r, F* two) { load_two<type>(w, w_row[r] + i, two); });
  }
  if (whole < d) {
    add(whole, [&](int r, F* two) {
      load_last<type>(w, w_row[r], whole, d, two);
    });
  }
  store_sums<rows>(total, sums);
}

#if defined(JAXKERN_PAIRS)
// The same with x in pairs.
template <int rows>
__attribute__((target("avx512bf16"))) void multiply_pairs(const float* const* x,
                                                          const void* w,
                                                          const int64_t* w_row, int64_t d,
                                                          float* sums) {
  __m512 total[rows][w_rows_at_once] = {};
  for (int64_t i = 0; i < d; i += 2 * lanes) {
    __m512bh pairs[w_rows_at_once];
#pragma GCC unroll 4
    for (int r = 0; r < w_rows_at_once; ++r) {
      pairs[r] = (__m512bh)load_pairs(w, w_row[r], i, d);
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m) {
      const __m512bh xs = (__m512bh)_mm512_loadu_ps(x[m] + i / 2);
#pragma GCC unroll 4
      for (int r = 0; r < w_rows_at_once; ++r) {
        total[m][r] = _mm512_dpbf16_ps(total[m][r], pairs[r], xs);
      }
    }
  }
  F all[rows][w_rows_at_once];
  memcpy(all, total, sizeof(all));
  store_sums<rows>(all, sums);
}
inline bool multiplies_pairs() { return __builtin_cpu_supports("avx512bf16"); }
#else
template <int rows>
void multiply_pairs(const float* const*, const void*, const int64_t*, int64_t, float*) {}
inline bool multiplies_pairs() { return false; }
#endif

// Rows [begin, end) of the routes times w_rows_at_once rows of w from `row` on, those
// below `last`.
template <Float type, bool pairs>
void multiply_block(const Matmul& p, const XRows& x, const void* w, const Routes& routes,
                    int64_t begin, int64_t end, int64_t row, int64_t last) {
  int64_t w_row[w_rows_at_once];  // the last one again where there are fewer
  for (int r = 0; r < w_rows_at_once; ++r) {
    w_row[r] = (row + r < last ? row + r : last - 1) * p.d;
  }
  for (int64_t m = begin; m < end;) {
    const int64_t rest = end - m;
    const int n = rest >= x_rows_at_once ? x_rows_at_once : rest >= 2 ? 2 : 1;
    const float* from[x_rows_at_once];
    for (int i = 0; i < n; ++i) from[i] = x.data + routes.x_row[m + i] * x.stride;
    float sums[x_rows_at_once * w_rows_at_once];
#define JAXKERN_CALL(rows) \
  (pairs ? multiply_pairs<rows> : multiply_rows<type, rows>)(from, w, w_row, p.d, sums)
    n == x_rows_at_once ? JAXKERN_CALL(x_rows_at_once)
    : n == 2            ? JAXKERN_CALL(2)
                        : JAXKERN_CALL(1);
#undef JAXKERN_CALL
    for (int i = 0; i < n; ++i) {
      const int64_t to = routes.y_row[m + i] * p.f + row;
      for (int r = 0; r < w_rows_at_once && row + r < last; ++r) {
        from_f32(p.y_type, sums[i * w_rows_at_once + r], p.y, to + r);
      }
    }
    m += n;
  }
}

// Where each row of y finds its row of x and its weight, and the experts that are asked.
class Plan {
 public:
  explicit Plan(const Matmul& p)
      : asked_{p.expert, p.rows, p.expert ? p.k : 1, p.expert ? p.experts : 1},
        indices_(2 * (asked_.experts + 1) + 2 * p.rows) {
    if (!indices_.get()) return;
    int64_t* rows = indices_.get() + asked_.experts + 1;
    routes = {indices_.get(), rows, rows + p.rows};
    experts = rows + 2 * p.rows;
    routes.sort(asked_, p.y, p.f * (p.y_type == Float::f32 ? 4 : 2));
    for (int64_t e = 0; e < asked_.experts; ++e) {
      if (routes.first[e + 1] > routes.first[e]) experts[count++] = e;
    }
  }
  int64_t x_rows() const { return asked_.count / asked_.per_x; }

  Routes routes = {};
  int64_t* experts = nullptr;  // that have rows; null without memory
  int64_t count = 0;

 private:
  Asked asked_;
  Scratch<int64_t> indices_;
};

template <Float type, bool pairs>
bool multiply(const Matmul& p, const Workers& workers) {
  const Order order = pairs                 ? Order::pairs
                      : type == Float::bf16 ? Order::split
                                            : Order::plain;
  const int64_t stride = row_stride(p.d, order);
  const Plan plan(p);
  Scratch<float> scratch(plan.x_rows() * stride);
  if (!plan.experts || !scratch.get()) return false;
  const XRows x = {scratch.get(), stride};
  prepare_x(p.x, p.x_type, plan.x_rows(), p.d, p.compute_type, order, x, workers);
  const int64_t x_rows = round_up(x_bytes_at_once / (4 * stride) + 1, x_rows_at_once);
  const int64_t wanted = 8 * (int64_t)workers.threads;
  const int64_t share = round_up((p.f + wanted - 1) / wanted, w_rows_at_once);
  const int64_t shares = (p.f + share - 1) / share;
  const int64_t w_bytes = p.f * p.d * (type == Float::f32 ? 4 : 2);
  workers.for_each(plan.count * shares, [&](int64_t item) {
    const int64_t e = plan.experts[item / shares], first = item % shares * share;
    const int64_t last = first + share < p.f ? first + share : p.f;
    const void* w = static_cast<const char*>(p.w) + e * w_bytes;
    const int64_t rows = plan.routes.first[e + 1];
    for (int64_t m = plan.routes.first[e]; m < rows; m += x_rows) {
      const int64_t end = m + x_rows < rows ? m + x_rows : rows;
      for (int64_t row = first; row < last; row += w_rows_at_once) {
        multiply_block<type, pairs>(p, x, w, plan.routes, m, end, row, last);
      }
    }
  });
  return true;
}

inline bool matmul_transpose_b(const Matmul& p, const Workers& workers) {
  if (p.w_type == Float::f16) return multiply<Float::f16, false>(p, workers);
  if (p.w_type == Float::f32) return multiply<Float::f32, false>(p, workers);
  const bool narrow = p.x_type == Float::bf16 || p.compute_type == Float::bf16;
  return (narrow && multiplies_pairs() ? multiply<Float::bf16, true>
                                       : multiply<Float::bf16, false>)(p, workers);
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
