// The kernels as plain functions on pointers, one table of them per instruction set.
//
// kernels.cc is compiled once per instruction set; `best_kernels` picks the table for
// the machine that runs. <family>/<op>.cc binds it to XLA. Shapes are checked there.
#pragma once
#include <cstdint>

#include "quant/block_formats.h"
#include "workers.h"

namespace jaxkern {

enum class Float { f32, f16, bf16 };  // of activations and results

struct QuantizedWeights {
  const uint8_t* data;
  Format format;
  bool interleaved;  // tiles of 16 rows, else rows as in the file
  int64_t rows, width;  // f, d
};

// y[i] = w[expert[i]] x[i / rows_per_x] + residual[i], 0 for no such expert
struct QuantizedMatmul {
  QuantizedWeights w;  // of one expert; the others follow
  const void* x;  // [x_rows, width]
  Float x_type;
  void* y;  // [count, rows], of x_type
  const void* residual;  // as y, or null
  const float* norm;  // [width], or null; x / rms(x) * norm is multiplied
  float eps;  // of the norm
  bool gated;  // w has twice y's rows: y = silu(first half) * second half
  bool int8_activations;
  int64_t x_rows, count, rows_per_x, experts;
  const int32_t* expert;  // [count], or null: expert 0
};

struct QuantizedEmbedding {  // y[i] = w[ids[i]], 0 for an id outside
  QuantizedWeights w;
  const int32_t* ids;
  int64_t count;
  void* y;
  Float y_type;
};

struct Attention {  // out = softmax(scale q k^T) v over the keys that a query may see
  const void *query, *key, *value;  // [b, t, k * g, h], [b, s, k, h], [b, s, k, hv]
  Float query_type, key_type, value_type;
  // [b, s, k] where keys or values are codes of a byte, 128 for 0; null: floats
  const float *key_scales, *value_scales;
  void* out;  // [b, t, k * g, hv], of query_type
  float* lse;  // [b, t, k * g]
  const int32_t *kv_lengths, *q_offset;  // [b]
  int64_t b, t, s, k, g, h, hv;
  float scale, softcap;  // no cap: 0
  int64_t window;  // none: 0
  bool causal;
};

struct Argmax {  // the first of the largest of each row
  const void* x;  // [rows, v]
  Float x_type;
  int64_t rows, v;
  bool nan_wins;  // else it never does
  int32_t* index;  // [rows]
};

struct TopK {  // the k largest of each row in descending order; a NaN is the largest
  const void* x;  // [rows, v]
  Float x_type;
  int64_t rows, v, k;  // 1 <= k <= v
  void* values;  // [rows, k], of x_type
  int32_t* indices;
};

struct SampleRow {  // a token of softmax(logits / temperature) after three cuts
  const void* logits;  // [v]
  float uniform, temperature, top_p, min_p;  // no cut: 1, 0
  int32_t top_k;  // no cut: 0 or less
  int32_t* token;
};

struct Sample {
  const SampleRow* row;
  Float logits_type;
  int64_t rows, v;
};

// y = (total - mean) rstd weight + bias with total = x + residual. What is absent is null.
struct Norm {
  const void *x, *residual;  // [rows, d]
  Float x_type, residual_type;
  const float *weight, *bias;  // [d]
  int64_t rows, d;
  float eps;
  bool centred;  // else the mean is not taken away
  float *mean, *rstd;  // [rows]; written forward, read by the gradient
  void *y, *total;  // of x_type and residual_type
  const void *dy, *dtotal;  // of their types too
  void *dx, *dresidual;
  float *dweight, *dbias;  // [d]
};

struct DeltaRule {  // S = e**g S + k beta (v - e**g S^T k)^T, out = scale S^T q, per token
  const float *query, *key;  // [b, t, k, h]
  const float *value, *g, *beta;  // [b, t, k * group, hv], [b, t, k * group]
  const float* state;  // [b, k * group, h, hv], or null for zeros
  float *out, *new_state;  // as value, as state
  int64_t b, t, k, group, h, hv;
  float scale;
  bool by_channel;  // g is [b, t, k * group, h], a decay of each row of S
};

struct StateSpace {  // S = decay S + step x b^T, y = S c, per token
  const float *x, *step, *decay;  // [r, t, k * group, h], [r, t, k * group]
  const float *b, *c;  // [r, t, k, size]
  const float* state;  // [r, k * group, h, size], or null for zeros
  float *y, *new_state;  // as x, as state
  int64_t r, t, k, group, h, size;
};

struct Matmul {  // y = x w^T, x rounded to compute_type first
  const void *x, *w;  // [rows, d], or [rows / k, d]; [f, d]
  Float x_type, w_type, compute_type;
  void* y;  // [rows, f]
  Float y_type;
  int64_t rows, d, f;
  // y[i] = w[expert[i]] x[i / k], 0 for no such expert; null: one w
  const int32_t* expert;
  int64_t k, experts;
};

struct AffineMatmul {  // y = x w^T with w = scale * code + bias in groups along d
  const void* x;  // [rows, d], or [rows / k, d]
  Float x_type, scale_type;
  const uint32_t* codes;  // [f, d * bits / 32], lowest bits first
  int bits;  // 2, 4 or 8
  int64_t group;  // a power of two
  const void *scales, *biases;  // [f, d / group]
  void* y;  // [rows, f], of x_type
  int64_t rows, d, f;
  // y[i] = x[i / k] w[expert[i]]^T, 0 for no such expert; null: one w
  const int32_t* expert;
  int64_t k, experts;
};

struct LinearCrossEntropy {  // z = cap(x weight^T), never stored as a whole
  const void *x, *weight;  // [n, d], [v, d]
  Float x_type, weight_type;
  const int32_t* label;  // [n], -1 for none
  int64_t n, d, v;
  float softcap;  // no cap: 0
  float *lse, *picked, *total;  // [n]: ln(sum(e**z)), z[label], sum(z)
  // dz = slope e**(z - lse) - on_every - (on_label at the label); read by the gradient
  const float *slope, *on_label, *on_every;  // [n]
  void *dx, *dweight;  // as x, as weight
};

struct CausalConv {  // y_t = act(bias + sum of weight[:, j] x_{t - (w - 1) + j})
  const void *x, *state;  // [b, t, d]; [b, w - 1, d], the inputs before, or null for zeros
  Float x_type, state_type;
  const float *weight, *bias;  // [d, w]; [d] or null
  const int32_t* segment;  // [b, t], or null: a tap sees its own segment only
  int64_t b, t, d, w;
  bool silu;
  void* y;
  const void* dy;  // as x
  void *dx, *dstate;
  float *dweight, *dbias;
};

struct Softmax {  // y = softmax(scale x) of each row over what the mask keeps
  const void *x, *dy;  // [rows, s]
  Float type;
  const uint8_t* mask;  // [rows, s] or null
  int64_t rows, s;
  float scale;
  void *y, *dx;  // y is read by the gradient
};

struct Rope {  // (y_a, y_b) = (x_a cos - x_b sin, x_b cos + x_a sin) for pairs of dims
  const void* x;  // [tokens, n, h]
  Float type;
  const float *cos, *sin;  // [tokens, pairs]
  int64_t tokens, n, h, pairs, pair_offset;
  bool neighbours;  // (a, b) = (2 i, 2 i + 1), else (i, i + pair_offset)
  float direction;  // of sin: 1, or -1 for the way back
  void* y;
};

struct Kernels {
  const char* name;
  bool (*quantized_matmul)(const QuantizedMatmul&, const Workers&);
  bool (*quantized_embedding)(const QuantizedEmbedding&, const Workers&);
  bool (*attention)(const Attention&, const Workers&);
  bool (*argmax)(const Argmax&, const Workers&);
  bool (*top_k)(const TopK&, const Workers&);
  bool (*sample)(const Sample&, const Workers&);
  bool (*norm)(const Norm&, const Workers&);
  bool (*norm_gradient)(const Norm&, const Workers&);
  bool (*delta_rule)(const DeltaRule&, const Workers&);
  bool (*state_space)(const StateSpace&, const Workers&);
  bool (*matmul_transpose_b)(const Matmul&, const Workers&);
  bool (*affine_matmul)(const AffineMatmul&, const Workers&);
  bool (*linear_cross_entropy)(const LinearCrossEntropy&, const Workers&);
  bool (*linear_cross_entropy_gradient)(const LinearCrossEntropy&, const Workers&);
  bool (*causal_conv)(const CausalConv&, const Workers&);
  bool (*causal_conv_gradient)(const CausalConv&, const Workers&);
  bool (*softmax)(const Softmax&, const Workers&);
  bool (*softmax_gradient)(const Softmax&, const Workers&);
  bool (*rope)(const Rope&, const Workers&);
};

const Kernels& best_kernels();

}  // namespace jaxkern
