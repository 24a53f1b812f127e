// Cross entropy of logits = x weight^T, of which only some are ever in memory.
//
// Vectors run along the tokens: all sums over classes stay in their lane. Forward, a run
// of classes keeps four sums a token, and its logits leave the registers for nothing
// else. Backward, a block of classes makes its gradients of logits again and multiplies
// them with weight and x while they lie in the caches.
#pragma once
#include <cmath>

#include "panels.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t classes_at_once = 4 * down;
constexpr int64_t most_gradients = 1 << 20;  // of logits in memory, but for many tokens
constexpr int64_t most_classes = 1024, fewest_classes = 128;  // of a block, backward
constexpr int64_t panels_at_once = 4;  // of an item, backward

inline F capped(F x, float cap) { return cap * tanh_of(x * (1 / cap)); }

// Of one token each: the largest logit, e**(logit - largest) summed, the label's logit
// and the sum of logits.
struct ClassSums {
  float *top, *weight, *picked, *total;
};

inline F or_zero(F top) {
  return (top > -INFINITY) & (top < INFINITY) ? top : F{};
}

// Adds `count` classes from `first` on, a row of z each, to the sums of a vector of tokens.
inline void add_classes(const F* z, int count, int32_t first, I label, ClassSums sums,
                        int64_t t) {
  const F before = load<F>(sums.top + t);
  F top = before, total = load<F>(sums.total + t), picked = load<F>(sums.picked + t);
  for (int r = 0; r < count; ++r) {
    top = z[r] > top ? z[r] : top;
    total += z[r];
    picked = label == first + r ? z[r] : picked;
  }
  const F origin = or_zero(top);
  F weight = load<F>(sums.weight + t) * exp_below(or_zero(before) - origin);
  for (int r = 0; r < count; ++r) weight += exp_below(z[r] - origin);
  store(sums.top + t, top), store(sums.weight + t, weight);
  store(sums.picked + t, picked), store(sums.total + t, total);
}

// x by tokens along the vectors, and what else lies per token, padded to whole panels.
struct Tokens {
  explicit Tokens(const LinearCrossEntropy& p)
      : panels(panels_of(p.n)), count(panels * across), depth(panels_of(p.d)),
        transposed(count * depth * across), label(count) {}
  bool complete() const { return transposed.get() && label.get(); }
  const float* panel(int64_t i) const {
    return transposed.get() + i * depth * across * across;
  }

  int64_t panels, count, depth;  // depth: panels of a row
  Scratch<float> transposed;
  Scratch<int32_t> label;
};

// `rows`: panels of x itself, which are kept if they hold all tokens.
inline bool lay_out(const LinearCrossEntropy& p, const Workers& workers, Tokens& tokens,
                    float* rows) {
  Flag failed;
  workers.for_each(tokens.panels, [&](int64_t i) {
    Scratch<float> own(rows ? 0 : tokens.depth * across * across);
    if (!own.get()) {
      failed.set();
      return;
    }
    const int64_t first = i * across, row = rows ? first : 0;
    const int64_t n = p.n - first < across ? p.n - first : across;
    float* to = rows ? rows : own.get();
    const int64_t all = rows ? tokens.count : across;
    to_panels(p.x_type, p.x, first, n, p.d, to, row, all);
    zero_rows(to, row + n, row + across, all, tokens.depth);
    transpose_panel(to, all, tokens.depth, rows ? i : 0,
                    tokens.transposed.get() + i * tokens.depth * across * across);
    for (int64_t t = 0; t < across; ++t) {
      tokens.label[first + t] = t < n ? p.label[first + t] : -1;
    }
  });
  return !failed;
}

inline void add_group(const LinearCrossEntropy& p, const Tokens& tokens, const float* w,
                      int64_t first, int64_t count, ClassSums sums) {
  for (int64_t panel = 0; panel < tokens.panels; ++panel) {
    for (int64_t row = 0; row < count; row += down) {
      F z[down][tile_vectors] = {};
      multiply(w, row, classes_at_once, tokens.depth, tokens.panel(panel), z);
      const int n = (int)(count - row < down ? count - row : down);
      for (int c = 0; c < tile_vectors; ++c) {
        F own[down];
        for (int r = 0; r < down; ++r) {
          own[r] = p.softcap > 0 ? capped(z[r][c], p.softcap) : z[r][c];
        }
        const int64_t t = panel * across + c * lanes;
        add_classes(own, n, (int32_t)(first + row), load<I>(tokens.label.get() + t), sums,
                    t);
      }
    }
  }
}

