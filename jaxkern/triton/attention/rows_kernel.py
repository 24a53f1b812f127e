"""What the gradients of attention need of each row: lse, and delta = rowsum(out dout).

From [b t n], out and dout from [b t n hv], each read once; to [b n t], padded, so that
the other kernels read the rows of a head as vectors.
"""

from jaxkern.triton.attention.head_rows import load_rows
from jaxkern.triton.triton_call import jit, tl


@jit
def flash_attention_bwd_rows_kernel(
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    T: tl.constexpr,
    PADDED_T: tl.constexpr,
    N: tl.constexpr,
    HV: tl.constexpr,
    PADDED_HV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """rowsum(out dout) - dlse; log2 e lse, or inf where p is to be 0. Both [b n t]."""
    row = tl.program_id(0) * ROWS
    n = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = (batch * T + row) * N + n
    out = load_rows(out_ptr + first * HV, T - row, N * HV, HV, ROWS, PADDED_HV, True)
    dout = load_rows(dout_ptr + first * HV, T - row, N * HV, HV, ROWS, PADDED_HV, True)
    r = tl.arange(0, ROWS)
    inside = r < T - row
    lse = tl.load(lse_ptr + first + r * N, inside, -float("inf"))
    dlse = tl.load(dlse_ptr + first + r * N, inside, 0.0)
    empty = lse == -float("inf")
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (batch * N + n) * PADDED_T + row + r
    tl.store(delta_ptr + at, delta - tl.where(empty, 0.0, dlse))
    lse2 = tl.where(empty, float("inf"), lse * 1.4426950408889634)
    tl.store(lse2_ptr + at, lse2)
