// y = x w^T with MLX's affine weights: w = scale * code + bias in groups along a row, the
// codes of a row packed into 32-bit words, lowest first.
//
// Few rows of x: vectors along the words of a row, so x is put into the order in which
// the codes come out: for `lanes` words the first code of each, then the second ... The
// scale is applied to the sum of a vector, the bias to the sum of x over its group. Many
// rows: panels.h, of w itself.
#pragma once
#include "../linear/panels.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t few_affine_rows = 6;  // up to which no panels are made

struct AffineShape {
  int64_t words, blocks, groups, per_group;  // words of a row, vectors of them ...
  explicit AffineShape(const AffineMatmul& p)
      : words(p.d * p.bits / 32), blocks((words + lanes - 1) / lanes),
        groups(p.d / p.group), per_group(p.group * p.bits / 32) {}
  int64_t padded_groups() const { return round_up(groups, lanes) + lanes; }
};

// Of `lanes` elements the first `left`, zeros behind.
inline F first_lanes(F x, int64_t left) {
  I lane;
  for (int i = 0; i < lanes; ++i) lane[i] = i;
  return left >= lanes ? x : (F)((I)x & (lane < (int32_t)left));
}

// The scales of `lanes` words from the first of a block on.
inline F scales_of_block(const float* scale, int64_t block, int64_t per_group) {
  const float* from = scale + block * lanes / per_group;
  if (per_group >= lanes) return broadcast(*from);
#if defined(__AVX512F__)
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m128i shift = _mm_cvtsi32_si128(__builtin_ctz((unsigned)per_group));
  return (F)_mm512_permutexvar_ps(_mm512_srl_epi32(lane, shift), (__m512)load<F>(from));
#elif defined(__AVX2__)
  const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m128i shift = _mm_cvtsi32_si128(__builtin_ctz((unsigned)per_group));
  return (F)_mm256_permutevar8x32_ps((__m256)load<F>(from), _mm256_srl_epi32(lane, shift));
#else
  F y;
  for (int i = 0; i < lanes; ++i) y[i] = from[i / per_group];
  return y;
#endif
}

// Code j of each word as a float.
template <int bits>
inline F code_of(I words, int j) {
#if defined(__AVX512F__)
  if (bits == 4) {  // the low four bits choose from a table
    const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return (F)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, 4 * j), table);
  }
#endif
  return to_float((words >> (bits * j)) & ((1 << bits) - 1));
}

inline I load_words(const uint32_t* from, int64_t left) {  // zeros behind the end
  if (left >= lanes) return load<I>(from);
  I words = {};
  if (left > 0) memcpy(&words, from, 4 * left);
  return words;
}

// x of one row in the order of the codes, and its sums over groups.
template <int bits>
void order_x(const float* x, const AffineMatmul& p, const AffineShape& s, float* to,
             float* sum) {
  constexpr int per_word = 32 / bits;
  for (int64_t block = 0; block < s.blocks; ++block) {
    for (int i = 0; i < lanes; ++i) {
      const int64_t at = (block * lanes + i) * per_word;
      for (int j = 0; j < per_word; ++j) {
        to[(block * per_word + j) * lanes + i] = at + j < p.d ? x[at + j] : 0;
      }
    }
  }
  for (int64_t g = 0; g < s.padded_groups(); ++g) {
    float total = 0;
    for (int64_t i = 0; i < (g < s.groups ? p.group : 0); ++i) total += x[g * p.group + i];
    sum[g] = total;
  }
}

struct AffineRow {  // of w
  const uint32_t* words;
  const float *scale, *bias;
};

