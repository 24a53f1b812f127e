// Binds linear_cross_entropy to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// The operands that both directions have: x [n, d], weight [v, d], label [n], after the
// dims of a batch.
bool loss_of(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer label,
             LinearCrossEntropy* p) {
  const auto x_dims = x.dimensions(), w_dims = weight.dimensions();
  const size_t rank = x_dims.size();
  if (rank < 2 || w_dims.size() != rank || label.dimensions().size() != rank - 1 ||
      w_dims.back() != x_dims.back() || label.dimensions().back() != x_dims[rank - 2] ||
      label.element_type() != ffi::S32 || !float_type(x.element_type(), &p->x_type) ||
      !float_type(weight.element_type(), &p->weight_type)) {
    return false;
  }
  p->n = x_dims[rank - 2], p->d = x_dims.back(), p->v = w_dims[rank - 2];
  return true;
}

void set_operands(const Batch& batch, int64_t i, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::AnyBuffer label, LinearCrossEntropy* p) {
  p->x = operand<void>(batch, i, x, p->n * p->d, item_size(p->x_type));
  p->weight = operand<void>(batch, i, weight, p->v * p->d, item_size(p->weight_type));
  p->label = operand<int32_t>(batch, i, label, p->n, 4);
}

ffi::Error linear_cross_entropy(ffi::ThreadPool pool, ffi::AnyBuffer x,
                                ffi::AnyBuffer weight, ffi::AnyBuffer label,
                                ffi::Result<ffi::AnyBuffer> lse,
                                ffi::Result<ffi::AnyBuffer> picked,
                                ffi::Result<ffi::AnyBuffer> total, float softcap) {
  LinearCrossEntropy p = {};
  if (!loss_of(x, weight, label, &p) ||
      lse->dimensions().size() != label.dimensions().size()) {
    return invalid("linear_cross_entropy: operands do not fit");
  }
  p.softcap = softcap;
  PoolWorkers workers(pool);
  const Batch batch(lse->dimensions(), lse->dimensions().size() - 1);
  for (int64_t i = 0; i < batch.count(); ++i) {
    set_operands(batch, i, x, weight, label, &p);
    p.lse = operand<float>(batch, i, *lse, p.n, 4);
    p.picked = operand<float>(batch, i, *picked, p.n, 4);
    p.total = operand<float>(batch, i, *total, p.n, 4);
    if (!best_kernels().linear_cross_entropy(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

ffi::Error linear_cross_entropy_gradient(
    ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer label,
    ffi::AnyBuffer lse, ffi::AnyBuffer slope, ffi::AnyBuffer on_label,
    ffi::AnyBuffer on_every, ffi::Result<ffi::AnyBuffer> dx,
    ffi::Result<ffi::AnyBuffer> dweight, float softcap) {
  LinearCrossEntropy p = {};
  bool fit = loss_of(x, weight, label, &p) && dx->element_type() == x.element_type() &&
             dweight->element_type() == weight.element_type();
  for (ffi::AnyBuffer y : {lse, slope, on_label, on_every}) {
    fit = fit && y.element_type() == ffi::F32 &&
          y.dimensions().size() == label.dimensions().size() &&
          y.dimensions().back() == p.n;
  }
  if (!fit) return invalid("linear_cross_entropy_gradient: operands do not fit");
  p.softcap = softcap;
  PoolWorkers workers(pool);
  const Batch batch(dx->dimensions(), dx->dimensions().size() - 2);
  for (int64_t i = 0; i < batch.count(); ++i) {
    set_operands(batch, i, x, weight, label, &p);
    p.lse = operand<float>(batch, i, lse, p.n, 4);
    p.slope = operand<float>(batch, i, slope, p.n, 4);
    p.on_label = operand<float>(batch, i, on_label, p.n, 4);
    p.on_every = operand<float>(batch, i, on_every, p.n, 4);
    p.dx = operand<void>(batch, i, *dx, p.n * p.d, item_size(p.x_type));
    p.dweight = operand<void>(batch, i, *dweight, p.v * p.d, item_size(p.weight_type));
    if (!best_kernels().linear_cross_entropy_gradient(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(linear_cross_entropy, 3, 3, .Attr<float>("softcap"));
JAXKERN_HANDLER(linear_cross_entropy_gradient, 7, 2, .Attr<float>("softcap"));

}  // namespace jaxkern
