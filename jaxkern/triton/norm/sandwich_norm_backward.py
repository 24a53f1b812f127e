"""The backward kernel of two norms with a sum between them.

Each norm needs a mean along the row. A short row lies in registers; a long one is read
once for the means and again, mostly from the caches, in chunks whose sums for the
vectors stay in registers. Where they do not fit, a kernel of its own finds the means,
and programs walk down stripes of columns.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from collections.abc import Sequence

import jax

from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_tiles import (
    backward_sizes,
    factor,
    means_sizes,
    partial_sums,
    per_row,
    prefetch_rows,
    read_each,
    read_scale,
    summed,
    write,
)
from jaxkern.triton.norm.sandwich_norm_means import (
    means_of,
    normed_and_summed,
    products_along,
    rstd_of,
    sandwich_norm_means_kernel,
    through_readers,
)
from jaxkern.triton.norm.split_rows import await_others, begin, mean_of, own_stripe

LONGEST = 8192  # columns of a row that stays in registers, where there is one norm
LONGEST_OF_TWO = 4096  # and where a norm or a residual stands before it
MOST, MOST_OF_TWO = 32768, 24576  # elements of the sums that stay there


@jit
def of_both_norms(first_ptr, second_ptr, rows, present):
    """A number of each row for the first norm and for the second, [ROWS, 1]."""
    return rstd_of(first_ptr, rows, present), rstd_of(second_ptr, rows, present)


@jit
def no_sums(CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(dweight, dscale, dnexts) before the first row, a chunk of columns each."""
    dweight = ()
    dscale = ()
    dnexts = ()
    for _ in tl.static_range(CHUNKS):
        zeros = tl.zeros([ROWS, BLOCK], tl.float32)
        dweight = dweight + (zeros,)
        dscale = dscale + (zeros,)
        dnexts = dnexts + ((zeros, zeros, zeros),)
    return dweight, dscale, dnexts


