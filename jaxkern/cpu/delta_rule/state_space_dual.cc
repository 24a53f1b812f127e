// Binds state-space duality to XLA's foreign function interface.
#include "../handler.h"

namespace jaxkern {
namespace {

// x [r, t, n, h], step, decay [r, t, n], b, c [r, t, k, size], state [r, n, h, size] or
// nothing -> y as x, state
ffi::Error state_space(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer step,
                       ffi::AnyBuffer decay, ffi::AnyBuffer b, ffi::AnyBuffer c,
                       ffi::AnyBuffer state, ffi::Result<ffi::AnyBuffer> y,
                       ffi::Result<ffi::AnyBuffer> new_state) {
  const auto x_dims = x.dimensions(), b_dims = b.dimensions(), c_dims = c.dimensions();
  const auto step_dims = step.dimensions(), decay_dims = decay.dimensions();
  const auto s_dims = new_state->dimensions();
  const size_t rank = x_dims.size();
  for (const ffi::AnyBuffer& a : {x, step, decay, b, c, state, *y, *new_state}) {
    if (a.element_type() != ffi::F32) return invalid("state_space: operands do not fit");
  }
  if (rank < 4 || b_dims.size() != rank || c_dims.size() != rank || s_dims.size() != rank ||
      y->dimensions().size() != rank || step_dims.size() != rank - 1 ||
      decay_dims.size() != rank - 1 ||
      (state.element_count() && state.dimensions().size() != rank)) {
    return invalid("state_space: operands do not fit");
  }
  StateSpace p = {};
  p.r = x_dims[rank - 4], p.t = x_dims[rank - 3], p.h = x_dims[rank - 1];
  p.k = b_dims[rank - 2], p.size = b_dims[rank - 1];
  p.group = p.k ? x_dims[rank - 2] / p.k : 0;
  const int64_t heads = p.k * p.group, own[] = {p.r, heads, p.h, p.size};
  bool fits = heads == x_dims[rank - 2];
  for (size_t j = 0, i = rank - 4; j < 4; ++j, ++i) {
    fits = fits && s_dims[i] == own[j] && c_dims[i] == b_dims[i] &&
           (!state.element_count() || state.dimensions()[i] == own[j]);
  }
  for (size_t i = rank - 4; i < rank - 1; ++i) {
    fits = fits && step_dims[i] == x_dims[i] && decay_dims[i] == x_dims[i] &&
           (i == rank - 2 || b_dims[i] == x_dims[i]);
  }
  if (!fits) return invalid("state_space: operands do not fit");
  PoolWorkers workers(pool);
  const Batch batch(y->dimensions(), rank - 4);
  const int64_t steps = p.r * p.t * heads, shared = p.r * p.t * p.k * p.size;
  const int64_t states = p.r * heads * p.h * p.size;
  for (int64_t i = 0; i < batch.count(); ++i) {
    p.x = operand<float>(batch, i, x, steps * p.h, 4);
    p.step = operand<float>(batch, i, step, steps, 4);
    p.decay = operand<float>(batch, i, decay, steps, 4);
    p.b = operand<float>(batch, i, b, shared, 4);
    p.c = operand<float>(batch, i, c, shared, 4);
    p.state = operand<float>(batch, i, state, states, 4);
    p.y = operand<float>(batch, i, *y, steps * p.h, 4);
    p.new_state = operand<float>(batch, i, *new_state, states, 4);
    if (!best_kernels().state_space(p, workers)) return out_of_memory();
  }
  return ffi::Error::Success();
}

}  // namespace

JAXKERN_HANDLER(state_space, 6, 2);

}  // namespace jaxkern
