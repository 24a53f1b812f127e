// y = x w^T with w quantised: each tile of 16 rows is decoded once for up to 128 rows of
// x, into the first or second cache, and multiplied from there.
#pragma once
#include <cmath>

#include "../linear/routes.h"
#include "../memory.h"
#include "tile_products.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t rows_per_item = 128;  // of x, for which a tile is decoded once

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
inline bool prepare(const QuantizedMatmul& p, const Activations& a, float* x32, int group,
                    const Workers& workers) {
  constexpr int64_t rows_at_once = 16;
  const int64_t width = p.w.width;
  Flag failed;
  auto prepare_rows = [&](int64_t item) {
    const bool in_place = p.x_type == Float::f32 && !p.norm;
    Scratch<float> row32(!in_place && !x32 ? width : 0);
    if (!row32.get()) {
      failed.set();
      return;
    }
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
  return !failed;
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
  if (!prepare(p, a, x32, form.group, workers)) return false;

  int64_t* rows = indices.get() + p.experts + 1;
  const Routes routes = {indices.get(), rows, rows + p.count};
  const Asked asked = {p.expert, p.count, p.rows_per_x, p.experts};
  const int64_t most = routes.sort(asked, p.y, y_rows * (p.x_type == Float::f32 ? 4 : 2));
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
  Flag failed;
  workers.for_each(p.count, [&](int64_t i) {
    const int64_t id = p.ids[i];
    const bool inside = 0 <= id && id < p.w.rows;
    Scratch<uint32_t> codes(width / 4 * tile_rows);
    Scratch<float> scales(2 * groups * tile_rows);
    if (!codes.get() || !scales.get()) {
      failed.set();
      return;
    }
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
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
