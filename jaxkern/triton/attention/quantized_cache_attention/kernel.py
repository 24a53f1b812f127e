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
    key_run,
    nth,
    out_layout,
    query_layout,
    scores_layout,
    value_run,
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
    T: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    KEY_DIMS: gl.constexpr,
    VALUE_DIMS: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    S: gl.constexpr,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    KEY_TYPE: gl.constexpr,
    VALUE_TYPE: gl.constexpr,
    KEY_GROUPS: gl.constexpr,
    VALUE_GROUPS: gl.constexpr,
    KEY_ENTRIES: gl.constexpr,
    VALUE_ENTRIES: gl.constexpr,
    SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    FAR: gl.constexpr,
    LOG2E: gl.constexpr,
    UNIT: gl.constexpr,
    WEIGHT: gl.constexpr,
    SPLITS: gl.constexpr,
    HEADS: gl.constexpr,
    SHARES: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    AT: gl.constexpr,
    REGION: gl.constexpr,
    SHARED: gl.constexpr,
):
    """SHARES of the shares of tokens, HEADS key heads, ROWS rows of each.

    As decode_attention_kernel: normalised sums and base-2 log-sum-exps, or the result.
    H and HV are KEY_DIMS and VALUE_DIMS with dims of zeros behind them.
    """
    W: gl.constexpr = HEADS * SHARES
    program = gl.program_id(0)
    group = program % (K // HEADS)
    program //= K // HEADS
    tile = program % TILES
    program //= TILES
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
    RUN: gl.constexpr = key_run(H, KEY) * (32 // KEY[0])
    VALUE_RUN: gl.constexpr = value_run(HV, VALUE) * (32 // VALUE[0])
    QUERIES: gl.constexpr = query_layout(W, ROWS, H, RUN)
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, QUERIES)))
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, QUERIES)))
    dim = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, QUERIES)))
    head = group * HEADS + warp % HEADS
    row = (b * T + r // G) * (K * G) + r % G
    row = gl.expand_dims(row, 0) + gl.expand_dims(head * G, 1)
    at = row[:, :, None] * KEY_DIMS + dim[None, None, :]
    present = (r < T * G)[None, :, None] & (dim < KEY_DIMS)[None, None, :]
    q = gl.load(query_ptr + at, present, 0.0)
    if key_table_ptr is not None:
        key_entry = gl.load(key_table_ptr + table_numbers(KEY_ENTRIES) % KEY_ENTRIES)
    if value_table_ptr is not None:
        number = table_numbers(VALUE_ENTRIES) % VALUE_ENTRIES
        value_entry = gl.load(value_table_ptr + number)
    if key_signs_ptr is not None:
        key_signs = gl.load(key_signs_ptr + dim, dim < KEY_DIMS, 0.0)
    OUT: gl.constexpr = out_layout(W, ROWS, HV, VALUE_RUN)
    out_dim = gl.arange(0, HV, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    if value_signs_ptr is not None:
        value_signs = gl.load(value_signs_ptr + out_dim, out_dim < VALUE_DIMS, 0.0)
    program = in_place("bar.warp.sync 0xffffffff;", program)
    # the keys that some row sees: first ... end - 1; a share has every so many blocks,
    # and those of a program lie far apart, so that not one program has all longer ones
    STEP: gl.constexpr = SPLITS * SHARES * BLOCK
    first, end, position = seen_keys(length, offset, S, T, CAUSAL, WINDOW, FAR)
    # the remainder tells the compiler a range, which saves 40 registers
    share = (split + warp_number(program) // HEADS * SPLITS) % (SPLITS * SHARES)
    begin = first // 8 * 8 + share * BLOCK
    PRODUCT: gl.constexpr = scores_layout(W)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    before = b * (S * K)

    # blocks are on their way while queries are split and the table is written
    SKIPS: gl.constexpr = WINDOW is not None
    TABLES: gl.constexpr = max(KEY_ENTRIES, VALUE_ENTRIES) * 256
    SLOT: gl.constexpr = AT[6]
    memory = gl.allocate_shared_memory(
        gl.int32, [SHARED // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    use_shared(memory)
    mine = shared_address(program, REGION) + TABLES
    where = (before, begin, first, end, group)
    copies = (
        first_copies(key_ptr, mine, where, K, HEADS, PARTS, AT, 0, BLOCK, False),
        first_copies(key_ptr, mine, where, K, HEADS, PARTS, AT, 1, BLOCK, False),
        first_copies(key_scales_ptr, mine, where, K, HEADS, PARTS, AT, 2, BLOCK, False),
        first_copies(value_ptr, mine, where, K, HEADS, PARTS, AT, 3, BLOCK, True),
        first_copies(value_ptr, mine, where, K, HEADS, PARTS, AT, 4, BLOCK, True),
        first_copies(
            value_scales_ptr, mine, where, K, HEADS, PARTS, AT, 5, BLOCK, False
        ),
    )
    # a branch, or the assembler would do other work before it
    if begin < end:
        for i in gl.static_range(STAGES - 1):
            copies = copy_blocks(copies, i * SLOT, K, PARTS, BLOCK, STEP, SKIPS)

    key_table = program
    value_table = program
    if key_table_ptr is not None:
        key_table = table_in_shared(program, key_entry, KEY_ENTRIES, 0)
        value_table = key_table
    if value_table_ptr is not None:
        value_table = table_in_shared(program, value_entry, VALUE_ENTRIES, 128)

    q = q.to(gl.float32)
    if key_signs_ptr is not None:
        q = q * key_signs[None, None, :]
        q = hadamard_product(q, KEY_DIMS, RUN // 2, (4, 1, 2))
    unit = gl.full([W, ROWS], SCALE, gl.float32, gl.SliceLayout(2, QUERIES))
    if KEY_TYPE == gl.float16:
        largest = gl.max(gl.abs(q), 2)
        largest = gl.where(largest == 0.0, 1.0, largest)
        q = q * gl.expand_dims(UNIT / largest, 2)
        unit = largest * (SCALE / UNIT)
    if SOFTCAP is None:
        unit = unit * LOG2E
    q = query_columns(q, RUN, KEY_TYPE)
    if KEY[0] == 4 and KEY[2] == 0:
        q = gl.reshape(q, [W, 2 * ROWS, H // 8, 2, 4])
        q = gl.permute(q, (0, 1, 2, 4, 3))
    q = gl.reshape(q, [W, 2 * ROWS, H // (4 * RUN), 4, RUN // 2, 2])
    q = gl.reshape(gl.permute(q, (0, 2, 4, 3, 5, 1)), [W, H, 2 * ROWS])
    q = gl.convert_layout(q, RIGHT, assert_trivial=True)

    none = gl.zeros([W, BLOCK, 2 * ROWS], gl.float32, PRODUCT)
    zeros = both_parts(none, ROWS)
    SCORES: gl.constexpr = zeros.type.layout
    STATE: gl.constexpr = gl.SliceLayout(1, SCORES)
    TOKENS: gl.constexpr = gl.SliceLayout(2, SCORES)
    unit = gl.expand_dims(gl.convert_layout(unit, STATE), 1)
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, STATE))
    p_at = (position + r // G)[None, None, :]
    token = gl.zeros([W, BLOCK], gl.int32, TOKENS)
    token += gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, TOKENS)), 0)
    start = begin
    top = gl.full([W, ROWS], -float("inf"), gl.float32, STATE)
    total = gl.zeros([W, ROWS], gl.float32, STATE)
    largest = gl.zeros([W], gl.float32, gl.SliceLayout(1, TOKENS))
    acc = gl.zeros([W, HV, max(ROWS, 8)], gl.float32, PRODUCT)
    ready = gl.to_tensor(0)
    free = gl.to_tensor((STAGES - 1) * SLOT)
    for _ in range(begin, end, STEP):
        # the slot that was read last is free once all lanes are here
        ready = in_place(wait_text(STAGES - 2), ready)
        copies = copy_blocks(copies, free, K, PARTS, BLOCK, STEP, SKIPS)
        here = mine + ready
        y = key_block(
            here,
            key_table,
            nth(PARTS, 0),
            nth(PARTS, 1),
            AT,
            BLOCK,
            H,
            KEY,
            KEY_TYPE,
        )
        if KEY_GROUPS > 1:
            y = gl.reshape(y, [W, BLOCK, KEY_GROUPS, H // KEY_GROUPS])
            y, key_scale = graded(y, here + AT[2])
            key_scale = gl.convert_layout(key_scale, TOKENS)
        if KEY_GROUPS == 1:
            key_scale = read_scales(here + AT[2], BLOCK, TOKENS)
        y = gl.reshape(y, [W, BLOCK, H // (4 * RUN), 4, RUN // 2, 2])
        y = gl.reshape(gl.permute(y, (0, 1, 2, 4, 3, 5)), [W, BLOCK, H])
        y = gl.convert_layout(y, LEFT, assert_trivial=True)
        z = both_parts(mma_v2(y, q, none), ROWS) * unit
        if KEY_GROUPS > 0:
            z = z * gl.expand_dims(key_scale, 2)
        if SOFTCAP is not None:
            z = SOFTCAP * LOG2E * libdevice.tanh(z / SOFTCAP)
        inside = token < end - start
        if WINDOW is not None:
            inside = inside & (token >= first - start)
        visible = gl.expand_dims(inside, 2)
        if CAUSAL and T > 1:
            visible = visible & (gl.expand_dims(start + token, 2) <= p_at)
        if WINDOW is not None and T > 1:
            visible = visible & (gl.expand_dims(start + token, 2) > p_at - WINDOW)
        start += STEP
        z = gl.where(visible, z, -float("inf"))
        higher = gl.maximum(top, gl.max(z, 1))
        base = gl.where(higher == -float("inf"), 0.0, higher)
        p = power_of_2(z - gl.expand_dims(base, 1))
        shrink = power_of_2(top - base)
        total = total * shrink + gl.sum(p, 1)
        top = higher

        y = value_block(
            here,
            value_table,
            nth(PARTS, 3),
            nth(PARTS, 4),
            AT,
            BLOCK,
            HV,
            VALUE,
            VALUE_TYPE,
        )
        if VALUE_GROUPS > 1:
            y = gl.reshape(y, [W, BLOCK, VALUE_GROUPS, HV // VALUE_GROUPS])
            y, scale = graded(y, here + AT[5])
            scale = gl.convert_layout(scale, TOKENS)
        if VALUE_GROUPS == 1:
            scale = read_scales(here + AT[5], BLOCK, TOKENS)
        if VALUE_GROUPS > 0:
            larger = gl.maximum(largest, gl.max(gl.abs(scale), 1))
            one_over = gl.where(larger < 1e-37, 0.0, 1.0 / larger)
            p = p * gl.expand_dims(scale * gl.expand_dims(one_over * WEIGHT, 1), 2)
            rest = gl.convert_layout(largest * one_over, gl.SliceLayout(1, STATE))
            shrink = shrink * gl.expand_dims(rest, 1)
            largest = larger
        p = weights_by_column(p, ROWS, VALUE_TYPE, RIGHT)
        y = gl.reshape(y, [W, BLOCK, HV // (8 * VALUE_RUN), 8, VALUE_RUN])
        y = gl.reshape(gl.permute(y, (0, 2, 4, 3, 1)), [W, HV, BLOCK])
        y = gl.convert_layout(y, LEFT, assert_trivial=True)
        acc = mma_v2(y, p, shrunk(acc, shrink, ROWS))
        free = ready
        ready = gl.where(ready == (STAGES - 1) * SLOT, 0, ready + SLOT)

    acc, _ = split_columns(acc, ROWS)
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top = gl.convert_layout(top, SUMS)
    total = gl.convert_layout(total, SUMS)
    if VALUE_GROUPS > 0:
        unit = gl.convert_layout(largest, gl.SliceLayout(1, SUMS)) / WEIGHT
        acc = acc * gl.expand_dims(gl.expand_dims(unit, 1), 1)
    seen = total != 0.0
    total = gl.where(seen, total, 1.0)
    lse = gl.where(seen, top + gl.log2(total), -float("inf"))
    # a lane has neighbouring dims and writes them together
    out = acc / gl.expand_dims(total, 1)
    out = gl.reshape(out, [W, HV // (8 * VALUE_RUN), VALUE_RUN, 8, ROWS])
    out = gl.reshape(gl.permute(out, (0, 4, 1, 3, 2)), [W, ROWS, HV])
    out = gl.convert_layout(out, OUT)
    if value_signs_ptr is not None:
        out = hadamard_product(out, VALUE_DIMS, VALUE_RUN, (4, 8, 16))
        out = out * value_signs[None, None, :]
    lse = gl.convert_layout(lse, gl.SliceLayout(2, OUT))
    if SHARES > 1:
        out, lse = merged_shares(out, lse, mine, VALUE_RUN, HEADS, SHARES, REGION)
    memory._keep_alive()

    LAST: gl.constexpr = lse.type.layout
    warp = gl.arange(0, W, gl.SliceLayout(1, LAST))
    head = group * HEADS + warp % HEADS
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, LAST))
    of_head = gl.expand_dims(head * G, 1) + gl.expand_dims(r % G, 0)
    row = gl.expand_dims((b * T + r // G) * (K * G), 0) + of_head
    present = gl.expand_dims(r < T * G, 0) & gl.expand_dims(warp < HEADS, 1)
    if SPLITS == 1:
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + of_head, present, 0.0).to(gl.float32) * LOG2E
            out, lse = with_sink(out, lse, sink)
        lse = lse / LOG2E
    seen = lse != -float("inf")
    to = row * SPLITS + split
    gl.store(lse_ptr + to, lse, present)
    # the merge reads no share without keys
    if SPLITS > 1:
        present = present & seen
    gl.store(
        out_ptr + (to[:, :, None] * VALUE_DIMS + out_dim[None, None, :]),
        out.to(out_ptr.dtype.element_ty),
        present[:, :, None] & (out_dim < VALUE_DIMS)[None, None, :],
    )
