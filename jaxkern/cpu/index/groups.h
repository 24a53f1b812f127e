// Selection without a sort: the largest of each group of a row says where to look.
//
// The k-th largest of the groups' maxima is no larger than the k-th largest element, so
// only groups that reach it are read again. Thresholds are found by halving the range
// of values that still may hold them.
#pragma once
#include <cmath>

#include "../float_types.h"
#include "../memory.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t group = 128;
constexpr int64_t shortest_part = 8192;  // elements of a row that a thread of its own pays

inline int64_t groups_of(int64_t v) { return (v + group - 1) / group; }

// For rows of which each has a thread of its own.
inline void run_alone(const Workers*, int64_t items, void (*item)(void*, int64_t),
                      void* data) {
  for (int64_t i = 0; i < items; ++i) item(data, i);
}
constexpr Workers alone = {1, run_alone};

// Calls f(begin, end) for parts of [0, n), each of at least `least`.
template <typename Function>
void for_parts(const Workers& workers, int64_t n, int64_t least, Function f) {
  const int64_t most = 4 * workers.threads, fit = n / least;
  const int64_t parts = workers.threads == 1 || fit < 2 ? 1 : fit < most ? fit : most;
  workers.for_each(parts, [&](int64_t i) { f(n * i / parts, n * (i + 1) / parts); });
}

// Calls f(row, its workers): many rows side by side, few one after the other.
template <typename Function>
void for_rows(const Workers& workers, int64_t rows, Function f) {
  if (rows < workers.threads) {
    for (int64_t row = 0; row < rows; ++row) f(row, workers);
  } else {
    workers.for_each(rows, [&](int64_t row) { f(row, alone); });
  }
}

// The largest element of each group, -inf for a group of NaN; whether there is a NaN.
template <Float type>
bool group_maxima(const void* x, int64_t v, const Workers& workers, float* maxima) {
  bool nan = false;
  for_parts(workers, groups_of(v), shortest_part / group, [&](int64_t g, int64_t end) {
    I bad = {};
    for (; g < end; ++g) {
      F most = broadcast(-INFINITY);
      const int64_t stop = (g + 1) * group < v ? (g + 1) * group : v;
      for (int64_t i = g * group; i < stop; i += lanes) {
        const F y = load_within<type>(x, i, v, -INFINITY);
        bad |= y != y;
        most = y > most ? y : most;
      }
      maxima[g] = max_of_lanes(most);
    }
    if (any_lane(bad)) __atomic_store_n(&nan, true, __ATOMIC_RELAXED);
  });
  return nan;
}

// Elements i ... of n that have room for `lanes` more behind them, `fill` there.
inline F load_padded(const float* x, int64_t i, int64_t n, float fill) {
  if (i + lanes <= n) return load<F>(x + i);
  I lane;
  for (int j = 0; j < lanes; ++j) lane[j] = j;
  return lane < (int32_t)(n - i) ? load<F>(x + i) : broadcast(fill);
}

inline float largest(const float* x, int64_t n) {
  F most = broadcast(-INFINITY);
  for (int64_t i = 0; i < n; i += lanes) {
    const F y = load_within<Float::f32>(x, i, n, -INFINITY);
    most = y > most ? y : most;
  }
  return max_of_lanes(most);
}

// The largest t for which the x >= t weigh `target` together, each by its weight or, if
// that is null, 1; the smallest x if all weigh less. No NaN, no -inf; n > 0. Both arrays
// have room for `lanes` more, and are lost.
inline float largest_threshold(float* x, float* weight, int64_t n, double target) {
  double above = 0;  // what those weigh that are larger than all still in question
  for (;;) {
    F low = broadcast(INFINITY), high = broadcast(-INFINITY);
    for (int64_t i = 0; i < n; i += lanes) {
      const F y = load_padded(x, i, n, x[0]);
      low = y < low ? y : low;
      high = y > high ? y : high;
    }
    const float least = -max_of_lanes(-low), most = max_of_lanes(high);
    if (least == most) return least;
    float middle = 0.5f * least + 0.5f * most;
    if (!(middle > least)) middle = most;
    double sum = 0;
    for (int64_t i = 0; i < n;) {
      const int64_t end = i + 1024 < n ? i + 1024 : n;
      F part = {};
      for (; i < end; i += lanes) {
        const F y = load_padded(x, i, n, -INFINITY);
        const F w = weight ? load_padded(weight, i, n, 0) : broadcast(1.f);
        part += y >= middle ? w : F{};
      }
      sum += sum_of_lanes(part);
    }
    const bool upper = above + sum >= target;
    if (!upper) above += sum;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += lanes) {
      const F y = load_padded(x, i, n, NAN);
      const I keep = upper ? y >= middle : y < middle;
      const F w = weight ? load_padded(weight, i, n, 0) : F{};
      if (weight) keep_lanes(keep, w, weight + kept);
      kept += keep_lanes(keep, y, x + kept);
    }
    n = kept;
  }
}

// The k-th largest of a row, of which -inf and NaN do not count; -inf if it has fewer.
// `scratch` holds v + lanes.
template <Float type>
float kth_largest(const void* x, int64_t v, const float* maxima, int64_t k,
                  float* scratch) {
  const int64_t groups = groups_of(v);
  auto collect = [&](Float kind, const void* from, int64_t begin, int64_t end, float low,
                     int64_t n) {
    for (int64_t i = begin; i < end; i += lanes) {
      const F y = kind == Float::f32 ? load_within<Float::f32>(from, i, end, -INFINITY)
                                     : load_within<type>(from, i, end, -INFINITY);
      n += keep_lanes((y >= low) & (y > -INFINITY), y, scratch + n);
    }
    return n;
  };
  float low = -INFINITY;
  if (k <= groups) {
    const int64_t n = collect(Float::f32, maxima, 0, groups, low, 0);
    if (n >= k) low = largest_threshold(scratch, nullptr, n, (double)k);
  }
  int64_t n = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (!(maxima[g] >= low)) continue;
    const int64_t end = (g + 1) * group < v ? (g + 1) * group : v;
    n = collect(type, x, g * group, end, low, n);
  }
  return n < k ? -INFINITY : largest_threshold(scratch, nullptr, n, (double)k);
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
