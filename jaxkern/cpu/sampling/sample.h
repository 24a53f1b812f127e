// A token of each row of logits, after the cuts of jaxkern/primitives/sampling/sample.py.
//
// Each cut only raises `low`, the least logit that is kept, so groups whose maximum lies
// below it are not read again. Sums are float32 within a group and double across groups.
#pragma once
#include <cfloat>

#include "../index/groups.h"

namespace jaxkern {
namespace JAXKERN_ISA {

struct Draw {  // what is left of a row
  const void* logits;
  int64_t v;
  const float* maxima;  // of its groups
  float best, inverse_temperature;
  float low, min_weight;

  F weight(F x) const {  // p / max(p), or 0 where it is cut
    const F gap = x == best ? F{} : best - x;
    const F y = exp_of(-gap * inverse_temperature);
    const I counts = (x >= low) & (x > -INFINITY) & (gap < INFINITY);
    return (counts & !(y < min_weight)) ? y : F{};
  }

  template <Float type>
  F weights_at(int64_t i) const {
    return weight(load_within<type>(logits, i, v, -INFINITY));
  }
  int64_t end_of(int64_t g) const { return (g + 1) * group < v ? (g + 1) * group : v; }
};

// What each group weighs; the sum.
template <Float type>
double group_weights(const Draw& draw, const Workers& workers, float* weights) {
  const int64_t groups = groups_of(draw.v);
  for_parts(workers, groups, shortest_part / group, [&](int64_t g, int64_t end) {
    for (; g < end; ++g) {
      F sum = {};
      if (draw.maxima[g] >= draw.low) {
        for (int64_t i = g * group; i < draw.end_of(g); i += lanes) {
          sum += draw.weights_at<type>(i);
        }
      }
      weights[g] = sum_of_lanes(sum);
    }
  });
  double total = 0;
  for (int64_t g = 0; g < groups; ++g) total += weights[g];
  return total;
}

// The largest logit t with at least `target` in logits >= t. None lighter than `least`
// is looked at: all such tokens together are too light to matter.
template <Float type>
float mass_threshold(const Draw& draw, float least, double target, float* logits,
                     float* weights) {
  int64_t n = 0;
  for (int64_t g = 0; g < groups_of(draw.v); ++g) {
    if (!(draw.maxima[g] >= draw.low)) continue;
    for (int64_t i = g * group; i < draw.end_of(g); i += lanes) {
      const F w = draw.weights_at<type>(i);
      const I keep = (w >= least) & (w > 0);
      if (!any_lane(keep)) continue;
      keep_lanes(keep, w, weights + n);
      n += keep_lanes(keep, load_within<type>(draw.logits, i, draw.v, 0), logits + n);
    }
  }
  return n ? largest_threshold(logits, weights, n, target) : draw.low;
}

// The first token whose cumulative weight exceeds `target`, else the last one kept.
template <Float type>
int32_t first_beyond(const Draw& draw, const float* weights, double target) {
  double sum = 0, before = 0;
  int64_t chosen = 0;
  for (int64_t g = 0; g < groups_of(draw.v) && sum <= target; ++g) {
    if (weights[g] > 0) chosen = g, before = sum;
    sum += weights[g];
  }
  int32_t last = 0;
  for (int64_t i = chosen * group; i < draw.end_of(chosen); i += lanes) {
    const F w = draw.weights_at<type>(i);
    for (int j = 0; j < lanes; ++j) {
      if (w[j] > 0) last = (int32_t)(i + j);
      before += w[j];
      if (w[j] > 0 && before > target) return last;
    }
  }
  return last;
}

template <Float type>
bool sample_row(const SampleRow& row, int64_t v, const Workers& workers) {
  const int64_t groups = groups_of(v);
  Scratch<float> maxima(groups), weights(groups);
  if (!maxima.get() || !weights.get()) return false;
  group_maxima<type>(row.logits, v, workers, maxima.get());
  const float best = largest(maxima.get(), groups);
  *row.token = 0;
  if (best == -INFINITY) return true;
  if (!(row.temperature > 0)) {
    int64_t i = 0;
    while (maxima[i / group] != best) i += group;
    while (to_f32(type, row.logits, i) != best) ++i;
    *row.token = (int32_t)i;
    return true;
  }
  const float inverse = 1 / row.temperature;
  Draw draw = {row.logits, v, maxima.get(), best, inverse < FLT_MAX ? inverse : FLT_MAX,
               -INFINITY, 0};
  if (row.top_k > 0 && row.top_k < v) {
    Scratch<float> scratch(v + lanes);
    if (!scratch.get()) return false;
    draw.low = kth_largest<type>(row.logits, v, maxima.get(), row.top_k, scratch.get());
  }
  if (row.top_p < 1) {
    Scratch<float> kept(v + lanes), kept_weights(v + lanes);
    if (!kept.get() || !kept_weights.get()) return false;
    const double total = group_weights<type>(draw, workers, weights.get());
    const double share = row.top_p > 0 ? row.top_p : 0;
    // lighter tokens weigh less than half of what may be cut away
    const float least = (float)(0.5 * (1 - share) * total / (double)v);
    draw.low = mass_threshold<type>(draw, least, share * total, kept.get(),
                                    kept_weights.get());
  }
  draw.min_weight = row.min_p < 1 ? row.min_p : 1;
  const double total = group_weights<type>(draw, workers, weights.get());
  *row.token = first_beyond<type>(draw, weights.get(), row.uniform * total);
  return true;
}

inline bool sample(const Sample& p, const Workers& workers) {
  Flag failed;
  for_rows(workers, p.rows, [&](int64_t i, const Workers& own) {
#define JAXKERN_CALL(type) sample_row<type>(p.row[i], p.v, own)
    if (!JAXKERN_BY_TYPE(p.logits_type, JAXKERN_CALL)) failed.set();
#undef JAXKERN_CALL
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
