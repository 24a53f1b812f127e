"""What one problem fixes for all of its kernels: operands and constants."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.operands import GradientOperands
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.precision import one_product
from jaxkern.primitives.attention.operands import AttentionOperands

LOG2_E = 1.4426950408889634
PADDING = 128  # of the rows of lse and delta; a multiple of every BLOCK_Q


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a problem fixes for all of its kernels; `C` in them.

    Attributes:
      B, T, S, N, HEADS, GROUP, H, HV: sizes; N = HEADS * GROUP.
      PADDED_T, PADDED_S, PADDED_H, PADDED_HV: what the kernels hold of T, S, H, HV.
      Q_STRIDE, K_STRIDE, V_STRIDE, OUT_STRIDE: from one row to the next.
      MASK_B, ..., BIAS_S: strides of mask and bias.
      SCALE: of q k^T, with log2 e where no cap comes after it.
      DSCALE: of dq and dk.
      FOLDED: SCALE is applied as late as in the exponent.
      SOFTCAP, CAUSAL, WINDOW: options.
      PRECISION: of products; "tf32" only of float32.
    """

    B: int
    T: int
    S: int
    N: int
    HEADS: int
    GROUP: int
    H: int
    HV: int
    PADDED_T: int
    PADDED_S: int
    PADDED_H: int
    PADDED_HV: int
    Q_STRIDE: int
    K_STRIDE: int
    V_STRIDE: int
    OUT_STRIDE: int
    MASK_B: int
    MASK_N: int
    MASK_T: int
    MASK_S: int
    BIAS_B: int
    BIAS_N: int
    BIAS_T: int
    BIAS_S: int
    DSCALE: float
    SCALE: float
    SOFTCAP: float | None
    FOLDED: bool
    CAUSAL: bool
    WINDOW: int | None
    PRECISION: str


def strides(x: jax.Array | None, name: str) -> dict[str, int]:
    """Of [#b #n #t #s]; 0 where a dim is broadcast."""
    if x is None:
        return {f"{name}_{dim}": 0 for dim in "BNTS"}
    _, n, t, s = x.shape
    steps = (n * t * s, t * s, s, 1)
    return {
        f"{name}_{dim}": 0 if size == 1 else step
        for dim, size, step in zip("BNTS", x.shape, steps, strict=True)
    }


def int32(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.astype(jnp.int32)


def factor(x: jax.Array) -> jax.Array:
    """x as a factor of products; one of TF32 cuts off what it does not hold."""
    if one_product(x.dtype):
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    return x


def turned(x: jax.Array) -> jax.Array | None:
    """[b t n h] of float32 as [b n h t], t padded with zeros.

    Products of 32 bits sum over what is contiguous in shared memory; without this
    kernels would turn every tile there.
    """
    if x.dtype != jnp.float32:
        return None
    short = -x.shape[1] % PADDING
    by_head = jnp.transpose(factor(x), (0, 2, 3, 1))
    return jnp.pad(by_head, ((0, 0), (0, 0), (0, 0), (0, short)))


def operands_and_constants(
    o: AttentionOperands | GradientOperands,
    scale,
    causal,
    window,
    softcap,
) -> tuple[dict, Constants]:
    """What the kernels share, in the order of their parameters; bounds come later."""
    b, t, n, h = o.query.shape
    _, s, heads, hv = o.value.shape
    given = {
        "q_ptr": factor(o.query),
        "k_ptr": factor(o.key),
        "v_ptr": factor(o.value),
        "bias_ptr": o.bias,
        "mask_ptr": o.mask,
        "q_ids_ptr": int32(o.q_segment_ids),
        "kv_ids_ptr": int32(o.kv_segment_ids),
        "bounds_ptr": None,
        "kv_lengths_ptr": int32(o.kv_lengths),
        "q_offset_ptr": int32(o.q_offset),
    }
    constants = Constants(
        B=b,
        T=t,
        S=s,
        N=n,
        HEADS=heads,
        GROUP=n // heads,
        H=h,
        HV=hv,
        PADDED_T=-(-t // PADDING) * PADDING,
        PADDED_S=-(-s // PADDING) * PADDING,
        PADDED_H=max(16, next_power_of_2(h)),
        PADDED_HV=max(16, next_power_of_2(hv)),
        Q_STRIDE=n * h,
        K_STRIDE=heads * h,
        V_STRIDE=heads * hv,
        OUT_STRIDE=n * hv,
        **strides(o.mask, "MASK"),
        **strides(o.bias, "BIAS"),
        DSCALE=scale,
        SCALE=scale * (LOG2_E if softcap is None else 1.0),
        SOFTCAP=softcap,
        FOLDED=softcap is None and o.bias is None and scale > 0,
        CAUSAL=causal,
        # no position is as far as 2^30, and more could overflow
        WINDOW=None if window is None else min(window, 2**30),
        PRECISION="tf32" if one_product(o.query.dtype) else "tf32x3",
    )
    return given, constants
