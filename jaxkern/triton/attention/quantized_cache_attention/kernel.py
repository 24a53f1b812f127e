"""The decode kernel over quantised caches, in Gluon, where layouts are chosen."""

from jaxkern.gpu.triton_call import gl, gluon_jit, libdevice, mma_v2
from jaxkern.triton.attention.quantized_cache_attention.blocks import (
    graded,
    key_block,
    read_scales,
    value_block,
)
from jaxkern.triton.attention.quantized_cache_attention.copies import (
    copy_blocks,
    first_copies,
    in_place,
    seen_keys,
    shared_address,
    use_shared,
    wait_text,
    warp_number,
)
from jaxkern.triton.attention.quantized_cache_attention.layouts import (
    dims_of_key_lane,
    dims_of_value_lane,
    out_layout,
    query_layout,
    scores_layout,
)
from jaxkern.triton.attention.quantized_cache_attention.rows import (
    both_parts,
    hadamard_product,
    merged_shares,
    power_of_2,
    query_columns,
    shrunk,
    split_columns,
    weights_by_column,
    with_sink,
)
from jaxkern.triton.attention.quantized_cache_attention.tables import (
    table_in_shared,
    table_numbers,
)


@gluon_jit
def quantized_decode_kernel(
    query_ptr,
    key_ptr,
    key_scales_ptr,
    value_ptr,
    value_scales_ptr,
    key_table_ptr,
    value_table_ptr,
    key_signs_ptr,
    value_signs_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """out = softmax(scale q keys^T) values, of P.rows rows of P.heads key heads each.

    Rows are queries times the heads that share a key head. Of SPLITS programs each has
    P.shares shares of the tokens, and each warp one of them for one head. As
    decode_attention_kernel: normalised sums and base-2 log-sum-exps, or the result.

    In three stages: all that is read once becomes operands of the products, blocks of
    keys and values already on their way (`load_queries`, `query_operand`); each warp
    walks over its blocks (`attend_tokens`); sums are normalised, rotated back, merged
    with those of the head's other warps and written (`finished`, `write_rows`).
    """
    program = gl.program_id(0)
    group = program % (P.key_heads // P.heads)
    program //= P.key_heads // P.heads
    tile = program % P.tiles
    program //= P.tiles
    split = program % SPLITS
    b = (program // SPLITS).to(gl.int64)
    length = None
    offset = None
    if kv_lengths_ptr is not None:
        length = gl.load(kv_lengths_ptr + b).to(gl.int64)
    if q_offset_ptr is not None:
        offset = gl.load(q_offset_ptr + b).to(gl.int64)
    # all that is read once is on its way before the length is here
    program = in_place("bar.warp.sync 0xffffffff;", program)
    q, dim = load_queries(query_ptr, b, tile, group, P)
    key_entry = None
    value_entry = None
    key_signs = None
    value_signs = None
    if key_table_ptr is not None:
        key_entry = table_entries(key_table_ptr, P.key_entries)
    if value_table_ptr is not None:
        value_entry = table_entries(value_table_ptr, P.value_entries)
    if key_signs_ptr is not None:
        key_signs = gl.load(key_signs_ptr + dim, dim < P.keys.dims, 0.0)
    out_dim = dims_of_results(P)
    if value_signs_ptr is not None:
        value_signs = gl.load(value_signs_ptr + out_dim, out_dim < P.values.dims, 0.0)
    program = in_place("bar.warp.sync 0xffffffff;", program)
    # the keys that some row sees: first ... end - 1; a share has every so many blocks,
    # and those of a program lie far apart, so that not one program has all longer ones
    first, end, position = seen_keys(
        length, offset, P.tokens, P.queries, P.causal, P.window, P.FAR
    )
    # the remainder tells the compiler a range, which saves 40 registers
    share = (split + warp_number(program) // P.heads * SPLITS) % (SPLITS * P.shares)
    begin = first // 8 * 8 + share * P.block
    before = b * (P.tokens * P.key_heads)

    # blocks are on their way while queries are split and the table is written
    memory = gl.allocate_shared_memory(
        gl.int32, [P.shared // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    use_shared(memory)
    mine = shared_address(program, P.region) + max(P.key_entries, P.value_entries) * 256
    where = (before, begin, first, end, group)
    copies = started_copies(
        key_ptr, key_scales_ptr, value_ptr, value_scales_ptr, mine, where, P, SPLITS
    )
    tables = tables_in_shared(program, key_entry, value_entry, P)
    q, unit = query_operand(q, key_signs, P)

    seen = (begin, first, end, position)
    acc, top, total, largest = attend_tokens(
        q, unit, tables, copies, mine, tile, seen, P, SPLITS
    )

    out, lse = finished(acc, top, total, largest, value_signs, mine, P)
    memory._keep_alive()
    to = (b, tile, group, split)
    write_rows(out_ptr, lse_ptr, sinks_ptr, out, lse, out_dim, to, P, SPLITS)


# The first stage: what is read once.


@gluon_jit
def load_queries(query_ptr, b, tile, group, P: gl.constexpr):
    """Queries [warps, rows, dims], and the numbers of their dims."""
    W: gl.constexpr = P.warps
    ROWS: gl.constexpr = P.rows
    H: gl.constexpr = P.keys.room
    DIMS: gl.constexpr = P.keys.dims
    T: gl.constexpr = P.queries
    G: gl.constexpr = P.group
    QUERIES: gl.constexpr = query_layout(W, ROWS, H, dims_of_key_lane(P))
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, QUERIES)))
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, QUERIES)))
    dim = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, QUERIES)))
    head = group * P.heads + warp % P.heads
    row = (b * T + r // G) * (P.key_heads * G) + r % G
    row = gl.expand_dims(row, 0) + gl.expand_dims(head * G, 1)
    at = row[:, :, None] * DIMS + dim[None, None, :]
    present = (r < T * G)[None, :, None] & (dim < DIMS)[None, None, :]
    return gl.load(query_ptr + at, present, 0.0), dim


@gluon_jit
def table_entries(ptr, ENTRIES: gl.constexpr):
    """Those that a lane writes."""
    return gl.load(ptr + table_numbers(ENTRIES) % ENTRIES)


@gluon_jit
def dims_of_results(P: gl.constexpr):
    """The numbers of the dims of results."""
    HV: gl.constexpr = P.values.room
    OUT: gl.constexpr = out_layout(P.warps, P.rows, HV, dims_of_value_lane(P))
    return gl.arange(0, HV, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))


