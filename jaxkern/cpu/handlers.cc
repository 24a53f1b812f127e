// Binds the products, rows and attention to XLA's foreign function interface.
#include <string_view>

#include "handler.h"

namespace jaxkern {
namespace {

// Fills `w` from `data` [rows, row_bytes] or, interleaved, [rows / 16, 16 * row_bytes].
bool weights_of(std::string_view qtype, bool interleaved, int64_t rows, int64_t bytes,
                QuantizedWeights* w) {
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

struct Around {  // what precedes and follows a product; null or 0: nothing
  const ffi::AnyBuffer *residual, *norm;
  float eps;
  bool gated;
};

// x [rows, d], w [f, row_bytes] or tiles -> y [rows, f], or [rows, f / 2] if gated
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                    ffi::Result<ffi::AnyBuffer> y, std::string_view qtype,
                    bool interleaved, bool int8_activations, Around extra) {
  const bool gated = extra.gated;
  const ffi::AnyBuffer *residual = extra.residual, *norm = extra.norm;
  const auto x_dims = x.dimensions(), w_dims = w.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  const int64_t halves = gated ? 2 : 1;
  QuantizedMatmul p = {};
  if (rank < 2 || w_dims.size() != rank || y_dims.size() != rank ||
      !float_type(x.element_type(), &p.x_type) || y->element_type() != x.element_type() ||
      !weights_of(qtype, interleaved, w_dims[rank - 2], w_dims[rank - 1], &p.w) ||
      p.w.width != x_dims[rank - 1] || p.w.rows != y_dims[rank - 1] * halves ||
      x_dims[rank - 2] != y_dims[rank - 2] || (gated && p.w.rows % 32)) {
    return invalid("quantized_matmul: operands do not fit");
  }
  if (residual && (residual->element_type() != x.element_type() ||
                   residual->dimensions().size() != rank ||
                   residual->dimensions()[rank - 2] != y_dims[rank - 2] ||
                   residual->dimensions()[rank - 1] != y_dims[rank - 1])) {
    return invalid("quantized_matmul: the residual does not fit");
  }
  if (norm && (norm->element_type() != ffi::F32 || norm->dimensions().size() != rank - 1 ||
               norm->dimensions()[rank - 2] != p.w.width)) {
    return invalid("quantized_matmul: the weight of the norm does not fit");
  }
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  p.int8_activations = int8_activations;
  p.gated = gated;
  p.eps = extra.eps;
  p.x_rows = p.count = x_dims[rank - 2];
  p.experts = p.rows_per_x = 1;
  const int64_t size = item_size(p.x_type), w_bytes = w_dims[rank - 2] * w_dims[rank - 1];
  const int64_t y_bytes = p.count * y_dims[rank - 1] * size;
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x_dims, i) * p.count * p.w.width * size);
    p.w.data = at<uint8_t>(w, batch.index(w_dims, i) * w_bytes);
    p.y = at<char>(*y, i * y_bytes);
    if (residual) {
      p.residual = at<char>(*residual, batch.index(residual->dimensions(), i) * y_bytes);
    }
    if (norm) {
      p.norm = at<float>(*norm, batch.index(norm->dimensions(), i) * p.w.width);
    }
    if (!best_kernels().quantized_matmul(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

ffi::Error quantized_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                            ffi::Result<ffi::AnyBuffer> y, std::string_view qtype,
                            bool interleaved, bool int8_activations, bool gated) {
  return multiply(pool, x, w, y, qtype, interleaved, int8_activations, {nullptr, nullptr, 0, gated});
}

// norm [d]: of x / rms(x) * norm instead of x
ffi::Error rms_norm_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm,
                           ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                           std::string_view qtype, bool interleaved, bool int8_activations,
                           bool gated, float eps) {
  return multiply(pool, x, w, y, qtype, interleaved, int8_activations,
                  {nullptr, &norm, eps, gated});
}

// residual [rows, f] -> y = residual + the product
ffi::Error quantized_matmul_add(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                                ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                                std::string_view qtype, bool interleaved,
                                bool int8_activations) {
  return multiply(pool, x, w, y, qtype, interleaved, int8_activations,
                  {&residual, nullptr, 0, false});
}

// x [t, d], expert [t, k], w [e, f, row_bytes] or tiles -> y [t, k, f]
ffi::Error quantized_matmul_id(ffi::ThreadPool pool, ffi::AnyBuffer x,
                               ffi::AnyBuffer expert, ffi::AnyBuffer w,
                               ffi::Result<ffi::AnyBuffer> y, std::string_view qtype,
                               bool interleaved, bool int8_activations) {
  const auto x_dims = x.dimensions(), w_dims = w.dimensions(), y_dims = y->dimensions();
  const auto e_dims = expert.dimensions();
  const size_t rank = x_dims.size();
  QuantizedMatmul p = {};
  if (rank < 2 || w_dims.size() != rank + 1 || y_dims.size() != rank + 1 ||
      e_dims.size() != rank || expert.element_type() != ffi::S32 ||
      !float_type(x.element_type(), &p.x_type) || y->element_type() != x.element_type() ||
      !weights_of(qtype, interleaved, w_dims[rank - 1], w_dims[rank], &p.w) ||
      p.w.width != x_dims[rank - 1] || p.w.rows != y_dims[rank] ||
      e_dims[rank - 2] != x_dims[rank - 2] || y_dims[rank - 2] != x_dims[rank - 2] ||
      e_dims[rank - 1] != y_dims[rank - 1]) {
    return invalid("quantized_matmul_id: operands do not fit");
  }
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  const int64_t k = e_dims[rank - 1];
  p.int8_activations = int8_activations;
  p.x_rows = x_dims[rank - 2];
  p.count = p.x_rows * k;
  p.rows_per_x = k;
  p.experts = w_dims[rank - 2];
  const int64_t size = item_size(p.x_type);
  const int64_t w_bytes = p.experts * w_dims[rank - 1] * w_dims[rank];
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x_dims, i) * p.x_rows * p.w.width * size);
    p.expert = at<int32_t>(expert, batch.index(e_dims, i) * p.count);
    p.w.data = at<uint8_t>(w, batch.index(w_dims, i) * w_bytes);
    p.y = at<char>(*y, i * p.count * p.w.rows * size);
    if (!best_kernels().quantized_matmul(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

// ids [n], w [v, row_bytes] or tiles -> y [n, d]
ffi::Error quantized_embedding(ffi::ThreadPool pool, ffi::AnyBuffer ids,
                               ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                               std::string_view qtype, bool interleaved) {
  const auto ids_dims = ids.dimensions(), w_dims = w.dimensions();
  const auto y_dims = y->dimensions();
  const size_t rank = y_dims.size();
  QuantizedEmbedding p = {};
  if (rank < 2 || w_dims.size() != rank || ids_dims.size() != rank - 1 ||
      ids.element_type() != ffi::S32 || !float_type(y->element_type(), &p.y_type) ||
      !weights_of(qtype, interleaved, w_dims[rank - 2], w_dims[rank - 1], &p.w) ||
      p.w.width != y_dims[rank - 1] || ids_dims[rank - 2] != y_dims[rank - 2]) {
    return invalid("quantized_embedding: operands do not fit");
  }
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  p.count = y_dims[rank - 2];
  const int64_t w_bytes = w_dims[rank - 2] * w_dims[rank - 1];
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.ids = at<int32_t>(ids, batch.index(ids_dims, i) * p.count);
    p.w.data = at<uint8_t>(w, batch.index(w_dims, i) * w_bytes);
    p.y = at<char>(*y, i * p.count * p.w.width * item_size(p.y_type));
    if (!best_kernels().quantized_embedding(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

// A float dtype, or bytes with one scale a row of each head.
bool cache_type(ffi::AnyBuffer cache, ffi::AnyBuffer scales, Float* type) {
  if (cache.element_type() != ffi::U8) return float_type(cache.element_type(), type);
  const auto dims = cache.dimensions(), scale_dims = scales.dimensions();
  if (scales.element_type() != ffi::F32 || scale_dims.size() + 1 != dims.size()) return false;
  // the batch dims in front may be 1 in either
  for (size_t d = dims.size() - 4; d < scale_dims.size(); ++d) {
    if (scale_dims[d] != dims[d]) return false;
  }
  return true;
}

// query [b, t, k * g, h], key [b, s, k, h], value [b, s, k, hv], lengths and offsets [b]
// -> out [b, t, k * g, hv], lse [b, t, k * g]. Keys or values of bytes are codes, with
// scales [b, s, k]; else their scales are not read.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                     ffi::AnyBuffer value, ffi::AnyBuffer kv_lengths,
                     ffi::AnyBuffer q_offset, ffi::AnyBuffer key_scales,
                     ffi::AnyBuffer value_scales, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::AnyBuffer> lse, float scale, float softcap,
                     int64_t window, bool causal) {
  const auto q_dims = query.dimensions(), k_dims = key.dimensions();
  const auto v_dims = value.dimensions(), out_dims = out->dimensions();
  const auto length_dims = kv_lengths.dimensions(), offset_dims = q_offset.dimensions();
  const size_t rank = q_dims.size();
  Attention p = {};
  if (rank < 4 || k_dims.size() != rank || v_dims.size() != rank ||
      out_dims.size() != rank || length_dims.size() != rank - 3 ||
      offset_dims.size() != rank - 3 || !float_type(query.element_type(), &p.query_type) ||
      !cache_type(key, key_scales, &p.key_type) ||
      !cache_type(value, value_scales, &p.value_type) ||
      out->element_type() != query.element_type() || lse->element_type() != ffi::F32 ||
      kv_lengths.element_type() != ffi::S32 || q_offset.element_type() != ffi::S32) {
    return invalid("attention: operands do not fit");
  }
  p.b = q_dims[rank - 4], p.t = q_dims[rank - 3], p.h = q_dims[rank - 1];
  p.s = k_dims[rank - 3], p.k = k_dims[rank - 2], p.hv = v_dims[rank - 1];
  p.g = p.k ? q_dims[rank - 2] / p.k : 0;
  if (p.g * p.k != q_dims[rank - 2] || k_dims[rank - 4] != p.b ||
      k_dims[rank - 1] != p.h || v_dims[rank - 4] != p.b || v_dims[rank - 3] != p.s ||
      v_dims[rank - 2] != p.k || length_dims[rank - 4] != p.b ||
      offset_dims[rank - 4] != p.b || out_dims[rank - 4] != p.b ||
      out_dims[rank - 3] != p.t || out_dims[rank - 2] != p.k * p.g ||
      out_dims[rank - 1] != p.hv) {
    return invalid("attention: operands do not fit");
  }
  p.scale = scale, p.softcap = softcap, p.window = window, p.causal = causal;
  PoolWorkers workers(pool);
  const Batch batch(out_dims, rank - 4);
  const int64_t rows = p.b * p.t * p.k * p.g, keys = p.b * p.s * p.k;
  const bool key_codes = key.element_type() == ffi::U8;
  const bool value_codes = value.element_type() == ffi::U8;
  const int64_t key_size = key_codes ? 1 : item_size(p.key_type);
  const int64_t value_size = value_codes ? 1 : item_size(p.value_type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    if (key_codes) {
      p.key_scales = at<float>(key_scales, batch.index(key_scales.dimensions(), i) * keys);
    }
    if (value_codes) {
      p.value_scales =
          at<float>(value_scales, batch.index(value_scales.dimensions(), i) * keys);
    }
    p.query = at<char>(query, batch.index(q_dims, i) * rows * p.h * item_size(p.query_type));
    p.key = at<char>(key, batch.index(k_dims, i) * keys * p.h * key_size);
    p.value = at<char>(value, batch.index(v_dims, i) * keys * p.hv * value_size);
    p.kv_lengths = at<int32_t>(kv_lengths, batch.index(length_dims, i) * p.b);
    p.q_offset = at<int32_t>(q_offset, batch.index(offset_dims, i) * p.b);
    p.out = at<char>(*out, i * rows * p.hv * item_size(p.query_type));
    p.lse = at<float>(*lse, i * rows);
    if (!best_kernels().attention(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)  // the rest of the library is hidden

JAXKERN_HANDLER(quantized_matmul, 2, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations")
                .Attr<bool>("gated"));
JAXKERN_HANDLER(quantized_matmul_add, 3, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations"));
JAXKERN_HANDLER(rms_norm_matmul, 3, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations")
                .Attr<bool>("gated").Attr<float>("eps"));
JAXKERN_HANDLER(quantized_matmul_id, 3, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations"));
JAXKERN_HANDLER(quantized_embedding, 2, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved"));
JAXKERN_HANDLER(attention, 7, 2, .Attr<float>("scale").Attr<float>("softcap")
                .Attr<int64_t>("window").Attr<bool>("causal"));

}  // namespace jaxkern

extern "C" const char* jaxkern_instruction_set() {
  return jaxkern::best_kernels().name;
}

#pragma GCC visibility pop
