// y = x w^T with w quantised: each tile of 16 rows is decoded once for up to 128 rows of
// x, into the first or second cache, and multiplied from there.
//
// Activations are float32, or int8 in blocks of 32 as llama.cpp has them:
//
//   y[f] = sum over groups of  scale_w scale_x sum((code_w - zero) code_x)
//                              + offset_w scale_x sum(code_x)
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"
#include "formats.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int activation_block = 32;
constexpr int64_t rows_per_item = 128;  // of x, for which a tile is decoded once
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
    const float inverse = largest > 0 ? 127 / largest : 0;
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
  constexpr VectorProduct of_format[] = {
      vector_product<Format::q4_0, int8>,   vector_product<Format::q4_1, int8>,
      vector_product<Format::q5_0, int8>,   vector_product<Format::q5_1, int8>,
      vector_product<Format::q8_0, int8>,   vector_product<Format::q2_k, int8>,
      vector_product<Format::q3_k, int8>,   vector_product<Format::q4_k, int8>,
      vector_product<Format::q5_k, int8>,   vector_product<Format::q6_k, int8>,
      vector_product<Format::iq4_nl, int8>, vector_product<Format::iq4_xs, int8>,
      vector_product<Format::mxfp4, int8>,  vector_product<Format::nvfp4, int8>,
  };
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

// The rows of y, in the order of the experts that they ask for.
struct Routes {
  int64_t* first;  // [experts + 1], where those of an expert begin
  int64_t *x_row, *y_row;  // [count]

  // Returns how many of the rows ask for the expert that most of them ask for.
  int64_t sort(const QuantizedMatmul& p, int64_t y_bytes) const {
    auto expert_of = [&](int64_t i) {
      const int64_t e = p.expert ? p.expert[i] : 0;
      return 0 <= e && e < p.experts ? e : -1;
    };
    for (int64_t e = 0; e <= p.experts; ++e) first[e] = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t e = expert_of(i);
      if (e >= 0) {
        ++first[e + 1];
      } else {
        memset(static_cast<char*>(p.y) + i * y_bytes, 0, y_bytes);
      }
    }
    int64_t most = 0;
    for (int64_t e = 0; e < p.experts; ++e) {
      most = first[e + 1] > most ? first[e + 1] : most;
      first[e + 1] += first[e];
    }
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t e = expert_of(i);
      if (e < 0) continue;
      const int64_t at = first[e]++;
      x_row[at] = i / p.rows_per_x;
      y_row[at] = i;
    }
    for (int64_t e = p.experts; e > 0; --e) first[e] = first[e - 1];
    first[0] = 0;
    return most;
  }
};

// to = from / rms(from) * weight; the width is a multiple of the lanes.
inline void normalise(const float* from, const float* weight, float eps, int64_t width,
                      float* to) {
  F sum[2] = {};
  for (int64_t i = 0; i < width; i += lanes) {
    const F v = load<F>(from + i);
    sum[i / lanes % 2] += v * v;
  }
  const float rstd = 1 / sqrtf(sum_of_lanes(sum[0] + sum[1]) / (float)width + eps);
  for (int64_t i = 0; i < width; i += lanes) {
    store(to + i, load<F>(from + i) * rstd * load<F>(weight + i));
  }
}

// Normalises, rounds or widens x as the products need it, 16 rows to an item.
inline void prepare(const QuantizedMatmul& p, const Activations& a, float* x32, int group,
                    const Workers& workers) {
  constexpr int64_t rows_at_once = 16;
  const int64_t width = p.w.width;
  auto prepare_rows = [&](int64_t item) {
    const bool in_place = p.x_type == Float::f32 && !p.norm;
    Scratch<float> row32(!in_place && !x32 ? width : 0);
    const int64_t end = (item + 1) * rows_at_once;
    for (int64_t m = item * rows_at_once; m < (end < p.x_rows ? end : p.x_rows); ++m) {
      float* x = x32 ? x32 + m * width : row32.get();
      float* given = const_cast<float*>(static_cast<const float*>(p.x)) + m * width;
      if (in_place) {
        x = given;
      } else if (p.x_type != Float::f32) {
        to_f32_row(p.x_type, p.x, m * width, width, width, x);
      }
      if (p.norm) normalise(p.x_type == Float::f32 ? given : x, p.norm, p.eps, width, x);
      prepare_row(a, x, m, width, group);
    }
  };
  const int64_t items = (p.x_rows + rows_at_once - 1) / rows_at_once;
  if (items == 1) {
    prepare_rows(0);
  } else {
    workers.for_each(items, prepare_rows);
  }
}

