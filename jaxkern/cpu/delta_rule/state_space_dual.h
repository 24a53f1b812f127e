// State-space duality, the layer of Mamba-2, as a recurrence
// (https://arxiv.org/abs/2405.21060).
//
// The rows of a state do not meet: one work item takes `lanes` of them through all tokens,
// so that they stay in the first cache. Vectors run along a row. Four tokens pass over a
// vector while it is in registers; their sums, and those of neighbouring rows, are taken
// across lanes together.
#pragma once
#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int tokens_at_once = 4;

// `rows` rows of a state from `row` on of head n, through `tokens` tokens from `token` on.
// Reads them at `from` and writes them to `to`, which may be the same.
template <int tokens, int rows>
void scan_rows(const StateSpace& p, int64_t token, int64_t n, int64_t row,
               const float* from, float* to) {
  const int64_t heads = p.k * p.group;
  const float *b[tokens], *c[tokens];
  float decay[tokens], written[tokens][rows];
  for (int j = 0; j < tokens; ++j) {
    const int64_t at = (token + j) * heads + n;
    const int64_t shared = ((token + j) * p.k + n / p.group) * p.size;
    b[j] = p.b + shared, c[j] = p.c + shared, decay[j] = p.decay[at];
    for (int i = 0; i < rows; ++i) written[j][i] = p.step[at] * p.x[at * p.h + row + i];
  }
  F read[tokens][rows] = {};
  auto advance = [&](int64_t at, auto get, auto put) {
    F state[rows];
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) state[i] = get(from + i * p.size, at);
#pragma GCC unroll 4
    for (int j = 0; j < tokens; ++j) {
      const F write = get(b[j], at), look_up = get(c[j], at);
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) {
        state[i] = state[i] * decay[j] + write * written[j][i];
        read[j][i] += state[i] * look_up;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) put(state[i], to + i * p.size, at);
  };
  int64_t at = 0;
  for (; at + lanes <= p.size; at += lanes) {
    advance(
        at, [](const float* x, int64_t i) { return load<F>(x + i); },
        [](F x, float* y, int64_t i) { store(y + i, x); });
  }
  if (at < p.size) {
    const int64_t end = p.size;
    advance(
        at, [=](const float* x, int64_t i) { return load_within<Float::f32>(x, i, end, 0); },
        [=](F x, float* y, int64_t i) { store_within<Float::f32>(x, y, i, end); });
  }
  float sums[tokens * rows];
  if (tokens * rows == lanes) {
    store(sums, sums_of_lanes(&read[0][0]));
  } else {
    for (int i = 0; i < tokens * rows; ++i) sums[i] = sum_of_lanes(read[i / rows][i % rows]);
  }
  for (int j = 0; j < tokens; ++j) {
    float* y = p.y + ((token + j) * heads + n) * p.h + row;
    for (int i = 0; i < rows; ++i) y[i] = sums[j * rows + i];
  }
}

// The same for rows [row, last), `rows` at a time while there are so many.
template <int tokens>
void scan_tokens(const StateSpace& p, int64_t token, int64_t n, int64_t row, int64_t last,
                 const float* from, float* to) {
  constexpr int rows = lanes / tokens;
  for (int step; row < last; row += step, from += step * p.size, to += step * p.size) {
    step = row + rows <= last ? rows : 1;
    (step == rows ? scan_rows<tokens, rows> : scan_rows<tokens, 1>)(p, token, n, row, from,
                                                                    to);
  }
}

// How many tokens from `token` on pass together: up to the next that forgets.
inline int64_t tokens_together(const StateSpace& p, int64_t token, int64_t end, int64_t n) {
  const int64_t heads = p.k * p.group;
  if (token + tokens_at_once > end) return 1;
  for (int64_t j = 1; j < tokens_at_once; ++j) {
    if (p.decay[(token + j) * heads + n] == 0) return 1;
  }
  return tokens_at_once;
}

inline bool state_space(const StateSpace& p, const Workers& workers) {
  const int64_t parts = (p.h + lanes - 1) / lanes, heads = p.k * p.group;
  workers.for_each(p.r * heads * parts, [&](int64_t item) {
    const int64_t head = item / parts, first = head / heads * p.t;
    const int64_t row = item % parts * lanes;
    const int64_t last = row + lanes < p.h ? row + lanes : p.h;
    float* to = p.new_state + (head * p.h + row) * p.size;
    const float* from = p.state ? p.state + (to - p.new_state) : to;
    auto forget = [&] { memset(to, 0, (size_t)((last - row) * p.size) * sizeof(float)); };
    if (!p.state) forget();
    for (int64_t t = 0, tokens; t < p.t; t += tokens, from = to) {
      const int64_t n = head % heads, token = first + t;
      if (p.decay[token * heads + n] == 0) forget(), from = to;  // NaN and inf as well
      tokens = tokens_together(p, token, first + p.t, n);
      (tokens == 1 ? scan_tokens<1> : scan_tokens<tokens_at_once>)(p, token, n, row, last,
                                                                   from, to);
    }
  });
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
