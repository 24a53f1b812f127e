// Into how many runs the rows of a kernel are dealt.
#pragma once
#include "workers.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int64_t elements_per_run = 16384;  // at least

inline int64_t num_runs(const Workers& workers, int64_t rows, int64_t d) {
  const int64_t fit = rows * d / elements_per_run, most = 4 * workers.threads;
  const int64_t runs = workers.threads == 1 || fit < 2 ? 1 : fit < most ? fit : most;
  return runs < rows ? runs : rows > 0 ? rows : 1;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
