"""The gated delta rule forward, from sm_80 on: what all chunks need, then the walk.

    chunk_matrices   T, scores and decays of each chunk, all at once
    forward_kernel   the state along the chunks, and out

Products take operands in the dtype of the keys and add in float32, in which the state
is kept. Chunks have 64 tokens, whatever chunk_size says.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.triton.delta_rule.constants import Constants
from jaxkern.triton.delta_rule.gated_delta_rule import hopper_tiles, hopper_walk, walk
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    CHUNK,
    chunk_matrices,
)

LARGEST = 256  # dims of a head
LONGEST = 65535 * CHUNK  # tokens: a grid has so many programs along its second axis
MUCH_SHARED = 160_000  # bytes of a multiprocessor that takes heads of 256 dims
COLUMNS = hopper_tiles.COLUMNS  # value columns of a program
HOPPER_WALKS = True  # those of `hopper_walk`, on compute capability 9.0


def unsupported(
    query: Any, key: Any, value: Any, *, chunk_size: int, scale: float, **named: Any
) -> str | None:
    """A reason in words, or None."""
    del scale
    operands = {"query": query, "key": key, "value": value}
    if reason := bridge.unsupported(**operands, **named):
        return reason
    if not key.size * value.size:
        return "an operand is empty"
    if key.shape[1] > LONGEST:
        return f"{key.shape[1]} tokens are more than {LONGEST}"
    if chunk_size == 1:
        return "chunk_size 1 asks for the recurrence, and the kernel has chunks of 64"
    if len({x.dtype for x in operands.values()}) > 1:
        names = [x.dtype.name for x in operands.values()]
        return f"`query`, `key` and `value` have the dtypes {', '.join(names)}"
    if key.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`key` is {key.dtype.name}"
    for name, x in (("key", key), ("value", value)):
        if x.shape[-1] % 16 or x.shape[-1] > LARGEST:
            return (
                f"heads of `{name}` have {x.shape[-1]} dims, no multiple of 16 up to "
                f"{LARGEST}"
            )
        if x.shape[-1] > 128 and bridge.max_shared_bytes() < MUCH_SHARED:
            return (
                f"heads of `{name}` have {x.shape[-1]} dims, which need more than the "
                "GPU's shared memory"
            )
    return None


def hopper() -> bool:
    """Whether kernels written for compute capability 9.0 are taken."""
    return HOPPER_WALKS and compute_capability() == 90


def hopper_shape(shape: dict[str, Any], stages: int) -> hopper_tiles.Walk:
    h = shape["H"]
    return hopper_tiles.Walk(
        tokens=shape["T"],
        heads=shape["NUM_HEADS"],
        group=shape["GROUP"],
        h=h,
        hv=shape["HV"],
        room=max(64, next_power_of_2(h)),
        scale=shape["SCALE"],
        stages=stages,
    )


def walk_of(
    shape: dict[str, Any], programs: int, backward: bool
) -> tuple[Any, dict[str, Any]]:
    """(the kernel of a walk, its constants) for a `shape` without blocks.

    As measured on an H200: the walk written for it is faster where a program has a
    multiprocessor alone, with three stages forward and with two backward. Where two of
    Triton's share one it has not been measured forward; backward two do not fit.
    """
    h = shape["H"]
    room = max(16, next_power_of_2(h))
    alone = backward or programs <= num_sms()
    if hopper() and h <= 128 and alone:
        kernel, stages = hopper_walk.hopper_forward_kernel, 3
        if backward:
            kernel, stages = hopper_walk.hopper_both_ways_kernel, 2
        known = hopper_shape(shape, stages)
        return kernel, {"P": known, "num_warps": 4, "num_stages": 1}
    fits = h <= 128 or not backward
    kernel = walk.both_ways_kernel if backward else walk.forward_kernel
    return kernel, {
        "C": Constants(**shape, BLOCK_H=room, BLOCK_V=COLUMNS),
        "num_warps": 4 if h <= 128 else 8,
        "num_stages": 2 if fits else 1,
    }


def gated_delta_rule(
    query, key, value, g, beta, initial_state, *, scale, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    matrices, vectors, _ = chunk_matrices(
        query, key, g, beta, scale=scale, by_warps=hopper()
    )
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    shape = dict(T=t, NUM_HEADS=n, GROUP=n // k, H=h, HV=hv, SCALE=scale)
    programs = -(-hv // COLUMNS) * b * n
    kernel, constants = walk_of(shape, programs, backward=False)
    return sparse_call(
        kernel,
        (programs,),
        {
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "matrices_ptr": matrices,
            "vectors_ptr": vectors,
            "initial_ptr": initial_state,
        },
        {
            "out_ptr": jax.ShapeDtypeStruct(value.shape, value.dtype),
            "final_ptr": jax.ShapeDtypeStruct((b, n, h, hv), kept),
        },
        constants,
    )
