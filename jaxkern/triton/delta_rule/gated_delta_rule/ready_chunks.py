"""Words by which programs that make matrices of chunks tell walks that they are there.

A word is 0 until the chunk of a value head is complete in memory. What a program wrote
before it said so is seen by those who waited for the word.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fragments import barrier


@constexpr_function
def wait_text():
    return """{ .reg .pred none;
AGAIN: ld.acquire.gpu.global.b32 $0, [$1];
setp.eq.s32 none, $0, 0;
@none bra AGAIN; }"""


@gluon_jit
def say_ready(ready_ptr, WARPS: gl.constexpr, CHUNKS: gl.constexpr):
    """Of a chunk of a value head for each warp, whose words are CHUNKS apart.

    All warps are done with their shared memory too.
    """
    barrier()
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = ready_ptr + gl.arange(0, WARPS, L) * CHUNKS
    one = gl.full([WARPS], 1, gl.int32, L)
    gl.atomic_xchg(at, one, sem="release", scope="gpu")


@gluon_jit
def wait_until_ready(ready_ptr, chunk, TOGETHER: gl.constexpr, CHUNKS: gl.constexpr):
    """Of TOGETHER chunks of a head from `chunk` on, as many as there are.

    All threads may read what was written before. A wait takes longer than a chunk's
    copies, so it is one for many.
    """
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    which = chunk + gl.arange(0, 32 * WARPS, L) % TOGETHER
    at = (ready_ptr + gl.minimum(which, CHUNKS - 1)).to(gl.int64)
    gl.inline_asm_elementwise(wait_text(), "=r,l", [at], gl.int32, False, 1)
    barrier()
