// Attention with an online softmax (https://arxiv.org/abs/2205.14135).
//
// A query sees one range of keys: causal, window and lengths only move its ends. One
// work item takes some query rows of one key head, a row being a query of one of the
// heads that share it, and a share of the keys; the shares are merged at the end, so
// that a single query over a long cache also keeps all threads busy.
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int key_block = 64;
constexpr int64_t rows_at_once = 64;
constexpr int64_t fewest_keys = 256;  // of a share of the keys
constexpr int64_t most_shares = 64;

struct Range {
  int64_t begin, end;
};

inline Range intersection(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

inline Range visible_keys(const Attention& p, int64_t b, int64_t t) {
  const int64_t position = t + p.q_offset[b], length = p.kv_lengths[b];
  Range seen = {0, length < p.s ? length : p.s};
  if (p.causal) seen.end = position + 1 < seen.end ? position + 1 : seen.end;
  if (p.window && position - p.window + 1 > 0) seen.begin = position - p.window + 1;
  return seen;
}

// score[r][j] = q[r] . k[j] for rows < 5; vectors along the head dim.
template <int rows>
void few_scores(const float* q, const float* k, int64_t stride, int64_t width, int keys,
                float* score) {
  for (int j = 0; j < keys; ++j) {
    F sum[rows] = {};
    for (int64_t i = 0; i < width; i += lanes) {
      const F key = load<F>(k + j * stride + i);
      for (int r = 0; r < rows; ++r) sum[r] += key * load<F>(q + r * width + i);
    }
    for (int r = 0; r < rows; ++r) score[r * key_block + j] = sum_of_lanes(sum[r]);
  }
}

// The same for many rows: vectors along the keys, which lie as [width, key_block].
template <int rows>
void many_scores(const float* q, const float* transposed, int64_t width, float* score) {
  for (int part = 0; part < key_block; part += 2 * lanes) {
    F sum[rows][2] = {};
    for (int64_t i = 0; i < width; ++i) {
      const F low = load<F>(transposed + i * key_block + part);
      const F high = load<F>(transposed + i * key_block + part + lanes);
      for (int r = 0; r < rows; ++r) {
        sum[r][0] += low * q[r * width + i];
        sum[r][1] += high * q[r * width + i];
      }
    }
    for (int r = 0; r < rows; ++r) {
      store(score + r * key_block + part, sum[r][0]);
      store(score + r * key_block + part + lanes, sum[r][1]);
    }
  }
}

// out[r] += weight[r][j] v[j] over the keys j in [first, end).
template <int rows>
void add_values(const float* weight, const float* v, int64_t stride, int64_t width,
                int first, int end, float* out) {
  for (int64_t i = 0; i < width; i += 2 * lanes) {
    const bool two = i + lanes < width;
    F sum[rows][2] = {};
    for (int j = first; j < end; ++j) {
      const F low = load<F>(v + j * stride + i);
      const F high = two ? load<F>(v + j * stride + i + lanes) : F{};
      for (int r = 0; r < rows; ++r) {
        sum[r][0] += low * weight[r * key_block + j];
        sum[r][1] += high * weight[r * key_block + j];
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* to = out + r * width + i;
      store(to, load<F>(to) + sum[r][0]);
      if (two) store(to + lanes, load<F>(to + lanes) + sum[r][1]);
    }
  }
}

inline int64_t padded(int64_t n) { return (n + lanes - 1) / lanes * lanes; }

// Some rows of keys or values as float32 with a padded width: in place if they are so.
struct WideRows {
  const float* first;
  int64_t stride;
};

inline WideRows wide_rows(const void* from, Float type, int64_t start, int64_t stride,
                          int64_t width, int rows, float* scratch) {
  if (type == Float::f32 && width % lanes == 0) {
    return {static_cast<const float*>(from) + start, stride};
  }
  for (int j = 0; j < rows; ++j) {
    to_f32_row(type, from, start + j * stride, width, padded(width),
               scratch + j * padded(width));
  }
  return {scratch, padded(width)};
}

// A share's result for one row: not yet divided by `total`, in units of e**top.
struct Share {
  float *out, *top, *total;
};

struct AttentionItem {
  int64_t b, k;
  Range rows;  // of the t * g that share the key head, the g heads of a query together
  Range keys;
};

inline bool attention_item(const Attention& p, const AttentionItem& item, Share share) {
  const int64_t width = padded(p.h), out_width = padded(p.hv);
  const int rows = (int)(item.rows.end - item.rows.begin);
  Scratch<float> q(rows * width), score(rows * key_block + 4 * key_block);
  Scratch<float> k_scratch(key_block * width), v_scratch(key_block * out_width);
  Scratch<float> transposed(rows > 4 ? key_block * width : 0);
  Scratch<Range> seen(rows);
  if (!q.get() || !score.get() || !k_scratch.get() || !v_scratch.get() ||
      !transposed.get() || !seen.get()) {
    return false;
  }
  Range all = {p.s, 0};  // what any of the rows sees
  for (int r = 0; r < rows; ++r) {
    const int64_t t = (item.rows.begin + r) / p.g, head = (item.rows.begin + r) % p.g;
    const int64_t at = ((item.b * p.t + t) * p.k + item.k) * p.g + head;
    to_f32_row(p.query_type, p.query, at * p.h, p.h, width, q.get() + r * width);
    for (int64_t i = 0; i < width; ++i) q[r * width + i] *= p.scale;
    seen[r] = intersection(visible_keys(p, item.b, t), item.keys);
    if (seen[r].begin < seen[r].end) {
      all.begin = seen[r].begin < all.begin ? seen[r].begin : all.begin;
      all.end = seen[r].end > all.end ? seen[r].end : all.end;
    }
    share.top[r] = -INFINITY;
    share.total[r] = 0;
    for (int64_t i = 0; i < out_width; ++i) share.out[r * out_width + i] = 0;
  }
  for (int64_t first = all.begin; first < all.end; first += key_block) {
    const int keys = (int)(all.end - first < key_block ? all.end - first : key_block);
    const int64_t row = (item.b * p.s + first) * p.k + item.k;
    const WideRows k = wide_rows(p.key, p.key_type, row * p.h, p.k * p.h, p.h, keys,
                                 k_scratch.get());
    const WideRows v = wide_rows(p.value, p.value_type, row * p.hv, p.k * p.hv, p.hv,
                                 keys, v_scratch.get());
    if (rows > 4) {
      for (int64_t i = 0; i < p.h; ++i) {
        float* to = transposed.get() + i * key_block;
        for (int j = 0; j < keys; ++j) to[j] = k.first[j * k.stride + i];
        for (int j = keys; j < key_block; ++j) to[j] = 0;
      }
      for (int64_t i = p.h; i < width; ++i) {
        for (int j = 0; j < key_block; ++j) transposed[i * key_block + j] = 0;
      }
    }
    for (int r = 0; r < rows; r += 4) {
      const float* from = q.get() + r * width;
      float* to = score.get() + r * key_block;
      const int n = rows - r < 4 ? rows - r : 4;
      if (rows > 4) {
        switch (n) {
          case 4: many_scores<4>(from, transposed.get(), width, to); break;
          case 3: many_scores<3>(from, transposed.get(), width, to); break;
          case 2: many_scores<2>(from, transposed.get(), width, to); break;
          default: many_scores<1>(from, transposed.get(), width, to);
        }
      } else {
        switch (n) {
          case 4: few_scores<4>(from, k.first, k.stride, width, keys, to); break;
          case 3: few_scores<3>(from, k.first, k.stride, width, keys, to); break;
          case 2: few_scores<2>(from, k.first, k.stride, width, keys, to); break;
          default: few_scores<1>(from, k.first, k.stride, width, keys, to);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* s = score.get() + r * key_block;
      const Range here = intersection(seen[r], {first, first + keys});
      for (int j = 0; j < key_block; ++j) {
        if (first + j < here.begin || first + j >= here.end) s[j] = -INFINITY;
      }
      if (here.begin >= here.end) {
        for (int j = 0; j < key_block; ++j) s[j] = 0;
        continue;
      }
      F most = broadcast(-INFINITY);
      for (int j = 0; j < key_block; j += lanes) {
        F x = load<F>(s + j);
        if (p.softcap > 0) {  // tanh(y) = 1 - 2 / (e**2y + 1)
          F y = x * (2 / p.softcap);
          y = y > 80.0f ? broadcast(80.0f) : y;
          const F capped = p.softcap - 2 * p.softcap / (exp_of(y) + 1.0f);
          x = x == broadcast(-INFINITY) ? x : capped;
          store(s + j, x);
        }
        most = x > most ? x : most;
      }
      float top = share.top[r];
      for (int j = 0; j < lanes; ++j) top = most[j] > top ? most[j] : top;
      const float origin = top == -INFINITY ? 0 : top;  // all scores are -infinity
      F total = {};
      for (int j = 0; j < key_block; j += lanes) {
        const F x = load<F>(s + j) - origin;
        const F weight = x != x ? x : exp_of(x);
        total += weight;
        store(s + j, weight);
      }
      if (top > share.top[r] && share.total[r] > 0) {
        const float shrink = expf(share.top[r] - top);
        share.total[r] *= shrink;
        for (int64_t i = 0; i < out_width; ++i) share.out[r * out_width + i] *= shrink;
      }
      share.top[r] = top;
      share.total[r] += sum_of_lanes(total);
    }
    for (int r = 0; r < rows; r += 4) {
      const float* weight = score.get() + r * key_block;
      float* to = share.out + r * out_width;
      switch (rows - r < 4 ? rows - r : 4) {
        case 4: add_values<4>(weight, v.first, v.stride, out_width, 0, keys, to); break;
        case 3: add_values<3>(weight, v.first, v.stride, out_width, 0, keys, to); break;
        case 2: add_values<2>(weight, v.first, v.stride, out_width, 0, keys, to); break;
        default: add_values<1>(weight, v.first, v.stride, out_width, 0, keys, to);
      }
    }
  }
  return true;
}

inline bool attention(const Attention& p, const Workers& workers) {
  const int64_t rows = p.t * p.g, out_width = padded(p.hv);
  const int64_t row_items = (rows + rows_at_once - 1) / rows_at_once;
  const int64_t heads = p.b * p.k;
  int64_t longest = 0;
  for (int64_t b = 0; b < p.b; ++b) {
    const int64_t end = visible_keys(p, b, p.t - 1).end;
    longest = end > longest ? end : longest;
  }
  // enough items that no thread waits long for another's last one
  const int64_t wanted = (4 * workers.threads + heads * row_items - 1) / (heads * row_items);
  const int64_t whole = (longest + fewest_keys - 1) / fewest_keys;
  const int64_t most = whole < most_shares ? whole : most_shares;
  const int64_t shares = wanted < most ? (wanted > 0 ? wanted : 1) : (most > 0 ? most : 1);
  const int64_t blocks = (longest + shares * key_block - 1) / (shares * key_block);
  const int64_t keys_per_share = blocks * key_block;

  const int64_t items = heads * row_items * shares;
  const int64_t item_rows = rows < rows_at_once ? rows : rows_at_once;
  Scratch<float> out(items * item_rows * out_width);
  Scratch<float> top(items * item_rows), total(items * item_rows);
  if (!out.get() || !top.get() || !total.get()) return false;
  auto share_of = [&](int64_t item) {
    const int64_t row = item * item_rows;
    return Share{out.get() + row * out_width, top.get() + row, total.get() + row};
  };
  auto rows_of = [&](int64_t item) {  // item / shares
    const int64_t begin = item % row_items * rows_at_once;
    const int64_t end = begin + rows_at_once;
    return Range{begin, end < rows ? end : rows};
  };
  bool failed = false;
  workers.for_each(items, [&](int64_t i) {
    const int64_t group = i / shares, begin = i % shares * keys_per_share;
    const int64_t head = group / row_items;
    const AttentionItem item = {head / p.k, head % p.k, rows_of(group),
                                {begin, begin + keys_per_share}};
    if (!attention_item(p, item, share_of(i))) failed = true;
  });
  if (failed) return false;
  for (int64_t group = 0; group < heads * row_items; ++group) {
    const int64_t b = group / row_items / p.k, k = group / row_items % p.k;
    const Range range = rows_of(group);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t r = row - range.begin;
      const int64_t at = ((b * p.t + row / p.g) * p.k + k) * p.g + row % p.g;
      const Share first = share_of(group * shares);
      float highest = first.top[r], sum = 0;
      for (int64_t i = 1; i < shares; ++i) {
        const float other = share_of(group * shares + i).top[r];
        highest = other > highest ? other : highest;
      }
      float factor[most_shares];
      for (int64_t i = 0; i < shares; ++i) {
        const Share share = share_of(group * shares + i);
        factor[i] = share.top[r] == highest ? 1 : expf(share.top[r] - highest);
        sum += share.total[r] * factor[i];
      }
      p.lse[at] = sum > 0 || sum != sum ? highest + logf(sum) : -INFINITY;
      const float inverse = sum > 0 || sum != sum ? 1 / sum : 0;
      for (int64_t i = 0; i < p.hv; ++i) {
        float y = 0;
        for (int64_t n = 0; n < shares; ++n) {
          y += share_of(group * shares + n).out[r * out_width + i] * factor[n];
        }
        from_f32(p.query_type, y * inverse, p.out, at * p.hv + i);
      }
    }
  }
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
