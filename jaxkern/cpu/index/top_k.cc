// Binds top_k to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// x [..., v] -> values and indices [..., k]
ffi::Error top_k(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                 ffi::Result<ffi::AnyBuffer> indices) {
  const auto dims = x.dimensions(), k_dims = values->dimensions();
  TopK p = {};
  if (dims.size() < 1 || k_dims.size() != dims.size() ||
      !float_type(x.element_type(), &p.x_type) ||
      values->element_type() != x.element_type() || indices->element_type() != ffi::S32 ||
      indices->element_count() != values->element_count() || k_dims.back() < 1 ||
      k_dims.back() > dims.back()) {
    return invalid("top_k: operands do not fit");
  }
  p.x = x.untyped_data(), p.v = dims.back(), p.k = k_dims.back();
  p.rows = static_cast<int64_t>(x.element_count()) / p.v;
  p.values = values->untyped_data(), p.indices = at<int32_t>(*indices, 0);
  if (!best_kernels().top_k(p, PoolWorkers(pool))) return out_of_memory();
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(top_k, 1, 2);

}  // namespace jaxkern
