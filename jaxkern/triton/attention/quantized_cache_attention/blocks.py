"""Blocks of keys and values from shared memory, decoded as the tensor cores want them.

Four lanes share a key, eight lanes a value, and dims are numbered as the lanes hold
them, which changes no sum and only permutes the result.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.attention.quantized_cache_attention.layouts import (
    key_run,
    lane_layout,
    nth_part,
    plane_at,
    planes_of,
    swizzle_of,
    token_layout,
    types_of,
    value_run,
)
from jaxkern.triton.attention.quantized_cache_attention.levels import (
    key_levels,
    levels_operands,
    registers,
    value_levels,
)


@constexpr_function
def loads_text(PLACES, COUNT, PAIRS, SIZES):
    """PTX of loads of COUNT words from each place, then of what other planes have.

    What belongs to a word comes in the low bits of a register. Up to 4 bytes are loaded
    at once, and above what belongs to it a register has others'.

    Args:
      PLACES: in bytes, of words and of what each other plane has for them.
      PAIRS: results of places 2 i and 2 i + 1 alternate.
      SIZES: bytes that each other plane has for a word.
    """
    total = len(PLACES) * COUNT
    inputs = total * (1 + len(SIZES))

    def number(i, j):
        return 2 * (i // 2 * COUNT + j) + i % 2 if PAIRS else i * COUNT + j

    text = ""
    for i, places in enumerate(PLACES):
        place = places[0]
        for j in range(0, COUNT, 4):
            out = [f"${number(i, x)}" for x in range(j, min(j + 4, COUNT))]
            kind = f"v{len(out)}.b32" if len(out) > 1 else "b32"
            out = f"{{{', '.join(out)}}}" if len(out) > 1 else out[0]
            text += f"ld.shared.{kind} {out}, [${inputs}+{place + 4 * j}]; "
        for k in range(1, 1 + len(SIZES)):
            size = SIZES[k - 1]
            load = min(4, COUNT * size)
            kind = "b32" if load == 4 else f"u{8 * load}"
            for j in range(0, COUNT, load // size):
                words = range(j, j + load // size)
                out = [f"${total * k + number(i, x)}" for x in words]
                at = places[k] + size * j
                text += f"ld.shared.{kind} {out[0]}, [${inputs + k}+{at}]; "
                for x in range(1, len(out)):
                    text += f"shr.u32 {out[x]}, {out[0]}, {8 * size * x}; "
    return text


@constexpr_function
def bytes_behind(FORMAT):
    """Of each other plane, for a word of the main one."""
    return tuple(4 * width // FORMAT.width for width in planes_of(FORMAT))


@constexpr_function
def run_behind(RUN, FORMAT, NUMBER):
    """Bytes that a lane has of one of the other planes for neighbouring words."""
    sizes = bytes_behind(FORMAT)
    return RUN * sizes[NUMBER] if NUMBER < len(sizes) else 0


@constexpr_function
def key_loads(PART, SECOND, BLOCK, COUNT, FORMAT):
    """COUNT words at once: of tokens 8 apart, then the parts of a token."""
    sizes = bytes_behind(FORMAT)
    places = [
        (i * PART.pitch + j, *(i * SECOND.pitch + j // 4 * size for size in sizes))
        for i in range(0, BLOCK, 8)
        for j in range(0, PART.room, 16 * COUNT)
    ]
    return loads_text(places, COUNT, False, sizes)


@constexpr_function
def value_loads(PART, SECOND, BLOCK, COUNT, FORMAT):
    """COUNT words at once: of tokens 8 apart, parts of a token, both of a pair."""
    sizes = bytes_behind(FORMAT)
    places = [
        (i * PART.pitch + j, *(i * SECOND.pitch + j // 4 * size for size in sizes))
        for octet in range(0, BLOCK, 8)
        for j in range(0, PART.room, 32 * COUNT)
        for i in (octet, octet + 4)
    ]
    return loads_text(places, COUNT, True, sizes)


@constexpr_function
def scale_loads(BLOCK):
    """Scales of tokens 8 apart, neighbours in shared memory."""
    octets = BLOCK // 8
    return loads_text([(0,)], octets, False, ()).replace("b32", "f32")


@constexpr_function
def level_types(FORMAT, TYPE, COUNT):
    return (gl.int32,) * (COUNT // 2) if FORMAT.together == 2 else (TYPE,) * COUNT


@gluon_jit
def both_halves(words, COUNT: gl.constexpr):
    """The float16 numbers of words, low halves first."""
    parts = ()
    for i in gl.static_range(COUNT):
        low = words[i].to(gl.int16).to(gl.float16, bitcast=True)
        high = (words[i] >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        parts += (low, high)
    return parts


@gluon_jit
def stacked(parts, START: gl.constexpr, STRIDE: gl.constexpr, COUNT: gl.constexpr):
    """parts[START::STRIDE] along new dims of two, the last one the fastest."""
    if COUNT == STRIDE:
        y = parts[START]
    else:
        y = gl.join(
            stacked(parts, START, 2 * STRIDE, COUNT),
            stacked(parts, START + STRIDE, 2 * STRIDE, COUNT),
        )
    return y


@gluon_jit
def load_words(
    LOADS: gl.constexpr,
    COUNT: gl.constexpr,
    main,
    behind,
    lane,
    RUN: gl.constexpr,
    SECOND: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """COUNT words of a lane: of its run, and of the planes behind."""
    return gl.inline_asm_elementwise(
        LOADS,
        registers("r", COUNT, 3),
        [
            main,
            behind + lane * run_behind(RUN, FORMAT, 0),
            behind + lane * run_behind(RUN, FORMAT, 1) + plane_at(SECOND, FORMAT, 1),
        ],
        dtype=types_of(gl.int32, COUNT),
        is_pure=False,
        pack=1,
    )


@gluon_jit
def key_block(shared, table, P: gl.constexpr):
    """Levels of keys as [warps, tokens, parts, 4 lanes, dims of a lane]."""
    PART: gl.constexpr = nth_part(P, 0)
    SECOND: gl.constexpr = nth_part(P, 1)
    BLOCK: gl.constexpr = P.block
    H: gl.constexpr = P.keys.room
    FORMAT: gl.constexpr = P.keys.form
    W: gl.constexpr = gl.num_warps()
    RUN: gl.constexpr = key_run(H, FORMAT)
    L: gl.constexpr = lane_layout(W, 4, 2, 8)
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    shared += gl.zeros([W, 8, 4], gl.int32, L)
    main = shared + P.at.keys + row * PART.pitch + lane * (4 * RUN)
    behind = shared + P.at.key_planes + row * SECOND.pitch
    WORDS: gl.constexpr = BLOCK // 8 * (H * FORMAT.width // 128)
    PLANES: gl.constexpr = len(planes_of(FORMAT))
    LOADED: gl.constexpr = WORDS * (1 + PLANES)
    LOADS: gl.constexpr = key_loads(PART, SECOND, BLOCK, RUN, FORMAT)
    loaded = load_words(LOADS, LOADED, main, behind, lane, RUN, SECOND, FORMAT)
    COUNT: gl.constexpr = 32 // FORMAT.width
    operands = (stacked(loaded, 0, 1, WORDS),)
    if FORMAT.together > 0:
        operands += (table,)
        for i in gl.static_range(1, 1 + PLANES):
            operands += (stacked(loaded[WORDS * i :], 0, 1, WORDS),)
    parts = gl.inline_asm_elementwise(
        key_levels(FORMAT),
        levels_operands(FORMAT, 1),
        operands,
        dtype=level_types(FORMAT, P.key_type, COUNT),
        is_pure=True,
        pack=1,
    )
    if FORMAT.together == 2:
        parts = both_halves(parts, COUNT // 2)
    y = stacked(parts, 0, 1, COUNT)
    RUNS: gl.constexpr = H // (4 * RUN * COUNT)
    y = gl.reshape(y, [W, 8, 4, BLOCK // 8, RUNS, RUN * COUNT])
    y = gl.permute(y, (0, 3, 1, 4, 2, 5))
    return gl.reshape(y, [W, BLOCK, RUNS, 4, RUN * COUNT])


@gluon_jit
def value_block(shared, table, P: gl.constexpr):
    """Levels of values as [warps, tokens, parts, 8 lanes, dims of a lane]."""
    PART: gl.constexpr = nth_part(P, 3)
    SECOND: gl.constexpr = nth_part(P, 4)
    BLOCK: gl.constexpr = P.block
    HV: gl.constexpr = P.values.room
    FORMAT: gl.constexpr = P.values.form
    W: gl.constexpr = gl.num_warps()
    RUN: gl.constexpr = value_run(HV, FORMAT)
    L: gl.constexpr = lane_layout(W, 4, 1, 8)
    row = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    SWIZZLE: gl.constexpr = swizzle_of(PART, BLOCK)
    shared += gl.zeros([W, 4, 8], gl.int32, L)
    main = shared + P.at.values + row * PART.pitch
    main += lane * (4 * RUN) ^ row // SWIZZLE[0] % SWIZZLE[1] * 32
    behind = shared + P.at.value_planes + row * SECOND.pitch
    WORDS: gl.constexpr = BLOCK // 4 * (HV * FORMAT.width // 256)
    PLANES: gl.constexpr = len(planes_of(FORMAT))
    LOADED: gl.constexpr = WORDS * (1 + PLANES)
    LOADS: gl.constexpr = value_loads(PART, SECOND, BLOCK, RUN, FORMAT)
    loaded = load_words(LOADS, LOADED, main, behind, lane, RUN, SECOND, FORMAT)
    operands = stacked(loaded, 0, 2, WORDS), stacked(loaded, 1, 2, WORDS)
    COUNT: gl.constexpr = 64 // FORMAT.width
    if FORMAT.together > 0:
        operands += (table,)
        for i in gl.static_range(1, 1 + PLANES):
            plane = loaded[WORDS * i :]
            operands += (stacked(plane, 0, 2, WORDS), stacked(plane, 1, 2, WORDS))
    parts = gl.inline_asm_elementwise(
        value_levels(FORMAT),
        levels_operands(FORMAT, 2),
        operands,
        dtype=level_types(FORMAT, P.value_type, COUNT),
        is_pure=True,
        pack=1,
    )
    if FORMAT.together == 2:
        parts = both_halves(parts, COUNT // 2)
    y = stacked(parts, 0, 1, COUNT)
    DIMS: gl.constexpr = RUN * COUNT // 2
    y = gl.reshape(y, [W, 4, 8, BLOCK // 8, HV // (8 * DIMS), DIMS, 2])
    y = gl.permute(y, (0, 3, 1, 6, 4, 2, 5))
    return gl.reshape(y, [W, BLOCK, HV // (8 * DIMS), 8, DIMS])


@gluon_jit
def read_scales(shared, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales [warps, tokens] of one a token, as a lane has the tokens of scores."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = token_layout(W)
    token = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    parts = gl.inline_asm_elementwise(
        scale_loads(BLOCK),
        registers("f", BLOCK // 8, 1),
        [gl.zeros([W, 8], gl.int32, L) + shared + token * (BLOCK // 2)],
        dtype=types_of(gl.float32, BLOCK // 8),
        is_pure=False,
        pack=1,
    )
    y = gl.reshape(stacked(parts, 0, 1, BLOCK // 8), [W, 8, BLOCK // 8])
    y = gl.reshape(gl.permute(y, (0, 2, 1)), [W, BLOCK])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon_jit
def graded(y, shared):
    """Levels [warps, tokens, groups, dims] times scales over the largest one, and that.

    `shared`: where the scales are.
    """
    W: gl.constexpr = y.shape[0]
    BLOCK: gl.constexpr = y.shape[1]
    GROUPS: gl.constexpr = y.shape[2]
    L: gl.constexpr = gl.SliceLayout(3, y.type.layout)
    token = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    number = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = token[None, :, None] * (4 * GROUPS) + number[None, None, :] * 4
    scales = gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [gl.zeros([W, BLOCK, GROUPS], gl.int32, L) + at + shared],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
    largest = gl.max(gl.abs(scales), 2)
    one_over = gl.where(largest < 1e-37, 1.0, 1.0 / largest)
    part = scales * gl.expand_dims(one_over, 2)
    return y * gl.expand_dims(part.to(y.dtype), 3), largest
