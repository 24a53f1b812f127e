"""Tables of levels in shared memory."""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.attention.quantized_cache_attention.copies import shared_address


@constexpr_function
def table_text(OFFSET):
    """What is looked up depends on this, so it comes after the barrier."""
    return f"bar.sync 0; mov.u32 $0, global_smem; add.u32 $0, $0, {OFFSET};"


@gluon_jit
def table_numbers(ENTRIES: gl.constexpr):
    """The entries that a lane loads and writes."""
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = max(ENTRIES, 32 * WARPS)
    return gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon_jit
def table_in_shared(any, entry, ENTRIES: gl.constexpr, OFFSET: gl.constexpr):
    """Writes a table of which every lane has a copy in a bank of its own: where."""
    i = table_numbers(ENTRIES)
    table = shared_address(any, 0) + OFFSET
    for copy in gl.static_range(32):
        at = table + (i % ENTRIES) * 256 + (i + copy) % 32 * 4
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, $2;",
            "=r,r,r",
            [at, entry],
            gl.int32,
            False,
            1,
        )
    return gl.inline_asm_elementwise(
        table_text(OFFSET), "=r,r", [any], gl.int32, False, 1
    )
