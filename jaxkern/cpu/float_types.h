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

typedef uint16_t H __attribute__((vector_size(2 * lanes)));
typedef uint32_t U __attribute__((vector_size(4 * lanes)));

// `lanes` elements from x[i] on, as float32.
template <Float type>
inline F load_f32(const void* x, int64_t i) {
  if (type == Float::f32) return load<F>(static_cast<const float*>(x) + i);
  const H h = load<H>(static_cast<const uint16_t*>(x) + i);
  if (type == Float::bf16) return (F)(__builtin_convertvector(h, U) << 16);
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16((float16x4_t)h);
#else
  F y;
  for (int j = 0; j < lanes; ++j) y[j] = from_f16(h[j]);
  return y;
#endif
}

template <Float type>
inline void store_f32(F value, void* y, int64_t i) {
  if (type == Float::f32) return store(static_cast<float*>(y) + i, value);
  uint16_t* to = static_cast<uint16_t*>(y) + i;
  if (type == Float::bf16) {
    const U bits = (U)value;
    const U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const U quiet = bits >> 16 | 64;
    return store(to, __builtin_convertvector(value != value ? quiet : rounded, H));
  }
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  store(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int j = 0; j < lanes; ++j) to[j] = to_f16(value[j]);
#endif
}

// The same for the last `n` < lanes elements of a row; other lanes are `fill`.
template <Float type>
inline F load_tail(const void* x, int64_t i, int64_t n, float fill) {
  F y = broadcast(fill);
  for (int64_t j = 0; j < n; ++j) y[j] = to_f32(type, x, i + j);
  return y;
}

// Elements i ... of a row of n, `fill` behind its end.
template <Float type>
inline F load_within(const void* x, int64_t i, int64_t n, float fill) {
  return i + lanes <= n ? load_f32<type>(x, i) : load_tail<type>(x, i, n - i, fill);
}

template <Float type>
inline void store_within(F value, void* y, int64_t i, int64_t n) {
  if (i + lanes <= n) return store_f32<type>(value, y, i);
  for (int64_t j = 0; i + j < n; ++j) from_f32(type, value[j], y, i + j);
}

// f.run<type>() for a dtype that is known when it runs.
#define JAXKERN_BY_TYPE(type, call)                     \
  ((type) == Float::f32    ? call(Float::f32)           \
   : (type) == Float::bf16 ? call(Float::bf16)          \
                           : call(Float::f16))

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
