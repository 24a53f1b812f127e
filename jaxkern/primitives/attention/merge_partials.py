"""Merges attention over parts of the keys: out = sum_p exp(lse_p - lse) out_p.

The reduction of split-key decoding (https://arxiv.org/abs/2311.01282) and of ring
attention (https://arxiv.org/abs/2310.01889).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def merge_partials(
    out: Float[Array, "p ... h"], lse: Float[Array, "p ..."], *, axis: int = 0
) -> tuple[Float[Array, "... h"], Float[Array, "..."]]:
    """Attention over all keys from attention over disjoint parts of them.

        lse = ln(sum_p exp(lse_p)),    out = sum_p exp(lse_p - lse) out_p

    The parts are `attention(..., return_lse=True)` over disjoint keys. Kernels that
    hand over an unnormalised sum O with its maximum m and total l give out = O / l and
    lse = m + ln(l). With sinks: pass them to one part only.

    A part with lse = -inf has seen no key: its out is not read and may be NaN. Where no
    part has seen one, out is 0 and lse -inf, with zero gradients. Computed in float32,
    each result rounded once.

    Source: https://arxiv.org/abs/2311.01282, https://arxiv.org/abs/2310.01889.

    Args:
      out: `[p, ..., h]`, normalised results of p parts.
      lse: `[p, ...]`, natural logarithms, as a rule float32.
      axis: where p stands in both, counted without h.

    Returns:
      out: `[..., h]`, dtype of out.
      lse: `[...]`, float32 (float64 for float64).

    Raises:
      TypeError: a shape or dtype does not fit.

    Example:
      >>> x = jnp.eye(4)[None, :, None, :2]  # [b, t, heads, h]
      >>> halves = x[:, :2], x[:, 2:]
      >>> parts = [jaxkern.attention(x, k, k, return_lse=True) for k in halves]
      >>> out, lse = jaxkern.merge_partials(*map(jnp.stack, zip(*parts)))
      >>> bool(jnp.allclose(out, jaxkern.attention(x, x, x)))
      True
    """
    if out.ndim != lse.ndim + 1 or out.shape[:-1] != lse.shape:
        raise TypeError(
            f"merge_partials: `out` must have the dims of `lse` and one more, the head "
            f"dim, got shapes {out.shape} and {lse.shape}."
        )
    axis = axis % lse.ndim
    return merge_partials_p(jnp.moveaxis(out, axis, -2), jnp.moveaxis(lse, axis, -1))


def merge_partials_reference(
    out: Float[Array, "... p h"], lse: Float[Array, "... p"]
) -> tuple[Float[Array, "... h"], Float[Array, "..."]]:
    weight, merged = weights(lse)
    return jnp.sum(weight[..., None] * seen(out, lse), -2).astype(out.dtype), merged


def merge_partials_bwd_reference(
    out: Float[Array, "... p h"],
    lse: Float[Array, "... p"],
    dout: Float[Array, "... h"],
    dlse: Float[Array, "..."],
) -> tuple[Float[Array, "... p h"], Float[Array, "... p"]]:
    """With w_p = exp(lse_p - lse), which is also the gradient of lse:

    dout_p = w_p dout,   dlse_p = w_p (dout . (out_p - out) + dlse)
    """
    weight, merged = weights(lse)
    dout = at_least_f32(dout)[..., None, :]
    # `out` from its parts again: the one that was returned has been rounded
    along = jnp.sum(dout * seen(out, lse), -1)
    apart = along - jnp.sum(weight * along, -1, keepdims=True)
    dlse = jnp.where(merged == -jnp.inf, 0, dlse)[..., None]
    dparts = weight * (apart + dlse)
    return (weight[..., None] * dout).astype(out.dtype), dparts.astype(lse.dtype)


def weights(lse):
    """exp(lse_p - lse) `[..., p]`, 0 where nothing was seen, and lse `[...]`."""
    lse = at_least_f32(lse)
    top = jnp.max(lse, axis=-1, keepdims=True, initial=-jnp.inf)
    # Any finite number is right here, so it has no gradient.
    top = lax.stop_gradient(jnp.where(jnp.isinf(top), 0, top))
    weight = jnp.exp(lse - top)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    merged = jnp.where(nothing, -jnp.inf, top + jnp.log(total))
    return weight / total, merged[..., 0]


def seen(out, lse):
    """The parts in float32, 0 where one has seen no key."""
    return jnp.where((lse == -jnp.inf)[..., None], 0, at_least_f32(out))


merge_partials_p = kernel_primitive(
    merge_partials_reference,
    bwd=merge_partials_bwd_reference,
    # the weights of all parts come from their common sum; lse is no sum over h
    replicated=("p", "h"),
)
