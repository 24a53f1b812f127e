// Of the bindings of quant: weights in blocks as XLA hands them over.
#pragma once
#include <string_view>

#include "../kernels.h"

namespace jaxkern {
namespace {

// Fills `w` from `data` [rows, row_bytes] or, interleaved, [rows / 16, 16 * row_bytes].
inline bool weights_of(std::string_view qtype, bool interleaved, int64_t rows,
                       int64_t bytes, QuantizedWeights* w) {
  for (const Layout& f : layouts) {
    const int64_t unit = f.bytes * (interleaved ? 16 : 1);
    if (qtype != f.name || bytes % unit) continue;
    w->format = (Format)(&f - layouts);
    w->interleaved = interleaved;
    w->rows = rows * (interleaved ? 16 : 1);
    w->width = bytes / unit * f.elements;
    return true;
  }
  return false;
}

}  // namespace
}  // namespace jaxkern
