// ggml's block formats, 16 rows at a time: bytes -> unsigned codes, scales, offsets.
//
//   weight = scale * (code - zero) + offset        in groups of 16 or 32 along a row
//
// `interleave` puts the same field of the same block of 16 rows side by side; the tiles
// of jaxkern.primitives.quant.interleaved_tensor are stored so. Then one vector
// instruction decodes all 16 rows, and the products need no sum across lanes.
#pragma once
#include "../kernels.h"
#include "../simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {

constexpr int tile_rows = 16;

// One block of up to 16 rows, whose first bytes are `stride` apart, interleaved.
// Rows that are not there become zeros.
inline void interleave(const Layout& form, const uint8_t* block, int64_t stride,
                       int rows, uint8_t* out) {
  if (rows < tile_rows) memset(out, 0, tile_rows * form.bytes);
  auto move = [&](int first, int end, int unit) {
    for (int at = first; at < end; at += unit) {
      for (int r = 0; r < rows; ++r) {
        const uint8_t* from = block + r * stride + at;
        uint8_t* to = out + tile_rows * at + r * unit;
        if (unit == 4) memcpy(to, from, 4);
        if (unit == 2) memcpy(to, from, 2);
        if (unit == 1) *to = *from;
      }
    }
  };
  move(0, form.head, form.unit);
  move(form.head, form.bytes - form.tail, 4);
  move(form.bytes - form.tail, form.bytes, form.unit);
}

// A decoded tile: 4 codes of one row are one uint32, [width / 4, 16 rows]; scales and
// offsets are [width / group, 16 rows].
struct Tile {
  uint32_t* codes;
  float *scale, *offset;
};

// Fields of `bits` bits, lowest first, of each run of `every` bytes: a run gives first
// the lowest field of all its bytes. Moved up by `shift`; `add` to those already there.
template <int bits, int bytes, int every, int shift = 0, bool add = false>
__attribute__((always_inline)) inline void fields(const uint8_t* from, uint32_t* codes) {
  constexpr int run = every / 4, per_byte = 8 / bits, mask = 255 >> (8 - bits);
  for (int unit = 0; unit < bytes / 4; ++unit) {
    for (int part = 0; part < tile_rows; part += lanes) {
      I v = load<I>(from + (unit * tile_rows + part) * 4);
      for (int f = 0; f < per_byte; ++f) {
        int chunk = (unit / run * per_byte + f) * run + unit % run;
        I field = ((v >> (f * bits)) & (mask * 0x01010101)) << shift;
        uint32_t* to = codes + chunk * tile_rows + part;
        store<I>(to, add ? field | load<I>(to) : field);
      }
    }
  }
}

// Bit e of 32 becomes bit 4 of code e.
inline void fifth_bits(const uint8_t* from, uint32_t* codes) {
  for (int chunk = 0; chunk < 8; ++chunk) {
    for (int part = 0; part < tile_rows; part += lanes) {
      I four = (load<I>(from + part * 4) >> (4 * chunk)) & 15;
      uint32_t* to = codes + chunk * tile_rows + part;
      // the products put bit i at i, i + 7, i + 14, i + 21: once on a multiple of 8
      store<I>(to, load<I>(to) | ((four * 0x00204081) & 0x01010101) << 4);
    }
  }
}

inline I look_up(I codes, const uint8_t* table) {  // bytes below 16
#if defined(__AVX512BW__)
  __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (I)_mm512_shuffle_epi8(t, (__m512i)codes);
#elif defined(__AVX2__)
  __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (I)_mm256_shuffle_epi8(t, (__m256i)codes);
#else
  uint8_t bytes[sizeof(I)];
  store<I>(bytes, codes);
  for (uint8_t& b : bytes) b = table[b];
  return load<I>(bytes);
#endif
}

inline void look_up_all(uint32_t* codes, int chunks, const uint8_t* table) {
  for (int i = 0; i < chunks * tile_rows; i += lanes) {
    store<I>(codes + i, look_up(load<I>(codes + i), table));
  }
}

