// Binds argmax to XLA's foreign function interface.
#include "../handler.h"

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

}  // namespace

JAXKERN_HANDLER(argmax, 1, 1, .Attr<bool>("nan_wins"));

}  // namespace jaxkern
