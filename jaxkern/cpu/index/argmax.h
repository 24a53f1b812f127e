// Index of the largest element of each row; every element is read once.
#pragma once
#include "groups.h"

namespace jaxkern {
namespace JAXKERN_ISA {

template <Float type>
int32_t argmax_of_row(const Argmax& p, int64_t row, const Workers& workers) {
  struct Best {
    float value;
    int64_t group;
    bool nan;
  };
  constexpr int64_t chunk = 8 * group;
  const char* x = static_cast<const char*>(p.x) + row * p.v * (type == Float::f32 ? 4 : 2);
  // of the chunks of each part: the best, or that of the first NaN
  auto best_of = [&](int64_t first, int64_t end) {
    Best best = {-INFINITY, first, false};
    for (int64_t c = first; c < end; ++c) {
      const int64_t stop = (c + 1) * chunk < p.v ? (c + 1) * chunk : p.v;
      F most[4];
      for (F& m : most) m = broadcast(-INFINITY);
      I nan = {};
      int64_t i = c * chunk;
      for (; i + 4 * lanes <= stop; i += 4 * lanes) {
        for (int j = 0; j < 4; ++j) {
          const F y = load_f32<type>(x, i + j * lanes);
          nan |= y != y;
          most[j] = y > most[j] ? y : most[j];
        }
      }
      for (; i < stop; i += lanes) {
        const F y = load_within<type>(x, i, stop, -INFINITY);
        nan |= y != y;
        most[0] = y > most[0] ? y : most[0];
      }
      if (p.nan_wins && any_lane(nan)) return Best{NAN, c, true};
      for (int j = 1; j < 4; ++j) most[0] = most[j] > most[0] ? most[j] : most[0];
      const float value = max_of_lanes(most[0]);
      if (value > best.value) best = {value, c, false};
    }
    return best;
  };
  const int64_t chunks = (p.v + chunk - 1) / chunk;
  constexpr int64_t most_parts = 64;
  Best found[most_parts];
  const int64_t wanted = chunks * chunk / shortest_part;
  int64_t parts = wanted < 2 * workers.threads ? wanted : 2 * workers.threads;
  parts = workers.threads == 1 || parts < 1 ? 1 : parts < most_parts ? parts : most_parts;
  workers.for_each(parts, [&](int64_t i) {
    found[i] = best_of(chunks * i / parts, chunks * (i + 1) / parts);
  });
  Best best = found[0];
  for (int64_t i = 1; i < parts && !best.nan; ++i) {
    if (found[i].nan || found[i].value > best.value) best = found[i];
  }
  // a row of -inf and of NaN that do not win: the first -inf
  const int64_t from = best.value == -INFINITY ? 0 : best.group * chunk;
  for (int64_t i = from; i < p.v; ++i) {
    const float y = to_f32(type, x, i);
    if (best.nan ? y != y : y == best.value) return (int32_t)i;
  }
  return 0;
}

inline bool argmax(const Argmax& p, const Workers& workers) {
  for_rows(workers, p.rows, [&](int64_t row, const Workers& own) {
#define JAXKERN_CALL(type) argmax_of_row<type>(p, row, own)
    p.index[row] = JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL);
#undef JAXKERN_CALL
  });
  return true;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
