"""RMS norm, with a residual or not, and layer norm on a CPU; the kernel is norm.h."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import cpu_call, refuses

FEWEST_ROWS = 1024  # of a gradient
NOTHING = jax.ShapeDtypeStruct((0,), jnp.float32)  # in the place of what is absent


def unsupported(**named: Any) -> str | None:
    return refuses(**{k: x for k, x in named.items() if hasattr(x, "dtype")})


def slower(**_: Any) -> str | None:
    return "it fuses a norm with what is around it; alone 0.6 to 3.7 times XLA here"


def slower_gradient(x, **_: Any) -> str | None:
    few = math.prod(x.shape[:-1]) < FEWEST_ROWS
    return f"of fewer than {FEWEST_ROWS} rows (0.9 to 2.2 times)" if few else None


def rms_norm_fwd(x, weight, bias, *, eps, offset):
    y, _, _, rstd = forward(x, None, weight, bias, eps, offset)
    return y, rstd


def rms_norm_bwd(x, weight, bias, rstd, dy, *, eps, offset):
    del eps  # already in rstd
    dx, _, *gradients = backward(x, None, weight, bias, None, rstd, dy, None, offset)
    return dx, *gradients


def add_rms_norm_fwd(x, residual, weight, bias, *, eps, offset):
    y, total, _, rstd = forward(x, residual, weight, bias, eps, offset)
    return y, total, rstd


def add_rms_norm_bwd(x, residual, weight, bias, rstd, dy, dtotal, *, eps, offset):
    del eps
    return backward(x, residual, weight, bias, None, rstd, dy, dtotal, offset)


def layer_norm_fwd(x, weight, bias, *, eps, offset):
    y, _, mean, rstd = forward(x, None, weight, bias, eps, offset, centred=True)
    return y, mean, rstd


def layer_norm_bwd(x, weight, bias, mean, rstd, dy, *, eps, offset):
    del eps
    dx, _, *gradients = backward(x, None, weight, bias, mean, rstd, dy, None, offset)
    return dx, *gradients


def or_nothing(x: jax.Array | None, offset: float = 0.0) -> jax.Array:
    """In float32, the offset added."""
    return jnp.zeros(0, jnp.float32) if x is None else x.astype(jnp.float32) + offset


def forward(x, residual, weight, bias, eps, offset, *, centred=False):
    """(y, total or nothing, mean or nothing, rstd)."""
    of_rows = jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.float32)
    return cpu_call(
        "norm",
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            NOTHING if residual is None else like(residual),
            of_rows if centred else NOTHING,
            of_rows,
        ],
        x,
        jnp.zeros(0, jnp.float32) if residual is None else residual,
        or_nothing(weight, offset),
        or_nothing(bias),
        eps=np.float32(eps),
        rows=np.int64(math.prod(x.shape[:-1])),
    )


def backward(x, residual, weight, bias, mean, rstd, dy, dtotal, offset):
    """Gradients of x, residual, weight and bias, None where those are absent."""
    nothing = jnp.zeros(0, jnp.float32)
    of_channels = jax.ShapeDtypeStruct(x.shape[-1:], jnp.float32)
    dx, dresidual, dweight, dbias = cpu_call(
        "norm_gradient",
        [
            like(x),
            NOTHING if residual is None else like(residual),
            NOTHING if weight is None else of_channels,
            NOTHING if bias is None else of_channels,
        ],
        x,
        nothing if residual is None else residual,
        or_nothing(weight, offset),
        or_nothing(bias),
        nothing if mean is None else mean.astype(jnp.float32),
        rstd.astype(jnp.float32),
        dy.astype(x.dtype),
        nothing if residual is None else dtotal.astype(residual.dtype),
        rows=np.int64(math.prod(x.shape[:-1])),
    )
    return (
        dx,
        None if residual is None else dresidual,
        None if weight is None else dweight.astype(weight.dtype),
        None if bias is None else dbias.astype(bias.dtype),
    )


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
