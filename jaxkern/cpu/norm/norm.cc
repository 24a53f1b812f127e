// Binds rms_norm, add_rms_norm and layer_norm to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

bool is_absent(ffi::AnyBuffer x) { return x.dimensions().back() == 0; }

// What both directions have in common; `p` but for its pointers, and the batch dims.
bool norm_of(ffi::AnyBuffer x, ffi::AnyBuffer residual, ffi::AnyBuffer weight,
             ffi::AnyBuffer bias, int64_t rows, Norm* p, int64_t* batch_dims) {
  const auto dims = x.dimensions();
  if (dims.size() < 1 || dims.back() == 0 || weight.dimensions().size() < 1 ||
      bias.dimensions().size() != weight.dimensions().size() ||
      !float_type(x.element_type(), &p->x_type) ||
      !float_type(residual.element_type(), &p->residual_type)) {
    return false;
  }
  for (ffi::AnyBuffer y : {weight, bias}) {
    const auto own = y.dimensions();
    if (y.element_type() != ffi::F32 || (own.back() != 0 && own.back() != dims.back())) {
      return false;
    }
  }
  p->rows = rows, p->d = dims.back();
  *batch_dims = static_cast<int64_t>(weight.dimensions().size()) - 1;
  int64_t product = 1;
  for (size_t d = *batch_dims; d + 1 < dims.size(); ++d) product *= dims[d];
  return product == rows;
}

// x, residual [..., d], weight, bias [d] -> y, total [..., d], mean, rstd [..., 1]
ffi::Error norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                ffi::Result<ffi::AnyBuffer> total, ffi::Result<ffi::AnyBuffer> mean,
                ffi::Result<ffi::AnyBuffer> rstd, float eps, int64_t rows) {
  Norm p = {};
  int64_t dims = 0;
  if (!norm_of(x, residual, weight, bias, rows, &p, &dims)) {
    return invalid("norm: operands do not fit");
  }
  PoolWorkers workers(pool);
  const Batch batch(y->dimensions(), dims);
  const int64_t n = rows * p.d, size = item_size(p.x_type);
  const int64_t residual_size = item_size(p.residual_type);
  p.eps = eps, p.centred = !is_absent(*mean);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = operand<void>(batch, i, x, n, size);
    p.residual = operand<void>(batch, i, residual, n, residual_size);
    p.weight = operand<float>(batch, i, weight, p.d, 4);
    p.bias = operand<float>(batch, i, bias, p.d, 4);
    p.y = operand<void>(batch, i, *y, n, size);
    p.total = operand<void>(batch, i, *total, n, residual_size);
    p.mean = operand<float>(batch, i, *mean, rows, 4);
    p.rstd = operand<float>(batch, i, *rstd, rows, 4);
    if (!best_kernels().norm(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

// The same and mean, rstd, dy, dtotal -> dx, dresidual [..., d], dweight, dbias [d]
ffi::Error norm_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                         ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::AnyBuffer mean,
                         ffi::AnyBuffer rstd, ffi::AnyBuffer dy, ffi::AnyBuffer dtotal,
                         ffi::Result<ffi::AnyBuffer> dx,
                         ffi::Result<ffi::AnyBuffer> dresidual,
                         ffi::Result<ffi::AnyBuffer> dweight,
                         ffi::Result<ffi::AnyBuffer> dbias, int64_t rows) {
  Norm p = {};
  int64_t dims = 0;
  if (!norm_of(x, residual, weight, bias, rows, &p, &dims) ||
      rstd.element_type() != ffi::F32 || dy.element_type() != x.element_type()) {
    return invalid("norm_gradient: operands do not fit");
  }
  PoolWorkers workers(pool);
  const Batch batch(dx->dimensions(), dims);
  const int64_t n = rows * p.d, size = item_size(p.x_type);
  const int64_t residual_size = item_size(p.residual_type);
  p.centred = !is_absent(mean);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = operand<void>(batch, i, x, n, size);
    p.residual = operand<void>(batch, i, residual, n, residual_size);
    p.weight = operand<float>(batch, i, weight, p.d, 4);
    p.bias = operand<float>(batch, i, bias, p.d, 4);
    p.mean = operand<float>(batch, i, mean, rows, 4);
    p.rstd = operand<float>(batch, i, rstd, rows, 4);
    p.dy = operand<void>(batch, i, dy, n, size);
    p.dtotal = operand<void>(batch, i, dtotal, n, residual_size);
    p.dx = operand<void>(batch, i, *dx, n, size);
    p.dresidual = operand<void>(batch, i, *dresidual, n, residual_size);
    p.dweight = operand<float>(batch, i, *dweight, p.d, 4);
    p.dbias = operand<float>(batch, i, *dbias, p.d, 4);
    if (!best_kernels().norm_gradient(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(norm, 4, 4, .Attr<float>("eps").Attr<int64_t>("rows"));
JAXKERN_HANDLER(norm_gradient, 8, 4, .Attr<int64_t>("rows"));

}  // namespace jaxkern