@jit
def write_sums(
    ptrs,
    sums,
    program,
    lanes,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The program's part of the gradients of the vectors."""
    dweight, dscale, dnexts = sums
    start = program.to(tl.int64) * D
    for k in tl.static_range(CHUNKS):
        columns = k * BLOCK + lanes
        inside = columns < D
        at = start + columns
        write(ptrs[0], at, tl.sum(dweight[k], 0, keep_dims=True), inside)
        write(ptrs[1], at, tl.sum(dscale[k], 0, keep_dims=True), inside)
        for i in tl.static_range(3):
            total = tl.sum(dnexts[k][i], 0, keep_dims=True)
            write(ptrs[2 + i], at, total, inside)


@jit
def through_total(
    now,
    total,
    dscale,
    dtotal_ptr,
    scale_ptr,
    columns,
    inside,
    SCALE_STRIDE: tl.constexpr,
):
    """What the scaled sum's gradient leaves: the sum's, and sums for the scale."""
    dsum = tl.zeros(total.shape, tl.float32)
    if dtotal_ptr is not None:
        dsum = now[2].to(tl.float32)
        dscale = dscale + dsum * total
        dsum *= read_scale(scale_ptr, columns, inside, SCALE_STRIDE)
    return dsum, dscale


@jit
def rest_of(sums, FIRST: tl.constexpr):
    """Those of three from FIRST on."""
    rest = ()
    for i in tl.static_range(FIRST, 3):
        rest = rest + (sums[i],)
    return rest


@jit
def sandwich_norm_bwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    next1_ptr,
    next2_ptr,
    next3_ptr,
    rstd_ptr,
    next_rstd_ptr,
    dy1_ptr,
    dy2_ptr,
    dy3_ptr,
    dtotal_ptr,
    along_ptr,
    next_along_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dscale_ptr,
    dnext1_ptr,
    dnext2_ptr,
    dnext3_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
):
    """Every PROGRAMS-th block of ROWS rows, CHUNKS of BLOCK columns each.

    With dsum the gradient of the sum and <> the mean along a row:

        dresidual = dsum,  dx = rstd (dsum weight - xhat <dsum weight xhat>)

    Gradients of the vectors are sums over rows, a part for each program.
    """
    memory = begin(CLUSTER, EXCHANGE)
    ptrs = (x_ptr, residual_ptr, dtotal_ptr, dy1_ptr, dy2_ptr, dy3_ptr)
    next_ptrs = (next1_ptr, next2_ptr, next3_ptr)
    vector_ptrs = (dweight_ptr, dscale_ptr, dnext1_ptr, dnext2_ptr, dnext3_ptr)
    GIVEN: tl.constexpr = along_ptr is not None or next_along_ptr is not None
    lanes = own_stripe(CLUSTER) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dweight, dscale, dnexts = no_sums(CHUNKS, ROWS, BLOCK)
    await_others(CLUSTER)
    program = tl.program_id(0) // CLUSTER
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(program, num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        present = rows < NUM_ROWS
        start = rows.to(tl.int64) * D
        rstd, next_rstd = of_both_norms(rstd_ptr, next_rstd_ptr, rows, present)
        if CHUNKS > 1:
            by_next, direct, across = products_along(
                ptrs,
                (weight_ptr, scale_ptr),
                next_ptrs,
                start,
                present,
                rstd,
                next_rstd,
                D,
                OFFSET,
                SCALE_STRIDE,
                ROWS,
                BLOCK,
            )
        tiles = read_each(ptrs, 6, start + lanes, present & (lanes < D), False)
        if PREFETCH:
            further = tl.minimum(block + PROGRAMS, NUM_ROWS - 1)
            prefetch_rows(ptrs, 6, further.to(tl.int64), D)
        if CHUNKS > 1:
            along, next_along = means_of(by_next, direct, across, D)
        elif GIVEN:
            along, next_along = of_both_norms(along_ptr, next_along_ptr, rows, present)
        place = 2 * (block // PROGRAMS % 2)
        of_weight = ()
        of_scale = ()
        of_nexts = ()
        for k in tl.static_range(CHUNKS):
            columns = k * BLOCK + lanes
            inside = columns < D
            mask = present & inside
            at = start + columns  # [ROWS, BLOCK]
            now = tiles
            if k + 1 < CHUNKS:
                # ahead of the stores, which loads behind them would wait for
                ahead = columns + BLOCK
                tiles = read_each(ptrs, 6, start + ahead, present & (ahead < D), False)
            # vectors are read each time: held over the loop they would cost registers
            weight = factor(weight_ptr, columns, inside, OFFSET)
            xhat, total = normed_and_summed(now, ptrs, weight, rstd)
            dsum, of_total = through_total(  # ptrs[2] is dtotal_ptr
                now, total, dscale[k], ptrs[2], scale_ptr, columns, inside, SCALE_STRIDE
            )
            of_scale = of_scale + (of_total,)
            of_next = ()
            if dy1_ptr is not None:
                dnormed, dys = through_readers(
                    now, ptrs, next_ptrs, columns, inside, OFFSET
                )
                total *= next_rstd
                for i in tl.static_range(len(dys)):
                    of_next = of_next + (dnexts[k][i] + dys[i] * total,)
                if CHUNKS == 1 and not GIVEN:
                    next_along = mean_of(dnormed * total, memory, place, D, CLUSTER)
                dsum += (dnormed - total * next_along) * next_rstd
            of_nexts = of_nexts + (of_next + rest_of(dnexts[k], len(of_next)),)
            write(dresidual_ptr, at, dsum, mask)
            of_weight = of_weight + (dweight[k] + dsum * xhat,)
            if rstd_ptr is not None:
                dsum *= weight
                if CHUNKS == 1 and not GIVEN:
                    along = mean_of(dsum * xhat, memory, place + 1, D, CLUSTER)
                dsum = (dsum - xhat * along) * rstd
            write(dx_ptr, at, dsum, mask)
        dweight, dscale, dnexts = of_weight, of_scale, of_nexts
    write_sums(vector_ptrs, (dweight, dscale, dnexts), program, lanes, D, CHUNKS, BLOCK)


def sandwich_norm_bwd(
    x: jax.Array,
    residual: jax.Array | None,
    vectors: Sequence[jax.Array | None],
    rstd: jax.Array | None,
    next_rstd: jax.Array | None,
    dys: Sequence[jax.Array],
    dtotal: jax.Array | None,
    *,
    offset: float,
    wanted: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    """Gradients of x, residual and the vectors, where wanted.

    Args:
      vectors: weight, scale and the next weights.
      wanted: for x, residual and each of them.
    """
    count = len(dys)
    vectors = [*vectors, *[None] * (5 - len(vectors))]
    wanted = [*wanted, *[False] * (7 - len(wanted))]
    scale = vectors[1]
    # the sum itself is needed where a norm or a factor stands behind it
    held = residual if count or wanted[3] else None
    names = ("weight", "scale", "next1", "next2", "next3")
    given = {"x_ptr": x, "residual_ptr": held}
    given |= {f"{n}_ptr": v for n, v in zip(names, vectors, strict=True)}
    given |= {"rstd_ptr": rstd, "next_rstd_ptr": next_rstd}
    rest = [*dys, *[None] * (3 - count)]
    given |= {f"dy{i}_ptr": dy for i, dy in enumerate(rest, 1)}
    given |= {"dtotal_ptr": dtotal}
    stride = 0 if scale is None or scale.size == 1 else 1
    options = {"OFFSET": offset, "SCALE_STRIDE": stride}
    read_once = (x, held, dtotal, *dys, *vectors)
    sizes, stripes = backward_sizes(
        x,
        streams=sum(v is not None for v in read_once),
        sums=sum(wanted[2:]),
        elements=LONGEST_OF_TWO,
        longest=LONGEST if rstd is None else LONGEST_OF_TWO,
        most=MOST if rstd is None or next_rstd is None else MOST_OF_TWO,
    )
    means = dict.fromkeys(("along_ptr", "next_along_ptr"))
    if stripes > 1:
        wanted_means = {
            "along_ptr": None if rstd is None else per_row(x),
            "next_along_ptr": None if next_rstd is None else per_row(x),
        }
        found = sparse_call(
            sandwich_norm_means_kernel,
            (num_rows(x),),
            given,
            wanted_means,
            means_sizes(x) | options,
        )
        means = dict(zip(means, found, strict=True))
    targets = [like(x), like(residual)]
    targets += [partial_sums(sizes["PROGRAMS"], x.shape[-1], v) for v in vectors]
    dx, dresidual, *sums = sparse_call(
        sandwich_norm_bwd_kernel,
        (sizes["PROGRAMS"] * sizes["CLUSTER"], stripes),
        given | means,
        {
            f"d{n}_ptr": t if w else None
            for n, t, w in zip(("x", "residual", *names), targets, wanted, strict=True)
        },
        sizes | options,
    )
    if scale is not None and sums[1] is not None and scale.size == 1:
        sums[1] = sums[1].sum(-1, keepdims=True)
    return dx, dresidual, *map(summed, sums, vectors)
