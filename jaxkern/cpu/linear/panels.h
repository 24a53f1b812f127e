// Many rows of x times w^T: panels of neighbouring rows of w are decoded and put side by
// side, [column][row], and multiplied from there, several rows of x in registers.
//
// A unit is what stands in 32 bits: a float32, or a pair of bfloat16 for the instruction
// that multiplies and adds pairs.
#pragma once
#include "../float_types.h"
#include "../memory.h"

#if defined(__AVX512VNNI__) && __has_include(<avx512bf16intrin.h>)
#define JAXKERN_PAIRS
#endif

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int panel_rows = 2 * lanes;
#if defined(__aarch64__)
constexpr int x_rows_at_once = 8;
#else
constexpr int x_rows_at_once = lanes == 16 ? 12 : lanes == 8 ? 6 : 4;
#endif
constexpr int64_t panel_units = 1024;  // of a panel that is decoded at once: 128 KB
constexpr int64_t x_rows_per_item = 256;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Does the machine multiply pairs of bfloat16?
inline bool multiplies_pairs() {
#if defined(JAXKERN_PAIRS)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// column[j][i] = row[i][j]
inline void transpose(const U* row, U* column) {
#if defined(__AVX512F__)
  __m512i pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32((__m512i)row[i], (__m512i)row[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)row[i], (__m512i)row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(quads[j], quads[j + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(quads[j + 8], quads[j + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(quads[j], quads[j + 4], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(quads[j + 8], quads[j + 12], 0xdd);
    column[j] = (U)_mm512_shuffle_i32x4(a, b, 0x88);
    column[j + 8] = (U)_mm512_shuffle_i32x4(a, b, 0xdd);
    column[j + 4] = (U)_mm512_shuffle_i32x4(c, d, 0x88);
    column[j + 12] = (U)_mm512_shuffle_i32x4(c, d, 0xdd);
  }
#elif defined(__AVX2__)
  __m256i pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32((__m256i)row[i], (__m256i)row[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32((__m256i)row[i], (__m256i)row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    column[j] = (U)_mm256_permute2x128_si256(quads[j], quads[j + 4], 0x20);
    column[j + 4] = (U)_mm256_permute2x128_si256(quads[j], quads[j + 4], 0x31);
  }
#elif defined(__aarch64__)
  const uint32x4x4_t columns = vld4q_u32(reinterpret_cast<const uint32_t*>(row));
  for (int j = 0; j < 4; ++j) column[j] = (U)columns.val[j];
#else
  for (int i = 0; i < lanes; ++i) {
    for (int j = 0; j < lanes; ++j) column[j][i] = row[i][j];
  }
#endif
}

// sum[m][panel_rows] += x[m] panel, of `units` units.
template <int rows>
void multiply_panel(const float* x, int64_t stride, const float* panel, int64_t units,
                    float* sum) {
  F total[rows][2] = {};
  for (int64_t i = 0; i < units; ++i) {
    const F w[2] = {load<F>(panel + i * panel_rows), load<F>(panel + i * panel_rows + lanes)};
#pragma GCC unroll 16
    for (int m = 0; m < rows; ++m) {
      const F value = broadcast(x[m * stride + i]);
      total[m][0] += w[0] * value;
      total[m][1] += w[1] * value;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < rows; ++m) {
    for (int c = 0; c < 2; ++c) {
      float* to = sum + m * panel_rows + c * lanes;
      store(to, load<F>(to) + total[m][c]);
    }
  }
}

#if defined(JAXKERN_PAIRS)
template <int rows>
__attribute__((target("avx512bf16"))) void multiply_pairs(const float* x, int64_t stride,
                                                          const float* panel, int64_t units,
                                                          float* sum) {
  __m512 total[rows][2] = {};
  for (int64_t i = 0; i < units; ++i) {
    const __m512bh w[2] = {
        (__m512bh)_mm512_loadu_ps(panel + i * panel_rows),
        (__m512bh)_mm512_loadu_ps(panel + i * panel_rows + lanes)};
#pragma GCC unroll 16
    for (int m = 0; m < rows; ++m) {
      const __m512bh pair = (__m512bh)_mm512_set1_ps(x[m * stride + i]);
      total[m][0] = _mm512_dpbf16_ps(total[m][0], w[0], pair);
      total[m][1] = _mm512_dpbf16_ps(total[m][1], w[1], pair);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < rows; ++m) {
    for (int c = 0; c < 2; ++c) {
      float* to = sum + m * panel_rows + c * lanes;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), total[m][c]));
    }
  }
}
#else
template <int rows>
void multiply_pairs(const float*, int64_t, const float*, int64_t, float*) {}
#endif

// The kernel for `rows` rows of x, 1 <= rows <= n.
template <int n = x_rows_at_once>
void multiply_rows(int rows, bool pairs, const float* x, int64_t stride, const float* panel,
                   int64_t units, float* sum) {
  if constexpr (n > 1) {
    if (rows < n) return multiply_rows<n - 1>(rows, pairs, x, stride, panel, units, sum);
  }
  (pairs ? multiply_pairs<n> : multiply_panel<n>)(x, stride, panel, units, sum);
}

inline F rounded(F value, Float to) {  // to a dtype and back
  alignas(64) uint16_t half[lanes];
  if (to == Float::f32) return value;
  if (to == Float::bf16) {
    store_f32<Float::bf16>(value, half, 0);
    return load_f32<Float::bf16>(half, 0);
  }
  store_f32<Float::f16>(value, half, 0);
  return load_f32<Float::f16>(half, 0);
}

// Rows of x as products read them: float32, or pairs of bfloat16; zeros behind the end.
struct Rows32 {
  float* data;
  int64_t stride, units;
};

inline int64_t units_of(int64_t d, bool pairs) { return pairs ? (d + 1) / 2 : d; }

// Rows a power of two apart would push each other out of the first cache.
inline int64_t row_stride(int64_t units) { return round_up(units, 2 * lanes) + lanes; }

template <Float type>
void prepare_x_row(const void* x, int64_t row, int64_t d, Float through, bool pairs,
                   const Rows32& to) {
  float* at = to.data + row * to.stride;
  for (int64_t i = 0; i < round_up(d, lanes); i += lanes) {
    const F value = load_within<type>(x, row * d + i, (row + 1) * d, 0.0f);
    if (pairs) {
      store_f32<Float::bf16>(value, at, i);
    } else {
      store(at + i, rounded(value, through));
    }
  }
}

// Rounds x to `through` on its way.
inline void prepare_x(const void* x, Float type, int64_t rows, int64_t d, Float through,
                      bool pairs, const Rows32& to, const Workers& workers) {
  constexpr int64_t rows_at_once = 16;
  auto prepare = [&](int64_t item) {
    const int64_t first = item * rows_at_once, rest = rows - first;
    for (int64_t m = first; m < first + (rest < rows_at_once ? rest : rows_at_once); ++m) {
#define JAXKERN_CALL(type) prepare_x_row<type>(x, m, d, through, pairs, to)
      JAXKERN_BY_TYPE(type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  };
  const int64_t items = (rows + rows_at_once - 1) / rows_at_once;
  if (items == 1) {
    prepare(0);
  } else {
    workers.for_each(items, prepare);
  }
}

// Writes the sums of rows [begin, end) of x, panel_rows side by side, to y's columns.
template <Float type>
void write_panel(const float* sum, void* y, int64_t begin, int64_t end, int64_t f,
                 int64_t column, const int64_t* y_row) {
  const int64_t left = f - column, columns = left < panel_rows ? left : panel_rows;
  for (int64_t m = begin; m < end; ++m) {
    const int64_t at = (y_row ? y_row[m] : m) * f + column;
    for (int64_t c = 0; c < columns; c += lanes) {
      const F value = load<F>(sum + (m - begin) * panel_rows + c);
      store_within<type>(value, y, at + c, at + columns);
    }
  }
}

// A decoder may write up to a multiple of so many units.
constexpr int64_t decode_step = 16 * lanes;

// y[y_row[m]] = x[m] w^T of [rows, f]. decode(row, first, units, panel) writes the units
// [first, first + units) of panel_rows rows of w from `row` on, zeros behind the last row.
template <typename Decode>
bool multiply_panels(Decode decode, const Rows32& x, bool pairs, int64_t rows, int64_t f,
                     void* y, Float y_type, const int64_t* y_row, const Workers& workers) {
  const int64_t panels = (f + panel_rows - 1) / panel_rows;
  const int64_t row_items = (rows + x_rows_per_item - 1) / x_rows_per_item;
  const int64_t at_once = (rows + row_items - 1) / row_items;
  const int64_t units_at_once = x.units < panel_units ? x.units : panel_units;
  bool failed = false;
  workers.for_each(panels * row_items, [&](int64_t item) {
    const int64_t column = item / row_items * panel_rows, begin = item % row_items * at_once;
    const int64_t end = begin + at_once < rows ? begin + at_once : rows;
    Scratch<float> panel(round_up(units_at_once, decode_step) * panel_rows);
    Scratch<float> sum(at_once * panel_rows);
    if (!panel.get() || !sum.get()) {
      failed = true;
      return;
    }
    memset(sum.get(), 0, at_once * panel_rows * sizeof(float));
    for (int64_t first = 0; first < x.units; first += units_at_once) {
      const int64_t left = x.units - first;
      const int64_t units = left < units_at_once ? left : units_at_once;
      decode(column, first, units, panel.get());
      for (int64_t m = begin; m < end;) {
        // as even as possible
        const int64_t calls = (end - m + x_rows_at_once - 1) / x_rows_at_once;
        const int n = (int)((end - m + calls - 1) / calls);
        multiply_rows(n, pairs, x.data + m * x.stride + first, x.stride, panel.get(), units,
                      sum.get() + (m - begin) * panel_rows);
        m += n;
      }
    }
#define JAXKERN_CALL(type) write_panel<type>(sum.get(), y, begin, end, f, column, y_row)
    JAXKERN_BY_TYPE(y_type, JAXKERN_CALL);
#undef JAXKERN_CALL
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
