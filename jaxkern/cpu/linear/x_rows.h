// Rows of x as the products read them: in scratch memory, in their order, padded with
// zeros.
#pragma once
#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum class Order {
  plain,  // float32
  split,  // float32, of each 2 * lanes elements those at even places before the others
  pairs,  // bfloat16
};

struct XRows {
  float* data;
  int64_t stride;  // from row to row
};

// Rows a power of two apart would push each other out of the first cache.
inline int64_t row_stride(int64_t d, Order order) {
  return round_up(order == Order::pairs ? (d + 1) / 2 : d, 2 * lanes) + lanes;
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

template <Float type>
void prepare_x_row(const void* x, int64_t row, int64_t d, Float through, Order order,
                   float* to) {
  for (int64_t i = 0; i < round_up(d, 2 * lanes); i += lanes) {
    const F value = load_within<type>(x, row * d + i, (row + 1) * d, 0.0f);
    if (order == Order::pairs) {
      store_f32<Float::bf16>(value, to, i);
    } else if (order == Order::plain) {
      store(to + i, rounded(value, through));
    } else {
      const F y = rounded(value, through);
      float* half = to + i - i % (2 * lanes) / 2;  // of a block, for places even or odd
      for (int j = 0; j < lanes; ++j) half[j / 2 + j % 2 * lanes] = y[j];
    }
  }
}

// Rounds x to `through` on its way.
inline void prepare_x(const void* x, Float type, int64_t rows, int64_t d, Float through,
                      Order order, const XRows& to, const Workers& workers) {
  constexpr int64_t rows_at_once = 16;
  auto prepare = [&](int64_t item) {
    const int64_t first = item * rows_at_once, rest = rows - first;
    for (int64_t m = first; m < first + (rest < rows_at_once ? rest : rows_at_once); ++m) {
      float* row = to.data + m * to.stride;
#define JAXKERN_CALL(type) prepare_x_row<type>(x, m, d, through, order, row)
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

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