inline F silu(F z) {
  F minus = z < -87.0f ? broadcast(87.0f) : -z;
  minus = minus < -87.0f ? broadcast(-87.0f) : minus;
  return z < -87.0f ? z * 0.0f : z / (1.0f + exp_of(minus));
}

// Writes 16 results of one row, or of the gate and the other half, to y.
inline void finish(const QuantizedMatmul& p, const float* product, const float* other,
                   int64_t at, int64_t columns) {
  if (p.x_type == Float::f32 && columns == tile_rows) {
    for (int part = 0; part < tile_rows; part += lanes) {
      F value = load<F>(product + part);
      if (p.gated) value = silu(value) * load<F>(other + part);
      if (p.residual) value += load<F>(static_cast<const float*>(p.residual) + at + part);
      store(static_cast<float*>(p.y) + at + part, value);
    }
    return;
  }
  float result[tile_rows], residual[tile_rows];
  if (p.residual) {
    to_f32_row(p.x_type, p.residual, at, columns, tile_rows, residual);
  }
  for (int part = 0; part < tile_rows; part += lanes) {
    F value = load<F>(product + part);
    if (p.gated) value = silu(value) * load<F>(other + part);
    if (p.residual) value += load<F>(residual + part);
    store(result + part, value);
  }
  if (p.x_type == Float::f32) {
    memcpy(static_cast<float*>(p.y) + at, result, columns * sizeof(float));
  } else {
    for (int64_t c = 0; c < columns; ++c) from_f32(p.x_type, result[c], p.y, at + c);
  }
}

