// Many rows of x times w^T: panels of neighbouring rows of w are decoded and put side by
// side, [column][row], and multiplied from there, several rows of x in registers.
#pragma once
#include "x_rows.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int panel_rows = 2 * lanes;
#if defined(__aarch64__)
constexpr int panel_x_rows = 8;
#else
constexpr int panel_x_rows = lanes == 16 ? 12 : lanes == 8 ? 6 : 4;
#endif
constexpr int64_t panel_columns = 1024;  // that are decoded at once: 128 KB
constexpr int64_t x_rows_per_item = 256;

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

// sum[m][panel_rows] += x[m] panel, over `columns`.
template <int rows>
void multiply_panel(const float* x, int64_t stride, const float* panel, int64_t columns,
                    float* sum) {
  F total[rows][2] = {};
  for (int64_t i = 0; i < columns; ++i) {
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

// The same for rows <= n of them.
template <int n = panel_x_rows>
void multiply_panel(int rows, const float* x, int64_t stride, const float* panel,
                    int64_t columns, float* sum) {
  if constexpr (n > 1) {
    if (rows < n) return multiply_panel<n - 1>(rows, x, stride, panel, columns, sum);
  }
  multiply_panel<n>(x, stride, panel, columns, sum);
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

// A decoder may write up to a multiple of so many columns.
constexpr int64_t decode_step = 16 * lanes;

// y[y_row[m]] = x[m] w^T of [rows, f]. decode(row, first, columns, panel) writes columns
// [first, first + columns) of panel_rows rows of w from `row` on, zeros behind the last.
template <typename Decode>
bool multiply_panels(Decode decode, const XRows& x, int64_t rows, int64_t d, int64_t f,
                     void* y, Float y_type, const int64_t* y_row, const Workers& workers) {
  const int64_t panels = (f + panel_rows - 1) / panel_rows;
  const int64_t row_items = (rows + x_rows_per_item - 1) / x_rows_per_item;
  const int64_t at_once = (rows + row_items - 1) / row_items;
  const int64_t columns_at_once = d < panel_columns ? d : panel_columns;
  Flag failed;
  workers.for_each(panels * row_items, [&](int64_t item) {
    const int64_t row = item / row_items * panel_rows, begin = item % row_items * at_once;
    const int64_t end = begin + at_once < rows ? begin + at_once : rows;
    Scratch<float> panel(round_up(columns_at_once, decode_step) * panel_rows);
    Scratch<float> sum(at_once * panel_rows);
    if (!panel.get() || !sum.get()) {
      failed.set();
      return;
    }
    memset(sum.get(), 0, at_once * panel_rows * sizeof(float));
    for (int64_t first = 0; first < d; first += columns_at_once) {
      const int64_t left = d - first;
      const int64_t columns = left < columns_at_once ? left : columns_at_once;
      decode(row, first, columns, panel.get());
      for (int64_t m = begin; m < end;) {
        // as even as possible
        const int64_t calls = (end - m + panel_x_rows - 1) / panel_x_rows;
        const int n = (int)((end - m + calls - 1) / calls);
        multiply_panel(n, x.data + m * x.stride + first, x.stride, panel.get(), columns,
                       sum.get() + (m - begin) * panel_rows);
        m += n;
      }
    }
#define JAXKERN_CALL(type) write_panel<type>(sum.get(), y, begin, end, f, row, y_row)
    JAXKERN_BY_TYPE(y_type, JAXKERN_CALL);
#undef JAXKERN_CALL
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
