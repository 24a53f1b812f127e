// Attention with an online softmax (https://arxiv.org/abs/2205.14135).
//
// A query sees one range of keys: causal, window and lengths only move its ends. The
// heads that share a key head are rows of one product with it, a row being one of these
// heads of one query. Few rows (decoding) take all key heads of some keys together, so
// that a cache is read from one end to the other; many rows (prefill) take one key head,
// whose blocks of keys are transposed once for up to 256 of them. A long cache is cut
// into shares that are merged at the end, so that few rows also keep all threads busy.
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int key_block = 64;
constexpr int64_t few = 8;  // rows up to which no block is transposed
constexpr int64_t most_rows = 256;  // of one item
constexpr int64_t fewest_keys = 64;  // of a share
constexpr int64_t most_shares = 64;
constexpr int64_t block_bytes = 1 << 16;  // of keys, or values, of all heads
constexpr int wide = lanes == 16 ? 4 : 2;  // vectors of a tile in registers

struct Range {
  int64_t begin, end;
};

inline Range intersection(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

inline Range hull(Range a, Range b) {  // of both; an empty one does not count
  if (a.begin >= a.end) return b;
  if (b.begin >= b.end) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

inline Range visible_keys(const Attention& p, int64_t b, int64_t t) {
  const int64_t position = t + p.q_offset[b], length = p.kv_lengths[b];
  Range seen = {0, length < p.s ? length : p.s};
  if (p.causal) seen.end = position + 1 < seen.end ? position + 1 : seen.end;
  if (p.window && position - p.window + 1 > 0) seen.begin = position - p.window + 1;
  return seen;
}

inline int64_t padded(int64_t n) { return (n + lanes - 1) / lanes * lanes; }

enum class Stored { f32, f16, bf16, codes };  // elements of keys and values

template <Stored stored>
inline F load_stored(const void* x, int64_t i) {
  if (stored == Stored::f32) return load_f32<Float::f32>(x, i);
  if (stored == Stored::f16) return load_f32<Float::f16>(x, i);
  if (stored == Stored::bf16) return load_f32<Float::bf16>(x, i);
  const uint8_t* code = static_cast<const uint8_t*>(x) + i;
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(code));
  return to_float((I)_mm512_cvtepu8_epi32(bytes) - 128);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(code));
  return to_float((I)_mm256_cvtepu8_epi32(bytes) - 128);
#else
  typedef uint8_t Bytes __attribute__((vector_size(lanes)));
  return to_float(__builtin_convertvector(load<Bytes>(code), I) - 128);
#endif
}

// Bytes of the keys, or values, of one token: of all heads.
inline int64_t token_bytes(const Attention& p, bool values) {
  const bool codes = values ? p.value_scales : p.key_scales;
  const Float type = values ? p.value_type : p.key_type;
  return p.k * (values ? p.hv : p.h) * (codes ? 1 : type == Float::f32 ? 4 : 2);
}

// Rows of one head lie apart, which the hardware does not foresee: those of all heads
// are brought into the caches as they lie, before they are read head by head. By loads:
// the processor may drop what is only asked for.
inline void fetch(const Attention& p, bool values, int64_t b, int64_t first, int64_t keys) {
  const int64_t size = token_bytes(p, values);
  const volatile char* from =
      static_cast<const char*>(values ? p.value : p.key) + (b * p.s + first) * size;
  for (int64_t i = 0; i < keys * size; i += 64) (void)from[i];
}

// Some rows of keys or values of one head, `stride` elements apart.
struct Rows {
  const void* data;
  int64_t start, stride, width;  // width: a multiple of lanes
  Stored stored;
  const float* scales;  // null, or one for each row
};

template <Stored stored>
void widen(const Rows& rows, int64_t width, int keys, float* to) {
  const int64_t out_width = padded(width), whole = width / lanes * lanes;
  for (int j = 0; j < keys; ++j, to += out_width) {
    const int64_t from = rows.start + j * rows.stride;
    for (int64_t i = 0; i < whole; i += lanes) {
      store(to + i, load_stored<stored>(rows.data, from + i));
    }
    for (int64_t i = whole; i < out_width; ++i) {
      float y = 0;
      if (i < width) {
        y = stored == Stored::codes
                ? (float)static_cast<const uint8_t*>(rows.data)[from + i] - 128
            : stored == Stored::f16  ? to_f32(Float::f16, rows.data, from + i)
            : stored == Stored::bf16 ? to_f32(Float::bf16, rows.data, from + i)
                                     : to_f32(Float::f32, rows.data, from + i);
      }
      to[i] = y;
    }
  }
}

