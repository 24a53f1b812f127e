// Elements of activations in their dtype.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {

inline float to_f32(Float type, const void* x, int64_t i) {
  if (type == Float::f32) return static_cast<const float*>(x)[i];
  uint16_t h = static_cast<const uint16_t*>(x)[i];
  return type == Float::f16 ? from_f16(h) : from_bf16(h);
}

inline void from_f32(Float type, float value, void* y, int64_t i) {
  if (type == Float::f32) {
    static_cast<float*>(y)[i] = value;
  } else {
    static_cast<uint16_t*>(y)[i] = type == Float::f16 ? to_f16(value) : to_bf16(value);
  }
}

// n elements from `from` on as float32, zeros up to `padded`.
inline void to_f32_row(Float type, const void* from, int64_t first, int64_t n,
                       int64_t padded, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_f32(type, from, first + i);
  for (int64_t i = n; i < padded; ++i) to[i] = 0;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
