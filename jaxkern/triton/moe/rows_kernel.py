"""Rows times the weight of their group: y = x w[group]^T, and dx = dy w[group]."""

from jaxkern.gpu.triton_call import jit, tl


@jit
def place(index, rows, COLUMNS: tl.constexpr, BESIDE: tl.constexpr):
    """(row, column) of a tile: strips of BESIDE columns, down each of them.

    The programs that run at once then share their rows and their columns in the cache.
    """
    strip = index // (rows * BESIDE)
    within = index - strip * rows * BESIDE
    width = tl.minimum(BESIDE, COLUMNS - strip * BESIDE)
    row = within // width
    return row, strip * BESIDE + within - row * width


@jit
def rows_kernel(
    x_ptr,
    w_ptr,
    tiles_ptr,
    count_ptr,
    y_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """w is `[E, N, K]` or `[E, K, N]`, as the strides say."""
    rows = tl.load(count_ptr)
    if tl.program_id(0) >= rows * COLUMNS:
        return
    block, column = place(tl.program_id(0), rows, COLUMNS, BESIDE)
    group = tl.load(tiles_ptr + 4 * block)
    first = tl.load(tiles_ptr + 4 * block + 1)
    stop = tl.load(tiles_ptr + 4 * block + 3)
    row = first + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    present = (row < stop)[:, None]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + depth[None, :]
    # columns beyond n are not stored: any that are there serve
    at_n = n % N if N % BLOCK_N else n
    w_ptrs = w_ptr + tl.minimum(group, E - 1).to(tl.int64) * N * K
    w_ptrs += depth[:, None] * STRIDE_K + at_n[None, :] * STRIDE_N
    # behind the last group there is nothing to sum
    steps = tl.where(group < E, tl.cdiv(K, BLOCK_K), 0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for j in range(steps):
        if K % BLOCK_K:
            left = K - j * BLOCK_K
            x = tl.load(x_ptrs, present & (depth[None, :] < left), 0.0)
            w = tl.load(w_ptrs, depth[:, None] < left, 0.0)
        else:
            x = tl.load(x_ptrs, present, 0.0)
            w = tl.load(w_ptrs)
        acc = tl.dot(x, w, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * STRIDE_K
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), present & (n < N)[None, :])