// Keys or values from `first` on, of which `keys` are read: in place where that is wanted
// and vectors fit them, else as float32 in `scratch`. Many rows want the copy: rows of
// a cache often lie a power of two apart, where they push each other out of the caches.
// `scratch` holds key_block rows of padded width, and their scales.
inline Rows cached_rows(const Attention& p, bool values, int64_t b, int64_t k,
                        int64_t first, int keys, bool in_place, float* scratch) {
  const float* scales = values ? p.value_scales : p.key_scales;
  const Float type = values ? p.value_type : p.key_type;
  const int64_t width = values ? p.hv : p.h, row = (b * p.s + first) * p.k + k;
  Rows rows = {values ? p.value : p.key, row * width, p.k * width, width,
               scales                ? Stored::codes
               : type == Float::f32  ? Stored::f32
               : type == Float::f16  ? Stored::f16
                                     : Stored::bf16,
               nullptr};
  if (scales) {
    float* to = scratch + key_block * padded(width);
    for (int j = 0; j < keys; ++j) to[j] = scales[row + j * p.k];
    rows.scales = to;
  }
  if (width % lanes == 0 && in_place) return rows;
  switch (rows.stored) {
    case Stored::f32: widen<Stored::f32>(rows, width, keys, scratch); break;
    case Stored::f16: widen<Stored::f16>(rows, width, keys, scratch); break;
    case Stored::bf16: widen<Stored::bf16>(rows, width, keys, scratch); break;
    case Stored::codes: widen<Stored::codes>(rows, width, keys, scratch); break;
  }
  return {scratch, 0, padded(width), padded(width), Stored::f32, rows.scales};
}

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

// Many rows of one key head over all keys.
inline bool prefill_item(const Attention& p, const Queries& own) {
  const int64_t width = padded(p.h), out_width = padded(p.hv), rows = own.count();
  Scratch<float> q(rows * width), k_scratch(key_block * (width + 1));
  Scratch<float> v_scratch(key_block * (out_width + 1));
  Scratch<float> transposed(key_block * width), out(rows * out_width), sums(2 * rows);
  Scratch<Range> seen(rows);
  if (!q.get() || !k_scratch.get() || !v_scratch.get() || !transposed.get() || !out.get() ||
      !sums.get() || !seen.get()) {
    return false;
  }
  const Share share = {out.get(), sums.get(), sums.get() + rows};
  const Range all = begin_rows(p, own, {0, p.s}, q.get(), seen.get(), share);
  for (int64_t first = all.begin; first < all.end; first += key_block) {
    const int keys = (int)(all.end - first < key_block ? all.end - first : key_block);
    const Rows k = cached_rows(p, false, own.b, own.k, first, keys, false, k_scratch.get());
    const Rows v = cached_rows(p, true, own.b, own.k, first, keys, false, v_scratch.get());
    for (int64_t i = 0; i < width; ++i) {
      float* to = transposed.get() + i * key_block;
      for (int j = 0; j < keys; ++j) to[j] = k_scratch[j * width + i];
      for (int j = keys; j < key_block; ++j) to[j] = 0;
    }
    for (int64_t r = 0; r < rows; r += 4) {
      add_keys(p, k, v, transposed.get(), q.get(), seen.get(), first, keys, r,
               rows - r < 4 ? (int)(rows - r) : 4, share);
    }
  }
  for (int64_t r = 0; r < rows; ++r) finish_row(p, own.at(p, r), share, r, 1, 0);
  return true;
}

