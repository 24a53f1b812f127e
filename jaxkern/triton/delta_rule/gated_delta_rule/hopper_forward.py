"""The forward pass on compute capability 9.0 in one launch, for few heads.

Walks along the chunks leave half of the multiprocessors idle where there are no more
heads than that. Here programs on the others make the matrices of chunks meanwhile, all
heads of the first chunks first, and a walk waits for those of the chunk it copies
(ready_chunks.py). Those who make wait for nobody and have the first numbers, so they
run, whatever else does.
"""

from jaxkern.gpu.triton_call import gl, gluon_jit, warp_specialize
from jaxkern.triton.delta_rule.gated_delta_rule.hopper_walk import forward
from jaxkern.triton.delta_rule.gated_delta_rule.ready_chunks import say_ready
from jaxkern.triton.delta_rule.gated_delta_rule.warp_chunk_matrices import (
    matrices_of_chunk,
)

GROUPS = 2  # of four warps that make, on a multiprocessor


@gluon_jit
def make_chunks(
    operands,
    results,
    ready_ptr,
    group,
    ROWS: gl.constexpr,
    MAKERS: gl.constexpr,
    M: gl.constexpr,
):
    """Chunks of some heads at a time, of ROWS heads of all sequences; two groups of
    warps of each program take them in turn."""
    TASKS: gl.constexpr = ROWS // M.warps
    first_task = gl.program_id(0) + group * MAKERS
    for task in range(first_task, TASKS * M.chunks, 2 * MAKERS):
        chunk, first = task // TASKS, task % TASKS * M.warps
        matrices_of_chunk(operands, results, first, chunk, M)
        say_ready(ready_ptr + (first * M.chunks + chunk), M.warps, M.chunks)


@gluon_jit
def hopper_forward_in_one_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    g_ptr,
    beta_ptr,
    initial_ptr,
    ready_ptr,
    out_ptr,
    final_ptr,
    matrices_ptr,
    vectors_ptr,
    was_ready_ptr,
    M: gl.constexpr,
    P: gl.constexpr,
    ROWS: gl.constexpr,
    MAKERS: gl.constexpr,
):
    if gl.program_id(0) < MAKERS:
        given = (query_ptr, key_ptr, g_ptr, beta_ptr)
        made = (matrices_ptr, vectors_ptr, None)
        warp_specialize(
            [
                (make_chunks, (given, made, ready_ptr, 0, ROWS, MAKERS, M)),
                (make_chunks, (given, made, ready_ptr, 1, ROWS, MAKERS, M)),
            ],
            [4],
            [232],
        )
    else:
        pointers = (key_ptr, query_ptr, value_ptr, matrices_ptr, vectors_ptr, key_ptr)
        program = gl.program_id(0) - MAKERS
        forward(pointers, initial_ptr, ready_ptr, out_ptr, final_ptr, program, P)
