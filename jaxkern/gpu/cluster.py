"""How programs of one cluster give each other numbers, through their shared memory.

A launch with `cluster=n` has programs 0 to n - 1, n to 2 n - 1, ... run together, each
such n on neighbouring multiprocessors (compute capability 9.0 and newer). A program
numbered i has rank i % n and can write to the shared memory of the other ranks:

    memory = exchange_memory(BYTES)     # the first thing of a kernel
    ...
    peers_have_begun()
    send(memory + 4 * place, rank, x, mask)
    all_have_sent()
    y = receive(memory + 4 * place)

Nothing is left for the next launch: no counter to clear, no order in which programs
arrive. `peers_have_begun` returns when all programs of the cluster run, so that their
memory is there, and `all_have_sent` when all have come to it, with release and acquire:
what was sent before is received after. Behind it a program reads its own memory only,
so the others may end. Both are for all threads of a program, on no branch that only
some of its threads take.

`all_have_sent` also waits till all that a program has written to global memory is seen,
which takes longer than the sums of a cluster. Where programs send once, a barrier in
each program's memory counts the bytes that come to it, and no write is waited for:

    memory = mailbox_memory(BYTES)
    ...
    peers_have_begun()
    post(memory, memory + 4 * place, rank, x, mask, PEERS)
    all_has_come(memory)
    y = receive(memory + 4 * place)

All of a cluster's PEERS post alike: as many numbers to each as to themselves.

The kernel declares the memory beside Triton's, which does not know of it. A thread that
holds an element which others hold too writes the same number to the same place.
"""

from jaxkern.gpu.instruction import instruction
from jaxkern.gpu.triton_call import constexpr_function, jit, tl

OLDEST_WITH_CLUSTERS = 90
MAX_PROGRAMS = 8  # of a cluster that every GPU can place
MAX_EXCHANGE = 32768  # bytes: a kernel may declare 48 KB
BAR = 16  # bytes of a mailbox's barrier, ahead of it
ALIGNED = 1024  # Triton's memory comes behind it, where tensor cores want it


def exchange_bytes(elements: int) -> int:
    """Of a constant EXCHANGE, by which launchers know what the kernel declares."""
    return -(-(4 * elements + BAR) // ALIGNED) * ALIGNED


@constexpr_function
def memory_text(BYTES):
    return f"""{{ .shared .align 16 .b8 exchange[{BYTES}];
        mov.u32 $0, exchange; barrier.cluster.arrive.relaxed.aligned; }}"""


@jit
def exchange_memory(BYTES: tl.constexpr):
    """The address of BYTES of shared memory; says to the others that this one runs."""
    return tl.inline_asm_elementwise(
        memory_text(BYTES), "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@constexpr_function
def mailbox_text(BYTES):
    return f"""{{ .shared .align 16 .b8 mailbox[{BYTES}];
        .reg .pred first; .reg .u32 thread, warps;
        mov.u32 $0, mailbox; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        mov.u32 warps, %ntid.x; shr.u32 warps, warps, 5;
        @first mbarrier.init.shared::cta.b64 [$0], warps;
        @first fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned; add.u32 $0, $0, {BAR}; }}"""


@jit
def mailbox_memory(BYTES: tl.constexpr):
    """`exchange_memory` for what others `post`, BAR bytes less."""
    return tl.inline_asm_elementwise(
        mailbox_text(BYTES), "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def peers_have_begun():
    """Returns when all programs of the cluster have their memory."""
    instruction("barrier.cluster.wait.acquire.aligned; // $0")


@jit
def send(at, rank, x, mask):
    """Writes float32 x to the address `at` of that rank where the mask says so."""
    tl.inline_asm_elementwise(
        """{ .reg .b32 there; .reg .pred asked;
        setp.ne.b32 asked, $4, 0;
        mapa.shared::cluster.u32 there, $1, $2;
        @asked st.shared::cluster.f32 [there], $3;
        mov.b32 $0, 0; }""",
        "=r,r,r,f,r",
        [at, at * 0 + rank, x, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@constexpr_function
def post_text(PEERS):
    return f"""{{ .reg .b32 own, bar, there; .reg .pred asked, mine;
        setp.ne.b32 asked, $5, 0;
        mov.u32 own, %cluster_ctarank; setp.eq.and.u32 mine, own, $3, asked;
        sub.u32 bar, $1, {BAR};
        @mine mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {4 * PEERS};
        mapa.shared::cluster.u32 bar, bar, $3;
        mapa.shared::cluster.u32 there, $2, $3;
        @asked st.async.shared::cluster.mbarrier::complete_tx::bytes.f32
        [there], $4, [bar]; mov.b32 $0, 0; }}"""


@jit
def post(memory, at, rank, x, mask, PEERS: tl.constexpr):
    """`send` to the mailbox of that rank. What goes to the own one is expected of all.

    So it does not matter how many threads hold an element: it is as many everywhere.
    """
    tl.inline_asm_elementwise(
        post_text(PEERS),
        "=r,r,r,r,f,r",
        [at * 0 + memory, at, at * 0 + rank, x, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@constexpr_function
def all_has_come_text():
    return f"""{{ .reg .pred leads, come; .reg .u32 lane, bar;
        bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 leads, lane, 0;
        sub.u32 bar, $1, {BAR};
        @leads mbarrier.arrive.shared::cta.b64 _, [bar];
        AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 come, [bar], 0;
        @!come bra AGAIN; mov.b32 $0, 0; }}"""


@jit
def all_has_come(memory):
    """Returns when what all programs have posted to this one is there."""
    tl.inline_asm_elementwise(
        all_has_come_text(), "=r,r", [memory], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def all_have_sent():
    """Returns when all programs of the cluster are here and what they sent is too."""
    instruction(
        """barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned; // $0"""
    )


@jit
def receive(at):
    """The float32 at the address `at` of this program's memory."""
    return tl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [at],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
