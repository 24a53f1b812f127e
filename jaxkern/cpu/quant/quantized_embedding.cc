// Binds rows of weights in blocks to XLA's foreign function interface.
#include <string_view>

#include "../handler.h"
#include "block_weights.h"

namespace jaxkern {
namespace {

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

}  // namespace

JAXKERN_HANDLER(quantized_embedding, 2, 1, .Attr<std::string_view>("qtype")
                .Attr<bool>("interleaved"));

}  // namespace jaxkern
