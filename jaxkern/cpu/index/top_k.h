// The k largest elements of each row: their threshold is found, and only they are sorted.
#pragma once
#include "groups.h"

namespace jaxkern {
namespace JAXKERN_ISA {

// By falling value, equal ones by rising index.
inline int64_t sort_key(float x, int64_t index) {
  const int32_t bits = (int32_t)bits_of_float(x + 0.0f);  // -0 becomes 0
  return (int64_t)(bits ^ (bits >> 31 & 0x7fffffff)) * ((int64_t)1 << 32) +
         (int64_t)(0xffffffffu - (uint32_t)index);
}

inline void sort_descending(int64_t* x, int64_t n) {  // heap sort
  auto sink = [&](int64_t i, int64_t end) {
    const int64_t y = x[i];
    for (int64_t child; (child = 2 * i + 1) < end; i = child) {
      if (child + 1 < end && x[child + 1] < x[child]) ++child;
      if (y <= x[child]) break;
      x[i] = x[child];
    }
    x[i] = y;
  };
  for (int64_t i = n / 2; i-- > 0;) sink(i, n);
  for (int64_t end = n; end-- > 1;) {
    const int64_t least = x[0];
    x[0] = x[end];
    x[end] = least;
    sink(0, end);
  }
}

template <Float type>
bool top_k_of_row(const TopK& p, int64_t row, const Workers& workers) {
  constexpr int64_t size = type == Float::f32 ? 4 : 2;
  const char* x = static_cast<const char*>(p.x) + row * p.v * size;
  int32_t* index = p.indices + row * p.k;
  const int64_t groups = groups_of(p.v);
  Scratch<float> maxima(groups), values(p.v + lanes);
  Scratch<int64_t> above(p.k);
  Scratch<int32_t> equal(p.k);
  if (!maxima.get() || !values.get() || !above.get() || !equal.get()) return false;
  int64_t found = 0;
  if (group_maxima<type>(x, p.v, workers, maxima.get())) {
    for (int64_t i = 0; i < p.v && found < p.k; ++i) {
      const float y = to_f32(type, x, i);
      if (y != y) index[found++] = (int32_t)i;
    }
  }
  const int64_t k = p.k - found;  // of those that are numbers
  if (k > 0) {
    const float cut = kth_largest<type>(x, p.v, maxima.get(), k, values.get());
    int64_t num_above = 0, num_equal = 0;
    for (int64_t g = 0; g < groups; ++g) {
      if (maxima[g] < cut) continue;
      const int64_t end = (g + 1) * group < p.v ? (g + 1) * group : p.v;
      for (int64_t i = g * group; i < end; i += lanes) {
        const F y = load_within<type>(x, i, end, NAN);
        if (!any_lane(y >= cut)) continue;
        for (int j = 0; j < lanes; ++j) {
          if (y[j] > cut) above[num_above++] = sort_key(y[j], i + j);
          if (y[j] == cut && num_equal < k) equal[num_equal++] = (int32_t)(i + j);
        }
      }
    }
    sort_descending(above.get(), num_above);
    for (int64_t i = 0; i < num_above; ++i) {
      index[found++] = (int32_t)(0xffffffffu - (uint32_t)above[i]);
    }
    for (int64_t i = 0; found < p.k; ++i) index[found++] = equal[i];
  }
  char* to = static_cast<char*>(p.values) + row * p.k * size;
  for (int64_t i = 0; i < p.k; ++i) memcpy(to + i * size, x + index[i] * size, size);
  return true;
}

inline bool top_k(const TopK& p, const Workers& workers) {
  Flag failed;
  for_rows(workers, p.rows, [&](int64_t row, const Workers& own) {
#define JAXKERN_CALL(type) top_k_of_row<type>(p, row, own)
    if (!JAXKERN_BY_TYPE(p.x_type, JAXKERN_CALL)) failed.set();
#undef JAXKERN_CALL
  });
  return !failed;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