inline bool linear_cross_entropy(const LinearCrossEntropy& p, const Workers& workers) {
  Tokens tokens(p);
  const int64_t groups = (p.v + classes_at_once - 1) / classes_at_once;
  const int64_t most = 4 * workers.threads, runs = groups < most ? groups : most;
  Scratch<float> scratch(runs * 4 * tokens.count);
  if (!tokens.complete() || !scratch.get() || !lay_out(p, workers, tokens, nullptr)) {
    return false;
  }
  auto sums_of = [&](int64_t run) {
    float* own = scratch.get() + run * 4 * tokens.count;
    return ClassSums{own, own + tokens.count, own + 2 * tokens.count,
                     own + 3 * tokens.count};
  };
  Flag failed;
  workers.for_each(runs, [&](int64_t run) {
    Scratch<float> w(classes_at_once * tokens.depth * across);
    if (!w.get()) {
      failed.set();
      return;
    }
    const ClassSums sums = sums_of(run);
    memset(sums.top, 0, (size_t)(4 * tokens.count) * sizeof(float));
    for (int64_t t = 0; t < tokens.count; ++t) sums.top[t] = -INFINITY;
    for (int64_t g = groups * run / runs; g < groups * (run + 1) / runs; ++g) {
      const int64_t first = g * classes_at_once, left = p.v - first;
      const int64_t count = left < classes_at_once ? left : classes_at_once;
      to_panels(p.weight_type, p.weight, first, count, p.d, w.get(), 0, classes_at_once);
      zero_rows(w.get(), count, classes_at_once, classes_at_once, tokens.depth);
      add_group(p, tokens, w.get(), first, count, sums);
    }
  });
  if (failed) return false;
  for (int64_t t = 0; t < p.n; ++t) {
    float top = -INFINITY, weight = 0;
    p.picked[t] = p.total[t] = 0;
    for (int64_t run = 0; run < runs; ++run) {
      const ClassSums sums = sums_of(run);
      top = sums.top[t] > top ? sums.top[t] : top;
      p.picked[t] += sums.picked[t], p.total[t] += sums.total[t];
    }
    for (int64_t run = 0; run < runs; ++run) {
      const ClassSums sums = sums_of(run);
      const float own = sums.top[t];
      // a NaN is in the weight, never in the top
      weight += own == top ? sums.weight[t] : sums.weight[t] * expf(own - top);
    }
    p.lse[t] = weight != weight     ? weight
               : top == INFINITY    ? INFINITY
               : top == -INFINITY   ? -INFINITY
                                    : top + logf(weight);
  }
  return true;
}

// What makes a gradient of logits, per token and padded with zeros.
struct Factors {
  explicit Factors(const LinearCrossEntropy& p, int64_t count)
      : count(count), data(4 * count) {
    if (!data.get()) return;
    memset(data.get(), 0, (size_t)(4 * count) * sizeof(float));
    const float* from[4] = {p.lse, p.slope, p.on_label, p.on_every};
    for (int i = 0; i < 4; ++i) {
      memcpy(data.get() + i * count, from[i], (size_t)p.n * sizeof(float));
    }
  }
  F at(int which, int64_t t) const { return load<F>(data.get() + which * count + t); }

  int64_t count;
  Scratch<float> data;
};

inline F logits_gradient(F x, int32_t own, I label, const Factors& f, int64_t t, float cap) {
  const F z = cap > 0 ? capped(x, cap) : x;
  F dz = f.at(1, t) * exp_below(z - f.at(0, t)) - f.at(3, t);
  dz = label == own ? dz - f.at(2, t) : dz;
  if (cap > 0) dz *= 1.0f - (z / cap) * (z / cap);
  return dz;
}

// A block of classes: their weights by panels of d, their gradients by panels of tokens.
struct ClassBlock {
  int64_t first, count, rows;  // rows: padded to whole groups
  float *weight, *gradient;
};

inline void make_gradients(const LinearCrossEntropy& p, const Tokens& tokens,
                           const Factors& factors, ClassBlock b, int64_t group,
                           int64_t panel) {
  float* to = b.gradient + panel * b.rows * across;
  for (int64_t row = group; row < group + classes_at_once; row += down) {
    F z[down][tile_vectors] = {};
    multiply(b.weight, row, b.rows, tokens.depth, tokens.panel(panel), z);
    for (int r = 0; r < down; ++r) {
      for (int c = 0; c < tile_vectors; ++c) {
        const int64_t t = panel * across + c * lanes;
        const I label = load<I>(tokens.label.get() + t);
        const F dz = logits_gradient(z[r][c], (int32_t)(b.first + row + r), label, factors,
                                     t, p.softcap);
        store(to + (row + r) * across + c * lanes, row + r < b.count ? dz : F{});
      }
    }
  }
}