constexpr uint8_t iq4_codes[16] = {  // -127 .. 113, each + 128
    1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t e2m1_codes[16] = {  // twice the value, each + 12
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

inline uint32_t unit(const uint8_t* from, int row) {
  uint32_t v;
  memcpy(&v, from + 4 * row, 4);
  return v;
}

inline void halves(const uint8_t* from, float* to) {  // 16 float16
#if defined(__AVX512F__)
  store(to, (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)));
#else
  for (int r = 0; r < tile_rows; ++r) {
    uint16_t h;
    memcpy(&h, from + 2 * r, 2);
    to[r] = from_f16(h);
  }
#endif
}

inline void half_pairs(const uint8_t* from, float* low, float* high) {
  for (int r = 0; r < tile_rows; ++r) {
    low[r] = from_f16((uint16_t)unit(from, r));
    high[r] = from_f16((uint16_t)(unit(from, r) >> 16));
  }
}

inline void scales_and_minima(const uint8_t* from, const float* d, const float* dmin,
                              float* scale, float* offset) {  // of q4_k and q5_k
  for (int j = 0; j < 4; ++j) {
    for (int r = 0; r < tile_rows; ++r) {
      uint32_t first = unit(from, r) >> (8 * j) & 255;
      uint32_t second = unit(from + 64, r) >> (8 * j) & 255;
      uint32_t rest = unit(from + 128, r) >> (8 * j) & 255;
      scale[j * 16 + r] = d[r] * (float)(int)(first & 63);
      scale[(4 + j) * 16 + r] = d[r] * (float)(int)((rest & 15) | first >> 6 << 4);
      offset[j * 16 + r] = -dmin[r] * (float)(int)(second & 63);
      offset[(4 + j) * 16 + r] = -dmin[r] * (float)(int)(rest >> 4 | second >> 6 << 4);
    }
  }
}

inline float e8m0_half(uint32_t e) {  // 2**(e - 128)
  return float_of_bits(e < 2 ? (1u << 21) << (e & 1) : (e - 1) << 23);
}

inline float e4m3_half(uint32_t b) {  // half of an unsigned e4m3, NaN is 0
  uint32_t exponent = b >> 3 & 15, mantissa = b & 7;
  if (b == 0x7f) return 0;
  if (exponent == 0) return (float)(int)mantissa * 0x1p-10f;
  return float_of_bits((exponent + 119) << 23 | mantissa << 20);
}

// Decodes one interleaved block; b + 16 * i is where byte i of the blocks begins.
template <Format format>
__attribute__((always_inline)) inline void decode_block(const uint8_t* b, Tile t) {
  [[maybe_unused]] float d[tile_rows], dmin[tile_rows];
  if constexpr (format == Format::q4_0) {
    halves(b, t.scale);
    fields<4, 16, 16>(b + 16 * 2, t.codes);
  } else if constexpr (format == Format::q4_1) {
    halves(b, t.scale);
    halves(b + 16 * 2, t.offset);
    fields<4, 16, 16>(b + 16 * 4, t.codes);
  } else if constexpr (format == Format::q5_0) {
    halves(b, t.scale);
    fields<4, 16, 16>(b + 16 * 6, t.codes);
    fifth_bits(b + 16 * 2, t.codes);
  } else if constexpr (format == Format::q5_1) {
    halves(b, t.scale);
    halves(b + 16 * 2, t.offset);
    fields<4, 16, 16>(b + 16 * 8, t.codes);
    fifth_bits(b + 16 * 4, t.codes);
  } else if constexpr (format == Format::q8_0) {
    halves(b, t.scale);
    for (int i = 0; i < 8 * tile_rows; i += lanes) {
      store<I>(t.codes + i, load<I>(b + 16 * 2 + 4 * i) ^ (int32_t)0x80808080);
    }
  } else if constexpr (format == Format::q2_k) {
    half_pairs(b + 16 * 80, d, dmin);
    for (int g = 0; g < 16; ++g) {
      for (int r = 0; r < tile_rows; ++r) {
        uint32_t s = unit(b + 16 * (g & ~3), r) >> (8 * (g & 3)) & 255;
        t.scale[g * 16 + r] = d[r] * (float)(int)(s & 15);
        t.offset[g * 16 + r] = -dmin[r] * (float)(int)(s >> 4);
      }
    }
    fields<2, 64, 32>(b + 16 * 16, t.codes);
  } else if constexpr (format == Format::q3_k) {
    halves(b + 16 * 108, d);
    for (int g = 0; g < 16; ++g) {
      for (int r = 0; r < tile_rows; ++r) {
        uint32_t low = unit(b + 16 * (96 + (g & 4)), r) >> (8 * (g & 3));
        uint32_t high = unit(b + 16 * 104, r) >> (8 * (g & 3) + g / 4 * 2);
        int s = (int)((low >> (g / 8 * 4) & 15) | (high & 3) << 4) - 32;
        t.scale[g * 16 + r] = d[r] * (float)s;
      }
    }
    fields<2, 64, 32>(b + 16 * 32, t.codes);
    fields<1, 32, 32, 2, true>(b, t.codes);
  } else if constexpr (format == Format::q4_k) {
    half_pairs(b, d, dmin);
    scales_and_minima(b + 16 * 4, d, dmin, t.scale, t.offset);
    fields<4, 128, 32>(b + 16 * 16, t.codes);
  } else if constexpr (format == Format::q5_k) {
    half_pairs(b, d, dmin);
    scales_and_minima(b + 16 * 4, d, dmin, t.scale, t.offset);
    fields<4, 128, 32>(b + 16 * 48, t.codes);
    fields<1, 32, 32, 4, true>(b + 16 * 16, t.codes);
  } else if constexpr (format == Format::q6_k) {
    halves(b + 16 * 208, d);
    for (int g = 0; g < 16; ++g) {
      for (int r = 0; r < tile_rows; ++r) {
        uint32_t s = unit(b + 16 * (192 + (g & ~3)), r) >> (8 * (g & 3));
        t.scale[g * 16 + r] = d[r] * (float)(int8_t)s;
      }
    }
    fields<4, 128, 64>(b, t.codes);
    fields<2, 64, 32, 4, true>(b + 16 * 128, t.codes);
  } else if constexpr (format == Format::iq4_nl) {
    halves(b, t.scale);
    fields<4, 16, 16>(b + 16 * 2, t.codes);
    look_up_all(t.codes, 8, iq4_codes);
  } else if constexpr (format == Format::iq4_xs) {
    halves(b, d);
    for (int g = 0; g < 8; ++g) {
      for (int r = 0; r < tile_rows; ++r) {
        uint16_t high;
        memcpy(&high, b + 16 * 2 + 2 * r, 2);
        uint32_t low = unit(b + 16 * 4, r) >> (4 * g) & 15;
        t.scale[g * 16 + r] = d[r] * (float)((int)(low | (high >> (2 * g) & 3) << 4) - 32);
      }
    }
    fields<4, 128, 16>(b + 16 * 8, t.codes);
    look_up_all(t.codes, 64, iq4_codes);
  } else if constexpr (format == Format::mxfp4) {
    for (int r = 0; r < tile_rows; ++r) t.scale[r] = e8m0_half(b[r]);
    fields<4, 16, 16>(b + 16, t.codes);
    look_up_all(t.codes, 8, e2m1_codes);
  } else if constexpr (format == Format::nvfp4) {
    for (int g = 0; g < 4; ++g) {
      for (int r = 0; r < tile_rows; ++r) {
        t.scale[g * 16 + r] = e4m3_half(unit(b, r) >> (8 * g) & 255);
      }
    }
    fields<4, 32, 8>(b + 16 * 4, t.codes);
    look_up_all(t.codes, 16, e2m1_codes);
  }
}

// Where the tile with rows [16 i, 16 i + 16) begins.
inline const uint8_t* tile_at(const QuantizedWeights& w, const Layout& form, int64_t i) {
  return w.data + i * tile_rows * (w.width / form.elements * form.bytes);
}

// Calls f(b) with each interleaved block of the rows [16 i, 16 i + 16).
template <Format format, typename F>
inline void for_each_block(const QuantizedWeights& w, int64_t i, F f) {
  constexpr Layout form = layouts[(int)format];
  const int64_t blocks = w.width / form.elements, row_bytes = blocks * form.bytes;
  const uint8_t* from = tile_at(w, form, i);
  const int64_t left = w.rows - i * tile_rows;
  const int rows = left < tile_rows ? (int)left : tile_rows;
  uint8_t scratch[tile_rows * form.bytes];
  for (int64_t block = 0; block < blocks; ++block) {
    if (w.interleaved) {
      f(from + block * tile_rows * form.bytes);
    } else {
      interleave(form, from + block * form.bytes, row_bytes, rows, scratch);
      f(scratch);
    }
  }
}

template <Format format>
void decode_tile_of(const QuantizedWeights& w, int64_t i, Tile t) {
  constexpr Layout form = layouts[(int)format];
  for_each_block<format>(w, i, [&](const uint8_t* b) {
    decode_block<format>(b, t);
    t.codes += form.elements / 4 * tile_rows;
    t.scale += form.elements / form.group * tile_rows;
    t.offset += form.elements / form.group * tile_rows;
  });
}

using DecodeTile = void (*)(const QuantizedWeights&, int64_t, Tile);

#define JAXKERN_DECODER(f) decode_tile_of<Format::f>,
constexpr DecodeTile decoders[] = {JAXKERN_FORMATS(JAXKERN_DECODER)};
#undef JAXKERN_DECODER

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
