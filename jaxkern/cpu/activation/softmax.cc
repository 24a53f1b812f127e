// Binds softmax to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// x or y, of which mask or dy has the shape, [rows, s] after the dims of a batch
ffi::Error softmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                   ffi::Result<ffi::AnyBuffer> y, float scale) {
  const auto dims = x.dimensions(), mask_dims = mask.dimensions();
  Softmax p = {};
  if (dims.size() < 2 || mask_dims.size() != dims.size() ||
      mask.element_type() != ffi::PRED || !float_type(x.element_type(), &p.type) ||
      y->element_type() != x.element_type() ||
      (mask.element_count() != 0 && mask_dims.back() != dims.back())) {
    return invalid("softmax: operands do not fit");
  }
  p.rows = dims[dims.size() - 2], p.s = dims.back(), p.scale = scale;
  PoolWorkers workers(pool);
  const Batch batch(y->dimensions(), dims.size() - 2);
  const int64_t n = p.rows * p.s, size = item_size(p.type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = operand<void>(batch, i, x, n, size);
    p.mask = operand<uint8_t>(batch, i, mask, n, 1);
    p.y = operand<void>(batch, i, *y, n, size);
    if (!best_kernels().softmax(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

ffi::Error softmax_gradient(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                            ffi::Result<ffi::AnyBuffer> dx, float scale) {
  const auto dims = y.dimensions(), dy_dims = dy.dimensions();
  Softmax p = {};
  if (dims.size() < 2 || dy_dims.size() != dims.size() || dy_dims.back() != dims.back() ||
      !float_type(y.element_type(), &p.type) || dy.element_type() != y.element_type() ||
      dx->element_type() != y.element_type()) {
    return invalid("softmax_gradient: operands do not fit");
  }
  p.rows = dims[dims.size() - 2], p.s = dims.back(), p.scale = scale;
  PoolWorkers workers(pool);
  const Batch batch(dx->dimensions(), dims.size() - 2);
  const int64_t n = p.rows * p.s, size = item_size(p.type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.y = operand<void>(batch, i, y, n, size);
    p.dy = operand<void>(batch, i, dy, n, size);
    p.dx = operand<void>(batch, i, *dx, n, size);
    if (!best_kernels().softmax_gradient(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(softmax, 2, 1, .Attr<float>("scale"));
JAXKERN_HANDLER(softmax_gradient, 2, 1, .Attr<float>("scale"));

}  // namespace jaxkern
