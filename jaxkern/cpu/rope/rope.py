"""apply_rope on a CPU, both passes; the kernel is rope.h."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.cpu.cpu_call import cpu_call, refuses
from jaxkern.primitives.rope.rope import check_pairs

FEWEST = 2**20  # elements; below, a model decodes and prefills no faster


def unsupported(cos, sin, at_end=False, **named: Any) -> str | None:
    if at_end:
        return "the kernel rotates the first dims of a head, not the last"
    x = named.get("x", named.get("dy"))
    return refuses(x=x, cos=cos, sin=sin)


def slower(**named: Any) -> str | None:
    x = named.get("x", named.get("dy"))
    if x is not None and x.size < FEWEST:
        return f"of fewer than {FEWEST} elements it is fused with what is around it"
    return None


def apply_rope(x, cos, sin, *, pairing, pair_offset, at_end):
    del at_end  # False, see above
    return rotated(x, cos, sin, pairing, pair_offset, 1.0)


def apply_rope_bwd(cos, sin, dy, *, pairing, pair_offset, at_end):
    del at_end  # False, see above
    return rotated(dy, cos, sin, pairing, pair_offset, -1.0)


def rotated(x, cos, sin, pairing, pair_offset, direction):
    (*tokens, n, h), pairs = x.shape, cos.shape[-1]
    check_pairs("apply_rope", h, pairs, pair_offset)
    tokens = math.prod(tokens)
    y = cpu_call(
        "rope",
        jax.ShapeDtypeStruct((tokens, n, h), x.dtype),
        x.reshape(tokens, n, h),
        *(table.astype(jnp.float32).reshape(tokens, pairs) for table in (cos, sin)),
        neighbours=pairing == "interleaved",
        pair_offset=np.int64(pair_offset),
        direction=np.float32(direction),
    )
    return y.reshape(x.shape)