// sums[m][r] of `rows` rows of ordered x and `w_rows` of w.
template <int bits, int rows, int w_rows>
void affine_few(const float* x, int64_t x_stride, const float* x_sum, int64_t sum_stride,
                const AffineRow* w, const AffineShape& s, float (*sums)[w_rows]) {
  constexpr int per_word = 32 / bits;
  F total[rows][w_rows] = {};
  for (int64_t g = 0; g < s.groups; g += lanes) {
#pragma GCC unroll 4
    for (int r = 0; r < w_rows; ++r) {
      const F b = first_lanes(load<F>(w[r].bias + g), s.groups - g);
      for (int m = 0; m < rows; ++m) total[m][r] += b * load<F>(x_sum + m * sum_stride + g);
    }
  }
  for (int64_t block = 0; block < s.blocks; ++block) {
    const int64_t left = s.words - block * lanes;
    const float* from = x + block * per_word * lanes;
    I words[w_rows];
    F dot[rows][w_rows] = {};
#pragma GCC unroll 4
    for (int r = 0; r < w_rows; ++r) words[r] = load_words(w[r].words + block * lanes, left);
#pragma GCC unroll 16
    for (int j = 0; j < per_word; ++j) {
      F code[w_rows];
#pragma GCC unroll 4
      for (int r = 0; r < w_rows; ++r) code[r] = code_of<bits>(words[r], j);
#pragma GCC unroll 4
      for (int m = 0; m < rows; ++m) {
        const F value = load<F>(from + m * x_stride + j * lanes);
#pragma GCC unroll 4
        for (int r = 0; r < w_rows; ++r) dot[m][r] += code[r] * value;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < w_rows; ++r) {
      const F scale = first_lanes(scales_of_block(w[r].scale, block, s.per_group), left);
      for (int m = 0; m < rows; ++m) total[m][r] += dot[m][r] * scale;
    }
  }
  for (int m = 0; m < rows; ++m) {
    for (int r = 0; r < w_rows; ++r) sums[m][r] = sum_of_lanes(total[m][r]);
  }
}

// n of the scales or biases from element `first` on; `lanes` more may be read.
inline void widen_groups(Float type, const void* from, int64_t first, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += lanes) {
#define JAXKERN_CALL(type) store(to + i, load_within<type>(from, first + i, first + n, 0.0f))
    JAXKERN_BY_TYPE(type, JAXKERN_CALL);
#undef JAXKERN_CALL
  }
  store(to + n, F{});
}

struct OrderedX {
  const float *x, *sum;
  int64_t stride, groups;  // from row to row of each
};

// Rows [m, m + rows) of x times `count` rows of w, to y's columns from f on.
template <int bits, int rows>
void affine_some(const AffineMatmul& p, const OrderedX& x, int64_t m, const int64_t* y_row,
                 const AffineRow& first, int64_t f, int64_t count, const AffineShape& s) {
  constexpr int w_rows = 4 / rows;
  for (int64_t i = 0; i < count; i += w_rows) {
    AffineRow w[w_rows];
    for (int r = 0; r < w_rows; ++r) {  // the last one again where there are fewer
      const int64_t at = i + r < count ? i + r : count - 1;
      w[r] = {first.words + at * s.words, first.scale + at * s.groups,
              first.bias + at * s.groups};
    }
    float sums[rows][w_rows];
    affine_few<bits, rows, w_rows>(x.x + m * x.stride, x.stride, x.sum + m * x.groups,
                                   x.groups, w, s, sums);
    for (int n = 0; n < rows; ++n) {
      const int64_t row = y_row ? y_row[m + n] : m + n;
      for (int r = 0; r < w_rows && i + r < count; ++r) {
        from_f32(p.x_type, sums[n][r], p.y, row * p.f + f + i + r);
      }
    }
  }
}

template <int bits>
bool affine_few_rows(const AffineMatmul& p, const XRows& x, const int64_t* y_row,
                     const Workers& workers) {
  constexpr int64_t w_rows = 16;  // whose scales are widened at once, and which x meets
  const AffineShape s(p);
  const int64_t x_stride = s.blocks * lanes * (32 / bits), groups = s.padded_groups();
  Scratch<float> ordered(p.rows * (x_stride + groups));
  if (!ordered.get()) return false;
  float* x_sum = ordered.get() + p.rows * x_stride;
  for (int64_t m = 0; m < p.rows; ++m) {
    order_x<bits>(x.data + m * x.stride, p, s, ordered.get() + m * x_stride,
                  x_sum + m * groups);
  }
  const OrderedX own = {ordered.get(), x_sum, x_stride, groups};
  const int64_t room = round_up(w_rows * s.groups, lanes) + lanes;
  const int64_t wanted = 8 * (int64_t)workers.threads;
  const int64_t share = round_up((p.f + wanted - 1) / wanted, 4);
  Flag failed;
  workers.for_each((p.f + share - 1) / share, [&](int64_t item) {
    Scratch<float> scale(2 * room);
    if (!scale.get()) {
      failed.set();
      return;
    }
    const int64_t end = (item + 1) * share < p.f ? (item + 1) * share : p.f;
    for (int64_t f = item * share; f < end; f += w_rows) {
      const int64_t count = end - f < w_rows ? end - f : w_rows;
      const AffineRow first = {p.codes + f * s.words, scale.get(), scale.get() + room};
      widen_groups(p.scale_type, p.scales, f * s.groups, count * s.groups, scale.get());
      widen_groups(p.scale_type, p.biases, f * s.groups, count * s.groups,
                   scale.get() + room);
      for (int64_t m = 0; m < p.rows;) {
        const int64_t rest = p.rows - m;
        const int n = rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        (n == 4   ? affine_some<bits, 4>
         : n == 2 ? affine_some<bits, 2>
                  : affine_some<bits, 1>)(p, own, m, y_row, first, f, count, s);
        m += n;
      }
    }
  });
  return !failed;
}

