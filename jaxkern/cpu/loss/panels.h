// Products of float32 matrices that lie in panels.
//
// A matrix is cut into panels of `across` columns, the last one filled with zeros:
// element (i, j) of one with `rows` rows lies at ((j / across) * rows + i) * across +
// j % across. The same panels serve as either factor, so each matrix is laid out once.
#pragma once
#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

// A tile of sums fills the registers but those for one row of b and one number of a.
constexpr int tile_vectors = 3, across = tile_vectors * lanes;
constexpr int down = lanes == 16 ? 8 : 4;

inline int64_t panels_of(int64_t columns) { return (columns + across - 1) / across; }

// sum[r] += a[r * row_step + k * step] b[k] over k < n, with b of `across` columns.
template <int row_step, int step>
inline __attribute__((always_inline)) void add_products(const float* a, const float* b,
                                                        int64_t n,
                                                        F (*sum)[tile_vectors]) {
  for (int64_t k = 0; k < n; ++k) {
    F y[tile_vectors];
    for (int c = 0; c < tile_vectors; ++c) y[c] = load<F>(b + k * across + c * lanes);
    for (int r = 0; r < down; ++r) {
      const float x = a[r * row_step + k * step];
      for (int c = 0; c < tile_vectors; ++c) sum[r][c] += x * y[c];
    }
  }
}

// down rows of a from `row` on, times one panel b: all columns of a, which is cut
// into `panels` panels of `rows` rows.
inline __attribute__((always_inline)) void multiply(const float* a, int64_t row,
                                                    int64_t rows, int64_t panels,
                                                    const float* b,
                                                    F (*sum)[tile_vectors]) {
  for (int64_t i = 0; i < panels; ++i) {
    add_products<across, 1>(a + (i * rows + row) * across, b + i * across * across, across,
                            sum);
  }
}

template <Float type>
void to_panels_of(const void* x, int64_t first, int64_t count, int64_t d, float* to,
                  int64_t row, int64_t rows) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = (first + i) * d, end = begin + d;
    for (int64_t j = 0; j < panels_of(d) * across; j += lanes) {
      const F y = j < d ? load_within<type>(x, begin + j, end, 0) : F{};
      store(to + (j / across * rows + row + i) * across + j % across, y);
    }
  }
}

// Rows [first, first + count) of x [., d] become those from `row` on of `rows` in panels.
inline void to_panels(Float type, const void* x, int64_t first, int64_t count, int64_t d,
                      float* to, int64_t row, int64_t rows) {
#define JAXKERN_CALL(type) to_panels_of<type>(x, first, count, d, to, row, rows)
  JAXKERN_BY_TYPE(type, JAXKERN_CALL);
#undef JAXKERN_CALL
}

inline void zero_rows(float* to, int64_t row, int64_t end, int64_t rows, int64_t panels) {
  for (int64_t j = 0; j < panels; ++j) {
    memset(to + (j * rows + row) * across, 0, (size_t)((end - row) * across) * sizeof(float));
  }
}

// Panel `panel` of the transpose of x, whose rows from panel * across on lie in panels.
inline void transpose_panel(const float* x, int64_t rows, int64_t panels, int64_t panel,
                            float* to) {
  for (int64_t j = 0; j < panels; ++j) {
    const float* from = x + (j * rows + panel * across) * across;
    for (int k = 0; k < across; ++k, to += across) {
      for (int i = 0; i < across; ++i) to[i] = from[i * across + k];
    }
  }
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