inline bool quantized_matmul(const QuantizedMatmul& p, const Workers& workers) {
  const Layout form = layouts[(int)p.w.format];
  const bool int8 = p.int8_activations;
  const int64_t width = p.w.width, groups = width / form.group;
  const int64_t halves = p.gated ? 2 : 1, y_rows = p.w.rows / halves;
  const int64_t tiles = (y_rows + tile_rows - 1) / tile_rows;
  const int64_t expert_bytes = p.w.rows * (width / form.elements * form.bytes);

  const bool copies = !int8 && (p.x_type != Float::f32 || p.norm);
  const int64_t codes_of_x = int8 ? p.x_rows * width : 0;
  const int64_t scales_of_x = int8 ? p.x_rows * groups : 0;
  Scratch<float> floats(p.x_rows * groups + scales_of_x + (copies ? p.x_rows * width : 0));
  Scratch<int32_t> code_sum(scales_of_x + codes_of_x / 4 + 1);
  Scratch<int64_t> indices(p.experts + 1 + 2 * p.count);
  if (!floats.get() || !code_sum.get() || !indices.get()) return false;
  float* scale = floats.get() + p.x_rows * groups;
  float* x32 = copies ? scale + scales_of_x : nullptr;
  int8_t* code = reinterpret_cast<int8_t*>(code_sum.get() + scales_of_x);
  const Activations a = {int8     ? nullptr
                         : copies ? x32
                                  : static_cast<const float*>(p.x),
                         int8 ? code : nullptr, scale, code_sum.get(), floats.get()};
  prepare(p, a, x32, form.group, workers);

  int64_t* rows = indices.get() + p.experts + 1;
  const Routes routes = {indices.get(), rows, rows + p.count};
  const int64_t most = routes.sort(p, y_rows * (p.x_type == Float::f32 ? 4 : 2));
  if (most == 0) return true;
  int64_t used = 0;
  for (int64_t e = 0; e < p.experts; ++e) used += routes.first[e + 1] > routes.first[e];
  const int64_t row_items = (most + rows_per_item - 1) / rows_per_item;
  const int64_t wanted = 8 * (int64_t)workers.threads;  // items, so that none waits long
  const int64_t fewest = tiles * row_items * used / wanted;
  const int64_t tiles_at_once = fewest < 1 ? 1 : fewest > tiles ? tiles : fewest;
  const int64_t tile_items = (tiles + tiles_at_once - 1) / tiles_at_once;

  const VectorProduct one_row = int8 ? choose_vector_product<true>(p.w.format)
                                     : choose_vector_product<false>(p.w.format);
  Flag failed;
  workers.for_each(p.experts * row_items * tile_items, [&](int64_t item) {
    const int64_t e = item / (row_items * tile_items);
    const int64_t begin = routes.first[e] + item / tile_items % row_items * rows_per_item;
    int64_t end = begin + rows_per_item;
    end = end < routes.first[e + 1] ? end : routes.first[e + 1];
    if (begin >= end) return;
    const int64_t tile = item % tile_items * tiles_at_once;
    const int64_t last = tile + tiles_at_once < tiles ? tile + tiles_at_once : tiles;
    QuantizedWeights w = p.w;
    w.data += e * expert_bytes;
    const bool one = end - begin == 1;
    const int64_t codes_of_tile = width / 4 * tile_rows, scales_of_tile = groups * tile_rows;
    Scratch<uint32_t> codes(one ? 0 : halves * codes_of_tile);
    Scratch<float> scales(one ? 0 : halves * 2 * scales_of_tile);
    if (!codes.get() || !scales.get()) {
      failed.set();
      return;
    }
    float y[2][max_rows * tile_rows];
    for (int64_t t = tile; t < last; ++t) {
      const int64_t left = y_rows - t * tile_rows;
      const int64_t columns = left < tile_rows ? left : tile_rows;
      Tile decoded[2];
      for (int64_t h = 0; h < halves; ++h) {
        float* scale_of_w = scales.get() + h * 2 * scales_of_tile;
        decoded[h] = {codes.get() + h * codes_of_tile, scale_of_w,
                      scale_of_w + scales_of_tile};
        if (one) {
          one_row(w, t + h * tiles, a, routes.x_row[begin], y[h]);
        } else {
          decoders[(int)w.format](w, t + h * tiles, decoded[h]);
        }
      }
      for (int64_t m = begin; m < end;) {
        const int64_t rest = end - m;
        const int n = rest >= 8 && max_rows >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        for (int64_t h = 0; h < halves && !one; ++h) {
          const Product product = {decoded[h], a, width, form.zero, routes.x_row + m, y[h]};
          switch (n) {
            case 8: choose_product<max_rows>(form, int8)(product); break;
            case 4: choose_product<4>(form, int8)(product); break;
            case 2: choose_product<2>(form, int8)(product); break;
            default: choose_product<1>(form, int8)(product);
          }
        }
        for (int i = 0; i < n; ++i) {
          const int64_t at = routes.y_row[m + i] * y_rows + t * tile_rows;
          finish(p, y[0] + i * tile_rows, y[1] + i * tile_rows, at, columns);
        }
        m += n;
      }
    }
  });
  return !failed;
}

inline bool quantized_embedding(const QuantizedEmbedding& p, const Workers& workers) {
  const Layout form = layouts[(int)p.w.format];
  const int64_t width = p.w.width, groups = width / form.group;
  workers.for_each(p.count, [&](int64_t i) {
    const int64_t id = p.ids[i];
    const bool inside = 0 <= id && id < p.w.rows;
    Scratch<uint32_t> codes(width / 4 * tile_rows);
    Scratch<float> scales(2 * groups * tile_rows);
    const Tile t = {codes.get(), scales.get(), scales.get() + groups * tile_rows};
    if (inside) decoders[(int)p.w.format](p.w, id / tile_rows, t);
    const int64_t row = id % tile_rows;
    for (int64_t k = 0; k < width; ++k) {
      float value = 0;
      if (inside) {
        const int64_t at = k / form.group * tile_rows + row;
        const uint32_t code = t.codes[k / 4 * tile_rows + row] >> (8 * (k % 4)) & 255;
        value = t.scale[at] * (float)((int)code - form.zero);
        if (form.offset) value += t.offset[at];
      }
      from_f32(p.y_type, value, p.y, i * width + k);
    }
  });
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
