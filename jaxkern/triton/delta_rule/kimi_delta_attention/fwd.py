"""Kimi delta attention forward, from sm_80 on: what all chunks need, then the walk.

    kimi_chunk_kernel     decayed queries and keys, solutions and scores of each chunk
    kimi_forward_kernel   the state along the chunks, and out

Products take operands in the dtype of the keys and add in float32, in which decays and
the state are kept. Chunks have 64 tokens, whatever chunk_size says.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import compute_capability, next_power_of_2
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.triton.delta_rule.constants import Constants
from jaxkern.triton.delta_rule.gated_delta_rule import fwd as gated_delta_rule
from jaxkern.triton.delta_rule.kimi_delta_attention.chunk_parts import chunk_parts
from jaxkern.triton.delta_rule.kimi_delta_attention.walk import kimi_forward_kernel

LARGEST = 128  # dims of a head


def unsupported(key: Any, value: Any, **named: Any) -> str | None:
    """A reason in words, or None."""
    if reason := gated_delta_rule.unsupported(key=key, value=value, **named):
        return reason
    for name, x in (("key", key), ("value", value)):
        if x.shape[-1] > LARGEST:
            return f"heads of `{name}` have {x.shape[-1]} dims, more than {LARGEST}"
    return None


def kimi_delta_attention(
    query, key, value, g, beta, initial_state, *, scale, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    (b, *_, h), (n, hv) = key.shape, value.shape[2:]
    parts = chunk_parts(query, key, g, beta, scale=scale)
    for name in ("total_ptr", "ends_ptr"):
        del parts[name]
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    return sparse_call(
        kimi_forward_kernel,
        (programs(b * n, hv),),
        {"value_ptr": value, **parts, "initial_ptr": initial_state},
        {
            "out_ptr": jax.ShapeDtypeStruct(value.shape, value.dtype),
            "final_ptr": jax.ShapeDtypeStruct((b, n, h, hv), kept),
        },
        walk_constants(key, value, scale),
    )


def columns() -> int:
    """Value columns of a program: as many as its registers hold without spilling.

    Those of compute capability 9.0 hold operands of 64 rows in no registers.
    """
    return 64 if compute_capability() >= 90 else 32


def programs(heads: int, hv: int) -> int:
    return -(-hv // columns()) * heads


def walk_constants(key: jax.Array, value: jax.Array, scale: float) -> dict[str, Any]:
    _, t, k, h = key.shape
    n, hv = value.shape[2:]
    room = max(16, next_power_of_2(h))
    known = Constants(t, n, n // k, h, hv, room, columns(), scale)
    return {"C": known, "num_warps": 4, "num_stages": 2}
