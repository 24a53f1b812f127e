// The causal convolution of each channel over time, and its gradients in one pass.
//
// Vectors run along the channels. Forward, rows are dealt out. Backward, an item takes
// some channels of one sequence through its tokens: a ring keeps the gradients that the
// next inputs still need, and the sums over time stay in the first cache.
#pragma once
#include "../float_types.h"
#include "../memory.h"
#include "../runs.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t channels_at_once = 16 * lanes;  // what the first cache holds of a row
constexpr int usual = 4;  // taps for which there is code of its own

inline int64_t whole_vectors(int64_t channels) {
  return (channels + lanes - 1) / lanes * lanes;
}

// Channels [first, first + count) of the taps, as [w, count] padded with zeros.
inline void lay_out_taps(const CausalConv& p, int64_t first, int64_t count, float* to) {
  const int64_t width = whole_vectors(count);
  const float* from = p.weight + first * p.w;
  memset(to, 0, (size_t)(p.w * width) * sizeof(float));
  if (p.w == usual) {
    for (int64_t i = 0; i < count; ++i) {
      for (int j = 0; j < usual; ++j) to[j * width + i] = from[i * usual + j];
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < p.w; ++j) to[j * width + i] = from[i * p.w + j];
  }
}

// Bit j: tap j of this token sees an input of its own segment.
inline uint64_t taps_of_segment(const CausalConv& p, int64_t b, int64_t t) {
  if (!p.segment) return ~(uint64_t)0;
  const int32_t* ids = p.segment + b * p.t;
  uint64_t seen = 0;
  for (int64_t j = 0; j < p.w; ++j) {
    const int64_t from = t - (p.w - 1) + j;
    seen |= (uint64_t)(ids[from < 0 ? 0 : from] == ids[t]) << j;
  }
  return seen;
}

// Channels i ... of the input at time t, which may lie before the first.
template <Float type>
inline F input_at(const CausalConv& p, int64_t b, int64_t t, int64_t i) {
  if (t >= 0) {
    const int64_t row = (b * p.t + t) * p.d;
    return load_within<type>(p.x, row + i, row + p.d, 0);
  }
  if (!p.state) return F{};
  const int64_t row = (b * (p.w - 1) + p.w - 1 + t) * p.d;
#define JAXKERN_CALL(type) load_within<type>(p.state, row + i, row + p.d, 0)
  return JAXKERN_BY_TYPE(p.state_type, JAXKERN_CALL);
#undef JAXKERN_CALL
}

constexpr uint64_t every_tap = ~(uint64_t)0;

// Whether the inputs of a token are `usual` whole vectors of x from channel i on.
inline bool is_usual(const CausalConv& p, uint64_t seen, int64_t t, int64_t i) {
  return p.w == usual && seen == every_tap && t >= usual - 1 && i + lanes <= p.d;
}

// The sum before the activation; `taps` begins at channel i and has rows of `width`.
template <Float type>
inline F convolved(const CausalConv& p, const float* taps, int64_t width, uint64_t seen,
                   int64_t b, int64_t t, int64_t i) {
  F z = p.bias ? load_within<Float::f32>(p.bias, i, p.d, 0) : F{};
  if (is_usual(p, seen, t, i)) {
    const int64_t row = (b * p.t + t - (usual - 1)) * p.d + i;
    for (int j = 0; j < usual; ++j) {
      z += load<F>(taps + j * width) * load_f32<type>(p.x, row + j * p.d);
    }
    return z;
  }
  for (int64_t j = 0; j < p.w; ++j) {
    if (!(seen >> j & 1)) continue;
    z += load<F>(taps + j * width) * input_at<type>(p, b, t - (p.w - 1) + j, i);
  }
  return z;
}

// Channels [first, end) of some rows.
template <Float type>
void convolve(const CausalConv& p, const float* taps, int64_t width, int64_t row,
              int64_t last, int64_t first, int64_t end) {
  for (; row < last; ++row) {
    const int64_t b = row / p.t, t = row % p.t;
    const uint64_t seen = taps_of_segment(p, b, t);
    for (int64_t i = first; i < end; i += lanes) {
      F y = convolved<type>(p, taps + i - first, width, seen, b, t, i);
      if (p.silu) y /= 1.0f + exp_below(-y);
      store_within<type>(y, p.y, row * p.d + i, (row + 1) * p.d);
    }
  }
}

inline bool causal_conv(const CausalConv& p, const Workers& workers) {
  const int64_t rows = p.b * p.t, runs = num_runs(workers, rows, p.d);
  Flag failed;
  workers.for_each(runs, [&](int64_t run) {
    // only of some channels: rows often lie a power of two apart
    Scratch<float> taps(p.w * channels_at_once);
    if (!taps.get()) {
      failed.set();
      return;
    }
    for (int64_t first = 0; first < p.d; first += channels_at_once) {
      const int64_t end = first + channels_at_once < p.d ? first + channels_at_once : p.d;
      const int64_t width = whole_vectors(end - first);
      lay_out_taps(p, first, end - first, taps.get());
#define JAXKERN_CALL(type)                                                             \
  convolve<type>(p, taps.get(), width, rows * run / runs, rows * (run + 1) / runs, first, \
                 end)
      JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL);
#undef JAXKERN_CALL
    }
  });
  return !failed;
}

