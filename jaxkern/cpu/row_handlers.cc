// Binds losses, the causal convolution, softmax and rotations to XLA's foreign function interface.
#include "handler.h"

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

// x [tokens, n, h], cos, sin [tokens, pairs], after the dims of a batch
ffi::Error rope(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos,
                ffi::AnyBuffer sin, ffi::Result<ffi::AnyBuffer> y, bool neighbours,
                int64_t pair_offset, float direction) {
  const auto dims = x.dimensions(), cos_dims = cos.dimensions(), sin_dims = sin.dimensions();
  const size_t rank = dims.size();
  Rope p = {};
  if (rank < 3 || cos_dims.size() != rank - 1 || sin_dims.size() != rank - 1 ||
      cos_dims.back() != sin_dims.back() || cos_dims[rank - 3] != dims[rank - 3] ||
      sin_dims[rank - 3] != dims[rank - 3] || cos.element_type() != ffi::F32 ||
      sin.element_type() != ffi::F32 || !float_type(x.element_type(), &p.type) ||
      y->element_type() != x.element_type() || pair_offset < cos_dims.back() ||
      pair_offset + cos_dims.back() > dims.back()) {
    return invalid("rope: operands do not fit");
  }
  p.tokens = dims[rank - 3], p.n = dims[rank - 2], p.h = dims.back();
  p.pairs = cos_dims.back(), p.pair_offset = pair_offset;
  p.neighbours = neighbours, p.direction = direction;
  PoolWorkers workers(pool);
  const Batch batch(y->dimensions(), rank - 3);
  const int64_t n = p.tokens * p.n * p.h, size = item_size(p.type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = operand<void>(batch, i, x, n, size);
    p.cos = operand<float>(batch, i, cos, p.tokens * p.pairs, 4);
    p.sin = operand<float>(batch, i, sin, p.tokens * p.pairs, 4);
    p.y = operand<void>(batch, i, *y, n, size);
    if (!best_kernels().rope(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)  // the rest of the library is hidden

JAXKERN_HANDLER(linear_cross_entropy, 3, 3, .Attr<float>("softcap"));
JAXKERN_HANDLER(linear_cross_entropy_gradient, 7, 2, .Attr<float>("softcap"));
JAXKERN_HANDLER(causal_conv, 5, 1, .Attr<bool>("silu"));
JAXKERN_HANDLER(causal_conv_gradient, 6, 4, .Attr<bool>("silu"));
JAXKERN_HANDLER(softmax, 2, 1, .Attr<float>("scale"));
JAXKERN_HANDLER(softmax_gradient, 2, 1, .Attr<float>("scale"));
JAXKERN_HANDLER(rope, 3, 1, .Attr<bool>("neighbours").Attr<int64_t>("pair_offset")
                .Attr<float>("direction"));

}  // namespace jaxkern

#pragma GCC visibility pop
