"""softmax on a CPU, both passes; the kernel is softmax.h."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import cpu_call, refuses


def unsupported(*, scale, **named) -> str | None:
    del scale
    return refuses(**{name: x for name, x in named.items() if name != "mask"})


def slower(*, mask=None, **_) -> str | None:
    return (
        None
        if mask is None
        else "with a mask, whose making it fuses (1.0 to 1.8 times)"
    )


def softmax(x, mask, *, scale):
    return by_rows(
        "softmax", x, jnp.zeros((0, 0), bool) if mask is None else mask, scale=scale
    )


def softmax_bwd(y, dy, *, scale):
    return by_rows("softmax_gradient", y, dy.astype(y.dtype), scale=scale)


def by_rows(name, x, other, *, scale):
    s = x.shape[-1]
    flat = x.reshape(-1, s)
    y = cpu_call(
        name,
        jax.ShapeDtypeStruct(flat.shape, x.dtype),
        flat,
        other if other.size == 0 else other.reshape(-1, s),
        scale=np.float32(scale),
    )
    return y.reshape(x.shape)