// The gradient of the input at time t, stored with x or with the state.
template <Float type>
inline void store_input_gradient(const CausalConv& p, F dx, int64_t b, int64_t t,
                                 int64_t i) {
  if (t >= 0) {
    const int64_t row = (b * p.t + t) * p.d;
    return store_within<type>(dx, p.dx, row + i, row + p.d);
  }
  if (!p.state) return;
  const int64_t row = (b * (p.w - 1) + p.w - 1 + t) * p.d;
#define JAXKERN_CALL(type) store_within<type>(dx, p.dstate, row + i, row + p.d)
  JAXKERN_BY_TYPE(p.state_type, JAXKERN_CALL);
#undef JAXKERN_CALL
}

// What an item keeps of its channels; rows of `width`.
struct ConvSums {
  float *taps, *ring, *dweight, *dbias;  // [w, .], [w, .], [w, .], [.]
  int64_t width;
};

// dz of a token, which adds to the sums of its taps and of the bias.
template <Float type>
inline F token_gradient(const CausalConv& p, ConvSums sums, uint64_t seen, int64_t b,
                        int64_t t, int64_t i, int64_t c) {
  const int64_t row = (b * p.t + t) * p.d;
  F dz = load_within<type>(p.dy, row + i, row + p.d, 0);
  if (p.silu) {
    const F z = convolved<type>(p, sums.taps + c, sums.width, seen, b, t, i);
    const F s = 1.0f / (1.0f + exp_below(-z));
    dz *= s * (1.0f + z * (1.0f - s));
  }
  store(sums.dbias + c, load<F>(sums.dbias + c) + dz);
  float* sum = sums.dweight + c;
  if (is_usual(p, seen, t, i)) {
    for (int j = 0; j < usual; ++j, sum += sums.width) {
      const F x = load_f32<type>(p.x, row + (j - (usual - 1)) * p.d + i);
      store(sum, load<F>(sum) + dz * x);
    }
    return dz;
  }
  for (int64_t j = 0; j < p.w; ++j, sum += sums.width) {
    if (!(seen >> j & 1)) continue;
    store(sum, load<F>(sum) + dz * input_at<type>(p, b, t - (p.w - 1) + j, i));
  }
  return dz;
}

// Gradients of channels [first, first + count) of sequence b. Input s was read by tap j
// of token s + w - 1 - j.
template <Float type>
void convolve_back(const CausalConv& p, int64_t b, int64_t first, int64_t count,
                   ConvSums sums) {
  uint64_t masks[64];  // of the tokens in the ring
  float* ring[64];  // of the token j before
  for (int64_t t = 0; t < p.t + p.w - 1; ++t) {
    // behind the last token nothing comes back
    masks[t % p.w] = t < p.t ? taps_of_segment(p, b, t) : 0;
    uint64_t came = 0;
    for (int64_t j = 0; j < p.w; ++j) {
      const int64_t token = t - j;
      ring[j] = sums.ring + (token < 0 ? 0 : token) % p.w * sums.width;
      if (token >= 0) came |= masks[token % p.w] & (uint64_t)1 << j;
    }
    const uint64_t seen = masks[t % p.w];
    const bool all = p.w == usual && came == (1 << usual) - 1;
    for (int64_t c = 0; c < count; c += lanes) {
      const F dz = t < p.t ? token_gradient<type>(p, sums, seen, b, t, first + c, c) : F{};
      store(ring[0] + c, dz);
      F dx = {};
      if (all) {
        for (int j = 0; j < usual; ++j) {
          dx += load<F>(ring[j] + c) * load<F>(sums.taps + j * sums.width + c);
        }
      } else {
        for (int64_t j = 0; j < p.w; ++j) {
          if (!(came >> j & 1)) continue;
          dx += load<F>(ring[j] + c) * load<F>(sums.taps + j * sums.width + c);
        }
      }
      store_input_gradient<type>(p, dx, b, t - (p.w - 1), first + c);
    }
  }
}

inline bool causal_conv_gradient(const CausalConv& p, const Workers& workers) {
  const int64_t chunks = (p.d + channels_at_once - 1) / channels_at_once;
  const int64_t size = (p.w + 1) * channels_at_once;
  Scratch<float> sums(p.b * chunks * size);  // of each item: dweight, dbias
  if (!sums.get()) return false;
  Flag failed;
  workers.for_each(p.b * chunks, [&](int64_t item) {
    const int64_t first = item % chunks * channels_at_once, left = p.d - first;
    const int64_t count = left < channels_at_once ? left : channels_at_once;
    const int64_t width = whole_vectors(count);
    Scratch<float> own(2 * p.w * width);
    if (!own.get()) {
      failed.set();
      return;
    }
    float* to = sums.get() + item * size;
    memset(to, 0, (size_t)size * sizeof(float));
    const ConvSums s = {own.get(), own.get() + p.w * width, to, to + p.w * width, width};
    lay_out_taps(p, first, count, s.taps);
#define JAXKERN_CALL(type) convolve_back<type>(p, item / chunks, first, count, s)
    JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL);
#undef JAXKERN_CALL
  });
  if (failed) return false;
  for (int64_t i = 0; i < p.d; ++i) {
    const int64_t first = i / channels_at_once * channels_at_once, left = p.d - first;
    const int64_t count = left < channels_at_once ? left : channels_at_once;
    const int64_t width = whole_vectors(count);
    for (int64_t j = 0; j <= p.w; ++j) {
      float sum = 0;
      for (int64_t b = 0; b < p.b; ++b) {
        sum += sums[(b * chunks + i / channels_at_once) * size + j * width + i - first];
      }
      if (j < p.w) p.dweight[i * p.w + j] = sum;
      else if (p.bias) p.dbias[i] = sum;
    }
  }
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
