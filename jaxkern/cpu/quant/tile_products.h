// Products of quantised weights: a decoded tile of 16 rows of w with some rows of x, or
// one row of x with blocks that are decoded on the way.
//
// Activations are float32, or int8 in blocks of 32 as llama.cpp has them:
//
//   y[f] = sum over groups of  scale_w scale_x sum((code_w - zero) code_x)
//                              + offset_w scale_x sum(code_x)
#pragma once
#include "../float_types.h"
#include "formats.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int activation_block = 32;
constexpr int max_rows = lanes == 8 ? 4 : 8;  // of x at once: 2 registers each

// Rows of x, prepared: float32, or int8 codes; and sums over each group.
struct Activations {
  const float* x;  // [rows, width], or null
  int8_t* code;  // [rows, width], or null
  float* scale;  // [rows, groups] of codes
  int32_t* code_sum;  // [rows, groups]
  float* sum;  // [rows, groups]
};

typedef int8_t Codes __attribute__((vector_size(lanes)));

inline void prepare_row(const Activations& a, float* x, int64_t row, int64_t width,
                        int group) {
  const int64_t groups = width / group;
  for (int64_t g = 0; g < groups && !a.code; ++g) {
    float sum = 0;
    for (int i = 0; i < group; ++i) sum += x[g * group + i];
    a.sum[row * groups + g] = sum;
  }
  for (int64_t first = 0; first < width && a.code; first += activation_block) {
    F most = {}, poison = {};  // the latter NaN where a value is infinite or NaN
    for (int i = 0; i < activation_block; i += lanes) {
      F v = load<F>(x + first + i);
      poison += v * 0;
      v = v < 0 ? -v : v;
      most = v > most ? v : most;
    }
    const float largest = max_of_lanes(most);
    const float scale = largest / 127 + sum_of_lanes(poison);
    // of smaller numbers it is infinite: their codes are zeros
    const float inverse = largest > 4e-37f ? 127 / largest : 0;
    for (int at = 0; at < activation_block; at += group) {
      F sums = {};
      for (int i = at; i < at + group; i += lanes) {
        // adding 1.5 * 2**23 rounds to the nearest integer, which are then the low bits
        const F shifted = load<F>(x + first + i) * inverse + 12582912.0f;
        store(a.code + row * width + first + i, __builtin_convertvector((I)shifted, Codes));
        sums += shifted - 12582912.0f;
      }
      const int32_t sum = scale == scale ? (int32_t)sum_of_lanes(sums) : 0;
      const int64_t g = row * groups + (first + at) / group;
      a.scale[g] = scale;
      a.code_sum[g] = sum;
      a.sum[g] = scale * (float)sum;
    }
  }
}

struct Product {  // what the inner loops need of one tile and some rows of x
  Tile tile;
  Activations a;
  int64_t width;
  int zero;
  const int64_t* row;  // rows of x
  float* y;  // [rows, 16]
};

template <int rows, int group, bool wide, bool offset>
void product_int8(const Product& p) {
  const int64_t groups = p.width / group;
  const int8_t* code[rows];
  const float *scale[rows], *sum[rows];
  const int32_t* code_sum[rows];
  for (int m = 0; m < rows; ++m) {
    code[m] = p.a.code + p.row[m] * p.width;
    scale[m] = p.a.scale + p.row[m] * groups;
    sum[m] = p.a.sum + p.row[m] * groups;
    code_sum[m] = p.a.code_sum + p.row[m] * groups;
  }
  for (int part = 0; part < tile_rows; part += lanes) {
    F total[rows] = {};
    const uint32_t* w = p.tile.codes + part;
    for (int64_t g = 0; g < groups; ++g) {
      I dot[rows];
      for (int m = 0; m < rows; ++m) dot[m] = broadcast(-p.zero * code_sum[m][g]);
      for (int chunk = 0; chunk < group / 4; ++chunk, w += tile_rows) {
        const I w4 = load<I>(w);
        for (int m = 0; m < rows; ++m) {
          dot[m] = dot4<wide>(dot[m], w4, code[m] + g * group + 4 * chunk);
        }
      }
      const F w_scale = load<F>(p.tile.scale + g * tile_rows + part);
      for (int m = 0; m < rows; ++m) total[m] += to_float(dot[m]) * (w_scale * scale[m][g]);
      if (offset) {
        const F w_offset = load<F>(p.tile.offset + g * tile_rows + part);
        for (int m = 0; m < rows; ++m) total[m] += w_offset * sum[m][g];
      }
    }
    for (int m = 0; m < rows; ++m) store(p.y + m * tile_rows + part, total[m]);
  }
}

