// The online softmax: a share of the keys adds to the results of some rows.
#pragma once
#include <cmath>

#include "cached_rows.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t most_shares = 64;
constexpr int wide = lanes == 16 ? 4 : 2;  // vectors of a tile in registers

// score[r][j] = q[r] . k[j] for rows <= 4; vectors along the head dim.
template <Stored stored, int rows>
void few_scores(const float* q, const Rows& k, int keys, float* score) {
  for (int first = 0; first < keys; first += lanes) {
    F sum[rows][lanes];
    const int here = keys - first < lanes ? keys - first : lanes;
    for (int j = 0; j < here; ++j) {
      const int64_t from = k.start + (first + j) * k.stride;
      F part[rows] = {};
      for (int64_t i = 0; i < k.width; i += lanes) {
        const F key = load_stored<stored>(k.data, from + i);
        for (int r = 0; r < rows; ++r) part[r] += key * load<F>(q + r * k.width + i);
      }
      for (int r = 0; r < rows; ++r) sum[r][j] = part[r];
    }
    for (int j = here; j < lanes; ++j) {
      for (int r = 0; r < rows; ++r) sum[r][j] = F{};
    }
    for (int r = 0; r < rows; ++r) {
      store(score + r * key_block + first, sums_of_lanes(sum[r]));
    }
  }
}

// The same for many rows: vectors along the keys, which lie as [width, key_block].
template <int rows>
void many_scores(const float* q, const float* transposed, int64_t width, float* score) {
  for (int part = 0; part < key_block; part += wide * lanes) {
    F sum[rows][wide] = {};
    for (int64_t i = 0; i < width; ++i) {
      F key[wide];
      for (int c = 0; c < wide; ++c) {
        key[c] = load<F>(transposed + i * key_block + part + c * lanes);
      }
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < wide; ++c) sum[r][c] += key[c] * q[r * width + i];
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < wide; ++c) {
        store(score + r * key_block + part + c * lanes, sum[r][c]);
      }
    }
  }
}

// out[r] += weight[r][j] v[j] over the keys j in `seen`, `n` vectors from i on.
template <Stored stored, int rows, int n>
void add_values_at(const float* weight, const Rows& v, Range seen, int64_t i, float* out) {
  F sum[rows][n];
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < n; ++c) sum[r][c] = load<F>(out + r * v.width + i + c * lanes);
  }
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    F value[n];
    for (int c = 0; c < n; ++c) {
      const int64_t from = v.start + j * v.stride + i + c * lanes;
      value[c] = load_stored<stored>(v.data, from);
    }
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < n; ++c) sum[r][c] += value[c] * weight[r * key_block + j];
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < n; ++c) store(out + r * v.width + i + c * lanes, sum[r][c]);
  }
}

template <Stored stored, int rows>
void add_values(const float* weight, const Rows& v, Range seen, float* out) {
  int64_t i = 0;
  for (; i + wide * lanes <= v.width; i += wide * lanes) {
    add_values_at<stored, rows, wide>(weight, v, seen, i, out);
  }
  for (; i < v.width; i += lanes) {
    add_values_at<stored, rows, 1>(weight, v, seen, i, out);
  }
}

// f<stored, rows>(...) for what is known when it runs.
#define JAXKERN_BY_ROWS(f, stored, n, ...)       \
  switch (n) {                                   \
    case 1: f<stored, 1>(__VA_ARGS__); break;    \
    case 2: f<stored, 2>(__VA_ARGS__); break;    \
    case 3: f<stored, 3>(__VA_ARGS__); break;    \
    default: f<stored, 4>(__VA_ARGS__);          \
  }
#define JAXKERN_BY_STORED(f, kind, n, ...)                                         \
  switch (kind) {                                                                  \
    case Stored::f32: JAXKERN_BY_ROWS(f, Stored::f32, n, __VA_ARGS__) break;       \
    case Stored::f16: JAXKERN_BY_ROWS(f, Stored::f16, n, __VA_ARGS__) break;       \
    case Stored::bf16: JAXKERN_BY_ROWS(f, Stored::bf16, n, __VA_ARGS__) break;     \
    case Stored::codes: JAXKERN_BY_ROWS(f, Stored::codes, n, __VA_ARGS__) break;   \
  }

// A share's result for its rows: not yet divided by `total`, in units of e**top.
struct Share {
  float *out, *top, *total;
};

