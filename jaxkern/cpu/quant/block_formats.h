// Written by block_formats.py from the table in jaxkern/primitives/quant.
#pragma once

namespace jaxkern {

enum class Format {  // of quantised weights, as ggml stores them
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
  nvfp4,
  none,
};

// weight = scale * (code - zero) + offset        in groups along a row
struct Layout {
  const char* name;
  int elements, bytes;  // of a block of one row
  int head, tail;  // bytes in units of `unit` before and after units of 4
  int unit;
  int group;  // weights that share a scale
  int zero;
  bool wide;  // codes above 127
  bool offset;
};

constexpr Layout layouts[] = {  // by Format
    // name elements bytes head tail unit group zero wide offset
    {"Q4_0", 32, 18, 2, 0, 2, 32, 8, false, false},  // d qs[16]
    {"Q4_1", 32, 20, 4, 0, 2, 32, 0, false, true},  // d m qs[16]
    {"Q5_0", 32, 22, 2, 0, 2, 32, 16, false, false},  // d qh[4] qs[16]
    {"Q5_1", 32, 24, 4, 0, 2, 32, 0, false, true},  // d m qh[4] qs[16]
    {"Q8_0", 32, 34, 2, 0, 2, 32, 128, true, false},  // d qs[32]
    {"Q2_K", 256, 84, 0, 0, 2, 16, 0, false, true},  // scales[16] qs[64] d dmin
    {"Q3_K", 256, 110, 0, 2, 2, 16, 4, false, false},  // hmask[32] qs[64] scales[12] d
    {"Q4_K", 256, 144, 0, 0, 2, 32, 0, false, true},  // d dmin scales[12] qs[128]
    {"Q5_K", 256, 176, 0, 0, 2, 32, 0, false, true},  // d dmin scales[12] qh[32] qs[128]
    {"Q6_K", 256, 210, 0, 2, 2, 16, 32, false, false},  // ql[128] qh[64] scales[16] d
    {"IQ4_NL", 32, 18, 2, 0, 2, 32, 128, true, false},  // d qs[16]
    {"IQ4_XS", 256, 136, 4, 0, 2, 32, 128, true, false},  // d scales_h scales_l[4] qs[128]
    {"MXFP4", 32, 17, 1, 0, 1, 32, 12, false, false},  // e[1] qs[16]
    {"NVFP4", 64, 36, 0, 0, 2, 16, 12, false, false},  // scales[4] qs[32]
};

// f(q4_0) f(q4_1) ...: every format in order
#define JAXKERN_FORMATS(f) \
  f(q4_0) \
  f(q4_1) \
  f(q5_0) \
  f(q5_1) \
  f(q8_0) \
  f(q2_k) \
  f(q3_k) \
  f(q4_k) \
  f(q5_k) \
  f(q6_k) \
  f(iq4_nl) \
  f(iq4_xs) \
  f(mxfp4) \
  f(nvfp4)

}  // namespace jaxkern
