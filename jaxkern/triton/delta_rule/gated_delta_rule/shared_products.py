"""Products of keys and queries that all value heads of a key head have.

k k^T and q k^T of a chunk are the same for each of them, before the decays. Warps of
one key head share them: half of them have k on the left, the other half q, of all dims
or, with four warps, of half of them. What they get goes through shared memory once.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit, reinterpreted
from jaxkern.triton.delta_rule.gated_delta_rule.block_inverse import (
    number,
    sums_layout,
    zero_block,
)
from jaxkern.triton.delta_rule.gated_delta_rule.block_products import (
    subtract_product_of_words,
)
from jaxkern.triton.delta_rule.gated_delta_rule.warp_chunks import block_of_words
from jaxkern.triton.quant.fragments import barrier


@constexpr_function
def shares_layout(parts):
    """Part of the dims; keys or queries; 16 rows of 16 words, 16 bytes a lane."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [parts, 2, 1, 1], [3, 2, 1, 0])


@gluon_jit
def load_share(
    rows, ROW: gl.constexpr, STEP: gl.constexpr, LEFT: gl.constexpr, P: gl.constexpr
):
    """As load_words of warp_chunks.py, on the left of keys or queries by the warp."""
    PARTS: gl.constexpr = P.parts
    L: gl.constexpr = shares_layout(PARTS)
    if PARTS == 1:
        rows = rows.slice(STEP // 2, 1, 0)
    rows = rows.slice(16 * ROW, 16, 2).slice(STEP % 2 * 16, 16, 3)
    if LEFT:
        words = rows.load(L)
    else:
        words = rows.slice(0, 1, 1).load(L)
        each = gl.zeros([PARTS, 2, 16, 16], gl.int32, L)
        words, _ = gl.broadcast(words, each)
    return block_of_words(words, P.warps)


@gluon_jit
def shared_products(room, DTYPE: gl.constexpr, P: gl.constexpr):
    """Leaves blocks of -k k^T and -q k^T in shared memory, in parts."""
    W: gl.constexpr = P.warps
    STEPS: gl.constexpr = P.steps // P.parts
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [3, 2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rows = reinterpreted(room, gl.int32, [P.tall, 2, 64, 32], WORDS)
    sums = (zero_block(W),) * 10
    for step in gl.static_range(STEPS):
        left, right, more = (), (), ()
        for i in gl.static_range(4):
            left += (load_share(rows, i, step, True, P),)
            right += (load_share(rows, i, step, False, P),)
        for i in gl.static_range(4):
            for j in gl.static_range(i + 1):
                before = sums[number(i, j)]
                after = subtract_product_of_words(left[i], right[j], before, DTYPE)
                more += (after,)
        sums = more
    found = gl.allocate_shared_memory(gl.float32, [10, W, 16, 16], PLAIN)
    for n in gl.static_range(10):
        found.index(n).store(sums[n])
    barrier()
    return found


@gluon_jit
def shared_block(found, NUMBER: gl.constexpr, WHICH: gl.constexpr, P: gl.constexpr):
    """A block of -k k^T, or of -q k^T, the second WHICH."""
    W: gl.constexpr = P.warps
    PARTS: gl.constexpr = P.parts
    total = zero_block(W)
    for part in gl.static_range(PARTS):
        one = found.index(NUMBER).slice(2 * part + WHICH, 1, 0)
        one, _ = gl.broadcast(one.load(sums_layout(W)), total)
        total += one
    return total
