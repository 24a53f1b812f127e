"""chunk_matrices for compute capability 9.0: a warp has the chunk of a value head.

A chunk's matrices are blocks of 16 x 16, those on and below the diagonal, in registers
of one warp. From the sums of keys to the last product no number leaves its lane
(block_products.py): warps wait for their copies, not for one another. T comes first and
stays, turned; of P there is a row of blocks at a time.
"""

from jaxkern.gpu.triton_call import async_copy, gl, gluon_jit
from jaxkern.triton.delta_rule.gated_delta_rule.block_inverse import (
    number,
    places,
    sums_layout,
    unit_lower_inverse,
    zero_block,
)
from jaxkern.triton.delta_rule.gated_delta_rule.block_products import (
    negative_product,
    subtract_product,
    subtract_product_of_words,
)
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_ends import store_ends
from jaxkern.triton.delta_rule.gated_delta_rule.warp_chunks import (
    chunk_vectors,
    copy_heads,
    in_words,
    load_gates,
    load_words,
    of_columns,
    of_row,
    of_rows,
    store_lower_row,
)
from jaxkern.triton.quant.fragments import barrier


@gluon_jit
def decayed(sums, factor, vectors, ROW: gl.constexpr, DIAGONAL: gl.constexpr):
    """Blocks (ROW, 0) to (ROW, ROW) times `factor` and, where seen, the decay between.

    The exponential is one of two products up to the token before the block's first
    and from there on, neither above 1, but for the block on the diagonal.
    """
    W: gl.constexpr = vectors.shape[1]
    _, row, column = places(W, 16, 16, sums_layout(W))
    later = of_rows(vectors, 0, ROW)
    blocks = ()
    if ROW > 0:
        start = of_row(vectors, 0, 16 * ROW - 1)
        since = factor * gl.exp2(later - start)
        for j in gl.static_range(ROW):
            before = gl.exp2(start - of_columns(vectors, 0, j))
            blocks += (sums[j] * since * before,)
    between = gl.exp2(gl.minimum(later - of_columns(vectors, 0, ROW), 0.0))
    seen = row >= column if DIAGONAL else row > column
    blocks += (gl.where(seen, sums[ROW] * factor * between, 0.0),)
    return blocks


@gluon_jit
def negative_gram(keys, DTYPE: gl.constexpr, P: gl.constexpr):
    """Blocks of -k k^T."""
    STEPS: gl.constexpr = P.steps
    sums = (zero_block(P.warps),) * 10
    for step in gl.static_range(STEPS):
        rows, more = (), ()
        for j in gl.static_range(4):
            rows += (load_words(keys, j, step, P),)
        for i in gl.static_range(4):
            for j in gl.static_range(i + 1):
                before = sums[number(i, j)]
                before = subtract_product_of_words(rows[i], rows[j], before, DTYPE)
                more += (before,)
        sums = more
    return sums


@gluon_jit
def row_of_scores(
    queries, keys, vectors, ROW: gl.constexpr, DTYPE: gl.constexpr, P: gl.constexpr
):
    """Blocks (ROW, j) of -P."""
    STEPS: gl.constexpr = P.steps
    sums = (zero_block(P.warps),) * (ROW + 1)
    for step in gl.static_range(STEPS):
        row, more = load_words(queries, ROW, step, P), ()
        for j in gl.static_range(ROW + 1):
            column = load_words(keys, j, step, P)
            more += (subtract_product_of_words(row, column, sums[j], DTYPE),)
        sums = more
    return decayed(sums, P.scale, vectors, ROW, True)


@gluon_jit
def row_of(blocks, ROW: gl.constexpr):
    row = ()
    for j in gl.static_range(ROW + 1):
        row += (blocks[number(ROW, j)],)
    return row


@gluon_jit
def negative_a(sums, vectors):
    """Blocks of -A."""
    a = ()
    for i in gl.static_range(4):
        a = a + decayed(row_of(sums, i), of_rows(vectors, 1, i), vectors, i, False)
    return a


@gluon_jit
def row_of_product(row, turned, ROW: gl.constexpr):
    """Blocks (ROW, j) of P T, of those of -P."""
    results = ()
    for j in gl.static_range(ROW + 1):
        result = negative_product(row[ROW], turned[number(ROW, j)])
        for m in gl.static_range(j, ROW):
            result = subtract_product(row[m], turned[number(m, j)], result)
        results += (result,)
    return results


@gluon_jit
def matrices_of_chunk(operands, results, first, chunk, P: gl.constexpr):
    """Of P.warps value heads, from number `first` of all sequences on."""
    query_ptr, key_ptr, g_ptr, beta_ptr = operands
    matrices_ptr, vectors_ptr, ends_ptr = results
    DTYPE: gl.constexpr = matrices_ptr.dtype.element_ty
    b, head = (first // P.heads).to(gl.int64), first % P.heads
    left = P.tokens - chunk * 64
    token = b * P.tokens + chunk * 64
    place = first.to(gl.int64) * P.chunks + chunk
    keys = copy_heads(key_ptr + token * P.row, head, left, P)
    queries = copy_heads(query_ptr + token * P.row, head, left, P)
    gates = token * P.heads + head
    g, beta = load_gates(g_ptr + gates, left, P), load_gates(beta_ptr + gates, left, P)
    vectors = chunk_vectors(g, beta, vectors_ptr + place * (4 * 64), P)
    async_copy.wait_group(0)
    barrier()
    words = in_words(keys)
    x, turned = unit_lower_inverse(negative_a(negative_gram(words, DTYPE, P), vectors))
    matrices_ptr += place * P.matrices
    for i in gl.static_range(4):
        store_lower_row(matrices_ptr, row_of(x, i), i, 0, P)
    for i in gl.static_range(4):
        row = row_of_scores(in_words(queries), words, vectors, i, DTYPE, P)
        row = row_of_product(row, turned, i)
        store_lower_row(matrices_ptr, row, i, 1, P)
    if ends_ptr is not None:
        store_ends(ends_ptr + place * (P.h * 64), keys, vectors, turned, P)


@gluon_jit
def warp_chunk_matrices_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    beta_ptr,
    matrices_ptr,
    vectors_ptr,
    ends_ptr,
    P: gl.constexpr,
):
    matrices_of_chunk(
        (query_ptr, key_ptr, g_ptr, beta_ptr),
        (matrices_ptr, vectors_ptr, ends_ptr),
        gl.program_id(0) * P.warps,
        gl.program_id(1),
        P,
    )
