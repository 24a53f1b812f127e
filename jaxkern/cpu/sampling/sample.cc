// Binds sample to XLA's foreign function interface.
#include <vector>

#include "../handler.h"

namespace jaxkern {
namespace {

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

JAXKERN_HANDLER(sample, 6, 1);

}  // namespace jaxkern
