"""Copies of blocks of a quantised cache to shared memory, each warp's to its own part.

All in PTX: Triton knows of the allocation only, and would put a barrier of the program
around every read.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.attention.quantized_cache_attention.layouts import (
    copies_of,
    is_one_scale,
    lane_layout,
    nth_part,
    nth_place,
    place_of,
    swizzle_of,
    token_of,
)


@constexpr_function
def in_place_text(TEXT):
    return TEXT + " mov.b32 $0, $1;"


@gluon_jit
def in_place(TEXT: gl.constexpr, x):
    """x, after PTX that stays where it is among loads and copies."""
    return gl.inline_asm_elementwise(
        in_place_text(TEXT), "=r,r", [x], gl.int32, False, 1
    )


@gluon_jit
def warp_number(any):
    """Of the lane's warp; by a shuffle, so that the assembler sees it to be one."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5;
        shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }""",
        "=r,r",
        [any],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def seen_keys(
    length,
    offset,
    S: gl.constexpr,
    T: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    FAR: gl.constexpr,
):
    """The keys first ... end - 1 that some row sees, and the first query's position."""
    first = gl.to_tensor(0)
    end = gl.to_tensor(S)
    position = gl.to_tensor(S - T)
    if length is not None:
        end = gl.minimum(gl.maximum(length, 0), S).to(gl.int32)
    if offset is not None:
        position = gl.minimum(gl.maximum(offset, -FAR), FAR).to(gl.int32)
    if CAUSAL:
        end = gl.minimum(end, position + T)
    if WINDOW is not None:
        first = gl.minimum(gl.maximum(position - WINDOW + 1, 0), S)
    return first, end, position


@gluon_jit
def use_shared(memory):
    """Has `global_smem` declared, the address of all shared memory; no instruction."""
    W: gl.constexpr = gl.num_warps()
    words = memory.index(0).load(gl.BlockedLayout([1], [32], [W], [0]))
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], gl.int32, False, 1)


@constexpr_function
def address_text(SIZE):
    return f"""{{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5;
        mov.u32 $0, global_smem; mad.lo.u32 $0, t, {SIZE}, $0; }}"""


@gluon_jit
def shared_address(any, SIZE: gl.constexpr):
    """Of the kernel's shared memory, SIZE bytes further for every warp."""
    return gl.inline_asm_elementwise(
        address_text(SIZE), "=&r,r", [any], gl.int32, False, 1
    )


@constexpr_function
def wait_text(OTHERS):
    """All but the last copies of so many blocks have arrived, for every lane."""
    return f"cp.async.wait_group {OTHERS}; bar.warp.sync 0xffffffff;"


@constexpr_function
def copy_text(PART, BLOCK, K, PAIRED, SKIPS):
    """PTX of all copies of a lane for a block; zeros where a token is not to be read.

    Its operands are where to and where from for its first row, how many tokens are left
    from that row's on, and how many there are to skip.
    """
    row = PART.vector
    unit, _, rows = copies_of(PART, BLOCK)
    kind = ("cg" if unit == 16 else "ca") + ".shared.global.L2::256B"
    # neighbouring heads are read by other warps: all of 256 bytes come at once
    text = "{ .reg .pred p; .reg .b32 n;"
    for i in range(0, BLOCK, rows):
        token = token_of(i, PAIRED)
        text += f" setp.gt.s32 p, $3, {token};"
        text += f" setp.le.and.s32 p, $4, {token}, p;" if SKIPS else ""
        text += f" selp.b32 n, {unit}, 0, p; cp.async.{kind}"
        text += f" [$1+{place_of(i, PART, BLOCK)}], [$2+{token * K * row}], {unit}, n;"
    return text + " mov.b32 $0, $1; }"


@gluon_jit
def first_copies(
    ptr,
    shared,
    where,
    P: gl.constexpr,
    NUMBER: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """What `copy_text` wants of a lane at first; zeros for an absent part."""
    PART: gl.constexpr = nth_part(P, NUMBER)
    K: gl.constexpr = P.key_heads
    HEADS: gl.constexpr = P.heads
    BLOCK: gl.constexpr = P.block
    before, begin, first, end, group = where
    none = gl.to_tensor(0)
    copies = (none, none, none, none)
    if PART.room != 0:
        W: gl.constexpr = gl.num_warps()
        BYTES: gl.constexpr = copies_of(PART, BLOCK)[0]
        UNITS: gl.constexpr = copies_of(PART, BLOCK)[1]
        ROWS: gl.constexpr = copies_of(PART, BLOCK)[2]
        L: gl.constexpr = lane_layout(W, UNITS, 2, ROWS)
        warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))
        row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))
        inner = gl.arange(0, UNITS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
        warp, row = warp[:, None, None], row[None, :, None]
        inner = inner[None, None, :] * BYTES
        token, to = row, row * PART.pitch + inner
        if PAIRED:
            token = row // 8 * 8 + row % 4 * 2 + row // 4 % 2
            SWIZZLE: gl.constexpr = swizzle_of(PART, BLOCK)
            to = row * PART.pitch + (inner ^ row // SWIZZLE[0] % SWIZZLE[1] * 32)
        if is_one_scale(PART):
            to = row // 8 * 4 + row % 8 * (BLOCK // 2)  # as place_of
        # zeros where the room has more than a vector
        here = end - begin - token
        if PART.size < PART.room:
            here = gl.where(inner < PART.size, here, 0)
        vector = before + begin.to(gl.int64) * K + (group * HEADS + warp % HEADS)
        origin = vector * PART.vector + token.to(gl.int64) * (K * PART.vector)
        origin += (ptr.to(gl.int64) + PART.start) + inner.to(gl.int64)
        every = gl.zeros([W, ROWS, UNITS], gl.int32, L)
        copies = (
            every + (shared + nth_place(P, NUMBER)) + to,
            origin,
            every + here,
            every + first - begin - token,
        )
    return copies


@gluon_jit
def copy_block(
    copies,
    slot,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
    NUMBER: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """Starts the copies of a block into a slot. Returns those of the share's next."""
    PART: gl.constexpr = nth_part(P, NUMBER)
    STEP: gl.constexpr = SPLITS * P.shares * P.block
    SKIPS: gl.constexpr = P.window is not None
    to, origin, left, skip = copies
    if PART.room != 0:
        gl.inline_asm_elementwise(
            copy_text(PART, P.block, P.key_heads, PAIRED, SKIPS),
            "=r,r,l,r,r",
            [to + slot, origin, left, skip],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        origin += STEP * P.key_heads * PART.vector
        left -= STEP
        skip -= STEP
    return to, origin, left, skip


@gluon_jit
def copy_blocks(copies, slot, P: gl.constexpr, SPLITS: gl.constexpr):
    """`copy_block` of all parts, as one group."""
    key, key_second, key_scales, value, value_second, value_scales = copies
    key = copy_block(key, slot, P, SPLITS, 0, False)
    key_second = copy_block(key_second, slot, P, SPLITS, 1, False)
    key_scales = copy_block(key_scales, slot, P, SPLITS, 2, False)
    value = copy_block(value, slot, P, SPLITS, 3, True)
    value_second = copy_block(value_second, slot, P, SPLITS, 4, True)
    value_scales = copy_block(value_scales, slot, P, SPLITS, 5, False)
    in_place("cp.async.commit_group;", slot)
    return key, key_second, key_scales, value, value_second, value_scales
