"""y = rms_norm(x) * weight * silu(gate), the norm of Mamba-2  (https://arxiv.org/abs/2405.21060)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def gated_rms_norm(
    x: Float[Array, "... d"],
    gate: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
) -> Float[Array, "... d"]:
    """RMS normalisation with a SiLU gate, after a state-space or delta-rule layer.

        y = rms(x) * weight * silu(gate)    norm_before_gate: Gated DeltaNet, Qwen3-Next
        y = rms(x * silu(gate)) * weight    otherwise: Mamba-2

    with rms(u) = u / sqrt(mean(u**2) + eps) and silu(z) = z / (1 + exp(-z)); the gate
    is SiLU, not a sigmoid. Computed in float32 (float64 for float64 operands) and
    rounded once. For norms over groups of channels reshape to `[..., groups, d]` and
    multiply by the weight outside. As in `swiglu`, silu(-inf) is NaN.

    Source: https://arxiv.org/abs/2405.21060.

    Args:
      x: `[..., d]`, any float dtype.
      gate: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale.
      eps: added to the mean square, in units of x**2.
      norm_before_gate: whether the norm sees x alone, or x times the gate.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, gate = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 9.0]])
      >>> jaxkern.gated_rms_norm(x, gate)
      Array([[ 0.62 , 10.181]], dtype=float32)
      >>> jaxkern.gated_rms_norm(x, gate, norm_before_gate=False)
      Array([[0.086, 1.412]], dtype=float32)
    """
    return gated_rms_norm_p(
        x, gate, weight, eps=eps, norm_before_gate=bool(norm_before_gate)
    )


def gated_rms_norm_fwd_reference(
    x: Float[Array, "... d"],
    gate: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    *,
    eps: float,
    norm_before_gate: bool,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"]]:
    x32, opening = at_least_f32(x), jax.nn.silu(at_least_f32(gate))
    u = x32 if norm_before_gate else x32 * opening
    rstd = lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps)
    y = u * rstd
    if weight is not None:
        y = y * at_least_f32(weight)
    if norm_before_gate:
        y = y * opening
    return y.astype(x.dtype), rstd


gated_rms_norm_reference = without_residuals(gated_rms_norm_fwd_reference)


def gated_rms_norm_bwd_reference(
    x: Float[Array, "... d"],
    gate: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    eps: float,
    norm_before_gate: bool,
) -> tuple[Float[Array, "... d"], Float[Array, "... d"], Float[Array, " d"] | None]:
    del eps  # already in rstd
    x32, z, dy32 = at_least_f32(x), at_least_f32(gate), at_least_f32(dy)
    s = jax.nn.sigmoid(z)
    opening, slope = z * s, s * (1 + z * (1 - s))  # silu(z) and its derivative
    u = x32 if norm_before_gate else x32 * opening
    dnormed = dy32 * opening if norm_before_gate else dy32  # normed = uhat * weight
    uhat = u * rstd
    duhat = dnormed if weight is None else dnormed * at_least_f32(weight)
    du = rstd * (duhat - uhat * jnp.mean(duhat * uhat, axis=-1, keepdims=True))
    if norm_before_gate:
        normed = uhat if weight is None else uhat * at_least_f32(weight)
        dx, dopening = du, dy32 * normed
    else:
        dx, dopening = du * opening, du * x32
    rows = tuple(range(x.ndim - 1))
    dweight = None
    if weight is not None:
        dweight = (dnormed * uhat).sum(rows).astype(weight.dtype)
    return dx.astype(x.dtype), (dopening * slope).astype(gate.dtype), dweight


gated_rms_norm_p = kernel_primitive(
    gated_rms_norm_reference,
    fwd=gated_rms_norm_fwd_reference,
    bwd=gated_rms_norm_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
