// Binds products with each row's own expert to XLA's foreign function interface.
#include <string_view>

#include "../handler.h"
#include "block_weights.h"

namespace jaxkern {
namespace {

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

}  // namespace

JAXKERN_HANDLER(quantized_matmul_id, 3, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved").Attr<bool>("int8_activations"));

}  // namespace jaxkern