@gluon_jit
def started_copies(
    key_ptr,
    key_scales_ptr,
    value_ptr,
    value_scales_ptr,
    mine,
    where,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """The first blocks on their way; what `copy_blocks` goes on with."""
    _, begin, _, end, _ = where
    copies = (
        first_copies(key_ptr, mine, where, P, 0, False),
        first_copies(key_ptr, mine, where, P, 1, False),
        first_copies(key_scales_ptr, mine, where, P, 2, False),
        first_copies(value_ptr, mine, where, P, 3, True),
        first_copies(value_ptr, mine, where, P, 4, True),
        first_copies(value_scales_ptr, mine, where, P, 5, False),
    )
    # a branch, or the assembler would do other work before it
    if begin < end:
        for i in gl.static_range(P.stages - 1):
            copies = copy_blocks(copies, i * P.at.end, P, SPLITS)
    return copies


@gluon_jit
def tables_in_shared(any, key_entry, value_entry, P: gl.constexpr):
    """Where the tables of keys and of values begin; those of both may be one."""
    key_table = any
    value_table = any
    if key_entry is not None:
        key_table = table_in_shared(any, key_entry, P.key_entries, 0)
        value_table = key_table
    if value_entry is not None:
        value_table = table_in_shared(any, value_entry, P.value_entries, 128)
    return key_table, value_table


@gluon_jit
def query_operand(q, signs, P: gl.constexpr):
    """q as the second operand of scores [warps, dims, 2 rows], and a row's unit.

    Of float16 levels a row is scaled to P.UNIT at most, which its unit takes back.
    """
    W: gl.constexpr = P.warps
    ROWS: gl.constexpr = P.rows
    H: gl.constexpr = P.keys.room
    RUN: gl.constexpr = dims_of_key_lane(P)
    QUERIES: gl.constexpr = q.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, scores_layout(W), 2)
    q = q.to(gl.float32)
    if signs is not None:
        q = q * signs[None, None, :]
        q = hadamard_product(q, P.keys.dims, RUN // 2, (4, 1, 2))
    unit = gl.full([W, ROWS], P.scale, gl.float32, gl.SliceLayout(2, QUERIES))
    if P.key_type == gl.float16:
        largest = gl.max(gl.abs(q), 2)
        largest = gl.where(largest == 0.0, 1.0, largest)
        q = q * gl.expand_dims(P.UNIT / largest, 2)
        unit = largest * (P.scale / P.UNIT)
    if P.softcap is None:
        unit = unit * P.LOG2E
    q = query_columns(q, RUN, P.key_type)
    if P.keys.form.width == 4 and P.keys.form.together == 0:
        q = gl.reshape(q, [W, 2 * ROWS, H // 8, 2, 4])
        q = gl.permute(q, (0, 1, 2, 4, 3))
    q = gl.reshape(q, [W, 2 * ROWS, H // (4 * RUN), 4, RUN // 2, 2])
    q = gl.reshape(gl.permute(q, (0, 2, 4, 3, 5, 1)), [W, H, 2 * ROWS])
    return gl.convert_layout(q, RIGHT, assert_trivial=True), unit


# The second stage: a warp's blocks.


@gluon_jit
def attend_tokens(
    q,
    unit,
    tables,
    copies,
    mine,
    tile,
    seen,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Each warp over its blocks of keys and values.

    Returns:
      sums [warps, dims, columns of rows], then, with the highest score m and t tokens,
      m [warps, rows], sum_t 2^(z - m) [warps, rows] and the largest scale of values
      [warps], to which the sums are relative.
    """
    W: gl.constexpr = P.warps
    ROWS: gl.constexpr = P.rows
    BLOCK: gl.constexpr = P.block
    STEP: gl.constexpr = SPLITS * P.shares * BLOCK
    HV: gl.constexpr = P.values.room
    LAST: gl.constexpr = (P.stages - 1) * P.at.end
    PRODUCT: gl.constexpr = scores_layout(W)
    key_table, value_table = tables
    begin, first, end, position = seen
    none = gl.zeros([W, BLOCK, 2 * ROWS], gl.float32, PRODUCT)
    zeros = both_parts(none, ROWS)
    SCORES: gl.constexpr = zeros.type.layout
    STATE: gl.constexpr = gl.SliceLayout(1, SCORES)
    TOKENS: gl.constexpr = gl.SliceLayout(2, SCORES)
    unit = gl.expand_dims(gl.convert_layout(unit, STATE), 1)
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, STATE))
    p_at = (position + r // P.group)[None, None, :]
    token = gl.zeros([W, BLOCK], gl.int32, TOKENS)
    token += gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, TOKENS)), 0)
    largest = gl.zeros([W], gl.float32, gl.SliceLayout(1, TOKENS))
    start = begin
    top = gl.full([W, ROWS], -float("inf"), gl.float32, STATE)
    total = gl.zeros([W, ROWS], gl.float32, STATE)
    acc = gl.zeros([W, HV, max(ROWS, 8)], gl.float32, PRODUCT)
    ready = gl.to_tensor(0)
    free = gl.to_tensor(LAST)
    for _ in range(begin, end, STEP):
        # the slot that was read last is free once all lanes are here
        ready = in_place(wait_text(P.stages - 2), ready)
        copies = copy_blocks(copies, free, P, SPLITS)
        here = mine + ready
        z = scores(q, unit, here, key_table, none, token, P)
        visible = seen_tokens(token, start, first, end, p_at, P)
        start += STEP
        z = gl.where(visible, z, -float("inf"))
        higher = gl.maximum(top, gl.max(z, 1))
        base = gl.where(higher == -float("inf"), 0.0, higher)
        p = power_of_2(z - gl.expand_dims(base, 1))
        shrink = power_of_2(top - base)
        total = total * shrink + gl.sum(p, 1)
        top = higher
        acc, largest = add_values(acc, p, shrink, largest, here, value_table, token, P)
        free = ready
        ready = gl.where(ready == LAST, 0, ready + P.at.end)
    return acc, top, total, largest


@gluon_jit
def scores(q, unit, here, table, none, token, P: gl.constexpr):
    """z [warps, tokens, rows] = unit q keys^T, with their scales, in base 2."""
    W: gl.constexpr = P.warps
    BLOCK: gl.constexpr = P.block
    H: gl.constexpr = P.keys.room
    RUN: gl.constexpr = dims_of_key_lane(P)
    GROUPS: gl.constexpr = P.keys.groups
    TOKENS: gl.constexpr = token.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, scores_layout(W), 2)
    y = key_block(here, table, P)
    if GROUPS > 1:
        y = gl.reshape(y, [W, BLOCK, GROUPS, H // GROUPS])
        y, scale = graded(y, here + P.at.key_scales)
        scale = gl.convert_layout(scale, TOKENS)
    if GROUPS == 1:
        scale = read_scales(here + P.at.key_scales, BLOCK, TOKENS)
    y = gl.reshape(y, [W, BLOCK, H // (4 * RUN), 4, RUN // 2, 2])
    y = gl.reshape(gl.permute(y, (0, 1, 2, 4, 3, 5)), [W, BLOCK, H])
    y = gl.convert_layout(y, LEFT, assert_trivial=True)
    z = both_parts(mma_v2(y, q, none), P.rows) * unit
    if GROUPS > 0:
        z = z * gl.expand_dims(scale, 2)
    if P.softcap is not None:
        z = P.softcap * P.LOG2E * libdevice.tanh(z / P.softcap)
    return z


@gluon_jit
def seen_tokens(token, start, first, end, p_at, P: gl.constexpr):
    """[warps, tokens, rows, or 1 for all]: which of a block's tokens a row sees."""
    inside = token < end - start
    if P.window is not None:
        inside = inside & (token >= first - start)
    visible = gl.expand_dims(inside, 2)
    if P.causal and P.queries > 1:
        visible = visible & (gl.expand_dims(start + token, 2) <= p_at)
    if P.window is not None and P.queries > 1:
        visible = visible & (gl.expand_dims(start + token, 2) > p_at - P.window)
    return visible


@gluon_jit
def add_values(acc, p, shrink, largest, here, table, token, P: gl.constexpr):
    """shrink acc + values^T p, relative to the largest scale so far; that scale too."""
    W: gl.constexpr = P.warps
    BLOCK: gl.constexpr = P.block
    HV: gl.constexpr = P.values.room
    RUN: gl.constexpr = dims_of_value_lane(P)
    GROUPS: gl.constexpr = P.values.groups
    TOKENS: gl.constexpr = token.type.layout
    STATE: gl.constexpr = shrink.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, scores_layout(W), 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, scores_layout(W), 2)
    y = value_block(here, table, P)
    if GROUPS > 1:
        y = gl.reshape(y, [W, BLOCK, GROUPS, HV // GROUPS])
        y, scale = graded(y, here + P.at.value_scales)
        scale = gl.convert_layout(scale, TOKENS)
    if GROUPS == 1:
        scale = read_scales(here + P.at.value_scales, BLOCK, TOKENS)
    if GROUPS > 0:
        larger = gl.maximum(largest, gl.max(gl.abs(scale), 1))
        one_over = gl.where(larger < 1e-37, 0.0, 1.0 / larger)
        p = p * gl.expand_dims(scale * gl.expand_dims(one_over * P.WEIGHT, 1), 2)
        rest = gl.convert_layout(largest * one_over, gl.SliceLayout(1, STATE))
        shrink = shrink * gl.expand_dims(rest, 1)
        largest = larger
    p = weights_by_column(p, P.rows, P.value_type, RIGHT)
    y = gl.reshape(y, [W, BLOCK, HV // (8 * RUN), 8, RUN])
    y = gl.reshape(gl.permute(y, (0, 2, 4, 3, 1)), [W, HV, BLOCK])
    y = gl.convert_layout(y, LEFT, assert_trivial=True)
    return mma_v2(y, p, shrunk(acc, shrink, P.rows)), largest


# The third stage: results.


@gluon_jit
def finished(acc, top, total, largest, signs, mine, P: gl.constexpr):
    """Normalised sums [warps, rows, dims] and base-2 log-sum-exps [warps, rows].

    Of several shares the first warps of a program have those of all.
    """
    W: gl.constexpr = P.warps
    ROWS: gl.constexpr = P.rows
    HV: gl.constexpr = P.values.room
    RUN: gl.constexpr = dims_of_value_lane(P)
    OUT: gl.constexpr = out_layout(W, ROWS, HV, RUN)
    acc, _ = split_columns(acc, ROWS)
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top = gl.convert_layout(top, SUMS)
    total = gl.convert_layout(total, SUMS)
    if P.values.groups > 0:
        unit = gl.convert_layout(largest, gl.SliceLayout(1, SUMS)) / P.WEIGHT
        acc = acc * gl.expand_dims(gl.expand_dims(unit, 1), 1)
    seen = total != 0.0
    total = gl.where(seen, total, 1.0)
    lse = gl.where(seen, top + gl.log2(total), -float("inf"))
    # a lane has neighbouring dims and writes them together
    out = acc / gl.expand_dims(total, 1)
    out = gl.reshape(out, [W, HV // (8 * RUN), RUN, 8, ROWS])
    out = gl.reshape(gl.permute(out, (0, 4, 1, 3, 2)), [W, ROWS, HV])
    out = gl.convert_layout(out, OUT)
    if signs is not None:
        out = hadamard_product(out, P.values.dims, RUN, (4, 8, 16))
        out = out * signs[None, None, :]
    lse = gl.convert_layout(lse, gl.SliceLayout(2, OUT))
    if P.shares > 1:
        out, lse = merged_shares(out, lse, mine, RUN, P.heads, P.shares, P.region)
    return out, lse


@gluon_jit
def write_rows(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    out,
    lse,
    out_dim,
    to,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """The rows of the first P.heads warps: the result, or one split's part of it."""
    T: gl.constexpr = P.queries
    G: gl.constexpr = P.group
    VALUE_DIMS: gl.constexpr = P.values.dims
    LAST: gl.constexpr = lse.type.layout
    b, tile, group, split = to
    warp = gl.arange(0, P.warps, gl.SliceLayout(1, LAST))
    head = group * P.heads + warp % P.heads
    r = tile * P.rows + gl.arange(0, P.rows, gl.SliceLayout(0, LAST))
    of_head = gl.expand_dims(head * G, 1) + gl.expand_dims(r % G, 0)
    row = gl.expand_dims((b * T + r // G) * (P.key_heads * G), 0) + of_head
    present = gl.expand_dims(r < T * G, 0) & gl.expand_dims(warp < P.heads, 1)
    if SPLITS == 1:
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + of_head, present, 0.0).to(gl.float32) * P.LOG2E
            out, lse = with_sink(out, lse, sink)
        lse = lse / P.LOG2E
    seen = lse != -float("inf")
    at = row * SPLITS + split
    gl.store(lse_ptr + at, lse, present)
    # the merge reads no share without keys
    if SPLITS > 1:
        present = present & seen
    gl.store(
        out_ptr + (at[:, :, None] * VALUE_DIMS + out_dim[None, None, :]),
        out.to(out_ptr.dtype.element_ty),
        present[:, :, None] & (out_dim < VALUE_DIMS)[None, None, :],
    )
