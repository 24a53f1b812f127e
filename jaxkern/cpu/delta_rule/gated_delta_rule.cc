// Binds the gated delta rule to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// query, key [b, t, k, h], value [b, t, n, hv], g [b, t, n] or [b, t, n, h], beta [b, t, n],
// state [b, n, h, hv] or nothing -> out as value, state
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
      g_dims.size() + 1 < rank || g_dims.size() > rank ||
      beta.dimensions().size() != rank - 1 || state.dimensions().size() < 1) {
    return invalid("delta_rule: operands do not fit");
  }
  p.b = v_dims[rank - 4], p.t = v_dims[rank - 3], p.hv = v_dims[rank - 1];
  p.k = k_dims[rank - 2], p.h = k_dims[rank - 1];
  p.group = p.k ? v_dims[rank - 2] / p.k : 0;
  const int64_t heads = p.k * p.group;
  p.by_channel = g_dims.size() == rank;
  if (heads != v_dims[rank - 2] || new_state->dimensions().size() != rank ||
      new_state->dimensions()[rank - 2] != p.h || (p.by_channel && g_dims.back() != p.h)) {
    return invalid("delta_rule: operands do not fit");
  }
  p.scale = scale;
  PoolWorkers workers(pool);
  const Batch batch(out->dimensions(), rank - 4);
  const int64_t tokens = p.b * p.t, keys = tokens * p.k * p.h;
  const int64_t states = p.b * heads * p.h * p.hv, decays = p.by_channel ? p.h : 1;
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.query = operand<float>(batch, i, query, keys, 4);
    p.key = operand<float>(batch, i, key, keys, 4);
    p.value = operand<float>(batch, i, value, tokens * heads * p.hv, 4);
    p.g = operand<float>(batch, i, g, tokens * heads * decays, 4);
    p.beta = operand<float>(batch, i, beta, tokens * heads, 4);
    p.state = operand<float>(batch, i, state, states, 4);
    p.out = operand<float>(batch, i, *out, tokens * heads * p.hv, 4);
    p.new_state = operand<float>(batch, i, *new_state, states, 4);
    if (!best_kernels().delta_rule(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(delta_rule, 6, 2, .Attr<float>("scale"));

}  // namespace jaxkern
