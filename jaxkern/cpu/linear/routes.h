// Rows of y in the order of the weights that they ask for: those of an expert lie side by
// side.
#pragma once
#include <cstdint>
#include <cstring>

namespace jaxkern {
namespace JAXKERN_ISA {

struct Asked {  // row i of y asks for expert[i], of row i / per_x of x
  const int32_t* expert;  // null: all ask for expert 0
  int64_t count, per_x, experts;

  int64_t expert_of(int64_t i) const {  // -1 for none
    const int64_t e = expert ? expert[i] : 0;
    return 0 <= e && e < experts ? e : -1;
  }
};

struct Routes {
  int64_t* first;  // [experts + 1], where the rows of an expert begin
  int64_t *x_row, *y_row;  // [count]

  // Rows of y, of y_bytes each, that ask for no expert are set to zero. Returns how many
  // ask for the expert that most of them ask for.
  int64_t sort(const Asked& asked, void* y, int64_t y_bytes) const {
    for (int64_t e = 0; e <= asked.experts; ++e) first[e] = 0;
    for (int64_t i = 0; i < asked.count; ++i) {
      const int64_t e = asked.expert_of(i);
      if (e >= 0) {
        ++first[e + 1];
      } else {
        memset(static_cast<char*>(y) + i * y_bytes, 0, y_bytes);
      }
    }
    int64_t most = 0;
    for (int64_t e = 0; e < asked.experts; ++e) {
      most = first[e + 1] > most ? first[e + 1] : most;
      first[e + 1] += first[e];
    }
    for (int64_t i = 0; i < asked.count; ++i) {
      const int64_t e = asked.expert_of(i);
      if (e < 0) continue;
      const int64_t at = first[e]++;
      x_row[at] = i / asked.per_x;
      y_row[at] = i;
    }
    for (int64_t e = asked.experts; e > 0; --e) first[e] = first[e - 1];
    first[0] = 0;
    return most;
  }
};

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
