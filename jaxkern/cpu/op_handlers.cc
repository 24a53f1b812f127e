// Binds selection and sampling to XLA's foreign function interface.
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

}  // namespace

#pragma GCC visibility push(default)  // the rest of the library is hidden

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_argmax, argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("nan_wins"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_top_k, top_k,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_sample, sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace jaxkern

#pragma GCC visibility pop
