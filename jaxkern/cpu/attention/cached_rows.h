// Keys and values as a cache has them: what a query sees of them, and rows of one head.
#pragma once
#include "../float_types.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int key_block = 64;

struct Range {
  int64_t begin, end;
};

inline Range intersection(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

inline Range hull(Range a, Range b) {  // of both; an empty one does not count
  if (a.begin >= a.end) return b;
  if (b.begin >= b.end) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

inline Range visible_keys(const Attention& p, int64_t b, int64_t t) {
  const int64_t position = t + p.q_offset[b], length = p.kv_lengths[b];
  Range seen = {0, length < p.s ? length : p.s};
  if (p.causal) seen.end = position + 1 < seen.end ? position + 1 : seen.end;
  if (p.window && position - p.window + 1 > 0) seen.begin = position - p.window + 1;
  return seen;
}

inline int64_t padded(int64_t n) { return (n + lanes - 1) / lanes * lanes; }

enum class Stored { f32, f16, bf16, codes };  // elements of keys and values

template <Stored stored>
inline F load_stored(const void* x, int64_t i) {
  if (stored == Stored::f32) return load_f32<Float::f32>(x, i);
  if (stored == Stored::f16) return load_f32<Float::f16>(x, i);
  if (stored == Stored::bf16) return load_f32<Float::bf16>(x, i);
  const uint8_t* code = static_cast<const uint8_t*>(x) + i;
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(code));
  return to_float((I)_mm512_cvtepu8_epi32(bytes) - 128);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(code));
  return to_float((I)_mm256_cvtepu8_epi32(bytes) - 128);
#else
  typedef uint8_t Bytes __attribute__((vector_size(lanes)));
  return to_float(__builtin_convertvector(load<Bytes>(code), I) - 128);
#endif
}

// Bytes of the keys, or values, of one token: of all heads.
inline int64_t token_bytes(const Attention& p, bool values) {
  const bool codes = values ? p.value_scales : p.key_scales;
  const Float type = values ? p.value_type : p.key_type;
  return p.k * (values ? p.hv : p.h) * (codes ? 1 : type == Float::f32 ? 4 : 2);
}

// Rows of one head lie apart, which the hardware does not foresee: those of all heads
// are brought into the caches as they lie, before they are read head by head. By loads:
// the processor may drop what is only asked for.
inline void fetch(const Attention& p, bool values, int64_t b, int64_t first, int64_t keys) {
  const int64_t size = token_bytes(p, values);
  const volatile char* from =
      static_cast<const char*>(values ? p.value : p.key) + (b * p.s + first) * size;
  for (int64_t i = 0; i < keys * size; i += 64) (void)from[i];
}

// Some rows of keys or values of one head, `stride` elements apart.
struct Rows {
  const void* data;
  int64_t start, stride, width;  // width: a multiple of lanes
  Stored stored;
  const float* scales;  // null, or one for each row
};

template <Stored stored>
void widen(const Rows& rows, int64_t width, int keys, float* to) {
  const int64_t out_width = padded(width), whole = width / lanes * lanes;
  for (int j = 0; j < keys; ++j, to += out_width) {
    const int64_t from = rows.start + j * rows.stride;
    for (int64_t i = 0; i < whole; i += lanes) {
      store(to + i, load_stored<stored>(rows.data, from + i));
    }
    for (int64_t i = whole; i < out_width; ++i) {
      float y = 0;
      if (i < width) {
        y = stored == Stored::codes
                ? (float)static_cast<const uint8_t*>(rows.data)[from + i] - 128
            : stored == Stored::f16  ? to_f32(Float::f16, rows.data, from + i)
            : stored == Stored::bf16 ? to_f32(Float::bf16, rows.data, from + i)
                                     : to_f32(Float::f32, rows.data, from + i);
      }
      to[i] = y;
    }
  }
}

// Keys or values from `first` on, of which `keys` are read: in place where that is wanted
// and vectors fit them, else as float32 in `scratch`. Many rows want the copy: rows of
// a cache often lie a power of two apart, where they push each other out of the caches.
// `scratch` holds key_block rows of padded width, and their scales.
inline Rows cached_rows(const Attention& p, bool values, int64_t b, int64_t k,
                        int64_t first, int keys, bool in_place, float* scratch) {
  const float* scales = values ? p.value_scales : p.key_scales;
  const Float type = values ? p.value_type : p.key_type;
  const int64_t width = values ? p.hv : p.h, row = (b * p.s + first) * p.k + k;
  Rows rows = {values ? p.value : p.key, row * width, p.k * width, width,
               scales                ? Stored::codes
               : type == Float::f32  ? Stored::f32
               : type == Float::f16  ? Stored::f16
                                     : Stored::bf16,
               nullptr};
  if (scales) {
    float* to = scratch + key_block * padded(width);
    for (int j = 0; j < keys; ++j) to[j] = scales[row + j * p.k];
    rows.scales = to;
  }
  if (width % lanes == 0 && in_place) return rows;
  switch (rows.stored) {
    case Stored::f32: widen<Stored::f32>(rows, width, keys, scratch); break;
    case Stored::f16: widen<Stored::f16>(rows, width, keys, scratch); break;
    case Stored::bf16: widen<Stored::bf16>(rows, width, keys, scratch); break;
    case Stored::codes: widen<Stored::codes>(rows, width, keys, scratch); break;
  }
  return {scratch, 0, padded(width), padded(width), Stored::f32, rows.scales};
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
