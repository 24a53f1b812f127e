// Binds products with each row's own dense expert to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// x [t, d], expert [t, k], w [e, f, d] -> y [t, k, f]; rounds x to w's dtype first if
// `narrow`
ffi::Error expert_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer expert,
                         ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y, bool narrow) {
  const auto x_dims = x.dimensions(), e_dims = expert.dimensions();
  const auto w_dims = w.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  Matmul p = {};
  if (rank < 2 || e_dims.size() != rank || w_dims.size() != rank + 1 ||
      y_dims.size() != rank + 1 || expert.element_type() != ffi::S32 ||
      !float_type(x.element_type(), &p.x_type) || !float_type(w.element_type(), &p.w_type) ||
      !float_type(y->element_type(), &p.y_type) || w_dims[rank] != x_dims[rank - 1] ||
      e_dims[rank - 2] != x_dims[rank - 2] || y_dims[rank - 2] != x_dims[rank - 2] ||
      y_dims[rank - 1] != e_dims[rank - 1] || y_dims[rank] != w_dims[rank - 1]) {
    return invalid("expert_matmul: operands do not fit");
  }
  p.compute_type = narrow ? p.w_type : Float::f32;
  p.k = e_dims[rank - 1], p.rows = x_dims[rank - 2] * p.k;
  p.experts = w_dims[rank - 2], p.f = w_dims[rank - 1], p.d = w_dims[rank];
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x_dims, i) * x_dims[rank - 2] * p.d * item_size(p.x_type));
    p.expert = at<int32_t>(expert, batch.index(e_dims, i) * p.rows);
    p.w = at<char>(w, batch.index(w_dims, i) * p.experts * p.f * p.d * item_size(p.w_type));
    p.y = at<char>(*y, i * p.rows * p.f * item_size(p.y_type));
    if (!best_kernels().matmul_transpose_b(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(expert_matmul, 3, 1, .Attr<bool>("narrow"));

}  // namespace jaxkern
