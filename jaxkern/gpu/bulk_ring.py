"""Weights on their way: a ring of shared memory for each warp, filled by bulk copies.

On Hopper and newer one thread asks for kilobytes at a time, which take no registers
while they are on their way. So a warp has many steps of its weights under way, asked
for before it waits for the kernel ahead, and reads each from shared memory once it has
come. A warp asks and waits for itself: no barrier of the program is in its loop.

    at = own_memory(lane, RING)         # the end of the program's shared memory
    begin_ring(bars, leads, DEPTH)
    ask(bars, places, source, EACH, leads)              # DEPTH times
    ...
    has_come(bars + 8 * place, parity)
    words = ...                         # `shared_pair(at, OFFSET)`
    all_have_read()
    ask(bars + 8 * place, ...)          # what comes DEPTH steps later

Tensors have one number in every lane. The memory is no array of Triton's: a launch has
a constant RING, the bytes of it, which launchers add to what Triton asks for.
"""

from jaxkern.gpu.launch import RING_ALIGNED
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit

OLDEST_WITH_BULK_COPIES = 90
BAR_BYTES = 8  # of what a thread waits at


def ring_bytes(warps: int, depth: int, each: int, more: int = 0) -> int:
    """Of a constant RING: of each warp `depth` places of `each` bytes; `more` beside.

    `each` and `more` are multiples of 16.
    """
    total = more + warps * depth * (each + BAR_BYTES)
    return -(-total // RING_ALIGNED) * RING_ALIGNED


@constexpr_function
def own_memory_text(BYTES):
    return f"""{{ .reg .b32 all; mov.u32 all, %dynamic_smem_size;
        mov.u32 $0, global_smem; add.u32 $0, $0, all; sub.u32 $0, $0, {BYTES}; }}
        // $1"""


@gluon_jit
def own_memory(any, BYTES: gl.constexpr):
    """The address of the last BYTES of the program's shared memory, in every lane."""
    return gl.inline_asm_elementwise(
        own_memory_text(BYTES), "=r,r", [any], gl.int32, True, 1
    )


@constexpr_function
def begin_text(DEPTH):
    one = "@leads mbarrier.init.shared::cta.b64 [$1+{}], 1; "
    return f"""{{ .reg .pred leads; setp.ne.b32 leads, $2, 0;
        {"".join(one.format(BAR_BYTES * i) for i in range(DEPTH))}
        fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; mov.b32 $0, 0; }}"""


@gluon_jit
def begin_ring(bars, leads, DEPTH: gl.constexpr):
    """Makes the places ready, of each warp by the lane that leads it."""
    gl.inline_asm_elementwise(
        begin_text(DEPTH), "=r,r,r", [bars, leads], gl.int32, False, 1
    )


@constexpr_function
def ask_text(BYTES):
    return f"""{{ .reg .pred asked; setp.ne.b32 asked, $4, 0;
        @asked mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {BYTES};
        @asked cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [$2], [$3], {BYTES}, [$1]; mov.b32 $0, 0; }}"""


@gluon_jit
def ask(bar, place, source, BYTES: gl.constexpr, asks):
    """Has BYTES copied from an address of global memory to a place of shared memory."""
    gl.inline_asm_elementwise(
        ask_text(BYTES), "=r,r,r,l,r", [bar, place, source, asks], gl.int32, False, 1
    )


@constexpr_function
def ask_up_to_text():
    return """{ .reg .pred leads, some; setp.ne.b32 leads, $5, 0;
        setp.gt.and.s32 some, $4, 0, leads;
        @leads mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $4;
        @some cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [$2], [$3], $4, [$1]; mov.b32 $0, 0; }"""


@gluon_jit
def ask_up_to(bar, place, source, count, asks):
    """`ask` for a number of bytes that a register says; of none it has come at once."""
    gl.inline_asm_elementwise(
        ask_up_to_text(),
        "=r,r,r,l,r,r",
        [bar, place, source, count, asks],
        gl.int32,
        False,
        1,
    )


@constexpr_function
def has_come_text():
    return """{ .reg .pred come;
        AGAIN: mbarrier.try_wait.parity.shared::cta.b64 come, [$1], $2;
        @!come bra AGAIN; mov.b32 $0, 0; }"""


@gluon_jit
def has_come(bar, parity):
    """Returns when the copy has come that was asked for at this bar."""
    gl.inline_asm_elementwise(
        has_come_text(), "=r,r,r", [bar, parity], gl.int32, False, 1
    )


@gluon_jit
def all_have_read(any):
    """Returns when all lanes of the warp are here: a place may be filled again."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [any], gl.int32, False, 1
    )


@constexpr_function
def shared_load_text(TYPE, OFFSET):
    return f"ld.shared.{TYPE} $0, [$1+{OFFSET}];"


@gluon_jit
def shared_pair(at, OFFSET: gl.constexpr):
    """64 bits at an address of shared memory, OFFSET bytes behind it."""
    return gl.inline_asm_elementwise(
        shared_load_text("b64", OFFSET), "=l,r", [at], gl.int64, False, 1
    )


@gluon_jit
def shared_word(at, OFFSET: gl.constexpr):
    return gl.inline_asm_elementwise(
        shared_load_text("b32", OFFSET), "=r,r", [at], gl.int32, False, 1
    )


@gluon_jit
def shared_half(at, OFFSET: gl.constexpr):
    """16 bits, without a sign."""
    return gl.inline_asm_elementwise(
        shared_load_text("u16", OFFSET), "=r,r", [at], gl.int32, False, 1
    )
