// Binds attention, also over a cache of codes, to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// A float dtype, or bytes with one scale a row of each head.
bool cache_type(ffi::AnyBuffer cache, ffi::AnyBuffer scales, Float* type) {
  if (cache.element_type() != ffi::U8) return float_type(cache.element_type(), type);
  const auto dims = cache.dimensions(), scale_dims = scales.dimensions();
  if (scales.element_type() != ffi::F32 || scale_dims.size() + 1 != dims.size()) return false;
  // the batch dims in front may be 1 in either
  for (size_t d = dims.size() - 4; d < scale_dims.size(); ++d) {
    if (scale_dims[d] != dims[d]) return false;
  }
  return true;
}

// query [b, t, k * g, h], key [b, s, k, h], value [b, s, k, hv], lengths and offsets [b]
// -> out [b, t, k * g, hv], lse [b, t, k * g]. Keys or values of bytes are codes, with
// scales [b, s, k]; else their scales are not read.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                     ffi::AnyBuffer value, ffi::AnyBuffer kv_lengths,
                     ffi::AnyBuffer q_offset, ffi::AnyBuffer key_scales,
                     ffi::AnyBuffer value_scales, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::AnyBuffer> lse, float scale, float softcap,
                     int64_t window, bool causal) {
  const auto q_dims = query.dimensions(), k_dims = key.dimensions();
  const auto v_dims = value.dimensions(), out_dims = out->dimensions();
  const auto length_dims = kv_lengths.dimensions(), offset_dims = q_offset.dimensions();
  const size_t rank = q_dims.size();
  Attention p = {};
  if (rank < 4 || k_dims.size() != rank || v_dims.size() != rank ||
      out_dims.size() != rank || length_dims.size() != rank - 3 ||
      offset_dims.size() != rank - 3 || !float_type(query.element_type(), &p.query_type) ||
      !cache_type(key, key_scales, &p.key_type) ||
      !cache_type(value, value_scales, &p.value_type) ||
      out->element_type() != query.element_type() || lse->element_type() != ffi::F32 ||
      kv_lengths.element_type() != ffi::S32 || q_offset.element_type() != ffi::S32) {
    return invalid("attention: operands do not fit");
  }
  p.b = q_dims[rank - 4], p.t = q_dims[rank - 3], p.h = q_dims[rank - 1];
  p.s = k_dims[rank - 3], p.k = k_dims[rank - 2], p.hv = v_dims[rank - 1];
  p.g = p.k ? q_dims[rank - 2] / p.k : 0;
  if (p.g * p.k != q_dims[rank - 2] || k_dims[rank - 4] != p.b ||
      k_dims[rank - 1] != p.h || v_dims[rank - 4] != p.b || v_dims[rank - 3] != p.s ||
      v_dims[rank - 2] != p.k || length_dims[rank - 4] != p.b ||
      offset_dims[rank - 4] != p.b || out_dims[rank - 4] != p.b ||
      out_dims[rank - 3] != p.t || out_dims[rank - 2] != p.k * p.g ||
      out_dims[rank - 1] != p.hv) {
    return invalid("attention: operands do not fit");
  }
  p.scale = scale, p.softcap = softcap, p.window = window, p.causal = causal;
  PoolWorkers workers(pool);
  const Batch batch(out_dims, rank - 4);
  const int64_t rows = p.b * p.t * p.k * p.g, keys = p.b * p.s * p.k;
  const bool key_codes = key.element_type() == ffi::U8;
  const bool value_codes = value.element_type() == ffi::U8;
  const int64_t key_size = key_codes ? 1 : item_size(p.key_type);
  const int64_t value_size = value_codes ? 1 : item_size(p.value_type);
  for (int64_t i = 0; i < batch.count(); ++i) {
    if (key_codes) {
      p.key_scales = at<float>(key_scales, batch.index(key_scales.dimensions(), i) * keys);
    }
    if (value_codes) {
      p.value_scales =
          at<float>(value_scales, batch.index(value_scales.dimensions(), i) * keys);
    }
    p.query = at<char>(query, batch.index(q_dims, i) * rows * p.h * item_size(p.query_type));
    p.key = at<char>(key, batch.index(k_dims, i) * keys * p.h * key_size);
    p.value = at<char>(value, batch.index(v_dims, i) * keys * p.hv * value_size);
    p.kv_lengths = at<int32_t>(kv_lengths, batch.index(length_dims, i) * p.b);
    p.q_offset = at<int32_t>(q_offset, batch.index(offset_dims, i) * p.b);
    p.out = at<char>(*out, i * rows * p.hv * item_size(p.query_type));
    p.lse = at<float>(*lse, i * rows);
    if (!best_kernels().attention(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(attention, 7, 2, .Attr<float>("scale").Attr<float>("softcap")
                .Attr<int64_t>("window").Attr<bool>("causal"));

}  // namespace jaxkern
