// Binds the causal convolution to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// x [b, t, d], weight [d, w], bias [d], state [b, w - 1, d], segment [b, t], after the dims
// of a batch; the last three may be nothing.
bool conv_of(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias,
             ffi::AnyBuffer state, ffi::AnyBuffer segment, CausalConv* p) {
  const auto dims = x.dimensions(), taps = weight.dimensions();
  const size_t rank = dims.size();
  if (rank < 3 || taps.size() != rank - 1 || taps[rank - 3] != dims.back() ||
      taps.back() < 1 || taps.back() > 64 || weight.element_type() != ffi::F32 ||
      bias.element_type() != ffi::F32 || segment.element_type() != ffi::S32 ||
      !float_type(x.element_type(), &p->x_type) ||
      !float_type(state.element_type(), &p->state_type)) {
    return false;
  }
  p->b = dims[rank - 3], p->t = dims[rank - 2], p->d = dims.back(), p->w = taps.back();
  auto fits = [&](ffi::AnyBuffer y, size_t own, int64_t last, int64_t before) {
    const auto y_dims = y.dimensions();
    return y.element_count() == 0 ||
           (y_dims.size() == rank - 3 + own && y_dims.back() == last &&
            (own < 2 || y_dims[y_dims.size() - 2] == before));
  };
  return fits(bias, 1, p->d, 0) && fits(state, 3, p->d, p->w - 1) &&
         fits(segment, 2, p->t, p->b);
}

void set_operands(const Batch& batch, int64_t i, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::AnyBuffer bias, ffi::AnyBuffer state, ffi::AnyBuffer segment,
                  CausalConv* p) {
  const int64_t past = p->b * (p->w - 1) * p->d;
  p->x = operand<void>(batch, i, x, p->b * p->t * p->d, item_size(p->x_type));
  p->weight = operand<float>(batch, i, weight, p->d * p->w, 4);
  p->bias = operand<float>(batch, i, bias, p->d, 4);
  p->state = operand<void>(batch, i, state, past, item_size(p->state_type));
  p->segment = operand<int32_t>(batch, i, segment, p->b * p->t, 4);
}

ffi::Error causal_conv(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                       ffi::AnyBuffer bias, ffi::AnyBuffer state, ffi::AnyBuffer segment,
                       ffi::Result<ffi::AnyBuffer> y, bool silu) {
  CausalConv p = {};
  if (!conv_of(x, weight, bias, state, segment, &p) ||
      y->element_type() != x.element_type()) {
    return invalid("causal_conv: operands do not fit");
  }
  p.silu = silu;
  PoolWorkers workers(pool);
  const Batch batch(y->dimensions(), y->dimensions().size() - 3);
  for (int64_t i = 0; i < batch.count(); ++i) {
    set_operands(batch, i, x, weight, bias, state, segment, &p);
    p.y = operand<void>(batch, i, *y, p.b * p.t * p.d, item_size(p.x_type));
    if (!best_kernels().causal_conv(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

ffi::Error causal_conv_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x,
                                ffi::AnyBuffer weight, ffi::AnyBuffer bias,
                                ffi::AnyBuffer state, ffi::AnyBuffer segment,
                                ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                                ffi::Result<ffi::AnyBuffer> dweight,
                                ffi::Result<ffi::AnyBuffer> dbias,
                                ffi::Result<ffi::AnyBuffer> dstate, bool silu) {
  CausalConv p = {};
  if (!conv_of(x, weight, bias, state, segment, &p) ||
      dy.element_type() != x.element_type() || dx->element_type() != x.element_type() ||
      dstate->element_type() != state.element_type()) {
    return invalid("causal_conv_gradient: operands do not fit");
  }
  p.silu = silu;
  PoolWorkers workers(pool);
  const Batch batch(dx->dimensions(), dx->dimensions().size() - 3);
  const int64_t n = p.b * p.t * p.d, size = item_size(p.x_type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    set_operands(batch, i, x, weight, bias, state, segment, &p);
    p.dy = operand<void>(batch, i, dy, n, size);
    p.dx = operand<void>(batch, i, *dx, n, size);
    p.dstate = operand<void>(batch, i, *dstate, p.b * (p.w - 1) * p.d,
                             item_size(p.state_type));
    p.dweight = operand<float>(batch, i, *dweight, p.d * p.w, 4);
    p.dbias = operand<float>(batch, i, *dbias, p.d, 4);
    if (!best_kernels().causal_conv_gradient(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(causal_conv, 5, 1, .Attr<bool>("silu"));
JAXKERN_HANDLER(causal_conv_gradient, 6, 4, .Attr<bool>("silu"));

}  // namespace jaxkern
