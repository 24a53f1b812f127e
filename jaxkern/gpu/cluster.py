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

The kernel declares the memory beside Triton's, which does not know of it. A thread that
holds an element which others hold too writes the same number to the same place.
"""

from jaxkern.gpu.instruction import instruction
from jaxkern.gpu.triton_call import constexpr_function, jit, tl

OLDEST_WITH_CLUSTERS = 90
MAX_PROGRAMS = 8  # of a cluster that every GPU can place
MAX_EXCHANGE = 32768  # bytes: a kernel may declare 48 KB
ALIGNED = 1024  # Triton's memory comes behind it, where tensor cores want it


def exchange_bytes(elements: int) -> int:
    """Of a constant EXCHANGE, by which launchers know what the kernel declares."""
    return -(-4 * elements // ALIGNED) * ALIGNED


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


@jit
def peers_have_begun():
    """Returns when all programs of the cluster have called `exchange_memory`."""
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
