// The gated delta rule, token after token  (https://arxiv.org/abs/2412.06464), with a decay
// of each head or of each channel of its keys  (https://arxiv.org/abs/2510.26692).
//
// The columns of a state do not meet: one work item takes two vectors of columns of one
// head through all tokens, so that its part of the state stays in the first cache. That
// makes the recurrence faster here than the chunked form, whose products XLA runs.
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t columns = 2 * lanes;  // of one item
constexpr int chains = 4;  // independent sums, which hide the latency of one

// Rows of `columns` columns of a state, `stride` floats apart.
struct States {
  float* first;
  int64_t stride;
  float* row(int64_t i) const { return first + i * stride; }
};

// What the channels of a key keep of a state, and that times the key.
struct Decays {
  float *of_channel, *of_key;  // [h], whole vectors; not read where a head has one decay

  // Whether a channel keeps nothing.
  bool set(const float* g, const float* key, int64_t h) const {
    bool forgets = false;
    for (int64_t i = 0; i < h; i += lanes) {
      const F decay = exp_below(load_within<Float::f32>(g, i, h, 0));
      store(of_channel + i, decay);
      store(of_key + i, decay * load_within<Float::f32>(key, i, h, 0));
    }
    for (int64_t i = 0; i < h; ++i) forgets |= of_channel[i] == 0;
    return forgets;
  }
};

// A decay of 0 forgets NaN and inf as well, which 0 times them would not: copies `from` to
// `to` with zeros in the rows of such a decay. They may be the same.
template <typename Decay>
void forget(States from, States to, int64_t h, Decay decay) {
  for (int64_t i = 0; i < h; ++i) {
    for (int64_t c = 0; c < columns; ++c) to.row(i)[c] = decay(i) == 0 ? 0 : from.row(i)[c];
  }
}

// Reads the state `from` and writes the next one `to`, which may be the same; `held` has
// room for one.
template <bool by_channel>
void delta_rule_token(const DeltaRule& p, int64_t token, int64_t n, int64_t column,
                      States from, States held, States to, Decays decays) {
  const int64_t heads = p.k * p.group, at = token * heads + n;
  const float* key = p.key + (token * p.k + n / p.group) * p.h;
  const float* query = p.query + (token * p.k + n / p.group) * p.h;
  const bool a_channel_forgets = by_channel && decays.set(p.g + at * p.h, key, p.h);
  const float* erase = by_channel ? decays.of_key : key;
  const float of_head = by_channel ? 1 : expf(p.g[at]);
  if (a_channel_forgets || of_head == 0) {
    forget(from, held, p.h, [&](int64_t i) { return by_channel ? decays.of_channel[i] : 0; });
    from = held;
  }
  F stored[chains][2] = {}, read[chains][2] = {}, error[2];  // S^T k, S^T q
  auto look_up = [&](int64_t i, int j) {
    for (int c = 0; c < 2; ++c) stored[j][c] += load<F>(from.row(i) + c * lanes) * erase[i];
  };
  auto update = [&](int64_t i, int j) {
    const float decay = by_channel ? decays.of_channel[i] : of_head;
    for (int c = 0; c < 2; ++c) {
      const F s = load<F>(from.row(i) + c * lanes) * decay + error[c] * key[i];
      store(to.row(i) + c * lanes, s);
      read[j][c] += s * query[i];
    }
  };
  auto sum = [](const F(&x)[chains][2], int c) {
    return (x[0][c] + x[1][c]) + (x[2][c] + x[3][c]);
  };
  int64_t i = 0;
  for (; i + chains <= p.h; i += chains) {
    for (int j = 0; j < chains; ++j) look_up(i + j, j);
  }
  for (; i < p.h; ++i) look_up(i, 0);
  for (int c = 0; c < 2; ++c) {
    const F value =
        load_within<Float::f32>(p.value + at * p.hv, column + c * lanes, p.hv, 0);
    error[c] = p.beta[at] * (value - of_head * sum(stored, c));
  }
  for (i = 0; i + chains <= p.h; i += chains) {
    for (int j = 0; j < chains; ++j) update(i + j, j);
  }
  for (; i < p.h; ++i) update(i, 0);
  for (int c = 0; c < 2; ++c) {
    store_within<Float::f32>(p.scale * sum(read, c), p.out + at * p.hv, column + c * lanes,
                             p.hv);
  }
}

template <bool by_channel>
void delta_rule_item(const DeltaRule& p, int64_t b, int64_t n, int64_t column,
                     float* scratch, Decays decays) {
  const int64_t head = (b * p.k * p.group + n) * p.h * p.hv + column;
  const States held = {scratch, columns};
  const States before = {p.state ? const_cast<float*>(p.state) + head : nullptr, p.hv};
  const States after = {p.new_state + head, p.hv};
  // whole vectors are read and written where the states are
  const bool whole = column + columns <= p.hv, first_in_place = whole && p.state && p.t > 0;
  if (!first_in_place) {
    for (int64_t i = 0; i < p.h; ++i) {
      for (int64_t c = 0; c < columns; ++c) {
        held.row(i)[c] = p.state && column + c < p.hv ? before.row(i)[c] : 0;
      }
    }
  }
  for (int64_t t = 0; t < p.t; ++t) {
    delta_rule_token<by_channel>(p, b * p.t + t, n, column,
                                 t == 0 && first_in_place ? before : held, held,
                                 t == p.t - 1 && whole ? after : held, decays);
  }
  if (whole && p.t > 0) return;
  for (int64_t i = 0; i < p.h; ++i) {
    for (int64_t c = 0; c < columns && column + c < p.hv; ++c) after.row(i)[c] = held.row(i)[c];
  }
}

inline bool delta_rule(const DeltaRule& p, const Workers& workers) {
  const int64_t parts = (p.hv + columns - 1) / columns, heads = p.k * p.group;
  const int64_t channels = p.by_channel ? (p.h + lanes - 1) / lanes * lanes : 0;
  Flag failed;
  workers.for_each(p.b * heads * parts, [&](int64_t i) {
    Scratch<float> state(p.h * columns), kept(2 * channels);
    if (!state.get() || !kept.get()) {
      failed.set();
      return;
    }
    const int64_t head = i / parts;
    (p.by_channel ? delta_rule_item<true> : delta_rule_item<false>)(
        p, head / heads, head % heads, i % parts * columns, state.get(),
        {kept.get(), kept.get() + channels});
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
