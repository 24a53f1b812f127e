// Vectors of the native width, and the three operations that C cannot say.
//
// F and I are `lanes` float32 and int32; + * & | >> work on them as on numbers.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxkern {
namespace JAXKERN_ISA {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * lanes)));
typedef int32_t I __attribute__((vector_size(4 * lanes)));
typedef uint32_t U __attribute__((vector_size(4 * lanes)));

template <typename V>
inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V>
inline void store(void* to, V v) {
  memcpy(to, &v, sizeof(V));
}

inline F broadcast(float x) { return F{} + x; }
inline I broadcast(int32_t x) { return I{} + x; }
inline F to_float(I x) { return __builtin_convertvector(x, F); }

// sum + the products of 4 unsigned bytes in each lane of w with the 4 signed bytes at x.
// `wide`: codes above 127 occur; else products of pairs fit 16 bits.
template <bool wide>
inline I dot4(I sum, I w, const int8_t* x) {
  int32_t x4;
  memcpy(&x4, x, 4);
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x4));
#elif defined(__AVX512BW__)
  if (!wide) {
    __m512i pairs = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x4));
    return sum + (I)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  // even and odd bytes apart: 255 * 127 fits 16 bits, the sum of two does not
  __m512i even = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255));
  __m512i odd = _mm512_srli_epi16((__m512i)w, 8);
  __m512i x2 = _mm512_set1_epi32(x4);
  __m512i x_even = _mm512_srai_epi16(_mm512_slli_epi16(x2, 8), 8);
  __m512i x_odd = _mm512_srai_epi16(x2, 8);
  return sum + (I)_mm512_madd_epi16(even, x_even) + (I)_mm512_madd_epi16(odd, x_odd);
#elif defined(__AVX2__)
  if (!wide) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x4));
    return sum + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  __m256i even = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255));
  __m256i odd = _mm256_srli_epi16((__m256i)w, 8);
  __m256i x2 = _mm256_set1_epi32(x4);
  __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x2, 8), 8);
  __m256i x_odd = _mm256_srai_epi16(x2, 8);
  return sum + (I)_mm256_madd_epi16(even, x_even) + (I)_mm256_madd_epi16(odd, x_odd);
#elif defined(__ARM_FEATURE_DOTPROD)
  int8x16_t x16 = vreinterpretq_s8_s32(vdupq_n_s32(x4));
  int8x16_t w16 = vreinterpretq_s8_s32((int32x4_t)w);
  if (!wide) return (I)vdotq_s32((int32x4_t)sum, w16, x16);
  // w = (w - 128) + 128, and the first part is a signed byte
  int8x16_t low = veorq_s8(w16, vdupq_n_s8(-128));
  I ones = (I)vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), x16);
  return (I)vdotq_s32((int32x4_t)sum, low, x16) + 128 * ones;
#else
  for (int j = 0; j < 4; ++j) sum += ((w >> (8 * j)) & 255) * (int32_t)x[j];
  return sum;
#endif
}

inline float sum_of_lanes(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int i = 0; i < lanes; ++i) sum += x[i];
  return sum;
#endif
}

// The sum of the lanes of each of `lanes` vectors.
inline F sums_of_lanes(const F* x) {
#if defined(__AVX512F__)
  __m512 pairs[8], quads[4], halves[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 a = quads[2 * i], b = quads[2 * i + 1];
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88),
                              _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return (F)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                          _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#elif defined(__AVX2__)
  __m256 quads[2];
  for (int i = 0; i < 2; ++i) {
    const F* y = x + 4 * i;
    quads[i] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)y[0], (__m256)y[1]),
                              _mm256_hadd_ps((__m256)y[2], (__m256)y[3]));
  }
  return (F)_mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                          _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#else
  F sums;
  for (int i = 0; i < lanes; ++i) sums[i] = sum_of_lanes(x[i]);
  return sums;
#endif
}

inline float max_of_lanes(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < lanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

inline bool any_lane(I condition) {  // of a comparison
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)condition, (__m256i)condition);
#else
  int32_t any = 0;
  for (int i = 0; i < lanes; ++i) any |= condition[i];
  return any != 0;
#endif
}

// Writes the lanes of x that the comparison keeps side by side; how many they are.
// All of to[0 ... lanes) may be written.
inline int keep_lanes(I condition, F x, float* to) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, (__m512)x));
  return __builtin_popcount(mask);
#else
  int n = 0;
  for (int i = 0; i < lanes; ++i) {
    to[n] = x[i];
    n -= condition[i];
  }
  return n;
#endif
}

// e**x within 2 units in the last place; 0 below -87, as for -infinity. x <= 88.
inline F exp_of(F x) {
  const F shifted = x * 1.44269504f + 12582912.0f;  // rounds x / ln 2, see prepare_row
  const F n = shifted - 12582912.0f;
  const F r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
  F y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  // the low bits of shifted are n; unsigned, for below -87 the sum wraps
  const U power = ((U)shifted << 23) + 0x3f800000u;
  return x < -87.0f ? F{} : y * (F)power;
}

// The same for any x: e**88 above 88, a NaN stays one.
inline F exp_below(F x) { return exp_of(x > 88.0f ? broadcast(88.0f) : x); }

// tanh(x) within 4 units in the last place. Near 0, where 1 - 2 / (e**2x + 1) cancels,
// an odd polynomial.
inline F tanh_of(F x) {
  const F z = x * x;
  F near = z * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * z - 5.37397155531e-2f;
  near = near * z + 1.33314422036e-1f;
  near = near * z - 3.33332819422e-1f;
  near = near * z * x + x;
  const F y = x > 20.0f ? broadcast(40.0f) : 2 * x;
  const F far = 1.0f - 2.0f / (exp_of(y) + 1.0f);
  return z < 0.390625f ? near : far;
}

inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float from_f16(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 x;
  memcpy(&x, &h, 2);
  return x;
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
  float tiny = (float)rest * 0x1p-24f;
  return sign ? -tiny : tiny;
#endif
}

inline uint16_t to_f16(float x) {  // to nearest, ties to even
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  __fp16 y = x;
  uint16_t h;
  memcpy(&h, &y, 2);
  return h;
#else
  uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00;
  if (rest >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (rest < 0x38800000) {  // subnormal: adding 0.5 rounds at 2**-24
    return sign | (uint16_t)(bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000);
  }
  return sign | (uint16_t)((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13);
#endif
}

inline float from_bf16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  uint32_t bits = bits_of_float(x);
  if (x != x) return bits >> 16 | 64;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