// Few rows of all key heads of one sequence over the keys of one share, which is the
// share of key head 0; those of the others follow.
inline bool decode_item(const Attention& p, int64_t b, Range keys, Share share) {
  const int64_t width = padded(p.h), out_width = padded(p.hv), rows = p.t * p.g;
  Scratch<float> q(p.k * rows * width);
  const bool copies = p.key_scales || p.value_scales || width != p.h || out_width != p.hv;
  Scratch<float> k_scratch(copies ? key_block * (width + 1) : 0);
  Scratch<float> v_scratch(copies ? key_block * (out_width + 1) : 0);
  Scratch<Range> seen(rows);
  if (!q.get() || !k_scratch.get() || !v_scratch.get() || !seen.get()) return false;
  auto share_of = [&](int64_t k) {
    return Share{share.out + k * rows * out_width, share.top + k * rows,
                 share.total + k * rows};
  };
  Range all = {0, 0};
  for (int64_t k = 0; k < p.k; ++k) {
    all = begin_rows(p, {b, k, {0, rows}}, keys, q.get() + k * rows * width, seen.get(),
                     share_of(k));
  }
  const int64_t fit = block_bytes / token_bytes(p, false) / lanes * lanes;
  const int64_t most = fit < lanes ? lanes : fit > key_block ? key_block : fit;
  const int64_t length = all.end - all.begin, blocks = (length + most - 1) / most;
  const int64_t step = blocks ? (length + blocks - 1) / blocks : 0;  // all of one size
  for (int64_t first = all.begin; first < all.end; first += step) {
    const int n = (int)(all.end - first < step ? all.end - first : step);
    fetch(p, false, b, first, n);
    fetch(p, true, b, first, n);
    for (int64_t head = 0; head < p.k; ++head) {
      const Rows k = cached_rows(p, false, b, head, first, n, true, k_scratch.get());
      const Rows v = cached_rows(p, true, b, head, first, n, true, v_scratch.get());
      for (int64_t r = 0; r < rows; r += 4) {
        add_keys(p, k, v, nullptr, q.get() + head * rows * width, seen.get(), first, n, r,
                 rows - r < 4 ? (int)(rows - r) : 4, share_of(head));
      }
    }
  }
  return true;
}

inline bool decode(const Attention& p, const Workers& workers) {
  const int64_t rows = p.t * p.g, out_width = padded(p.hv), all_rows = p.k * rows;
  Range seen = {0, 0};
  for (int64_t b = 0; b < p.b; ++b) {
    for (int64_t t = 0; t < p.t; ++t) seen = hull(seen, visible_keys(p, b, t));
  }
  // enough items that no thread waits long for another's last one
  const int64_t length = seen.end - seen.begin, wanted = (4 * workers.threads + p.b - 1) / p.b;
  const int64_t fit = length / fewest_keys, most = fit < most_shares ? fit : most_shares;
  const int64_t shares = wanted < most ? wanted : most > 0 ? most : 1;
  const int64_t keys_per_share = (length + shares - 1) / shares;
  const int64_t count = p.b * shares * all_rows;
  Scratch<float> out(count * out_width), top(count), total(count);
  if (!out.get() || !top.get() || !total.get()) return false;
  auto share_of = [&](int64_t item) {
    const int64_t row = item * all_rows;
    return Share{out.get() + row * out_width, top.get() + row, total.get() + row};
  };
  Flag failed;
  workers.for_each(p.b * shares, [&](int64_t i) {
    const int64_t begin = seen.begin + i % shares * keys_per_share;
    const Range keys = {begin, begin + keys_per_share};
    if (!decode_item(p, i / shares, keys, share_of(i))) failed.set();
  });
  if (failed) return false;
  for (int64_t b = 0; b < p.b; ++b) {
    for (int64_t row = 0; row < all_rows; ++row) {
      const Queries own = {b, row / rows, {0, rows}};
      finish_row(p, own.at(p, row % rows), share_of(b * shares), row, shares, all_rows);
    }
  }
  return true;
}

inline bool attention(const Attention& p, const Workers& workers) {
  const int64_t rows = p.t * p.g, heads = p.b * p.k;
  if (rows <= few) return decode(p, workers);
  int64_t at_once = heads * rows / (4 * workers.threads) / 4 * 4;
  at_once = at_once > most_rows ? most_rows : at_once < 64 ? 64 : at_once;
  const int64_t row_items = (rows + at_once - 1) / at_once;
  Flag failed;
  workers.for_each(heads * row_items, [&](int64_t i) {
    // the last rows see most where attention is causal: first
    const int64_t head = i % heads, begin = (row_items - 1 - i / heads) * at_once;
    const int64_t end = begin + at_once < rows ? begin + at_once : rows;
    if (!prefill_item(p, {head / p.k, head % p.k, {begin, end}})) failed.set();
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