template <int rows, int group, bool offset>
void product_f32(const Product& p) {
  const int64_t groups = p.width / group;
  const float *x[rows], *sum[rows];
  for (int m = 0; m < rows; ++m) {
    x[m] = p.a.x + p.row[m] * p.width;
    sum[m] = p.a.sum + p.row[m] * groups;
  }
  const F zero = broadcast((float)p.zero);
  for (int part = 0; part < tile_rows; part += lanes) {
    F total[rows] = {};
    const uint32_t* w = p.tile.codes + part;
    for (int64_t g = 0; g < groups; ++g) {
      F dot[rows] = {};
      for (int chunk = 0; chunk < group / 4; ++chunk, w += tile_rows) {
        const I w4 = load<I>(w);
        for (int j = 0; j < 4; ++j) {
          const F code = to_float((w4 >> (8 * j)) & 255) - zero;
          for (int m = 0; m < rows; ++m) dot[m] += code * x[m][g * group + 4 * chunk + j];
        }
      }
      const F w_scale = load<F>(p.tile.scale + g * tile_rows + part);
      for (int m = 0; m < rows; ++m) total[m] += dot[m] * w_scale;
      if (offset) {
        const F w_offset = load<F>(p.tile.offset + g * tile_rows + part);
        for (int m = 0; m < rows; ++m) total[m] += w_offset * sum[m][g];
      }
    }
    for (int m = 0; m < rows; ++m) store(p.y + m * tile_rows + part, total[m]);
  }
}

// One row of x: each block is multiplied as soon as it is decoded, so that arithmetic
// goes on while the next blocks come from memory. y[16] = rows [16 i, 16 i + 16).
template <Format format, bool int8>
void vector_product(const QuantizedWeights& w, int64_t i, const Activations& a,
                    int64_t row, float* y) {
  constexpr Layout form = layouts[(int)format];
  constexpr int group = form.group, groups = form.elements / group;
  const int64_t all_groups = w.width / group;
  const int8_t* code = a.code + row * w.width;
  const float *x = a.x + row * w.width, *scale = a.scale + row * all_groups;
  const float* sum = a.sum + row * all_groups;
  const int32_t* code_sum = a.code_sum + row * all_groups;
  F total[tile_rows / lanes] = {};
  for_each_block<format>(w, i, [&](const uint8_t* b) {
    alignas(64) uint32_t codes[form.elements / 4 * tile_rows];
    alignas(64) float w_scale[groups * tile_rows], w_offset[groups * tile_rows];
    decode_block<format>(b, {codes, w_scale, w_offset});
    for (int g = 0; g < groups; ++g) {
      for (int part = 0; part < tile_rows; part += lanes) {
        const uint32_t* w4 = codes + g * group / 4 * tile_rows + part;
        F& t = total[part / lanes];
        const F scale_of_w = load<F>(w_scale + g * tile_rows + part);
        if constexpr (int8) {
          I dot = broadcast(-form.zero * code_sum[g]), odd = {};
          for (int chunk = 0; chunk < group / 4; chunk += 2) {  // two chains of sums
            dot = dot4<form.wide>(dot, load<I>(w4 + chunk * tile_rows),
                                  code + g * group + 4 * chunk);
            odd = dot4<form.wide>(odd, load<I>(w4 + (chunk + 1) * tile_rows),
                                  code + g * group + 4 * chunk + 4);
          }
          t += to_float(dot + odd) * (scale_of_w * scale[g]);
        } else {
          F dot[4] = {};
          for (int chunk = 0; chunk < group / 4; ++chunk) {
            const I four = load<I>(w4 + chunk * tile_rows);
            for (int j = 0; j < 4; ++j) {
              const F value = to_float((four >> (8 * j)) & 255) - (float)form.zero;
              dot[j] += value * x[g * group + 4 * chunk + j];
            }
          }
          t += ((dot[0] + dot[1]) + (dot[2] + dot[3])) * scale_of_w;
        }
        if constexpr (form.offset) t += load<F>(w_offset + g * tile_rows + part) * sum[g];
      }
    }
    if (int8) {
      code += form.elements, scale += groups, code_sum += groups;
    } else {
      x += form.elements;
    }
    sum += groups;
  });
  for (int part = 0; part < tile_rows; part += lanes) {
    store(y + part, total[part / lanes]);
  }
}

using VectorProduct = void (*)(const QuantizedWeights&, int64_t, const Activations&,
                               int64_t, float*);

template <bool int8>
VectorProduct choose_vector_product(Format format) {
#define JAXKERN_PRODUCT(f) vector_product<Format::f, int8>,
  constexpr VectorProduct of_format[] = {JAXKERN_FORMATS(JAXKERN_PRODUCT)};
#undef JAXKERN_PRODUCT
  return of_format[(int)format];
}

using Multiply = void (*)(const Product&);

template <int rows>
Multiply choose_product(const Layout& form, bool int8) {
  if (int8) {
    if (form.group == 16) {
      return form.offset ? product_int8<rows, 16, false, true>
                         : product_int8<rows, 16, false, false>;
    }
    if (form.wide) return product_int8<rows, 32, true, false>;
    return form.offset ? product_int8<rows, 32, false, true>
                       : product_int8<rows, 32, false, false>;
  }
  if (form.group == 16) {
    return form.offset ? product_f32<rows, 16, true> : product_f32<rows, 16, false>;
  }
  return form.offset ? product_f32<rows, 32, true> : product_f32<rows, 32, false>;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
