// y = x w^T with bfloat16 or float16 weights, which are read once, as they are.
//
// Few rows of x: vectors along the columns, 4 rows of w against up to 4 of x, so that w
// comes from memory in long runs. Many rows: panels.h. Sums are float32; where both
// operands are bfloat16 and the machine multiplies pairs of them, many rows use that.
#pragma once
#include "panels.h"

namespace jaxkern {
namespace JAXKERN_ISA {

// up to which no panels are made
constexpr int64_t few_x_rows = lanes == 16 ? 32 : 8, few_before_pairs = 8;
constexpr int few_at_once = lanes == 8 ? 2 : 4, w_rows_at_once = 4;

// sums[m][r] of `rows` rows of x and w_rows_at_once of w; w_row says where those begin.
template <Float type, int rows>
void multiply_few(const float* x, int64_t stride, const void* w, const int64_t* w_row,
                  int64_t d, float (*sums)[w_rows_at_once]) {
  F total[rows][w_rows_at_once] = {};
  const int64_t whole = d / lanes * lanes;
  auto add = [&](int64_t i, auto load_w) {
    F value[w_rows_at_once];
#pragma GCC unroll 4
    for (int r = 0; r < w_rows_at_once; ++r) value[r] = load_w(w_row[r] + i);
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m) {
      const F xs = load<F>(x + m * stride + i);
#pragma GCC unroll 4
      for (int r = 0; r < w_rows_at_once; ++r) total[m][r] += value[r] * xs;
    }
  };
  for (int64_t i = 0; i < whole; i += lanes) {
    add(i, [&](int64_t at) { return load_f32<type>(w, at); });
  }
  if (whole < d) add(whole, [&](int64_t at) { return load_tail<type>(w, at, d - whole, 0); });
  for (int m = 0; m < rows; ++m) {
    for (int r = 0; r < w_rows_at_once; ++r) sums[m][r] = sum_of_lanes(total[m][r]);
  }
}

template <Float type>
void multiply_few_rows(const Matmul& p, const Rows32& x, const Workers& workers) {
  const int64_t wanted = 8 * (int64_t)workers.threads;
  const int64_t share = round_up((p.f + wanted - 1) / wanted, w_rows_at_once);
  workers.for_each((p.f + share - 1) / share, [&](int64_t item) {
    const int64_t end = (item + 1) * share < p.f ? (item + 1) * share : p.f;
    for (int64_t f = item * share; f < end; f += w_rows_at_once) {
      int64_t w_row[w_rows_at_once];  // the last one again where there are fewer
      for (int r = 0; r < w_rows_at_once; ++r) {
        w_row[r] = (f + r < p.f ? f + r : p.f - 1) * p.d;
      }
      for (int64_t m = 0; m < p.rows;) {
        const int64_t rest = p.rows - m;
        const int n = rest >= few_at_once ? few_at_once : rest >= 2 ? 2 : 1;
        const float* at = x.data + m * x.stride;
        float sums[few_at_once][w_rows_at_once];
        (n == few_at_once ? multiply_few<type, few_at_once>
         : n == 2 ? multiply_few<type, 2>
                  : multiply_few<type, 1>)(at, x.stride, p.w, w_row, p.d, sums);
        for (int i = 0; i < n; ++i) {
          for (int r = 0; r < w_rows_at_once && f + r < end; ++r) {
            from_f32(p.y_type, sums[i][r], p.y, (m + i) * p.f + f + r);
          }
        }
        m += n;
      }
    }
  });
}

// `lanes` pairs of a row of w, the first of element i; zeros behind the end.
inline U load_pairs(const void* w, int64_t row, int64_t i, int64_t d) {
  const char* from = static_cast<const char*>(w) + 2 * (row * d + i);
  if (i + 2 * lanes <= d) return load<U>(from);
  U units = {};
  if (i < d) memcpy(&units, from, 2 * (d - i));
  return units;
}

// The first or the second of each pair.
template <Float type>
inline F one_of_pairs(U pairs, int which) {
  if (type == Float::bf16) return (F)(which ? pairs >> 16 << 16 : pairs << 16);
  const H half = __builtin_convertvector(which ? pairs >> 16 : pairs & 0xffff, H);
  return load_f32<type>(&half, 0);
}

// Pairs are transposed in either case: as panels of pairs, or into two columns each.
template <Float type, bool pairs>
bool multiply_many_rows(const Matmul& p, const Rows32& x, const Workers& workers) {
  auto decode = [&](int64_t row, int64_t first, int64_t units, float* panel) {
    constexpr int per_pair = pairs ? 1 : 2;  // units
    for (int half = 0; half < panel_rows; half += lanes) {
      for (int64_t i = 0; i < units; i += per_pair * lanes) {
        U rows[lanes], columns[lanes];
        for (int r = 0; r < lanes; ++r) {
          const int64_t at = row + half + r, element = (first + i) * 2 / per_pair;
          rows[r] = at < p.f ? load_pairs(p.w, at, element, p.d) : U{};
        }
        transpose(rows, columns);
        for (int j = 0; j < lanes; ++j) {
          float* to = panel + (i + per_pair * j) * panel_rows + half;
          if (pairs) {
            store(to, columns[j]);
          } else {
            store(to, one_of_pairs<type>(columns[j], 0));
            store(to + panel_rows, one_of_pairs<type>(columns[j], 1));
          }
        }
      }
    }
  };
  return multiply_panels(decode, x, pairs, p.rows, p.f, p.y, p.y_type, nullptr, workers);
}

inline bool matmul_transpose_b(const Matmul& p, const Workers& workers) {
  const bool bf16 = p.w_type == Float::bf16;
  const bool pairs = p.rows > few_before_pairs && bf16 && multiplies_pairs() &&
                     (p.x_type == Float::bf16 || p.compute_type == Float::bf16);
  const bool few = !pairs && p.rows <= few_x_rows;
  const int64_t units = units_of(p.d, pairs), stride = row_stride(units);
  Scratch<float> scratch(p.rows * stride);
  if (!scratch.get()) return false;
  const Rows32 x = {scratch.get(), stride, units};
  prepare_x(p.x, p.x_type, p.rows, p.d, p.compute_type, pairs, x, workers);
  if (few) {
    (bf16 ? multiply_few_rows<Float::bf16> : multiply_few_rows<Float::f16>)(p, x, workers);
    return true;
  }
  return (pairs  ? multiply_many_rows<Float::bf16, true>
          : bf16 ? multiply_many_rows<Float::bf16, false>
                 : multiply_many_rows<Float::f16, false>)(p, x, workers);
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
