// Attention with an online softmax (https://arxiv.org/abs/2205.14135).
//
// A query sees one range of keys: causal, window and lengths only move its ends. The
// heads that share a key head are rows of one product with it, a row being one of these
// heads of one query. Few rows (decoding) take all key heads of some keys together, so
// that a cache is read from one end to the other; many rows (prefill) take one key head,
// whose blocks of keys are transposed once for up to 256 of them. A long cache is cut
// into shares that are merged at the end, so that few rows also keep all threads busy.
#pragma once
#include "../memory.h"
#include "online_softmax.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t few = 8;  // rows up to which no block is transposed
constexpr int64_t most_rows = 256;  // of one item
constexpr int64_t fewest_keys = 64;  // of a share
constexpr int64_t block_bytes = 1 << 16;  // of keys, or values, of all heads

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
