// Binds products with weights in blocks, and what stands around one, to XLA's
// foreign function interface.
#include <string_view>

#include "../handler.h"
#include "block_weights.h"

namespace jaxkern {
namespace {

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

}  // namespace

JAXKERN_HANDLER(quantized_matmul, 2, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations")
                .Attr<bool>("gated"));
JAXKERN_HANDLER(quantized_matmul_add, 3, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations"));
JAXKERN_HANDLER(rms_norm_matmul, 3, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations")
                .Attr<bool>("gated").Attr<float>("eps"));

}  // namespace jaxkern
