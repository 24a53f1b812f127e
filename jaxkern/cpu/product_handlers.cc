// Binds products with dense and with affine weights to XLA's foreign function interface.
#include "handler.h"

namespace jaxkern {
namespace {

// x [rows, d], w [f, d] -> y [rows, f]; rounds x to w's dtype first if `narrow`
ffi::Error matmul_transpose_b(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                              ffi::Result<ffi::AnyBuffer> y, bool narrow) {
  const auto x_dims = x.dimensions(), w_dims = w.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  Matmul p = {};
  if (rank < 2 || w_dims.size() != rank || y_dims.size() != rank ||
      !float_type(x.element_type(), &p.x_type) || !float_type(w.element_type(), &p.w_type) ||
      !float_type(y->element_type(), &p.y_type) || p.w_type == Float::f32 ||
      w_dims[rank - 1] != x_dims[rank - 1] || y_dims[rank - 2] != x_dims[rank - 2] ||
      y_dims[rank - 1] != w_dims[rank - 2]) {
    return invalid("matmul_transpose_b: operands do not fit");
  }
  p.compute_type = narrow ? p.w_type : Float::f32;
  p.rows = x_dims[rank - 2], p.d = x_dims[rank - 1], p.f = w_dims[rank - 2];
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x_dims, i) * p.rows * p.d * item_size(p.x_type));
    p.w = at<char>(w, batch.index(w_dims, i) * p.f * p.d * item_size(p.w_type));
    p.y = at<char>(*y, i * p.rows * p.f * item_size(p.y_type));
    if (!best_kernels().matmul_transpose_b(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

// x [rows, d], codes [f, words] or [f, d] bytes, scales and biases [f, d / group_size]
// -> y [rows, f]
ffi::Error affine_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                         ffi::AnyBuffer scales, ffi::AnyBuffer biases,
                         ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t group_size) {
  const auto x_dims = x.dimensions(), c_dims = codes.dimensions(), y_dims = y->dimensions();
  const auto s_dims = scales.dimensions(), b_dims = biases.dimensions();
  const size_t rank = x_dims.size();
  AffineMatmul p = {};
  const bool bytes = codes.element_type() == ffi::U8;
  p.bits = bytes ? 8 : static_cast<int>(bits), p.group = group_size;
  if (rank < 2 || c_dims.size() != rank || s_dims.size() != rank || b_dims.size() != rank ||
      y_dims.size() != rank || !float_type(x.element_type(), &p.x_type) ||
      !(bytes || codes.element_type() == ffi::U32) ||
      !float_type(scales.element_type(), &p.scale_type) ||
      biases.element_type() != scales.element_type() ||
      y->element_type() != x.element_type() ||
      !(p.bits == 2 || p.bits == 4 || p.bits == 8) || group_size * p.bits < 32 ||
      (group_size & (group_size - 1)) != 0 || x_dims[rank - 1] % group_size ||
      c_dims[rank - 1] * (bytes ? 8 : 32) != x_dims[rank - 1] * p.bits ||
      s_dims[rank - 1] * group_size != x_dims[rank - 1] ||
      b_dims[rank - 1] != s_dims[rank - 1] || s_dims[rank - 2] != c_dims[rank - 2] ||
      b_dims[rank - 2] != c_dims[rank - 2] || y_dims[rank - 1] != c_dims[rank - 2] ||
      y_dims[rank - 2] != x_dims[rank - 2]) {
    return invalid("affine_matmul: operands do not fit");
  }
  p.rows = x_dims[rank - 2], p.d = x_dims[rank - 1], p.f = c_dims[rank - 2];
  PoolWorkers workers(pool);
  const Batch batch(y_dims, rank - 2);
  const int64_t groups = p.f * s_dims[rank - 1] * item_size(p.scale_type);
  const int64_t words = p.f * p.d * p.bits / 32, size = item_size(p.x_type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x_dims, i) * p.rows * p.d * size);
    p.codes = at<uint32_t>(codes, batch.index(c_dims, i) * words);
    p.scales = at<char>(scales, batch.index(s_dims, i) * groups);
    p.biases = at<char>(biases, batch.index(b_dims, i) * groups);
    p.y = at<char>(*y, i * p.rows * p.f * size);
    if (!best_kernels().affine_matmul(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)  // the rest of the library is hidden

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_matmul_transpose_b, matmul_transpose_b,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("narrow"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_affine_matmul, affine_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group_size"));

#pragma GCC visibility pop

}  // namespace jaxkern
