// Binds selection, sampling, norms and the delta rule to XLA's foreign function interface.
#include <vector>

#include "handler.h"

namespace jaxkern {
namespace {

// x [..., v] -> index [...]
ffi::Error argmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> index,
                  bool nan_wins) {
  const auto dims = x.dimensions();
  Argmax p = {};
  if (dims.size() < 1 || !float_type(x.element_type(), &p.x_type) || dims.back() == 0 ||
      index->element_type() != ffi::S32 ||
      static_cast<int64_t>(index->element_count()) * dims.back() !=
          static_cast<int64_t>(x.element_count())) {
    return invalid("argmax: operands do not fit");
  }
  p.x = x.untyped_data(), p.v = dims.back(), p.nan_wins = nan_wins;
  p.rows = static_cast<int64_t>(index->element_count());
  p.index = at<int32_t>(*index, 0);
  best_kernels().argmax(p, PoolWorkers(pool));
  return ffi::Error::Success();
}

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

// logits [..., v], the others [...] -> token [...]
ffi::Error sample(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer uniform,
                  ffi::AnyBuffer temperature, ffi::AnyBuffer top_k, ffi::AnyBuffer top_p,
                  ffi::AnyBuffer min_p, ffi::Result<ffi::AnyBuffer> token) {
  const auto dims = logits.dimensions(), token_dims = token->dimensions();
  const size_t rank = token_dims.size();
  Sample p = {};
  if (dims.size() != rank + 1 || !float_type(logits.element_type(), &p.logits_type) ||
      dims.back() == 0 || top_k.element_type() != ffi::S32 ||
      token->element_type() != ffi::S32) {
    return invalid("sample: operands do not fit");
  }
  for (const ffi::AnyBuffer& x : {uniform, temperature, top_p, min_p}) {
    if (x.dimensions().size() != rank || x.element_type() != ffi::F32) {
      return invalid("sample: operands do not fit");
    }
  }
  const Batch batch(token_dims, rank);
  std::vector<SampleRow> rows(batch.count());
  p.v = dims.back(), p.rows = batch.count(), p.row = rows.data();
  for (int64_t i = 0; i < p.rows; ++i) {
    auto option = [&](ffi::AnyBuffer x) {
      return *at<float>(x, batch.index(x.dimensions(), i));
    };
    rows[i] = {at<char>(logits, batch.index(dims, i) * p.v * item_size(p.logits_type)),
               option(uniform),
               option(temperature),
               option(top_p),
               option(min_p),
               *at<int32_t>(top_k, batch.index(top_k.dimensions(), i)),
               at<int32_t>(*token, i)};
  }
  if (!best_kernels().sample(p, PoolWorkers(pool))) return out_of_memory();
  return ffi::Error::Success();
}

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

// query, key [b, t, k, h], value [b, t, n, hv], g, beta [b, t, n], state [b, n, h, hv] or
// nothing -> out as value, state
ffi::Error delta_rule(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                      ffi::AnyBuffer value, ffi::AnyBuffer g, ffi::AnyBuffer beta,
                      ffi::AnyBuffer state, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> new_state, float scale) {
  const auto q_dims = query.dimensions(), k_dims = key.dimensions();
  const auto v_dims = value.dimensions(), g_dims = g.dimensions();
  const size_t rank = v_dims.size();
  DeltaRule p = {};
  for (const ffi::AnyBuffer& x : {query, key, value, g, beta, state}) {
    if (x.element_type() != ffi::F32) return invalid("delta_rule: operands do not fit");
  }
  if (rank < 4 || q_dims.size() != rank || k_dims.size() != rank ||
      g_dims.size() != rank - 1 || beta.dimensions().size() != rank - 1 ||
      state.dimensions().size() < 1) {
    return invalid("delta_rule: operands do not fit");
  }
  p.b = v_dims[rank - 4], p.t = v_dims[rank - 3], p.hv = v_dims[rank - 1];
  p.k = k_dims[rank - 2], p.h = k_dims[rank - 1];
  p.group = p.k ? v_dims[rank - 2] / p.k : 0;
  const int64_t heads = p.k * p.group;
  if (heads != v_dims[rank - 2] || new_state->dimensions().size() != rank ||
      new_state->dimensions()[rank - 2] != p.h) {
    return invalid("delta_rule: operands do not fit");
  }
  p.scale = scale;
  PoolWorkers workers(pool);
  const Batch batch(out->dimensions(), rank - 4);
  const int64_t tokens = p.b * p.t, keys = tokens * p.k * p.h;
  const int64_t states = p.b * heads * p.h * p.hv;
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.query = operand<float>(batch, i, query, keys, 4);
    p.key = operand<float>(batch, i, key, keys, 4);
    p.value = operand<float>(batch, i, value, tokens * heads * p.hv, 4);
    p.g = operand<float>(batch, i, g, tokens * heads, 4);
    p.beta = operand<float>(batch, i, beta, tokens * heads, 4);
    p.state = operand<float>(batch, i, state, states, 4);
    p.out = operand<float>(batch, i, *out, tokens * heads * p.hv, 4);
    p.new_state = operand<float>(batch, i, *new_state, states, 4);
    if (!best_kernels().delta_rule(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)  // the rest of the library is hidden

JAXKERN_HANDLER(argmax, 1, 1, .Attr<bool>("nan_wins"));
JAXKERN_HANDLER(top_k, 1, 2);
JAXKERN_HANDLER(sample, 6, 1);
JAXKERN_HANDLER(norm, 4, 4, .Attr<float>("eps").Attr<int64_t>("rows"));
JAXKERN_HANDLER(norm_gradient, 8, 4, .Attr<int64_t>("rows"));
JAXKERN_HANDLER(delta_rule, 6, 2, .Attr<float>("scale"));

}  // namespace jaxkern

#pragma GCC visibility pop