template <int bits>
bool affine_many_rows(const AffineMatmul& p, const XRows& x, const int64_t* y_row,
                      const Workers& workers) {
  constexpr int per_word = 32 / bits;
  const AffineShape s(p);
  // panel_columns and decode_step are whole vectors of words
  static_assert(panel_columns % (lanes * per_word) == 0 && decode_step >= lanes * per_word);
  auto decode = [&](int64_t row, int64_t first, int64_t columns, float* panel) {
    for (int half = 0; half < panel_rows; half += lanes) {
      float scales[lanes], biases[lanes];
      int64_t group = -1;
      for (int64_t i = 0; i < columns; i += lanes * per_word) {
        const int64_t word = (first + i) / per_word, left = s.words - word;
        U rows[lanes], words[lanes];
        for (int r = 0; r < lanes; ++r) {
          const int64_t at = row + half + r;
          rows[r] = at < p.f ? (U)load_words(p.codes + at * s.words + word, left) : U{};
        }
        transpose(rows, words);
        for (int c = 0; c < lanes && c < left; ++c) {
          if ((word + c) / s.per_group != group) {
            group = (word + c) / s.per_group;
            for (int r = 0; r < lanes; ++r) {
              const int64_t at = (row + half + r) * s.groups + group;
              const bool inside = row + half + r < p.f;
              scales[r] = inside ? to_f32(p.scale_type, p.scales, at) : 0;
              biases[r] = inside ? to_f32(p.scale_type, p.biases, at) : 0;
            }
          }
          const F scale = load<F>(scales), bias = load<F>(biases);
          float* to = panel + (i + c * per_word) * panel_rows + half;
#pragma GCC unroll 16
          for (int j = 0; j < per_word; ++j) {
            store(to + j * panel_rows, code_of<bits>((I)words[c], j) * scale + bias);
          }
        }
      }
    }
  };
  return multiply_panels(decode, x, p.rows, p.d, p.f, p.y, p.x_type, y_row, workers);
}

template <int bits>
bool affine_rows(const AffineMatmul& p, const XRows& x, const int64_t* y_row,
                 const Workers& workers) {
  return (p.rows <= few_affine_rows ? affine_few_rows<bits> : affine_many_rows<bits>)(
      p, x, y_row, workers);
}

// Multiplies p.rows rows of x; the results go to rows y_row of y, or to the same ones.
inline bool affine_product(const AffineMatmul& p, const XRows& x, const int64_t* y_row,
                           const Workers& workers) {
  return (p.bits == 8   ? affine_rows<8>
          : p.bits == 4 ? affine_rows<4>
                        : affine_rows<2>)(p, x, y_row, workers);
}

// Each expert after the other, with the rows that ask for it side by side.
inline bool affine_experts(const AffineMatmul& p, const XRows& x, const Workers& workers) {
  const int64_t y_bytes = p.f * (p.x_type == Float::f32 ? 4 : 2);
  const int64_t groups = p.f * (p.d / p.group) * (p.scale_type == Float::f32 ? 4 : 2);
  Scratch<int64_t> y_row(p.rows);
  Scratch<float> asked(p.rows * x.stride);
  if (!y_row.get() || !asked.get()) return false;
  for (int64_t i = 0; i < p.rows; ++i) {
    if (p.expert[i] >= 0 && p.expert[i] < p.experts) continue;
    memset(static_cast<char*>(p.y) + i * y_bytes, 0, y_bytes);
  }
  for (int64_t e = 0; e < p.experts; ++e) {
    AffineMatmul own = p;
    own.codes += e * p.f * p.d * p.bits / 32;
    own.scales = static_cast<const char*>(p.scales) + e * groups;
    own.biases = static_cast<const char*>(p.biases) + e * groups;
    own.rows = 0;
    for (int64_t i = 0; i < p.rows; ++i) {
      if (p.expert[i] != e) continue;
      memcpy(asked.get() + own.rows * x.stride, x.data + i / p.k * x.stride,
             x.stride * sizeof(float));
      y_row[own.rows++] = i;
    }
    const XRows rows = {asked.get(), x.stride};
    if (own.rows && !affine_product(own, rows, y_row.get(), workers)) return false;
  }
  return true;
}

inline bool affine_matmul(const AffineMatmul& p, const Workers& workers) {
  const int64_t stride = row_stride(p.d, Order::plain);
  const int64_t x_rows = p.expert ? p.rows / p.k : p.rows;
  Scratch<float> scratch(x_rows * stride);
  if (!scratch.get()) return false;
  const XRows x = {scratch.get(), stride};
  prepare_x(p.x, p.x_type, x_rows, p.d, Float::f32, Order::plain, x, workers);
  return p.expert ? affine_experts(p, x, workers) : affine_product(p, x, nullptr, workers);
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