// Panel j of the gradient of a group's weights.
inline void weight_gradient(const LinearCrossEntropy& p, const Tokens& tokens,
                            const float* x, ClassBlock b, int64_t group, int64_t j) {
  for (int64_t row = group; row < group + classes_at_once; row += down) {
    F sum[down][tile_vectors] = {};
    multiply(b.gradient, row, b.rows, tokens.panels, x + j * tokens.count * across, sum);
    for (int r = 0; r < down && row + r < b.count; ++r) {
      const int64_t begin = (b.first + row + r) * p.d, end = begin + p.d;
      for (int c = 0; c < tile_vectors; ++c) {
        const int64_t i = begin + j * across + c * lanes;
#define JAXKERN_CALL(type) store_within<type>(sum[r][c], p.dweight, i, end)
        JAXKERN_BY_TYPE(p.weight_type, JAXKERN_CALL);
#undef JAXKERN_CALL
      }
    }
  }
}

// Adds a block's part to the gradient of a panel of tokens.
inline void add_token_gradient(const Tokens& tokens, ClassBlock b, int64_t panel,
                               float* dx) {
  const float* gradient = b.gradient + panel * b.rows * across;
  for (int64_t j = 0; j < tokens.depth; ++j) {
    for (int64_t t = 0; t < across; t += down) {
      float* to = dx + (j * tokens.count + panel * across + t) * across;
      F sum[down][tile_vectors];
      for (int r = 0; r < down; ++r) {
        for (int c = 0; c < tile_vectors; ++c) {
          sum[r][c] = load<F>(to + r * across + c * lanes);
        }
      }
      add_products<1, across>(gradient + t, b.weight + j * b.rows * across, b.rows, sum);
      for (int r = 0; r < down; ++r) {
        for (int c = 0; c < tile_vectors; ++c) {
          store(to + r * across + c * lanes, sum[r][c]);
        }
      }
    }
  }
}

inline void store_token(const LinearCrossEntropy& p, const float* dx, int64_t rows,
                        int64_t t) {
  for (int64_t j = 0; j < p.d; j += lanes) {
    const F y = load<F>(dx + (j / across * rows + t) * across + j % across);
#define JAXKERN_CALL(type) store_within<type>(y, p.dx, t * p.d + j, (t + 1) * p.d)
    JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL);
#undef JAXKERN_CALL
  }
}

inline bool linear_cross_entropy_gradient(const LinearCrossEntropy& p,
                                          const Workers& workers) {
  Tokens tokens(p);
  const Factors factors(p, tokens.count);
  const int64_t width = tokens.depth * across;
  int64_t block = most_gradients / tokens.count / classes_at_once * classes_at_once;
  block = block < fewest_classes ? fewest_classes : block > most_classes ? most_classes : block;
  Scratch<float> x(tokens.count * width), dx(tokens.count * width), weight(block * width);
  Scratch<float> gradient(block * tokens.count);
  if (!tokens.complete() || !factors.data.get() || !x.get() || !dx.get() ||
      !weight.get() || !gradient.get() || !lay_out(p, workers, tokens, x.get())) {
    return false;
  }
  memset(dx.get(), 0, (size_t)(tokens.count * width) * sizeof(float));
  const int64_t chunks = (tokens.depth + panels_at_once - 1) / panels_at_once;
  const int64_t token_chunks = (tokens.panels + panels_at_once - 1) / panels_at_once;
  for (int64_t first = 0; first < p.v; first += block) {
    const int64_t count = p.v - first < block ? p.v - first : block;
    const int64_t groups = (count + classes_at_once - 1) / classes_at_once;
    const ClassBlock b = {first, count, groups * classes_at_once, weight.get(),
                          gradient.get()};
    workers.for_each(groups, [&](int64_t i) {
      const int64_t row = i * classes_at_once, end = row + classes_at_once;
      const int64_t stop = end < count ? end : count;
      to_panels(p.weight_type, p.weight, first + row, stop - row, p.d, b.weight, row, b.rows);
      zero_rows(b.weight, stop, end, b.rows, tokens.depth);
    });
    workers.for_each(groups * token_chunks, [&](int64_t i) {
      const int64_t from = i % token_chunks * panels_at_once, end = from + panels_at_once;
      for (int64_t panel = from; panel < end && panel < tokens.panels; ++panel) {
        make_gradients(p, tokens, factors, b, i / token_chunks * classes_at_once, panel);
      }
    });
    workers.for_each(tokens.panels + groups * chunks, [&](int64_t i) {
      if (i < tokens.panels) return add_token_gradient(tokens, b, i, dx.get());
      i -= tokens.panels;
      const int64_t from = i % chunks * panels_at_once, end = from + panels_at_once;
      for (int64_t j = from; j < end && j < tokens.depth; ++j) {
        weight_gradient(p, tokens, x.get(), b, i / chunks * classes_at_once, j);
      }
    });
  }
  workers.for_each(tokens.panels, [&](int64_t i) {
    const int64_t end = (i + 1) * across < p.n ? (i + 1) * across : p.n;
    for (int64_t t = i * across; t < end; ++t) store_token(p, dx.get(), tokens.count, t);
  });
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
