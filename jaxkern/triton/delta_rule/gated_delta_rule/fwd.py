"""The gated delta rule forward, from sm_80 on: what all chunks need, then the walk.

    chunk_matrices   T, scores and decays of each chunk, all at once
    forward_kernel   the state along the chunks, and out

Products take operands in the dtype of the keys and add in float32, in which the state
is kept. Chunks have 64 tokens, whatever chunk_size says.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.triton.delta_rule.constants import Constants
from jaxkern.triton.delta_rule.gated_delta_rule import (
    hopper_forward,
    hopper_tiles,
    hopper_walk,
    walk,
    warp_chunks,
)
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    CHUNK,
    chunk_matrices,
    results_of_chunks,
)

LARGEST = 256  # dims of a head
LONGEST = 65535 * CHUNK  # tokens: a grid has so many programs along its second axis
MUCH_SHARED = 160_000  # bytes of a multiprocessor that takes heads of 256 dims
COLUMNS = hopper_tiles.COLUMNS  # value columns of a program
MAKING = 4  # value heads that warps make the matrices of together
BESIDE_ROWS = 32_768  # bytes of shared memory that they need at most beside the rows
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
) -> tuple[Any, int, dict[str, Any]]:
    """(the kernel of a walk, its programs, its constants) for a `shape` without blocks.

    Of `programs`, each with 64 value columns, two are one where all have more than
    one multiprocessor's turn: what they both read comes once. These take matrices
    packed. A walk by itself waits for its products, not for bytes.

    As measured on an H200 for heads of 128 dims: the walk written for it is faster,
    with three stages forward and with two backward. Narrower heads have not been
    measured where two programs of Triton share a multiprocessor forward; backward two
    do not fit.
    """
    h = shape["H"]
    room = max(16, next_power_of_2(h))
    alone = backward or h > 64 or programs <= num_sms()
    if hopper() and h <= 128 and alone:
        kernel, stages = hopper_walk.hopper_forward_kernel, 3
        if backward:
            kernel, stages = hopper_walk.hopper_both_ways_kernel, 2
        known = hopper_shape(shape, stages)
        if known.blocks == 2 and programs > num_sms():
            known = dataclasses.replace(known, together=2, packed=True)
        constants = {"P": known, "num_warps": 4, "num_stages": 1}
        return kernel, programs // known.together, constants
    fits = h <= 128 or not backward
    kernel = walk.both_ways_kernel if backward else walk.forward_kernel
    return (
        kernel,
        programs,
        {
            "C": Constants(**shape, BLOCK_H=room, BLOCK_V=COLUMNS),
            "num_warps": 4 if h <= 128 else 8,
            "num_stages": 2 if fits else 1,
        },
    )


def makers(key, heads: int, scale: float) -> warp_chunks.Chunks:
    """What four warps make the matrices of together, beside walks."""
    _, t, k, h = key.shape
    return warp_chunks.Chunks(
        tokens=t, heads=heads, group=heads // k, h=h, scale=scale, warps=MAKING
    )


def in_one(key, value) -> bool:
    """Whether walks leave so many multiprocessors idle that one launch does all.

    As measured on an H200, the others keep up with as many walks as there are of them.
    """
    b, t, _, h = key.shape
    n, hv = value.shape[2:]
    walks = -(-hv // COLUMNS) * b * n
    if not hopper() or max(h, hv) > 128 or n % MAKING or t <= CHUNK:
        return False
    rows = 2 * hopper_forward.GROUPS * makers(key, n, 1.0).bytes_of_rows
    fits = rows + BESIDE_ROWS <= bridge.max_shared_bytes()
    return fits and walks <= num_sms() - walks


def forward_in_one(query, key, value, g, beta, initial_state, *, scale):
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    walks, chunks = -(-hv // COLUMNS) * b * n, -(-t // CHUNK)
    shape = dict(T=t, NUM_HEADS=n, GROUP=n // k, H=h, HV=hv, SCALE=scale)
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    ready = jax.ShapeDtypeStruct((b, n, chunks), jnp.int32)
    matrices, vectors = results_of_chunks(key, n)
    out, final, *_ = sparse_call(
        hopper_forward.hopper_forward_in_one_kernel,
        (num_sms(),),
        {
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "g_ptr": g,
            "beta_ptr": beta,
            "initial_ptr": initial_state,
            "ready_ptr": jnp.zeros(ready.shape, ready.dtype),
        },
        {
            "out_ptr": jax.ShapeDtypeStruct(value.shape, value.dtype),
            "final_ptr": jax.ShapeDtypeStruct((b, n, h, hv), kept),
            "matrices_ptr": matrices,
            "vectors_ptr": vectors,
            "was_ready_ptr": ready,
        },
        {
            "M": makers(key, n, scale),
            "P": hopper_shape(shape, stages=3),
            "ROWS": b * n,
            "MAKERS": num_sms() - walks,
            "num_warps": 4,
            "num_stages": 1,
        },
        in_place={"ready_ptr": "was_ready_ptr"},
    )
    return out, final


def gated_delta_rule(
    query, key, value, g, beta, initial_state, *, scale, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    given = query, key, value, g, beta, initial_state
    if in_one(key, value):
        return forward_in_one(*given, scale=scale)
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    shape = dict(T=t, NUM_HEADS=n, GROUP=n // k, H=h, HV=hv, SCALE=scale)
    programs = -(-hv // COLUMNS) * b * n
    kernel, programs, constants = walk_of(shape, programs, backward=False)
    packed = "P" in constants and constants["P"].packed
    matrices, vectors, _ = chunk_matrices(
        query, key, g, beta, scale=scale, by_warps=hopper(), packed=packed
    )
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
