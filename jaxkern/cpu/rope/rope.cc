// Binds rotations to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

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

JAXKERN_HANDLER(rope, 3, 1, .Attr<bool>("neighbours").Attr<int64_t>("pair_offset")
                .Attr<float>("direction"));

}  // namespace jaxkern
