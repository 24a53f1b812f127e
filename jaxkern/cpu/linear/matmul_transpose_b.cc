// Binds products with dense weights to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// x [rows, d], w [f, d] -> y [rows, f]; rounds x to w's dtype first if `narrow`
ffi::Error matmul_transpose_b(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                              ffi::Result<ffi::AnyBuffer> y, bool narrow) {
  const auto x_dims = x.dimensions(), w_dims = w.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  Matmul p = {};
  if (rank < 2 || w_dims.size() != rank || y_dims.size() != rank ||
      !float_type(x.element_type(), &p.x_type) || !float_type(w.element_type(), &p.w_type) ||
      !float_type(y->element_type(), &p.y_type) || p.w_type == Float::f32 ||
      w_dims[rank - 1] != x_dims[rank - 1] || y_dims[rank - 2] != x_dims[rank - 2] ||
      y_dims[rank - 1] != w_dims[rank - 2]) {
    return invalid("matmul_transpose_b: operands do not fit");
  }
  p.compute_type = narrow ? p.w_type : Float::f32;
  p.rows = x_dims[rank - 2], p.d = x_dims[rank - 1], p.f = w_dims[rank - 2];
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x_dims, i) * p.rows * p.d * item_size(p.x_type));
    p.w = at<char>(w, batch.index(w_dims, i) * p.f * p.d * item_size(p.w_type));
    p.y = at<char>(*y, i * p.rows * p.f * item_size(p.y_type));
    if (!best_kernels().matmul_transpose_b(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(matmul_transpose_b, 2, 1, .Attr<bool>("narrow"));

}  // namespace jaxkern
