"""causal_conv1d on a CPU, both passes; the kernel is causal_conv1d.h."""

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import cpu_call, refuses

NOTHING = jax.ShapeDtypeStruct((0,), jnp.float32)  # in the place of what is absent


def unsupported(x, weight, bias, initial_state, segment_ids, **_) -> str | None:
    if segment_ids is not None and segment_ids.dtype.itemsize > 4:
        return f"`segment_ids` is {segment_ids.dtype}, the kernel compares 32 bits"
    if weight.shape[1] > 64:
        return f"`weight` has {weight.shape[1]} taps, the kernel at most 64"
    if initial_state is not None and weight.shape[1] == 1:
        initial_state = None  # empty, and not read
    return refuses(x=x, weight=weight, bias=bias, initial_state=initial_state)


def causal_conv1d(x, weight, bias, initial_state, segment_ids, *, activation):
    return cpu_call(
        "causal_conv",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        *operands(x, weight, bias, initial_state, segment_ids),
        silu=activation == "silu",
    )


def causal_conv1d_bwd(x, weight, bias, initial_state, segment_ids, dy, *, activation):
    state = initial_state
    dx, dweight, dbias, dstate = cpu_call(
        "causal_conv_gradient",
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(weight.shape, jnp.float32),
            NOTHING if bias is None else jax.ShapeDtypeStruct(bias.shape, jnp.float32),
            NOTHING
            if state is None
            else jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        *operands(x, weight, bias, state, segment_ids),
        dy.astype(x.dtype),
        silu=activation == "silu",
    )
    return (
        dx,
        dweight.astype(weight.dtype),
        None if bias is None else dbias.astype(bias.dtype),
        None if state is None else dstate,
    )


def operands(x, weight, bias, state, segment_ids):
    nothing = jnp.zeros(0, jnp.float32)
    return (
        x,
        weight.astype(jnp.float32),
        nothing if bias is None else bias.astype(jnp.float32),
        nothing if state is None else state,
        jnp.zeros(0, jnp.int32)
        if segment_ids is None
        else segment_ids.astype(jnp.int32),
    )
