"""ends = k^T to_end T of chunk_matrices, by warps with a head each."""

from jaxkern.gpu.triton_call import gl, gluon_jit, mma_v2
from jaxkern.triton.delta_rule.gated_delta_rule.block_inverse import (
    number,
    sums_layout,
    zero_block,
)
from jaxkern.triton.delta_rule.gated_delta_rule.warp_chunks import (
    of_columns,
    store_row,
)


@gluon_jit
def right_of(x):
    """Of 16 bits, turned, as right operand."""
    L: gl.constexpr = gl.DotOperandLayout(1, sums_layout(x.shape[0]), 2)
    return gl.convert_layout(gl.permute(x, [0, 2, 1]), L, assert_trivial=True)


@gluon_jit
def in_two_parts(vectors, turned, DTYPE: gl.constexpr):
    """Blocks of to_end T as right operands: 16 bits, and the rest in 16 bits."""
    high, low = (), ()
    for i in gl.static_range(4):
        to_end = of_columns(vectors, 2, i)
        for j in gl.static_range(i + 1):
            late = to_end * turned[number(i, j)]
            first = late.to(DTYPE)
            high += (right_of(first),)
            low += (right_of((late - first.to(gl.float32)).to(DTYPE)),)
    return high, low


@gluon_jit
def left_of_keys(keys, W: gl.constexpr):
    """16 x 16 numbers as left operand, of the one key head or of each warp's."""
    L: gl.constexpr = gl.DotOperandLayout(0, sums_layout(W), 2)
    left = keys.permute([0, 2, 1]).load(L)
    left, _ = gl.broadcast(left, gl.zeros([W, 16, 16], keys.dtype, L))
    return left


@gluon_jit
def store_ends(ends_ptr, keys, vectors, turned, P: gl.constexpr):
    """k^T to_end T, turned, from keys in shared memory."""
    TALL: gl.constexpr = P.tall
    high, low = in_two_parts(vectors, turned, keys.dtype)
    for part in gl.static_range(TALL):
        for m in gl.static_range(4):
            sums = (zero_block(P.warps),) * 4
            columns = keys.index(part).slice(16 * m, 16, 2)
            for i in gl.static_range(4):
                key = left_of_keys(columns.slice(16 * i, 16, 1), P.warps)
                more = ()
                for j in gl.static_range(4):
                    total = sums[j]
                    if j <= i:
                        total = mma_v2(key, high[number(i, j)], total)
                        total = mma_v2(key, low[number(i, j)], total)
                    more += (total,)
                sums = more
            to = ends_ptr + (64 * part + 16 * m) * 64
            store_row(to, sums, P.h - 64 * part - 16 * m, P.chunks * P.h * 64)