// `size` scores of one row become weights of the keys that it sees, 0 elsewhere; its
// result so far moves to the new top. `seen` counts from the first and is not empty.
inline void weigh(const Attention& p, const Rows& k, const Rows& v, Range seen,
                  int64_t size, float* s, Share share, int64_t r) {
  for (int64_t j = 0; j < seen.begin; ++j) s[j] = -INFINITY;
  for (int64_t j = seen.end; j < size; ++j) s[j] = -INFINITY;
  if (k.scales) {
    for (int64_t j = seen.begin; j < seen.end; ++j) s[j] *= k.scales[j];
  }
  F most = broadcast(-INFINITY);
  for (int64_t j = 0; j < size; j += lanes) {
    F x = load<F>(s + j);
    if (p.softcap > 0) {
      const F capped = p.softcap * tanh_of(x * (1 / p.softcap));
      x = x == broadcast(-INFINITY) ? x : capped;
      store(s + j, x);
    }
    most = x > most ? x : most;
  }
  const float highest = max_of_lanes(most), before = share.top[r];
  const float top = highest > before ? highest : before;
  const float origin = top == -INFINITY ? 0 : top;  // all scores are -infinity
  F total = {};
  for (int64_t j = 0; j < size; j += lanes) {
    const F x = load<F>(s + j) - origin;
    const F weight = x != x ? x : exp_of(x);
    total += weight;
    store(s + j, weight);
  }
  if (top > before && share.total[r] > 0) {
    const float shrink = expf(before - top);
    share.total[r] *= shrink;
    float* out = share.out + r * v.width;
    for (int64_t i = 0; i < v.width; i += lanes) store(out + i, load<F>(out + i) * shrink);
  }
  share.top[r] = top;
  share.total[r] += sum_of_lanes(total);
  if (v.scales) {
    for (int64_t j = seen.begin; j < seen.end; ++j) s[j] *= v.scales[j];
  }
}

// Rows [rows.begin, rows.end) of the t * g that share key head k.
struct Queries {
  int64_t b, k;
  Range rows;

  int64_t count() const { return rows.end - rows.begin; }
  int64_t at(const Attention& p, int64_t r) const {  // row r among [b, t, k * g]
    const int64_t row = rows.begin + r;
    return ((b * p.t + row / p.g) * p.k + k) * p.g + row % p.g;
  }
};

// Queries as float32 times the scale, what each row sees of `keys`, and empty results.
inline Range begin_rows(const Attention& p, const Queries& own, Range keys, float* q,
                        Range* seen, Share share) {
  const int64_t width = padded(p.h), out_width = padded(p.hv);
  Range all = {0, 0};
  for (int64_t r = 0; r < own.count(); ++r) {
    to_f32_row(p.query_type, p.query, own.at(p, r) * p.h, p.h, width, q + r * width);
    for (int64_t i = 0; i < width; ++i) q[r * width + i] *= p.scale;
    seen[r] = intersection(visible_keys(p, own.b, (own.rows.begin + r) / p.g), keys);
    all = hull(all, seen[r]);
    share.top[r] = -INFINITY;
    share.total[r] = 0;
    for (int64_t i = 0; i < out_width; ++i) share.out[r * out_width + i] = 0;
  }
  return all;
}

// Adds the keys [first, first + keys) to the results of up to 4 rows, r the first.
inline void add_keys(const Attention& p, const Rows& k, const Rows& v,
                     const float* transposed, const float* q, const Range* seen,
                     int64_t first, int keys, int64_t r, int n, Share share) {
  float score[4 * key_block] __attribute__((aligned(64)));
  Range here[4], any = {0, 0};
  for (int i = 0; i < n; ++i) {
    here[i] = intersection(seen[r + i], {first, first + keys});
    here[i].begin -= first, here[i].end -= first;
    any = hull(any, here[i]);
  }
  if (any.begin >= any.end) return;
  const float* from = q + r * k.width;
  if (transposed) {
    switch (n) {
      case 1: many_scores<1>(from, transposed, k.width, score); break;
      case 2: many_scores<2>(from, transposed, k.width, score); break;
      case 3: many_scores<3>(from, transposed, k.width, score); break;
      default: many_scores<4>(from, transposed, k.width, score);
    }
  } else {
    JAXKERN_BY_STORED(few_scores, k.stored, n, from, k, keys, score)
  }
  for (int i = 0; i < n; ++i) {
    float* s = score + i * key_block;
    if (here[i].begin < here[i].end) {
      weigh(p, k, v, here[i], padded(keys), s, share, r + i);
    } else {
      for (int j = 0; j < keys; ++j) s[j] = 0;
    }
  }
  JAXKERN_BY_STORED(add_values, v.stored, n, score, v, any, share.out + r * v.width)
}

// Divides by the total of `shares` shares, of which row r lies `apart` rows apart.
inline void finish_row(const Attention& p, int64_t at, Share first, int64_t r,
                       int64_t shares, int64_t apart) {
  const int64_t out_width = padded(p.hv);
  float highest = first.top[r], sum = 0, factor[most_shares];
  for (int64_t i = 1; i < shares; ++i) {
    const float other = first.top[r + i * apart];
    highest = other > highest ? other : highest;
  }
  for (int64_t i = 0; i < shares; ++i) {
    const float top = first.top[r + i * apart];
    factor[i] = top == highest ? 1 : expf(top - highest);
    sum += first.total[r + i * apart] * factor[i];
  }
  const bool sees = sum > 0 || sum != sum;
  p.lse[at] = sees ? highest + logf(sum) : -INFINITY;
  const float inverse = sees ? 1 / sum : 0;
  for (int64_t i = 0; i < p.hv; i += lanes) {
    F y = {};
    for (int64_t n = 0; n < shares; ++n) {
      y += load<F>(first.out + (r + n * apart) * out_width + i) * factor[n];
    }
    const int64_t end = at * p.hv + p.hv;
    y *= inverse;
#define JAXKERN_CALL(type) store_within<type>(y, p.out, at * p.hv + i, end)
    JAXKERN_BY_TYPE(p.query_type, JAXKERN_CALL);
#undef JAXKERN_CALL
  }
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
