"""SwiGLU and GeGLU, elementwise: y = act(gate) * up."""

import jax
import jax.numpy as jnp

from jaxkern.triton.triton_call import jit, tl, triton_call

BLOCK, NUM_WARPS = 2048, 4


@jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@jit
def factor_and_slope(z, ACTIVATION: tl.constexpr):
    """act(z) / z and its derivative in z."""
    if ACTIVATION == "silu":
        s = sigmoid(z)
        return s, s * (1.0 - s)
    if ACTIVATION == "gelu_tanh":
        z = tl.minimum(tl.maximum(z, -40.0), 40.0)
        s = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        slope = s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
        return s, slope
    density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)), density


@jit
def gated_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    z = tl.load(gate_ptr + at, inside, 0.0, eviction_policy="evict_first")
    up = tl.load(up_ptr + at, inside, 0.0, eviction_policy="evict_first")
    z = z.to(tl.float32)
    factor, _ = factor_and_slope(z, ACTIVATION)
    y = z * factor * up.to(tl.float32)
    tl.store(y_ptr + at, y, inside, eviction_policy="evict_first")


@jit
def gated_bwd_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    z = tl.load(gate_ptr + at, inside, 0.0, eviction_policy="evict_first")
    up = tl.load(up_ptr + at, inside, 0.0, eviction_policy="evict_first")
    dy = tl.load(dy_ptr + at, inside, 0.0, eviction_policy="evict_first")
    z, dy = z.to(tl.float32), dy.to(tl.float32)
    factor, slope = factor_and_slope(z, ACTIVATION)
    dgate = dy * up.to(tl.float32) * (factor + z * slope)
    tl.store(dgate_ptr + at, dgate, inside, eviction_policy="evict_first")
    tl.store(dup_ptr + at, dy * z * factor, inside, eviction_policy="evict_first")


def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    dtype = jnp.result_type(gate, up)
    return triton_call(
        gated_kernel,
        gate,
        up,
        out=[jax.ShapeDtypeStruct(gate.shape, dtype)],
        grid=(-(-gate.size // BLOCK),),
        num_warps=NUM_WARPS,
        SIZE=gate.size,
        ACTIVATION=activation,
        BLOCK=BLOCK,
    )[0]


def gated_bwd(
    gate: jax.Array, up: jax.Array, dy: jax.Array, activation: str
) -> list[jax.Array]:
    return triton_call(
        gated_bwd_kernel,
        gate,
        up,
        dy,
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (gate, up)],
        grid=(-(-gate.size // BLOCK),),
        num_warps=NUM_WARPS,
        SIZE=gate.size,
        ACTIVATION=activation,
        BLOCK=BLOCK,
    )


def swiglu_fwd(gate, up):
    return gated(gate, up, "silu")


def swiglu_bwd(gate, up, dy):
    return gated_bwd(gate, up, dy, "silu")


def geglu_fwd(gate, up, *, approximate):
    return gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def geglu_bwd(gate, up, dy, *, approximate):
    return gated_bwd(gate, up, dy, "gelu" if approximate == "none" else "gelu_tanh")
