// Binds products with affine weights to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// Fills `p` from x [..., d], codes [..., f, words] or [..., f, d] bytes, scales and biases
// [..., f, d / group_size], y [..., f].
bool affine_operands(ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                     ffi::AnyBuffer biases, ffi::AnyBuffer y, int64_t bits,
                     int64_t group_size, AffineMatmul* p) {
  const auto x_dims = x.dimensions(), c_dims = codes.dimensions();
  const auto s_dims = scales.dimensions(), b_dims = biases.dimensions();
  const auto y_dims = y.dimensions();
  const bool bytes = codes.element_type() == ffi::U8;
  const size_t rank = c_dims.size();
  p->bits = bytes ? 8 : static_cast<int>(bits), p->group = group_size;
  if (x_dims.size() < 2 || rank < 2 || s_dims.size() != rank || b_dims.size() != rank ||
      y_dims.size() < 2 || !float_type(x.element_type(), &p->x_type) ||
      !(bytes || codes.element_type() == ffi::U32) ||
      !float_type(scales.element_type(), &p->scale_type) ||
      biases.element_type() != scales.element_type() ||
      y.element_type() != x.element_type() ||
      !(p->bits == 2 || p->bits == 4 || p->bits == 8) || group_size * p->bits < 32 ||
      (group_size & (group_size - 1)) != 0) {
    return false;
  }
  p->d = x_dims.back(), p->f = c_dims[rank - 2];
  return p->d % group_size == 0 && c_dims[rank - 1] * (bytes ? 8 : 32) == p->d * p->bits &&
         s_dims[rank - 1] * group_size == p->d && b_dims[rank - 1] == s_dims[rank - 1] &&
         s_dims[rank - 2] == p->f && b_dims[rank - 2] == p->f && y_dims.back() == p->f;
}

// Runs `p` for each call of a batch; `stack` is how many [f, d] one of them reads.
ffi::Error multiply_affine(AffineMatmul p, ffi::ThreadPool pool, const Batch& batch,
                           ffi::AnyBuffer x, const ffi::AnyBuffer* expert,
                           ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                           ffi::AnyBuffer biases, ffi::AnyBuffer y, int64_t stack) {
  PoolWorkers workers(pool);
  const int64_t size = item_size(p.x_type), words = stack * p.f * p.d * p.bits / 32;
  const int64_t groups = stack * p.f * (p.d / p.group) * item_size(p.scale_type);
  const int64_t x_rows = expert ? p.rows / p.k : p.rows;
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = at<char>(x, batch.index(x.dimensions(), i) * x_rows * p.d * size);
    p.codes = at<uint32_t>(codes, batch.index(codes.dimensions(), i) * words);
    p.scales = at<char>(scales, batch.index(scales.dimensions(), i) * groups);
    p.biases = at<char>(biases, batch.index(biases.dimensions(), i) * groups);
    p.y = at<char>(y, i * p.rows * p.f * size);
    if (expert) {
      p.expert = at<int32_t>(*expert, batch.index(expert->dimensions(), i) * p.rows);
    }
    if (!best_kernels().affine_matmul(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

// x [rows, d], codes [f, words] -> y [rows, f]
ffi::Error affine_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                         ffi::AnyBuffer scales, ffi::AnyBuffer biases,
                         ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t group_size) {
  const auto x_dims = x.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  AffineMatmul p = {};
  if (!affine_operands(x, codes, scales, biases, *y, bits, group_size, &p) ||
      codes.dimensions().size() != rank || y_dims.size() != rank ||
      y_dims[rank - 2] != x_dims[rank - 2]) {
    return invalid("affine_matmul: operands do not fit");
  }
  p.rows = x_dims[rank - 2];
  const Batch batch(y_dims, rank - 2);
  return multiply_affine(p, pool, batch, x, nullptr, codes, scales, biases, *y, 1);
}

// x [t, d], expert [t, k], codes [e, f, words] -> y [t, k, f]
ffi::Error affine_matmul_id(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer expert,
                            ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                            ffi::AnyBuffer biases, ffi::Result<ffi::AnyBuffer> y,
                            int64_t bits, int64_t group_size) {
  const auto x_dims = x.dimensions(), e_dims = expert.dimensions();
  const auto c_dims = codes.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  AffineMatmul p = {};
  if (!affine_operands(x, codes, scales, biases, *y, bits, group_size, &p) ||
      c_dims.size() != rank + 1 || y_dims.size() != rank + 1 || e_dims.size() != rank ||
      expert.element_type() != ffi::S32 || e_dims[rank - 2] != x_dims[rank - 2] ||
      y_dims[rank - 2] != x_dims[rank - 2] || y_dims[rank - 1] != e_dims[rank - 1] ||
      scales.dimensions()[rank - 2] != c_dims[rank - 2] ||
      biases.dimensions()[rank - 2] != c_dims[rank - 2]) {
    return invalid("affine_matmul_id: operands do not fit");
  }
  p.k = e_dims[rank - 1], p.rows = x_dims[rank - 2] * p.k, p.experts = c_dims[rank - 2];
  const Batch batch(y_dims, rank - 2);
  return multiply_affine(p, pool, batch, x, &expert, codes, scales, biases, *y, p.experts);
}

}  // namespace

JAXKERN_HANDLER(affine_matmul, 4, 1, .Attr<int64_t>("bits").Attr<int64_t>("group_size"));
JAXKERN_HANDLER(affine_matmul_id, 5, 1, .Attr<int64_t>("bits").Attr<int64_t>("group_size"));

}  // namespace jaxkern
